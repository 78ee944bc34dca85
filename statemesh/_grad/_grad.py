"""Gradients of functions of a model, reduced across shards exactly once."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import cast

from .._base import _errors as errors
from .._base._checks import check_flag, check_function, check_names
from .._base._trees import fun_name, positional_names
from .._base._types import (
    Filter,
    Fun,
    FunOf,
    Leaf,
    Params,
    PyTree,
    ReduceLoss,
    Result,
    SeveralAxes,
    Size,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._jax._frames import without_own_frames
from .._state._filters import to_predicate
from ._loss import LossFunction, Parts, Scope, at_once
from ._microbatches import check_microbatches, in_microbatches


def value_and_grad(
    fun: FunOf[Params, Result],
    *,
    wrt: Filter = None,
    axis_name: SeveralAxes = None,
    reduce: ReduceLoss = "mean",
    has_aux: bool = False,
    microbatches: Size | None = None,
) -> Callable[Params, tuple[Result, PyTree]]:
    """A function that evaluates a loss, the new model, and the gradient of the loss, reduced exactly once.

    Inside a mapped call every shard has a loss of its own, of its rows. With `axis_name` the loss that is
    returned, and whose gradient is taken, is the mean (or sum) of the shards' over those axes. The numbers
    are the same with `check_vma` on and off, in lanes, and unsharded.

    A parameter that is the same on all shards gets the whole gradient. One that is split over an axis, of
    `axis_name` or not, keeps its own part of the gradient there. Over mesh axes that are not in `axis_name`
    the loss must be the same on all shards, as where each has a part of the parameters and `jax.lax.psum`
    has joined what they made. Lanes that are not in `axis_name` each have the gradient of their own loss, and
    so have shards with parameters of their own, as long as no gradient passes from one to another.

    The loss may have gradients in it, to any order. In the loss of one that names an axis another one that
    does not has the gradient of this shard's own loss.

    **Arguments:**

    - `fun`: `fun(model, *args, **kwargs) -> (loss, model)`, the loss a real scalar of floating dtype.
    - `wrt`: what to differentiate: a filter of states, to which arrays outside any State are shown as well.
        Left out: every `ParamState` and every array of floats (or complex numbers) outside any State.
    - `axis_name`: the mesh axes or lanes, one name or several, over which the loss is taken together. Outside
        any mapped call they mean one shard.
    - `reduce`: `'mean'` or `'sum'` of the shards' losses. A loss that is the same on all shards over an axis,
        because `fun` reduced it, is taken as it is by `'mean'`; `'sum'` refuses to count it again.
    - `has_aux`: whether `fun` returns `((loss, aux), model)`.
    - `microbatches`: into how many parts the rows of a shard are split, to run `fun` on one part after the
        other in the memory of one; left out, it runs on all rows at once. Rows are the leading axis of
        every array in the positional arguments after the model; part `i` holds every `microbatches`-th row
        from row `i` on, and all parts share the keyword arguments. Each part sees the model as it was
        before. What the parts write to states is merged by the states' own policies, as what shards write
        is; `RandomState.rows` counts rows over parts and shards alike. Losses and gradients are summed in
        float32 at least, and reduced over `axis_name` once. Arrays in `aux` come stacked, one for each
        part.

    **Returns:** a function of the same arguments that returns `((loss, model), grads)`, with `has_aux`
    `(((loss, aux), model), grads)`. `grads` has the model's structure: in place of a state or array that was
    differentiated its gradient, of the same shapes and dtypes, in place of everything else `None`. So
    `equinox.apply_updates` and Optax take it; see `trainable`.

    **Raises:** `StructureError` where there is nothing to differentiate, where `wrt` picks what cannot be,
    or where `fun` does not return a scalar loss and a model; `StatemeshError` for an axis name that is not
    bound inside a mapped call, and for a loss that differs over a mesh axis that is not in `axis_name`, or
    comes there of what gradients pass through from one to another. With `microbatches` also `StructureError`
    for arrays without rows or with a number of rows that it does not divide, and `DivergedStateError` for a
    state without a policy that the parts write differently.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.numpy as jnp, statemesh as sm
        >>> model = {"w": sm.ParamState(jnp.ones(3)), "steps": sm.State(0)}
        >>> def loss_fn(model, x):
        ...     loss = ((x @ model["w"].value) ** 2).mean()
        ...     return loss, {**model, "steps": model["steps"].set(model["steps"].value + 1)}
        >>> step = sm.value_and_grad(loss_fn, axis_name="data")
        >>> (loss, model), grads = step(model, jnp.eye(3))
        >>> grads
        {'steps': None, 'w': ParamState(float32[3])}
        >>> updates = jax.tree.map(lambda g: -0.1 * g, grads)
        >>> eqx.apply_updates(model, updates)["w"].value
        Array([0.93333334, 0.93333334, 0.93333334], dtype=float32)

        ```

    Where types say what varies (`shard_map` with `check_vma`), the parameters are made varying over
    `axis_name` while `fun` runs, so that JAX does not sum their gradient by itself. A state that `fun` writes
    from parameters alone varies then too, and needs `reduce='mean'`.
    """
    if reduce not in ("mean", "sum"):
        raise errors.unknown_choice("value_and_grad: reduce", reduce, ("mean", "sum"))
    check_function("value_and_grad", fun)
    check_names("value_and_grad", axis_name)
    check_flag("value_and_grad", "has_aux", has_aux)
    check_microbatches(microbatches)
    to_predicate(wrt)
    name = fun_name(fun)
    loss_fun = LossFunction(fun, has_aux, name)

    @without_own_frames
    def value_and_grads(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        parts = Parts("value_and_grad", model, wrt, positional_names(fun, 1)[0])
        scope = Scope(name, axis_name, reduce == "mean", parts)
        with _mesh_of(tree_util.tree_leaves((model, args, kwargs))):
            if microbatches is None:
                made = at_once(loss_fun, scope, parts, args, kwargs)
            else:
                made = in_microbatches(loss_fun, scope, parts, model, args, kwargs, microbatches)
        loss, grads = scope.reduced(made)
        aux, model = made.result
        return ((loss, aux) if has_aux else loss, model), parts.tree(grads)

    value_and_grads.__name__ = value_and_grads.__qualname__ = f"value_and_grad_of_{name}"
    return cast(Fun, value_and_grads)


def grad(
    fun: FunOf[Params, PyTree],
    *,
    wrt: Filter = None,
    axis_name: SeveralAxes = None,
    reduce: ReduceLoss = "mean",
    has_aux: bool = False,
    microbatches: Size | None = None,
) -> Callable[Params, tuple[PyTree, PyTree]]:
    """As `value_and_grad`, without the loss.

    **Arguments:** those of `value_and_grad`.

    **Returns:** a function of the arguments of `fun` that returns `(grads, model)`, with `has_aux`
    `((grads, aux), model)`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def loss_fn(w, x):
        ...     return ((x * w) ** 2).mean(), w
        >>> grads, _ = sm.grad(loss_fn)(jnp.ones(2), jnp.arange(2.0))
        >>> grads
        Array([0., 1.], dtype=float32)

        ```
    """
    both = value_and_grad(
        fun,
        wrt=wrt,
        axis_name=axis_name,
        reduce=reduce,
        has_aux=has_aux,
        microbatches=microbatches,
    )

    @without_own_frames
    def grads_of(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        (value, model), grads = both(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads, model

    grads_of.__name__ = grads_of.__qualname__ = f"grad_of_{fun_name(fun)}"
    return cast(Fun, grads_of)


def _mesh_of(values: Iterable[Leaf]) -> PyTree:
    """A context with the mesh whose Explicit axes type these arrays, if no mesh is set.

    JAX cannot differentiate such arrays without it.
    """
    if compat.current_trace(()) is not compat.TOP_LEVEL or compat.context_mesh() is not None:
        return nullcontext()
    typed = (x.sharding.mesh for x in values if explicit.is_explicitly_typed(x))
    mesh = next(typed, None)
    return nullcontext() if mesh is None else compat.in_mesh(mesh, traced=False)
