"""Gradients of functions of a model, reduced across shards exactly once; at once or in microbatches."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._axes._differing import all_axes, crossed, name_varying, whole_over
from ._axes._joined import largest, widened
from ._axes._mesh_and_lanes import (
    BLOCKS,
    IN_MICROBATCHES,
    MICROBATCHES,
    all_varying,
    bound_names,
    gradients_around,
    inside_microbatches,
    meshes_and_lanes,
)
from ._axes._ordered import gathered, in_turn
from ._axes._reduction import (
    REDUCING,
    Pending,
    Reduction,
    loss_exchanged,
    loss_str,
    reduce_on_mesh,
)
from ._base import _errors as errors
from ._base._checks import (
    check_flag,
    check_function,
    check_names,
    is_array,
    is_inexact,
    is_key,
    is_shaped,
)
from ._base._errors import (
    DivergedStateError,
    StatemeshError,
    StructureError,
    axes_argument,
    error_listing,
    filter_str,
    first_paths,
    kind_str,
    listed,
    quoted,
)
from ._base._trees import describe, fun_name, is_state, path_str, positional_names
from ._base._types import (
    NO_AXES,
    NUMBERS,
    Array,
    Axes,
    AxisName,
    Dtype,
    Filter,
    Fun,
    FunOf,
    KeyPath,
    Leaf,
    Params,
    PyTree,
    ReduceLoss,
    Result,
    SeveralAxes,
    Size,
    Tree,
)
from ._call._arguments import inside_modules
from ._call._lanes import Lanes
from ._call._mesh_and_specs import UNDECLARED
from ._call._packed import members, shapes_of, with_models
from ._call._per_shard import Leaving, Written, checked_state
from ._call._rules import AxisRules, Mistakes, Varying
from ._call._tracing import (
    Entered,
    FromTypes,
    Skeleton,
    find_origins,
    has_same_leaves,
    taken_apart,
    values,
)
from ._fsdp import Step, own_parts, scattered, steps_like
from ._jax import _compat as compat
from ._jax import _explicit as explicit
from ._jax import _jaxprs as jaxprs
from ._jax._compat import Jaxpr, tree_util
from ._jax._dataflow import forwarded
from ._jax._frames import frames_of, user_line, without_own_frames
from ._jax._jaxprs import run_varying, traced_outside
from ._jax._merged import run_merged
from ._state import _random
from ._state._filters import to_predicate
from ._state._random import RandomState, again
from ._state._state import ParamState, State, mark_origin, origin, origins
from ._state._values import strong


def value_and_grad(
    fun: FunOf[Params, Result],
    *,
    wrt: Filter = None,
    axis_name: SeveralAxes = None,
    reduce: ReduceLoss = "mean",
    has_aux: bool = False,
    microbatches: Size | None = None,
    blocks: Size | None = None,
    split_as: PyTree = None,
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
    - `blocks`: into how many blocks the rows of all shards are cut, a power of two, so that loss, gradients
        and states have the same bits on 1, 2, 4 and so on up to `blocks` shards. Every shard runs the blocks
        of its own rows one after the other, as it does microbatches, and sums go over a fixed tree. The rows
        of positional arguments are to be split over the axes of `axis_name`, in this order. Arrays in `aux`
        come stacked, one for each block. `microbatches` beside it must be made of whole blocks, and changes
        nothing.
    - `split_as`: what `fsdp` made of the model, for parameters that are whole here. Each shard then keeps
        only its own part of each gradient. A reduce-scatter takes the place of the sum over all shards: one
        in all for small gradients of one dtype that are split over the same mesh axes, and one for each
        large gradient, after the last microbatch. Only the structure and the specs are read, so shapes do.

    **Returns:** a function of the same arguments that returns `((loss, model), grads)`, with `has_aux`
    `(((loss, aux), model), grads)`. `grads` has the model's structure: in place of a state or array that was
    differentiated its gradient, of the same shapes and dtypes, in place of everything else `None`. So
    `equinox.apply_updates` and Optax take it; see `trainable`. With `split_as` it has the structure and the
    specs of that.

    **Raises:** `StructureError` where there is nothing to differentiate, where `wrt` picks what cannot be,
    or where `fun` does not return a scalar loss and a model; `StatemeshError` for an axis name that is not
    bound inside a mapped call, and for a loss that differs over a mesh axis that is not in `axis_name`, or
    comes there of what gradients pass through from one to another; for a `split_as` of another structure, or
    that splits over other axes than `axis_name`. With `microbatches` also `StructureError`
    for arrays without rows or with a number of rows that it does not divide, and `DivergedStateError` for a
    state without a policy that the parts write differently. With `blocks` also `StatemeshError` for numbers
    that are no powers of two or do not divide it, for what `fun` exchanges over `axis_name`, and for keys
    that are drawn for a shard and not for rows.

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
    `axis_name` while `fun` runs, so that JAX does not sum their gradient by itself. What `fun` computes from
    parameters alone leaves as one value all the same. With `microbatches` a state needs `reduce='mean'` for
    it.
    """
    if reduce not in ("mean", "sum"):
        raise errors.unknown_choice("value_and_grad: reduce", reduce, ("mean", "sum"))
    check_function("value_and_grad", fun)
    check_names("value_and_grad", axis_name)
    check_flag("value_and_grad", "has_aux", has_aux)
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise StatemeshError(
            "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is "
            f"{microbatches!r}."
        )
    if blocks is not None and (type(blocks) is not int or not _is_power_of_two(blocks)):
        near = ""
        if type(blocks) is int and blocks > 2:
            low = 1 << (blocks.bit_length() - 1)
            near = f" Near it are {low} and {2 * low}."
        raise StatemeshError(
            "value_and_grad: blocks must be a power of two, or None for sums in any order, but is "
            f"{blocks!r}. Sums over blocks go two by two, so that each shard's is a branch of one tree.{near}"
        )
    to_predicate(wrt)
    name = fun_name(fun)
    loss_fun = LossFunction(fun, has_aux, name)

    def value_and_grads(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        parts = Parts("value_and_grad", model, wrt, positional_names(fun, 1)[0], split_as)
        scope = Scope(name, axis_name, reduce == "mean", blocks, parts)
        with _mesh_of(tree_util.tree_leaves((model, args, kwargs))):
            if cut := scope.cut(microbatches):
                evaluated = one_after_another(loss_fun, scope, parts, model, args, kwargs, cut)
            else:
                evaluated = at_once(loss_fun, scope, parts, args, kwargs)
        loss, grads = scope.reduced(evaluated)
        aux, model = evaluated.result
        return ((loss, aux) if has_aux else loss, model), parts.tree(grads)

    options = {"wrt": wrt, "axis_name": axis_name, "reduce": reduce, "has_aux": has_aux}
    options |= {"microbatches": microbatches, "blocks": blocks, "split_as": split_as}
    return Derivative(value_and_grads, value_and_grad, fun, options)


def grad(
    fun: FunOf[Params, PyTree],
    *,
    wrt: Filter = None,
    axis_name: SeveralAxes = None,
    reduce: ReduceLoss = "mean",
    has_aux: bool = False,
    microbatches: Size | None = None,
    blocks: Size | None = None,
    split_as: PyTree = None,
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
    both: Any = value_and_grad(
        fun,
        wrt=wrt,
        axis_name=axis_name,
        reduce=reduce,
        has_aux=has_aux,
        microbatches=microbatches,
        blocks=blocks,
        split_as=split_as,
    )

    def grads_of(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        (value, model), grads = both(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads, model

    return Derivative(grads_of, grad, fun, both.options)


class Derivative:
    """What `value_and_grad` and `grad` return: a function that pickles as what makes it.

    **Arguments:**

    - `run`: the function.
    - `make`, `fun`, `options`: `make(fun, **options)` makes it.
    """

    def __init__(self, run: Fun, make: Fun, fun: Fun, options: dict[str, Any]) -> None:
        self.__wrapped__ = run
        self.__name__ = self.__qualname__ = f"{make.__name__}_of_{fun_name(fun)}"
        self.options = options
        self._make, self._fun = make, fun

    @without_own_frames
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # As a function it is its own copy.

    def __copy__(self) -> "Derivative":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Derivative":
        return self

    def __reduce__(self) -> tuple[Fun, tuple[PyTree, ...]]:
        return _derivative, (self._make, self._fun, self.options)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _derivative(make: Fun, fun: Fun, options: dict[str, Any]) -> Fun:
    return make(fun, **options)


def _mesh_of(values: Iterable[Leaf]) -> PyTree:
    """A context with the mesh whose Explicit axes type these arrays, if no mesh is set.

    JAX cannot differentiate such arrays without it.
    """
    if compat.current_trace(()) is not compat.TOP_LEVEL or compat.context_mesh() is not None:
        return nullcontext()
    typed = (x.sharding.mesh for x in values if explicit.is_explicitly_typed(x))
    mesh = next(typed, None)
    return nullcontext() if mesh is None else compat.in_mesh(mesh, traced=False)


def trainable(model: Tree, wrt: Filter = None, *, split_as: PyTree = None) -> Tree:
    """The part of a model that `value_and_grad` differentiates, in the structure of its `grads`.

    It is what an optimizer is initialised with. Its states keep their kinds and specs, and so do those in
    the optimizer's slots: they lie where the parameters lie. Of a `Packed` it is a `Packed`.

    **Arguments:**

    - `model`: any pytree.
    - `wrt`: as for `value_and_grad`.
    - `split_as`: as for `value_and_grad`. Inside a mapped call each shard gets its own part of each
        parameter. Nothing is sent for it.

    **Returns:** the model with `None` in place of everything else.

    **Raises:** `StructureError` where there is nothing to differentiate, or where `wrt` picks what cannot be.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> sm.trainable({"w": sm.ParamState(jnp.ones(3)), "steps": sm.State(0)})
        {'steps': None, 'w': ParamState(float32[3])}

        ```
    """
    return trained_part("trainable", model, wrt, split_as)


def trained_part(what: str, model: PyTree, wrt: Filter, split_as: PyTree = None) -> PyTree:
    """What `trainable` returns, with `what` in its errors."""
    parts = Parts(what, model, wrt, "model", split_as)
    return parts.tree(parts.own)


class Parts:
    """A model's leaves, which of them are differentiated, and of which a shard keeps a part of the gradient.

    **Attributes:**

    - `params`: the leaves that are differentiated.
    - `steps`: for each of them how its gradient is split.
    """

    def __init__(self, what: str, model: PyTree, wrt: Filter, root: str, split_as: PyTree) -> None:
        leaves, treedef = tree_util.tree_flatten(model)
        # Filters see the packed states, but the buffers that hold them are differentiated.
        shown, hits = _picked(what, with_models(model, shapes_of), wrt, root)
        units, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        self.paths: list[str] = []
        positions: list[int] = []
        torn: list[str] = []
        start = 0
        for (path, unit), made_of in zip(units, members(model), strict=True):
            unit_leaves = tree_util.tree_leaves(unit)
            picked = [shown[k][0] for k in made_of if hits[k]]
            left = [shown[k][0] for k in made_of if not hits[k]]
            chosen = [
                k for k, x in enumerate(unit_leaves, start) if picked and _is_differentiable(x)
            ]
            if chosen and left:
                torn.append(f"picked: {first_paths(picked)}; not picked: {first_paths(left)}")
            name = shown[made_of[0]][0] if len(made_of) == 1 else path_str(path, root)
            self.paths += [name] * len(chosen)
            positions += chosen
            start += len(unit_leaves)
        if torn:
            raise error_listing(
                StructureError,
                f"{what}: wrt={filter_str(wrt)} picks only some of the states that share a packed buffer, "
                "and a buffer has one gradient",
                torn,
                "Take the gradient inside the mapped call, which sees the model, or pass the model itself to "
                "this call: `packed.unpack()`.",
            )
        if not positions:
            values = [f"{path}: {describe(unit)}" for path, unit in shown if _is_shown(unit)]
            text = f"{what}: wrt={filter_str(wrt)} picks nothing in the model. It has"
            if wrt is None:
                text = (
                    f"{what}: the model has no ParamState of floating or complex numbers, and no such array "
                    "outside States. It has"
                )
            if not values:
                raise StructureError(f"{text} no states and no arrays.")
            raise error_listing(StructureError, text, values)
        # The model, to be filled with other arrays in place of those that are differentiated.
        self.model = Skeleton(leaves, treedef, origins(model), positions)
        self.params = [leaves[k] for k in positions]
        self.steps: list[list[Step]] = [[] for _ in positions]
        self._structure = treedef
        if split_as is not None:
            of_leaves = steps_like(what, model, split_as, root)
            self.steps = [of_leaves[k] for k in positions]
            self._structure = tree_util.tree_structure(split_as)

    @functools.cached_property
    def own(self) -> list[Leaf]:
        """This shard's parts of the parameters."""
        return own_parts(self.params, self.steps)

    def tree(self, values: Sequence[Leaf]) -> PyTree:
        """The gradients' tree with `values` in place of what is differentiated, and `None` elsewhere."""
        chosen = dict(zip(self.model.positions, values, strict=True))
        leaves = [chosen.get(k) for k in range(len(self.model.leaves))]
        or_none = lambda unit: unit if tree_util.tree_leaves(unit) else None
        return tree_util.tree_map(or_none, self._structure.unflatten(leaves), is_leaf=is_state)


def _picked(
    what: str, model: PyTree, wrt: Filter, root: str
) -> tuple[list[tuple[str, PyTree]], list[bool]]:
    """The units of a model with their paths, and for each whether it is differentiated."""
    hit = _is_trained if wrt is None else to_predicate(wrt, model)
    units, hits = [], []
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    for (path, unit), inside in zip(flat, inside_modules(model), strict=True):
        offered = _is_shown(unit) or (_is_number(unit) and not inside)
        units.append((path_str(path, root), unit))
        hits.append(bool(offered and hit(path, unit)))
    impossible = [
        f"{path}: {describe(unit)}"
        for (path, unit), picked in zip(units, hits, strict=True)
        if picked and not any(map(_is_differentiable, tree_util.tree_leaves(unit)))
    ]
    if impossible and wrt is not None:
        raise error_listing(
            StructureError,
            f"{what}: wrt picks values that hold no floating or complex numbers",
            impossible,
            "Let it pick parameters, as `wrt=sm.ParamState` does; sm.filters.All, Any and Not join several "
            "filters.",
        )
    return units, hits


def _is_trained(path: KeyPath, unit: PyTree) -> bool:
    return isinstance(unit, ParamState) or (not is_state(unit) and _is_differentiable(unit))


def _is_number(x: Leaf) -> bool:
    """Whether `x` is a Python number that can be differentiated: a mapped call makes an array of it."""
    return type(x) in (float, complex)


def _is_differentiable(x: Leaf) -> bool:
    return _is_number(x) or is_inexact(x)


def _is_shown(unit: PyTree) -> bool:
    return is_state(unit) or is_array(unit)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The loss of one shard and its gradients, not reduced over shards yet.

    **Attributes:**

    - `result`: a pair of auxiliary values (or `None`) and the new model.
    - `crossed`: gives the axes over which the gradients hold parts of other shards' losses.
    - `program`: traces the function.
    - `dtypes`: those in which the gradients and the loss leave, if they are others than their own.
    """

    loss: Array
    grads: list[Leaf]
    result: tuple[PyTree, PyTree]
    crossed: Callable[[], Axes]
    program: Callable[[], Jaxpr]
    dtypes: Sequence[Dtype] | None = None


class Scope:
    """Bound axes, grouped by how we learn over which of them a value differs."""

    def __init__(
        self,
        name: str,
        axis_name: SeveralAxes,
        mean: bool,
        blocks: Size | None,
        parts: Parts,
    ) -> None:
        self.params, self.own, self.steps = parts.params, parts.own, parts.steps
        self.axis_names = bound_names("value_and_grad", axis_name)
        named = frozenset(self.axis_names)
        unnamed = [
            f"{path}: over {quoted(left)}"
            for path, steps in zip(parts.paths, parts.steps, strict=True)
            if (left := [n for step in steps for n in step.names if n not in named])
        ]
        if unnamed:
            raise error_listing(
                StatemeshError,
                "value_and_grad: split_as splits parameters over mesh axes that axis_name does not name",
                unnamed,
                "Gradients are summed over the axes of axis_name only. Name these axes there too.",
            )
        self.reduction = Reduction(named, mean, name, tuple(parts.paths), blocks)
        if blocks is not None:
            self._check_order(parts.paths)
        bound = compat.bound_axis_names()
        meshes, self.lanes = meshes_and_lanes(bound)
        self.entry = named, frozenset(bound)
        meshes = self._as_named(meshes)
        self.from_types = tuple(n for n in meshes if compat.varying(jax.lax.axis_index(n)))
        self.types = FromTypes(self.from_types)
        self.from_dataflow = compat.axes_from_dataflow()
        from_dataflow = [name for mark in self.from_dataflow for name in mark.axis_names]
        unknown = [name for name in meshes if name not in (*self.from_types, *from_dataflow)]
        if from_dataflow and (self.from_types or unknown):
            checked = [name for name in self.from_types if name not in from_dataflow]
            inner, outer = (
                ("checks", "does not")
                if checked
                else ("does not check", "does, or is run by JAX itself")
            )
            apart = unknown or from_dataflow
            raise StatemeshError(
                f"{_split_unknown(apart)} the map over {quoted(checked or from_dataflow)} {inner} what "
                f"varies, and stands inside the map over {quoted(apart)}, which {outer}. Use "
                "`statemesh.shard_map` for both, and leave check_vma at its default."
            )
        if unknown:
            raise StatemeshError(
                f"{_split_unknown(unknown)} this map does not check what varies, and is run by JAX itself or "
                "with jit=False. Use `statemesh.shard_map` (without jit=False), or leave check_vma at its "
                "default."
            )
        around = NO_AXES.union(*(names for names, _ in gradients_around.get()))
        if twice := named & around & frozenset(self.from_types):
            axes = quoted(self._in_order(twice))
            raise StatemeshError(
                f"value_and_grad: inside the loss of another value_and_grad over {axes}, it cannot reduce "
                "over the same axes: there each shard has its own parameters, which may differ. Leave "
                "axis_name out inside, for the gradient of this shard's own loss."
            )
        # Inside the loss of one shard, each shard has parameters of its own.
        self.separate = around - named
        self.cast_over = (named | around) & frozenset(self.from_types)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Entered while the function runs on cast parameters: their types do not tell how they are split."""
        token = gradients_around.set((*gradients_around.get(), self.entry))
        try:
            yield
        finally:
            gradients_around.reset(token)

    def cast(self, params: Sequence[Leaf]) -> list[Leaf]:
        """The parameters, typed so that JAX gives each shard its own gradient."""
        over = self._in_order(self.cast_over)
        return [compat.vary(x, over) for x in params] if over else list(params)

    def restored(self, arrays: Sequence[Leaf], program: Callable[[], Jaxpr]) -> list[Leaf]:
        """The results of the function, with the original parameter in place of each that is a cast one.

        A parameter that passes through `jax.jit` or `jax.checkpoint` comes back as another array. Only the
        jaxpr of the function tells whether it is the same one.

        **Arguments:**

        - `arrays`: the arrays in the results, after the loss.
        - `program`: traces the function, from the parameters to the loss and these arrays.
        """
        cast = self.cast_over
        forms = {(x.shape, x.dtype) for x in self.params if cast - compat.varying(x)}
        if not any((x.shape, x.dtype) in forms and cast <= compat.varying(x) for x in arrays):
            return list(arrays)
        sources = forwarded(program())[1:]
        pairs = zip(arrays, sources, strict=True)
        return [x if k is None else self.params[k] for x, k in pairs]

    def made_of_casts(self, arrays: Sequence[Leaf]) -> list[int]:
        """The numbers of the arrays that have the type of cast parameters, and are the same on all shards."""
        if not (self.cast_over and compat.under_jit()):
            return []
        same = []
        for i, x in enumerate(arrays):
            fact = self.types.recorded.of(x)
            # A parameter that was gathered belongs back in its parts.
            if self.cast_over & compat.varying(x) - fact - whole_over(fact):
                same.append(i)
        return same

    def pulled(
        self, pull: Callable[..., PyTree], loss: Leaf
    ) -> tuple[list[Leaf], Callable[[], Axes]]:
        """JAX's gradients, and a function that gives the axes over which they hold parts of other losses.

        JAX gives the gradient of the sum of all instances' losses. It is the gradient of an instance's own
        loss where no cotangent passes from one instance to another on its way back.
        """
        cotangent = compat.vary(jnp.ones((), loss.dtype), compat.varying(loss))
        traced = functools.cache(lambda: jax.make_jaxpr(pull)(cotangent))
        over = functools.cache(lambda: crossed(jaxprs.open_jaxpr(traced())))
        if self.lanes or self.from_dataflow:
            return jaxprs.run_jaxpr(traced(), [cotangent]), over
        (grads,) = pull(cotangent)
        return grads, over

    def asks_what_crosses(self, loss: Leaf) -> bool:
        """Whether the reduction of this loss depends on what passes from one instance to another."""
        apart = self._varying(loss) - self.reduction.named
        return bool(self.lanes or self.from_dataflow or apart)

    def reduced(self, evaluated: Evaluated) -> tuple[Leaf, list[Leaf]]:
        """The loss and its gradients, reduced over all axes."""
        loss, crossed, name = evaluated.loss, evaluated.crossed, self.reduction.name
        dtypes = evaluated.dtypes or [x.dtype for x in (*evaluated.grads, loss)]
        with jax.named_scope(REDUCING):
            values = [*self._scattered(evaluated.grads), loss]
        # Over these axes types do not tell what differs: a `Pending` is decided by a `vmap` or by a walk.
        lanes = [((lane,), True, True) for lane in self.lanes]
        walked = [(mark.axis_names, mark.lanes, False) for mark in self.from_dataflow]
        for axis_names, are_lanes, vmapped in (*lanes, *walked):
            over = crossed()
            if inside := self.separate & over:
                raise _loss_exchanged_inside(name, sorted(inside, key=str))
            separate = (
                self.separate | (frozenset(axis_names) - over) if are_lanes else self.separate
            )
            if left := tuple(
                n
                for n in self._as_named(axis_names)
                if n in self.reduction.named or n not in separate
            ):
                pending = Pending(self.reduction, left, are_lanes, over)
                # A derivative taken outside of a map differentiates what was decided inside.
                within = [names for _, names in gradients_around.get() if names.issuperset(left)]
                values = pending([*self.own, loss], values, vmapped, reverse=len(within))
        if self.from_types:
            axes, over = frozenset(self.from_types), self._varying(loss)
            pairs = zip(self.own, self.reduction.params, strict=True)
            params = [self._param_varying(x, path) | (self.separate & axes) for x, path in pairs]
            self.reduction.check(over, params, self.from_types)
            # Over these axes each shard has a loss and parameters of its own.
            apart = over - self.reduction.named
            if apart and (shared := apart & crossed()):
                if inside := shared & self.separate:
                    raise _loss_exchanged_inside(name, self._in_order(inside))
                raise loss_exchanged(name, self._in_order(shared))
            # JAX's types let the cotangent of a loss that all shards share pass to each of them without an
            # error.
            same = (self.separate & axes) - over
            if same and (inside := same & jaxprs.exchanged_over(evaluated.program())):
                raise _loss_exchanged_inside(name, self._in_order(inside))
            plans = [self.reduction.typed(param, over, axes) for param in params]
            plans.append(self.reduction.of_loss(over, axes))
            values = reduce_on_mesh(values, plans, self.from_types, self.reduction.sums)
            values = self.reduction.with_names(values)
        if blocks := self.reduction.blocks:
            # What follows is not to be compiled into one loop with the sums, where it may round otherwise.
            values = compat.optimization_barrier(
                [x / blocks if self.reduction.mean else x for x in values]
            )
        narrowed = zip(values, dtypes, strict=True)
        *grads, loss = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in narrowed]
        return loss, grads

    def _scattered(self, grads: Sequence[Leaf]) -> list[Leaf]:
        """The gradients; of those that are split this shard's part of the sum, of narrow ones in float32."""
        pairs = zip(grads, self.steps, strict=True)
        wide = [widened(x) if steps else x for x, steps in pairs]
        return scattered(wide, self.steps, self.reduction.sums)

    def _varying(self, x: Leaf) -> Axes:
        """The mesh axes over which a value may differ, by its type or by what is recorded of it."""
        (axes,) = self.types.of([x])
        return axes

    def differs_over(self, x: Leaf) -> Axes:
        """The axes of `axis_name` over which a value may differ."""
        return self._varying(x) & self.reduction.named

    def _param_varying(self, x: Leaf, path: str) -> Axes:
        """The same of a parameter. One that `all_gather` made whole has a type that varies, yet one value.

        A parameter that was cast to vary is one that each shard has for itself: the author asked for it.
        """
        axes = self._varying(x)
        reduced = self._in_order(self.reduction.named & compat.varying(x))
        if not reduced:
            return axes
        whole = whole_over(self.types.recorded.of(x)) if compat.under_jit() else NO_AXES
        name_varying(x, reduced, whole, path)
        return axes - whole

    def _in_order(self, axes: Axes) -> tuple[AxisName, ...]:
        return tuple(name for name in self.from_types if name in axes)

    def _as_named(self, axes: Sequence[AxisName]) -> tuple[AxisName, ...]:
        """The axes with those of `axis_name` in its order, the order in which they split the rows."""
        named = iter([name for name in self.axis_names if name in axes])
        return tuple(next(named) if name in self.reduction.named else name for name in axes)

    def _check_order(self, paths: Sequence[str]) -> None:
        """Refuse parameters that are split over axes in another order than the tree of sums goes."""
        apart = []
        for path, steps in zip(paths, self.steps, strict=True):
            split = [name for step in reversed(steps) for name in step.names]
            if split and self.axis_names[-len(split) :] != tuple(split):
                apart.append(f"{path}: over {quoted(split)}")
        if apart:
            raise error_listing(
                StatemeshError,
                f"value_and_grad: blocks={self.reduction.blocks} sums over the last axes of axis_name="
                f"{axes_argument(self.axis_names)!r} first, but split_as splits parameters over others",
                apart,
                "Split parameters over the last axes, or over all of them in this order.",
            )

    def shared_over(self, x: Leaf) -> tuple[AxisName, ...]:
        """The axes of `axis_name` over which types say that shards have the same rows."""
        return self._in_order(self.reduction.named - self._varying(x))

    def cut(self, microbatches: Size | None) -> "Cut | None":
        """How the rows of a shard are cut; `None` if they are not."""
        blocks = self.reduction.blocks
        if blocks is None:
            return None if microbatches is None else Cut(MICROBATCHES, microbatches)
        sizes = [jax.lax.axis_size(name) for name in self.axis_names]
        shards = math.prod(sizes)
        if not _is_power_of_two(shards) or blocks % shards:
            product = " x ".join(map(str, sizes)) + (f" = {shards}" if len(sizes) > 1 else "")
            raise StatemeshError(
                f"value_and_grad: blocks={blocks} cannot be shared out evenly among {product} shards over "
                f"{quoted(self.axis_names)}: {blocks} = {blocks // shards} x {shards} + {blocks % shards}. "
                "The number of shards must be a power of two, and at most the number of blocks."
            )
        count = blocks // shards
        if microbatches is not None and count % microbatches:
            raise StatemeshError(
                f"value_and_grad: microbatches={microbatches} are not made of whole blocks: a shard has "
                f"{count} of blocks={blocks}, and {count} = {count // microbatches} x {microbatches} + "
                f"{count % microbatches}. Leave microbatches out: blocks run one after the other anyway."
            )
        return Cut(BLOCKS, count, blocks, self.axis_names)


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """The function that a user gave, which returns a loss and a model.

    **Attributes:**

    - `name`: what messages call it.
    """

    fun: Fun
    has_aux: bool
    name: str

    def __call__(
        self, model: PyTree, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[Array, tuple[PyTree, PyTree]]:
        """The loss, and a pair of auxiliary values (or `None`) and the model."""
        returned = self.fun(model, *args, **kwargs)
        expected = "((loss, aux), model)" if self.has_aux else "(loss, model)"
        if not _is_pair(returned) or (self.has_aux and not _is_pair(returned[0])):
            kind = kind_str(returned)
            if isinstance(returned, tuple):
                kind = f"a tuple of {', '.join(map(kind_str, returned))}" if returned else "()"
            text = f"value_and_grad: {self.name} must return {expected}, but returned {kind}."
            if not self.has_aux:
                text += (
                    " If it writes no state, return the model as it came in; if it returns more, pass "
                    "`has_aux=True` and return ((loss, aux), model)."
                )
            raise StructureError(text)
        value, new = returned
        (root,) = positional_names(self.fun, 1)
        before, after = _paths(model, root), _paths(new, root)
        if before != after:
            missing = [f"{path} is missing" for path in before if path not in after]
            added = [f"{path} is new" for path in after if path not in before]
            is_shown = new is None or isinstance(new, int | float | str)
            what = repr(new) if is_shown else f"a {type(new).__name__}"
            head = (
                f"value_and_grad: {self.name} must return {expected} with the model that it was given, a "
                f"{type(model).__name__}, but returned {what} in its place"
            )
            mend = (
                "Return the model as it came in, or with what was written to its states. What else is "
                "returned goes beside the loss: pass `has_aux=True` and return ((loss, aux), model)."
            )
            # Of something else altogether, such as the state of a library, the leaves tell nothing.
            if type(new) is not type(model):
                raise StructureError(f"{head}. {mend}")
            raise error_listing(StructureError, head, [*missing, *added], mend)
        loss, aux = value if self.has_aux else (value, None)
        if isinstance(loss, np.ndarray | np.generic | float):
            loss = jnp.asarray(loss)
        is_array = isinstance(loss, jax.Array)
        if not is_array or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise StructureError(
                f"{loss_str(self.name)} must be one real floating number, but is {describe(loss)}. Reduce "
                "it: `loss.mean()`."
            )
        return loss, (aux, new)


def at_once(
    fun: LossFunction,
    scope: Scope,
    parts: Parts,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Evaluated:
    """Evaluate the function on its arguments as they are."""
    leaves = (*parts.model.leaves, *tree_util.tree_leaves((args, kwargs)))
    arguments = {id(x): x for x in leaves}
    results: list[Skeleton] = []

    def run(params: list[Leaf]) -> tuple[Array, PyTree]:
        return fun(parts.model.filled(params), args, kwargs)

    def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
        loss, rest = run(params)
        kept = arguments | {id(x): old for x, old in zip(params, parts.params, strict=True)}
        skeleton, arrays = taken_apart(rest, kept)
        results[:] = [skeleton]
        return loss, arrays

    with scope.casting():
        params = scope.cast(parts.params)
        loss, pull, arrays = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
    (result,) = results

    def loss_and_made(params: list[Leaf]) -> tuple[Array, list[Array]]:
        # The same results as of the first run, even if JAX now gives other arrays for some of the arguments.
        loss, rest = run(params)
        leaves = tree_util.tree_leaves(rest)
        return loss, [jnp.asarray(leaves[i]) for i in result.positions]

    # Few cases need it, and only these trace it.
    program = functools.cache(lambda: jaxprs.open_jaxpr(jax.make_jaxpr(loss_and_made)(params)))
    arrays = scope.restored(arrays, program)
    if same := scope.made_of_casts(arrays):
        # What comes of parameters alone varies by the type of the cast, so it is made without the cast.
        closed = jax.make_jaxpr(loss_and_made)(parts.params)
        uncast = jaxprs.run_only(closed, parts.params, [1 + i for i in same])
        for i, x in zip(same, uncast, strict=True):
            arrays[i] = x
    return Evaluated(loss, grads, result.filled(arrays), crossed, program)


def _paths(model: PyTree, root: str) -> list[str]:
    """The paths of a model's states, and of its leaves outside of them."""
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    return [path_str(keys, root) for keys, _ in flat]


def _is_pair(x: Leaf) -> bool:
    return isinstance(x, tuple) and len(x) == 2


def _split_unknown(axes: Sequence[AxisName]) -> str:
    return (
        f"value_and_grad cannot know over which of {quoted(axes)} the parameters are split, on which their "
        "gradients depend:"
    )


def _loss_exchanged_inside(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, the loss that "
        f"{name} returns depends on what the shards exchange over the same axes. There each shard has its "
        "own parameters, which may differ. Return this shard's own loss, without a collective over "
        f"{quoted(axes)}."
    )


_DIFFERS = frozenset([MICROBATCHES])
# What messages call one part of the rows, and several.
_PARTS: dict[AxisName, tuple[str, str]] = {
    MICROBATCHES: ("microbatch", "microbatches"),
    BLOCKS: ("block", "blocks"),
}


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the rows of a shard are cut into parts that run one after the other: microbatches or blocks.

    **Attributes:**

    - `name`: by which name states see the parts, as if they were lanes.
    - `count`: how many parts a shard has.
    - `blocks`, `axis_names`: of blocks how many all shards have, and the axes that split the rows.
    """

    name: str
    count: Size
    blocks: Size | None = None
    axis_names: tuple[AxisName, ...] = ()

    def __str__(self) -> str:
        if self.blocks is None:
            return f"microbatches={self.count}"
        return f"blocks={self.blocks} ({self.count} on a shard)"

    @property
    def of_all(self) -> Size:
        """The values of how many parts a shard has of what the parts wrote."""
        return self.count if self.blocks is None else self.blocks

    @property
    def kind(self) -> str:
        return _PARTS[self.name][1]

    def apart(self, x: Array) -> Array:
        """An array of rows, with the parts along an axis."""
        groups = len(x) // self.count if self.blocks is None else self.count
        return explicit.rows_in_groups(x, groups)

    def part(self, x: Array, number: Leaf) -> Array:
        """One part of such an array. A microbatch has a row of each group, and a block is a group."""
        axis = 1 if self.blocks is None else 0
        return jax.lax.dynamic_index_in_dim(x, number, axis, keepdims=False)

    def compiled_apart(
        self, fun: Callable[..., list[Array]], operands: Sequence[Array], number: Leaf = 0
    ) -> list[Array]:
        """The results of a function; for blocks of one that XLA compiles alike wherever it stands.

        Otherwise XLA would compile it together with what stands around it, and round otherwise: it contracts
        a product and a sum. A branch is a computation of its own, and barriers keep what goes in and out in
        its place.

        **Arguments:**

        - `number`: in a loop over parts that of the part.
        """
        if self.blocks is None:
            return fun(*operands)
        impls: list[Any] = []

        def without_keys(*operands: Array) -> list[Array]:
            results = fun(*operands)
            impls[:] = [jax.random.key_impl(x) if is_key(x) else None for x in results]
            return [jax.random.key_data(x) if is_key(x) else jnp.asarray(x) for x in results]

        closed = jax.make_jaxpr(without_keys)(*operands)

        def run(*operands: Array) -> list[Array]:
            inputs = compat.optimization_barrier(operands)
            return compat.optimization_barrier(run_merged(closed, inputs))

        def never(*_: Array) -> list[Array]:
            avals = closed.out_avals
            return [compat.vary(explicit.zeros_of(x), compat.varying_type(x)) for x in avals]

        # XLA does not know what a barrier hands on, so it keeps the branch. On a CPU it compiles a loop that
        # reads less than a kilobyte as one function, which rounds otherwise, but not one with a sort:
        # https://github.com/openxla/xla/blob/main/xla/service/cpu/small_while_loop_hoisting_pass.cc
        two = jax.lax.optimization_barrier(jnp.asarray(number) + jnp.arange(2))
        first, second = jax.lax.sort(two)
        results = jax.lax.cond(first < second, run, never, *operands)
        return [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(results, impls, strict=True)
        ]


def one_after_another(
    fun: LossFunction,
    scope: Scope,
    parts: Parts,
    model: PyTree,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    cut: Cut,
) -> Evaluated:
    """Evaluate the function on one microbatch, or block, after the other.

    One part is traced. Its program shows which results depend on its rows or on its number, and may
    differ from one part to the next: these are stacked. The others are kept once. The loss and the
    gradients are summed up.
    """
    if inside_microbatches():
        raise StatemeshError(
            f"value_and_grad: the {cut.kind} of {fun.name} stand inside those of another value_and_grad. "
            f"Split the rows once: leave `{cut.kind}` out inside, and give the outer one the product of "
            "both."
        )
    batch, rows = _split_rows(fun, args, cut, scope)
    entering = _Entering(fun.fun, model, kwargs, cut)
    arguments = {id(x): x for x in tree_util.tree_leaves((model, args, kwargs))}
    params = scope.cast(parts.params)
    results: list[tuple[Skeleton, Skeleton, list[_ReturnedUnit], Axes]] = []

    def of_part(params: list[Leaf], pieces: list[Leaf]) -> tuple[Array, list[Leaf], list[Array]]:
        returned: list[tuple[Skeleton, Skeleton, list[_ReturnedUnit]]] = []

        def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
            entered, seen, keywords = entering.seen(parts.model.filled(params), pieces[len(rows) :])
            loss, (aux, new) = fun(seen, batch.filled(pieces[: len(rows)]), keywords)
            new, returned_units = _unwritten_restored(fun.name, entering.root, entered, new)
            kept = arguments | {id(x): old for x, old in zip(params, parts.params, strict=True)}
            aux, aux_arrays = taken_apart(_outside(aux), kept)
            new, new_arrays = taken_apart(new, kept)
            returned[:] = [(aux, new, returned_units)]
            return loss, [*aux_arrays, *new_arrays]

        loss, pull, arrays = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
        results[:] = [(*returned[0], crossed() if scope.asks_what_crosses(loss) else NO_AXES)]
        return loss, grads, arrays

    with scope.casting():
        first = [
            *(cut.part(x, 0) for x in rows),
            *((again(x) if is_key(x) else x)[0] for x in entering.parts),
        ]
        closed = compat.trace_marked(of_part, [params, first], [IN_MICROBATCHES])
    ((aux, new, returned_units, crossed),) = results
    program = jaxprs.open_jaxpr(closed)
    if cut.blocks is not None:
        _refuse_what_depends_on_shards(fun, program, cut)
    # Parameters, and what the function closes over, may be each shard's own.
    axes_of_shards = [scope.differs_over(x) for x in (*closed.consts, *parts.params)]
    facts = all_axes(
        program.replace(constvars=[], invars=[*program.constvars, *program.invars]),
        [*axes_of_shards, *[_DIFFERS] * len(first)],
    )
    differs = [bool(axes & _DIFFERS) for axes in facts]
    if not scope.reduction.mean and (cut.blocks or cut.count) > 1 and not differs[0]:
        raise StatemeshError(
            f"{loss_str(fun.name)} is the same in every {_PARTS[cut.name][0]}: "
            "reduce='sum' would count it once for each. Compute it from the rows, or write reduce='mean', "
            "which leaves such a loss as it is."
        )
    # The program's results are the loss and the gradients, which are summed; auxiliary arrays, which are
    # stacked; and arrays of the model, which are stacked if they differ. Keys are stacked too, because there
    # are no zeros of them for a loop to start with.
    avals = closed.out_avals
    summed = 1 + len(params)
    of_model = summed + len(aux.positions)
    is_key_result = [jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in avals]
    is_stacked = [
        k >= summed and (k < of_model or differs[k] or is_key_result[k]) for k in range(len(avals))
    ]
    known = {
        k: parts.params[i]
        for k, i in enumerate(forwarded(program))
        if k >= of_model and i is not None and i < len(params)
    }
    carried = [k for k, hit in enumerate(is_stacked) if not hit and k not in known]

    def start(k: int) -> Array:
        zeros = compat.vary(explicit.zeros_of(avals[k]), compat.varying_type(avals[k]))
        # -0.0 alone changes no number that is added to it.
        return -widened(zeros) if k < summed else zeros

    def run(number: Leaf) -> tuple[list[Array], list[Array]]:
        # The rows are picked here. As the scan's own operand the whole batch would be copied first, to put
        # the rows of each microbatch side by side.
        picked = [cut.part(x, number) for x in rows]
        others = [(again(x) if is_key(x) else x)[number] for x in entering.parts]
        operands = [*params, *picked, *others]
        outputs = cut.compiled_apart(lambda *xs: jaxprs.run_jaxpr(closed, xs), operands, number)
        after = [widened(outputs[k]) if k < summed else strong(outputs[k]) for k in carried]
        return after, [x for x, hit in zip(outputs, is_stacked, strict=True) if hit]

    def together(before: list[Array], after: list[Array]) -> list[Array]:
        triples = zip(carried, before, after, strict=True)
        return [old + new if k < summed else new for k, old, new in triples]

    def in_line(before: list[Array], number: Array) -> tuple[list[Array], list[Array]]:
        after, kept = run(number)
        return together(before, after), kept

    zeros = [start(k) for k in carried]
    if cut.blocks is None:
        last, stacks = jax.lax.scan(in_line, zeros, jnp.arange(cut.count))
    else:
        last, stacks = in_turn(run, together, cut.count, zeros)
    once = dict(zip(carried, last, strict=True)) | known
    left = iter(stacks)
    outputs = [next(left) if hit else once[k] for k, hit in enumerate(is_stacked)]
    loss, *grads = outputs[:summed]
    if scope.reduction.mean and cut.blocks is None:
        loss, *grads = [x / cut.count for x in (loss, *grads)]
    of_all = [
        x[0] if is_stacked[k] and not differs[k] else x
        for k, x in enumerate(outputs[of_model:], start=of_model)
    ]
    if cut.axis_names:
        of_all = _on_all_shards(new, of_all, facts[of_model:], cut.axis_names)
    stacked = {id(x) for x, hit in zip(of_all, differs[of_model:], strict=True) if hit}
    model = _left_together(fun.name, new.filled(of_all), stacked, returned_units, cut)
    # Of auxiliary values every array is stacked, also those that all microbatches share.
    shared = [
        jnp.broadcast_to(x, (cut.count, *x.shape)) if isinstance(x, jax.Array | np.ndarray) else x
        for x in aux.leaves
    ]
    result = dataclasses.replace(aux, leaves=shared).filled(outputs[summed:of_model]), model
    dtypes = [aval.dtype for aval in (*avals[1:summed], avals[0])]
    return Evaluated(loss, grads, result, lambda: crossed, lambda: program, dtypes)


def _on_all_shards(
    model: Skeleton,
    arrays: Sequence[Array],
    facts: Sequence[Axes],
    axis_names: tuple[AxisName, ...],
) -> list[Array]:
    """The arrays of a model as blocks left them; each shard gets those of the blocks of all shards.

    So the states' policies see all blocks at once, in one order, and merge them alike on every mesh. Random
    streams stay as they are: their keys are the shard's own, and leave as the first shard's.

    **Arguments:**

    - `facts`: over which axes each array differs, whatever its type says. One that differs between blocks
        has those of a shard along its first axis.
    """
    units = tree_util.tree_leaves(model.filled(arrays), is_leaf=is_state)
    streams = {
        id(x)
        for unit in units
        if isinstance(unit, RandomState)
        for x in tree_util.tree_leaves(unit)
    }

    def on_all(x: Array, differs: Axes) -> Array:
        if id(x) in streams:
            return x
        if differs & _DIFFERS:
            return gathered(all_varying(x, axis_names), axis_names)
        typed = [name for name in axis_names if name in compat.varying(x)]
        if not typed or differs.intersection(axis_names):
            return x
        # Parameters are cast inside, and what comes of them alone is the same on all shards. The mean of
        # equal numbers would not be that number: 5 x is rounded, for one.
        (same,) = largest([x], typed)
        return same

    return [on_all(x, axes) for x, axes in zip(arrays, facts, strict=True)]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _refuse_what_depends_on_shards(fun: LossFunction, program: Jaxpr, cut: Cut) -> None:
    """Refuse collectives and the shard's number inside a block: both depend on how many shards there are."""
    lines = []
    for eqn in jaxprs.equations(program):
        if jaxprs.jaxprs_of(eqn):
            continue
        is_index = eqn.primitive.name == "axis_index"
        over = jaxprs.axes_named(eqn) if is_index else jaxprs.exchanged_by(eqn)
        if axes := [name for name in cut.axis_names if name in over]:
            frames = frames_of(eqn)
            # Random streams number the rows of blocks by the shard, which gives the same on every mesh.
            if not is_index or all(file != _random.__file__ for file, _ in frames):
                operation = jaxprs.spelled(eqn.primitive.name)
                lines.append(f"{user_line(frames)}: {operation} over {quoted(axes)}")
    if lines:
        raise error_listing(
            StatemeshError,
            f"value_and_grad: {cut} runs {fun.name} on one block after the other, and these lines depend on "
            "which blocks the shards run at the same time. That depends on the number of shards, and so "
            "would the bits",
            list(dict.fromkeys(lines)),
            "Return the loss of the rows: value_and_grad takes the mean. Gather parameters before, and pass "
            "`split_as`. Layers such as BatchNorm need no axis_name here: their statistics are merged by the "
            "states' own policies. Pass the numbers of rows as one more argument.",
        )


def _split_rows(
    fun: LossFunction, args: tuple[PyTree, ...], cut: Cut, scope: Scope
) -> tuple[Skeleton, list[Array]]:
    """The positional arguments after the model, and their arrays with the leading axis split.

    A microbatch holds every `count`-th row. The number of rows on a shard is a multiple of `count`, so the
    rows of one microbatch on all shards are every `count`-th row of the whole batch, whatever the mesh. A
    block holds rows that follow one another.
    """
    count = cut.count
    leaves, treedef = tree_util.tree_flatten(args)
    positions: list[int] = []
    bare: list[tuple[str, object]] = []
    uneven: list[str] = []
    same: list[str] = []
    k = 0
    for root, arg in zip(positional_names(fun.fun, 1 + len(args))[1:], args, strict=True):
        units, _ = tree_util.tree_flatten_with_path(arg, is_leaf=is_state)
        for (keys, unit), inside in zip(units, inside_modules(arg), strict=True):
            for rest, x in tree_util.tree_flatten_with_path(unit)[0]:
                if is_shaped(x) or (type(x) in NUMBERS and not inside):
                    positions.append(k)
                    path, shape = path_str((*keys, *rest), root), np.shape(x)
                    if not shape:
                        bare.append((path, x))
                    elif shape[0] % count:
                        parts = f"{shape[0] // count} x {count} + {shape[0] % count}"
                        uneven.append(f"{path}: {describe(x)}, {shape[0]} = {parts}")
                    elif cut.blocks is not None and (axes := scope.shared_over(x)):
                        same.append(f"{path}: {describe(x)}, the same over {quoted(axes)}")
                k += 1
    if bare:
        argument = bare[0][0].split(".")[0].split("[")[0]
        raise error_listing(
            StructureError,
            f"value_and_grad: {cut} splits the leading axis of every array in the positional "
            f"arguments of {fun.name} after the model, but these have none",
            [f"{path}: {describe(x)}" for path, x in bare],
            f"Pass what all {cut.kind} share as a keyword argument: `{argument}=...`.",
        )
    if uneven:
        raise error_listing(
            StructureError,
            f"value_and_grad: {cut} does not divide the leading axis of arguments of {fun.name}",
            uneven,
            "Inside a mapped call these are the rows of one shard. Choose a number that divides them; or pad "
            "the rows and leave them out of the loss by a mask.",
        )
    if same:
        raise error_listing(
            StatemeshError,
            f"value_and_grad: {cut} counts rows over {quoted(cut.axis_names)}, but shards have the same rows "
            f"of arguments of {fun.name}",
            same,
            "Name in axis_name the axes that split the rows, and no others. Pass what all shards share as a "
            f"keyword argument of {fun.name}.",
        )
    skeleton = Skeleton(leaves, treedef, [None] * len(origins(args)), positions)
    return skeleton, [cut.apart(jnp.asarray(leaves[i])) for i in positions]


# Of a state in a model that a microbatch returned, or of a leaf outside of any: its path, the state that it
# continues, and whether it was written.
_ReturnedUnit: TypeAlias = tuple[str, Entered | None, bool]


class _Entering:
    """The states of the model and of the keyword arguments on their way into a microbatch.

    **Attributes:**

    - `parts`: the arrays that each microbatch has for itself, of all of them along a new first axis. Only
        states that enter a shard as another state have such arrays.
    """

    def __init__(self, fun: Fun, model: PyTree, kwargs: dict[str, PyTree], cut: Cut) -> None:
        self.root = positional_names(fun, 1)[0]
        self.kwargs = kwargs
        self.olds: list[tuple[str, KeyPath, State]] = [
            (path_str(keys, name), keys, node)
            for name, tree in [(self.root, model), *kwargs.items()]
            for keys, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
            if is_state(node)
        ]
        changed = [old for _, _, old in self.olds if _enters_changed(old)]
        kept = {id(x): x for x in tree_util.tree_leaves(changed)}
        skeletons: list[Skeleton] = []

        def enter() -> list[Array]:
            states = [checked_state(old._made((cut.name,)), old, "enter") for old in changed]
            skeleton, arrays = taken_apart(states, kept)
            skeletons[:] = [skeleton]
            return arrays

        self.parts = jax.vmap(enter, axis_name=cut.name, axis_size=cut.count)()
        (self.changed,) = skeletons

    def seen(
        self, model: PyTree, parts: Sequence[Leaf]
    ) -> tuple[list[Entered], PyTree, dict[str, PyTree]]:
        """The states that enter, and the model and the keyword arguments as the function sees them."""
        entered: list[Entered] = []
        olds, changed = iter(self.olds), iter(self.changed.filled(parts))

        def enter(node: PyTree) -> PyTree:
            if not is_state(node):
                return node
            (path, keys, old), mark = next(olds), object()
            new = mark_origin(next(changed) if _enters_changed(old) else node, mark)
            entered.append(Entered(mark, path, keys, old, new, (), ()))
            return new

        trees = model, *self.kwargs.values()
        model, *others = [jax.tree.map(enter, tree, is_leaf=is_state) for tree in trees]
        return entered, model, dict(zip(self.kwargs, others, strict=True))


def _unwritten_restored(
    name: str, root: str, entered: Sequence[Entered], model: PyTree
) -> tuple[PyTree, list[_ReturnedUnit]]:
    """The model that was returned, with states that were not written as they came in."""
    flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    returned = [(keys, node) for keys, node in flat if is_state(node)]
    sources = iter(find_origins(name, returned, entered, False))
    units: list[PyTree] = []
    returned_units: list[_ReturnedUnit] = []
    for keys, node in flat:
        source = next(sources) if is_state(node) else None
        is_written = is_state(node) and (source is None or not has_same_leaves(node, source.seen))
        if source is not None:
            if not is_written:
                node = source.old._with_value(source.old.value, node._meta)
            # What the function saw are tracers of its own trace.
            source = dataclasses.replace(source, seen=source.old)
        returned_units.append((path_str(keys, root), source, is_written))
        units.append(node)
    return treedef.unflatten(units), returned_units


def _enters_changed(state: State) -> bool:
    return type(state).enter is not State.enter


def _outside(tree: PyTree) -> PyTree:
    """Auxiliary values, with states as they are outside of any microbatch."""

    def leave(node: PyTree) -> PyTree:
        return node.leave(None, ()) if is_state(node) and _enters_changed(node) else node

    return jax.tree.map(leave, tree, is_leaf=is_state)


@dataclasses.dataclass(frozen=True)
class _MicrobatchRules(AxisRules):
    """Microbatches leave as lanes do of which the result keeps one copy, with errors in their own words."""

    def refuse(self, name: str, mistakes: Mistakes) -> None:
        unmerged = [
            write
            for write in mistakes.diverged
            if write.value.reduce is None and type(write.value).leave is State.leave
        ]
        arrays = mistakes.varying
        _, kind = _PARTS[self.names[0]]
        if unmerged or arrays:
            items = [(write.path, write.value) for write in unmerged]
            items += [(write.path, write.value) for write in arrays]
            remedies = {
                "declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
                "function": unmerged,
                "put an array that is written into a State, which can say how writes are merged": arrays,
                f"return the {kind}' own values as auxiliary ones, with `has_aux=True`": True,
            }
            raise error_listing(
                DivergedStateError,
                f"value_and_grad: the {kind} of {name} wrote different values, but the model keeps one",
                [f"{path}: {describe(value)}" for path, value in items],
                listed(
                    "Mend it in one of these ways",
                    [text for text, fits in remedies.items() if fits],
                ),
            )
        if mistakes.diverged:
            raise error_listing(
                DivergedStateError,
                f"value_and_grad: policies that merge what the {kind} of {name} wrote gave values that "
                "still differ between these",
                [
                    f"{write.path}: merged by {errors.policy_name(write.value)}"
                    for write in mistakes.diverged
                ],
                "A policy must return one value for all instances, as with jax.lax.psum(value, axis_names).",
            )


def _left_together(
    name: str, model: PyTree, stacked: Set[int], returned_units: Sequence[_ReturnedUnit], cut: Cut
) -> PyTree:
    """The model that all microbatches, or blocks, together have made.

    **Arguments:**

    - `model`: what one microbatch after the other returned.
    - `stacked`: by identity the arrays in it that have the values of all microbatches along their first axis.
    """
    rules = _MicrobatchRules("value_and_grad", Lanes(), 0, None, cut.name, cut.count, (), ())
    units, treedef = tree_util.tree_flatten(model, is_leaf=is_state)
    arrays = [
        Varying(path, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rules.names, None)
        for x, (path, _, _) in zip(units, returned_units, strict=True)
        if id(x) in stacked
    ]

    def group_left(at: Sequence[int], outside: bool, count: Size) -> list[State]:
        olds = [returned_units[i][1] for i in at]
        before, operands = taken_apart(
            [(units[i], old and old.old) for i, old in zip(at, olds, strict=True)]
        )
        after: list[Skeleton] = []

        def leave(*operands: Array) -> list[Array]:
            leaving = Leaving(rules, {}, FromTypes(rules.names))
            leaving.mistakes.varying += arrays
            writing: list[Written] = []
            for i, old, (new, came) in zip(at, olds, before.filled(operands), strict=True):
                placements = [rules.auxiliary()] * len(values(new))
                entered = old and dataclasses.replace(old, old=came)
                writing.append(Written(new, entered, UNDECLARED, returned_units[i][0], placements))
            merged = leaving.merge(writing)
            for written in merged:
                leaving.state(written)
            rules.refuse(name, leaving.mistakes)
            skeleton, results = taken_apart([written.state for written in merged])
            after[:] = [skeleton]
            return results

        run = jax.vmap(
            leave,
            in_axes=tuple(0 if id(x) in stacked else None for x in operands),
            out_axes=None,
            axis_name=cut.name,
            axis_size=count,
        )

        def merged(*operands: Array) -> list[Array]:
            if outside:
                return run_varying(traced_outside(run, *operands), operands)
            results: list[Array] = run(*operands)
            return results

        outputs = cut.compiled_apart(merged, operands)
        return after[0].filled(outputs)

    # JAX's collectives, which a function may call, fail over lanes inside a checked `shard_map`. States with
    # such policies are merged by a program that is traced outside of any mapped call.
    checked = compat.inside_checked_shard_map()
    # Of random streams each shard has those of its own blocks, and of all else the blocks of all shards.
    # They go by themselves on every mesh, so that the others are merged by the same program.
    groups: dict[tuple[bool, bool], list[int]] = {(False, False): []} if arrays else {}
    for i, (_, _, is_written) in enumerate(returned_units):
        if is_written:
            kind = checked and callable(units[i].reduce), isinstance(units[i], RandomState)
            groups.setdefault(kind, []).append(i)
    for (outside, is_stream), at in groups.items():
        count = cut.count if is_stream else cut.of_all
        for i, state in zip(at, group_left(at, outside, count), strict=True):
            # Where nothing shows what it continues, the surrounding call is not to take it for known.
            old = None if origin(units[i]) is None else returned_units[i][1]
            units[i] = mark_origin(state, None if old is None else origin(old.old))
    return treedef.unflatten(units)
