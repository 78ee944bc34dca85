"""Which leaves are differentiated, the loss and its gradients, and how they are reduced over mapped axes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._differing import (
    Gathered,
    Recorded,
    crossed,
    name_varying,
    whole_over,
)
from .._axes._mesh_and_lanes import bound_names, gradients_around, meshes_and_lanes
from .._axes._reduction import (
    Pending,
    Reduction,
    reduce_on_mesh,
)
from .._base import _errors as errors
from .._base._checks import is_array, is_inexact
from .._base._errors import (
    StatemeshError,
    StructureError,
    _loss,
    error_listing,
    filter_str,
    first_paths,
    kind_str,
    quoted,
)
from .._base._trees import describe, is_state, path_str, positional_names
from .._base._types import (
    NO_AXES,
    Array,
    Axes,
    AxisName,
    Dtype,
    Filter,
    Fun,
    KeyPath,
    Leaf,
    PyTree,
    PyTreeDef,
    SeveralAxes,
)
from .._call._arguments import inside_modules
from .._call._packed import members, shapes_of, with_models
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import Jaxpr, tree_util
from .._jax._dataflow import forwarded
from .._state._filters import to_predicate
from .._state._state import ParamState, origins, with_origins


def trainable(model: PyTree, wrt: Filter = None) -> PyTree:
    """The part of a model that `value_and_grad` differentiates, in the structure of its `grads`.

    It is what an optimizer is initialised with. Its states keep their kinds and specs, and so do those in
    the optimizer's slots: they lie where the parameters lie. Of a `Packed` it is a `Packed`.

    **Arguments:**

    - `model`: any pytree.
    - `wrt`: as for `value_and_grad`.

    **Returns:** the model with `None` in place of everything else.

    **Raises:** `StructureError` where there is nothing to differentiate, or where `wrt` picks what cannot be.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> sm.trainable({"w": sm.ParamState(jnp.ones(3)), "steps": sm.State(0)})
        {'steps': None, 'w': ParamState(float32[3])}

        ```
    """
    parts = Parts("trainable", model, wrt, "model")
    return parts.tree(parts.params)


class Parts:
    """A model's leaves, and which of them are differentiated."""

    def __init__(self, what: str, model: PyTree, wrt: Filter, root: str) -> None:
        self.leaves, self.treedef = tree_util.tree_flatten(model)
        self.marks = origins(model)
        # Filters see the packed states, but the buffers that hold them are differentiated.
        shown, hits = _picked(what, with_models(model, shapes_of), wrt, root)
        units, self.unit_def = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        # For each unit (a State, or an array outside of any) its structure and the leaves to differentiate.
        self.units: list[tuple[PyTreeDef, list[int | None]]] = []
        self.paths: list[str] = []
        torn: list[tuple[list[str], ...]] = []
        start = 0
        for (path, unit), made_of in zip(units, members(model), strict=True):
            own, treedef = tree_util.tree_flatten(unit)
            chosen: list[int | None] = [None] * len(own)
            if any(hits[k] for k in made_of):
                chosen = [start + k if _is_differentiable(x) else None for k, x in enumerate(own)]
            self.units.append((treedef, chosen))
            some = [k for k in chosen if k is not None]
            if some and not all(hits[k] for k in made_of):
                apart = ([shown[k][0] for k in made_of if hits[k] is hit] for hit in (True, False))
                torn.append(tuple(apart))
            name = shown[made_of[0]][0] if len(made_of) == 1 else path_str(path, root)
            self.paths += [name] * len(some)
            start += len(own)
        if torn:
            raise _picks_part_of_buffer(what, wrt, torn)
        self.positions = [k for _, chosen in self.units for k in chosen if k is not None]
        if not self.positions:
            there = [(path, unit) for path, unit in shown if _is_shown(unit)]
            raise _nothing_to_differentiate(what, wrt, there)
        self.params = [self.leaves[k] for k in self.positions]

    def model(self, params: Sequence[Leaf]) -> PyTree:
        """The model with other arrays in place of those that are differentiated."""
        leaves = list(self.leaves)
        for k, x in zip(self.positions, params, strict=True):
            leaves[k] = x
        return with_origins(self.treedef.unflatten(leaves), self.marks)

    def tree(self, values: Sequence[Leaf]) -> PyTree:
        """The model's tree with `values` in place of what is differentiated, and `None` elsewhere."""
        left = iter(values)
        units = []
        for treedef, chosen in self.units:
            here = [None if k is None else next(left) for k in chosen]
            some = any(k is not None for k in chosen)
            units.append(treedef.unflatten(here) if some else None)
        return self.unit_def.unflatten(units)


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
        unit
        for unit, picked in zip(units, hits, strict=True)
        if picked and not any(map(_is_differentiable, tree_util.tree_leaves(unit[1])))
    ]
    if impossible and wrt is not None:
        raise _cannot_differentiate(what, impossible)
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


class Scope:
    """Bound axes, grouped by how we learn over which of them a value differs."""

    def __init__(self, name: str, axis_name: SeveralAxes, mean: bool, parts: Parts) -> None:
        self.params = parts.params
        self.recorded = Recorded()
        self.gathered = Recorded(Gathered())
        named = frozenset(bound_names("value_and_grad", axis_name))
        self.reduction = Reduction(named, mean, name, tuple(parts.paths))
        bound = compat.bound_axis_names()
        meshes, self.lanes = meshes_and_lanes(bound)
        self.entry = named, frozenset(bound)
        self.from_types = tuple(n for n in meshes if compat.varying(jax.lax.axis_index(n)))
        self.from_dataflow = compat.axes_from_dataflow()
        from_dataflow = [name for mark in self.from_dataflow for name in mark.axis_names]
        unknown = [name for name in meshes if name not in (*self.from_types, *from_dataflow)]
        if from_dataflow and (self.from_types or unknown):
            checked = [name for name in self.from_types if name not in from_dataflow]
            raise _gradient_in_mixed_maps(unknown or from_dataflow, from_dataflow, checked)
        if unknown:
            raise _gradient_unchecked(unknown)
        around = NO_AXES.union(*(names for names, _ in gradients_around.get()))
        if twice := named & around & frozenset(self.from_types):
            raise _gradient_in_gradient(_in_order(twice, self.from_types))
        # Inside the loss of one shard, each shard has parameters of its own.
        self.own = around - named
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
        over = _in_order(self.cast_over, self.from_types)
        return [compat.vary(x, over) for x in params] if over else list(params)

    def restored(self, made: Sequence[Leaf], program: Callable[[], Jaxpr]) -> list[Leaf]:
        """The results of the function, with the original parameter in place of each that is a cast one.

        A parameter that passes through `jax.jit` or `jax.checkpoint` comes back as another array. Only the
        jaxpr of the function tells whether it is the same one.

        **Arguments:**

        - `made`: the arrays in the results, after the loss.
        - `program`: traces the function, from the parameters to the loss and these arrays.
        """
        cast = self.cast_over
        forms = {(x.shape, x.dtype) for x in self.params if cast - compat.varying(x)}
        if not any((x.shape, x.dtype) in forms and cast <= compat.varying(x) for x in made):
            return list(made)
        sources = forwarded(program())[1:]
        pairs = zip(made, sources, strict=True)
        return [x if k is None else self.params[k] for x, k in pairs]

    def pulled(
        self, pull: Callable[..., PyTree], loss: Leaf
    ) -> tuple[list[Leaf], Callable[[], Axes]]:
        """JAX's gradients, and a function that gives the axes over which they hold parts of other losses.

        JAX gives the gradient of the sum of all instances' losses. It is the gradient of an instance's own
        loss where no cotangent passes from one instance to another on its way back.
        """
        one = compat.vary(jnp.ones((), loss.dtype), compat.varying(loss))
        traced = functools.cache(lambda: jax.make_jaxpr(pull)(one))
        over = functools.cache(lambda: crossed(jaxprs.open_jaxpr(traced())))
        if self.lanes or self.from_dataflow:
            return jaxprs.run_jaxpr(traced(), [one]), over
        (grads,) = pull(one)
        return grads, over

    def asks_what_crosses(self, loss: Leaf) -> bool:
        """Whether the reduction of this loss depends on what passes from one instance to another."""
        apart = (self._varying(loss) & frozenset(self.from_types)) - self.reduction.named
        return bool(self.lanes or self.from_dataflow or apart)

    def reduced(
        self,
        loss: Leaf,
        grads: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> tuple[Leaf, list[Leaf]]:
        """The loss and its gradients, reduced over all axes."""
        keys, values = [*self.params, loss], [*grads, loss]
        for axis_names, lanes, vmapped in self._axes_without_types():
            over = crossed()
            if inside := self.own & over:
                raise _loss_exchanged_inside(self.reduction.name, sorted(inside, key=str))
            own = self.own if not lanes else self.own | (frozenset(axis_names) - over)
            if left := tuple(n for n in axis_names if n in self.reduction.named or n not in own):
                pending = Pending(self.reduction, left, lanes, over)
                # A derivative taken outside of a map differentiates what was decided inside.
                within = [names for _, names in gradients_around.get() if names.issuperset(left)]
                values = pending(keys, values, vmapped, reverse=len(within))
        if self.from_types:
            values = self._reduced_by_types(loss, values, crossed, program)
        *grads, loss = values
        return loss, list(grads)

    def _varying(self, x: Leaf) -> Axes:
        """The mesh axes over which a value may differ, by its type or by what is recorded of it."""
        typed = compat.varying(x)
        if typed.issuperset(self.from_types) or not compat.under_jit():
            return typed
        return typed | self.recorded.of(x)

    def _param_varying(self, x: Leaf, path: str) -> Axes:
        """The same of a parameter. One that `all_gather` made whole has a type that varies, yet one value.

        A cast is the word of whoever wrote it: then each shard has a parameter of its own.
        """
        typed = compat.varying(x)
        reduced = _in_order(self.reduction.named & typed, self.from_types)
        if not reduced:
            return self._varying(x)
        whole = whole_over(self.gathered.of(x)) if compat.under_jit() else NO_AXES
        name_varying(x, reduced, whole, path)
        return self._varying(x) - whole

    def _axes_without_types(self) -> Iterator[tuple[tuple[AxisName, ...], bool, bool]]:
        """The axes over which types do not tell what differs; whether they are lanes, and of a `vmap`."""
        for lane in self.lanes:
            yield (lane,), True, True
        for mark in self.from_dataflow:
            yield mark.axis_names, mark.lanes, False

    def _reduced_by_types(
        self,
        loss: Leaf,
        values: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> list[Leaf]:
        axes, over = frozenset(self.from_types), self._varying(loss)
        pairs = zip(self.params, self.reduction.params, strict=True)
        own = [self._param_varying(x, path) | (self.own & axes) for x, path in pairs]
        self.reduction.check(over, own, self.from_types)
        # Over these axes each shard has a loss and parameters of its own.
        apart = (over & axes) - self.reduction.named
        if apart and (shared := apart & crossed()):
            if inside := shared & self.own:
                raise _loss_exchanged_inside(
                    self.reduction.name, _in_order(inside, self.from_types)
                )
            raise errors.loss_exchanged(self.reduction.name, _in_order(shared, self.from_types))
        # JAX's types let the cotangent of a loss that all shards share pass to each of them without an error.
        if (one := (self.own & axes) - over) and (inside := one & jaxprs.exchanged_over(program())):
            raise _loss_exchanged_inside(self.reduction.name, _in_order(inside, self.from_types))
        plans = [self.reduction.typed(param, over, axes) for param in own]
        plans.append(self.reduction.of_loss(over, axes))
        return self.reduction.with_names(reduce_on_mesh(values, plans, self.from_types))


def _in_order(axes: Axes, names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    return tuple(name for name in names if name in axes)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The loss of one shard and its gradients, not reduced over shards yet.

    **Attributes:**

    - `result`: a pair of auxiliary values (or `None`) and the new model.
    - `crossed`: gives the axes over which the gradients hold parts of other shards' losses.
    - `program`: traces the function.
    - `dtypes`: those in which the loss and the gradients leave, if they are others than their own.
    """

    loss: Array
    grads: list[Leaf]
    result: tuple[PyTree, PyTree]
    crossed: Callable[[], Axes]
    program: Callable[[], Jaxpr]
    dtypes: Sequence[Dtype] | None = None

    def narrowed(self, values: Sequence[Leaf]) -> list[Leaf]:
        """The reduced loss and its gradients, in the dtypes in which they leave."""
        if self.dtypes is None:
            return list(values)
        return [x.astype(dtype) for x, dtype in zip(values, self.dtypes, strict=True)]


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
        if not _is_pair(returned) or (self.has_aux and not _is_pair(returned[0])):
            raise _not_loss_and_model(self.name, returned, self.has_aux)
        value, new = returned
        (root,) = positional_names(self.fun, 1)
        before, after = _paths(model, root), _paths(new, root)
        if before != after:
            raise _not_the_model(
                self.name,
                model,
                new,
                [path for path in before if path not in after],
                [path for path in after if path not in before],
                self.has_aux,
            )
        loss, aux = value if self.has_aux else (value, None)
        if not isinstance(loss, jax.Array | np.ndarray | np.generic | float):
            raise _not_a_loss(self.name, loss)
        loss = jnp.asarray(loss)
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise _not_a_loss(self.name, loss)
        return loss, (aux, new)


class Returned:
    """What a function returned, with its new arrays apart.

    JAX would return other arrays for results that are arguments, so these are no results of its.

    **Arguments:**

    - `tree`: what was returned.
    - `same`: by the identity of an array: the argument that it stands for.
    """

    def __init__(self, tree: PyTree, same: dict[int, Leaf]) -> None:
        leaves, self.structure = tree_util.tree_flatten(tree)
        arguments = {id(x) for x in same.values()}
        self.marks = origins(tree)
        self.leaves = [same.get(id(x), x) for x in leaves]
        # The positions of the arrays that are new.
        self.new = [
            i
            for i, x in enumerate(self.leaves)
            if isinstance(x, jax.Array) and id(x) not in arguments
        ]

    def take(self) -> list[Array]:
        """The new arrays, of which it keeps none: JAX reports a tracer that we keep as a leak."""
        made = [self.leaves[i] for i in self.new]
        for i in self.new:
            self.leaves[i] = None
        return made

    def filled(self, made: Sequence[Leaf]) -> PyTree:
        """The tree, with these arrays as the new ones."""
        leaves = list(self.leaves)
        for i, x in zip(self.new, made, strict=True):
            leaves[i] = x
        return with_origins(self.structure.unflatten(leaves), self.marks)


def at_once(
    fun: LossFunction,
    scope: Scope,
    parts: Parts,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Evaluated:
    """Evaluate the function on its arguments as they are."""
    given = {id(x): x for x in (*parts.leaves, *tree_util.tree_leaves((args, kwargs)))}
    results: list[Returned] = []

    def run(params: list[Leaf]) -> tuple[Array, PyTree]:
        return fun(parts.model(params), args, kwargs)

    def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
        loss, rest = run(params)
        same = given | {id(x): old for x, old in zip(params, parts.params, strict=True)}
        results[:] = [Returned(rest, same)]
        return loss, results[0].take()

    with scope.casting():
        params = scope.cast(parts.params)
        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
    (result,) = results

    def loss_and_made(params: list[Leaf]) -> tuple[Array, list[Array]]:
        # The same results as of the first run, even if JAX now gives other arrays for some of the arguments.
        loss, rest = run(params)
        leaves = tree_util.tree_leaves(rest)
        return loss, [jnp.asarray(leaves[i]) for i in result.new]

    # Few cases need it, and only these trace it.
    program = functools.cache(lambda: jaxprs.open_jaxpr(jax.make_jaxpr(loss_and_made)(params)))
    return Evaluated(loss, grads, result.filled(scope.restored(made, program)), crossed, program)


def _paths(model: PyTree, root: str) -> list[str]:
    """The paths of a model's states, and of its leaves outside of them."""
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    return [path_str(keys, root) for keys, _ in flat]


def _is_pair(x: Leaf) -> bool:
    return isinstance(x, tuple) and len(x) == 2


def _cannot_differentiate(what: str, bad: Sequence[tuple[str, object]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{what}: wrt picks values that hold no floating or complex numbers",
        [f"{path}: {describe(value)}" for path, value in bad],
        "Let it pick parameters, as `wrt=sm.ParamState` does; sm.filters.All, Any and Not join several "
        "filters.",
    )


def _nothing_to_differentiate(
    what: str, wrt: object, values: Sequence[tuple[str, object]]
) -> StructureError:
    picks = f"wrt={filter_str(wrt)} picks nothing in the model"
    if wrt is None:
        picks = "the model has no ParamState of floating or complex numbers, and no such array outside States"
    if not values:
        return StructureError(f"{what}: {picks}. It has no states and no arrays.")
    items = [f"{path}: {describe(value)}" for path, value in values]
    return error_listing(StructureError, f"{what}: {picks}. It has", items)


def _picks_part_of_buffer(
    what: str, wrt: object, split: Sequence[Sequence[Sequence[str]]]
) -> StructureError:
    return error_listing(
        StructureError,
        f"{what}: wrt={filter_str(wrt)} picks only some of the states that share a packed buffer, and a "
        "buffer has one gradient",
        [
            f"picked: {first_paths(picked)}; not picked: {first_paths(left)}"
            for picked, left in split
        ],
        "Take the gradient inside the mapped call, which sees the model, or pass the model itself to "
        "this call: `packed.unpack()`.",
    )


def _not_loss_and_model(name: str, returned: object, has_aux: bool) -> StructureError:
    expected = "((loss, aux), model)" if has_aux else "(loss, model)"
    kind = kind_str(returned)
    if isinstance(returned, tuple):
        kind = f"a tuple of {', '.join(map(kind_str, returned))}" if returned else "()"
    text = f"value_and_grad: {name} must return {expected}, but returned {kind}."
    if not has_aux:
        text += (
            " If it writes no state, return the model as it came in; if it returns more, pass "
            "`has_aux=True` and return ((loss, aux), model)."
        )
    return StructureError(text)


def _not_the_model(
    name: str,
    model: object,
    returned: object,
    missing: Sequence[str],
    added: Sequence[str],
    has_aux: bool,
) -> StructureError:
    expected = "((loss, aux), model)" if has_aux else "(loss, model)"
    items = [f"{path} is missing" for path in missing] + [f"{path} is new" for path in added]
    head = (
        f"value_and_grad: {name} must return {expected} with the model that it was given, a "
        f"{type(model).__name__}, but returned {_model_str(returned)} in its place"
    )
    return error_listing(
        StructureError,
        head,
        items,
        "Return the model as it came in, or with what was written to its states. What else is returned goes "
        "beside the loss: pass `has_aux=True` and return ((loss, aux), model).",
    )


def _model_str(value: object) -> str:
    whole = value is None or isinstance(value, int | float | str)
    return repr(value) if whole else f"a {type(value).__name__}"


def _not_a_loss(name: str, loss: object) -> StructureError:
    return StructureError(
        f"{_loss(name)} must be one real floating number, but is {describe(loss)}. Reduce it: `loss.mean()`."
    )


def _gradient_unchecked(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"{_split_unknown(axes)} this map does not check what varies, and is run by JAX itself or with "
        "jit=False. Use `statemesh.shard_map` (without jit=False), or leave check_vma at its default."
    )


def _gradient_in_mixed_maps(
    apart: Sequence[AxisName], unchecked: Sequence[AxisName], checked: Sequence[AxisName]
) -> StatemeshError:
    inner, outer = (
        ("checks", "does not") if checked else ("does not check", "does, or is run by JAX itself")
    )
    return StatemeshError(
        f"{_split_unknown(apart)} the map over {quoted(checked or unchecked)} {inner} what varies, and "
        f"stands inside the map over {quoted(apart)}, which {outer}. Use `statemesh.shard_map` for both, "
        "and leave check_vma at its default."
    )


def _split_unknown(axes: Sequence[AxisName]) -> str:
    return (
        f"value_and_grad cannot know over which of {quoted(axes)} the parameters are split, on which their "
        "gradients depend:"
    )


def _gradient_in_gradient(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, it cannot reduce "
        "over the same axes: there each shard has its own parameters, which may differ. Leave axis_name out "
        "inside, for the gradient of this shard's own loss."
    )


def _loss_exchanged_inside(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, the loss that "
        f"{name} returns depends on what the shards exchange over the same axes. There each shard has its "
        "own parameters, which may differ. Return this shard's own loss, without a collective over "
        f"{quoted(axes)}."
    )
