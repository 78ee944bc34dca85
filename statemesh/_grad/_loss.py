"""Which leaves are differentiated, the loss and its gradients, and how they are reduced over mapped axes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._differing import Gathered, Recorded, crossed, name_varying, whole_over
from .._axes._mesh_and_lanes import bound_names, gradients_around, meshes_and_lanes
from .._axes._reduction import Pending, Reduction, reduce_on_mesh
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
from .._call._origins import Skeleton, taken_apart
from .._call._packed import members, shapes_of, with_models
from .._call._varying import FromTypes
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import Jaxpr, tree_util
from .._jax._dataflow import forwarded
from .._state._filters import to_predicate
from .._state._state import ParamState, origins


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
        leaves, treedef = tree_util.tree_flatten(model)
        # Filters see the packed states, but the buffers that hold them are differentiated.
        shown, hits = _picked(what, with_models(model, shapes_of), wrt, root)
        units, self.unit_def = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        # For each unit (a State, or an array outside of any) its structure, and which of its leaves are
        # differentiated; `None` if none is.
        self.units: list[tuple[PyTreeDef, list[bool]] | None] = []
        self.paths: list[str] = []
        positions: list[int] = []
        torn: list[tuple[list[str], ...]] = []
        start = 0
        for (path, unit), made_of in zip(units, members(model), strict=True):
            own, unit_def = tree_util.tree_flatten(unit)
            is_picked = any(hits[k] for k in made_of)
            chosen = [is_picked and _is_differentiable(x) for x in own]
            self.units.append((unit_def, chosen) if any(chosen) else None)
            if any(chosen) and not all(hits[k] for k in made_of):
                apart = ([shown[k][0] for k in made_of if hits[k] is hit] for hit in (True, False))
                torn.append(tuple(apart))
            name = shown[made_of[0]][0] if len(made_of) == 1 else path_str(path, root)
            self.paths += [name] * sum(chosen)
            positions += [start + k for k, hit in enumerate(chosen) if hit]
            start += len(own)
        if torn:
            raise error_listing(
                StructureError,
                f"{what}: wrt={filter_str(wrt)} picks only some of the states that share a packed buffer, "
                "and a buffer has one gradient",
                [
                    f"picked: {first_paths(picked)}; not picked: {first_paths(left)}"
                    for picked, left in torn
                ],
                "Take the gradient inside the mapped call, which sees the model, or pass the model itself to "
                "this call: `packed.unpack()`.",
            )
        if not positions:
            values = [f"{path}: {describe(unit)}" for path, unit in shown if _is_shown(unit)]
            picks = f"wrt={filter_str(wrt)} picks nothing in the model"
            if wrt is None:
                picks = (
                    "the model has no ParamState of floating or complex numbers, and no such array outside "
                    "States"
                )
            if not values:
                raise StructureError(f"{what}: {picks}. It has no states and no arrays.")
            raise error_listing(StructureError, f"{what}: {picks}. It has", values)
        # The model, to be filled with other arrays in place of those that are differentiated.
        self.model = Skeleton(leaves, treedef, origins(model), positions)
        self.params = [leaves[k] for k in positions]

    def tree(self, values: Sequence[Leaf]) -> PyTree:
        """The model's tree with `values` in place of what is differentiated, and `None` elsewhere."""
        left = iter(values)
        units = [
            None
            if unit is None
            else unit[0].unflatten([next(left) if h else None for h in unit[1]])
            for unit in self.units
        ]
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

    def __init__(self, name: str, axis_name: SeveralAxes, mean: bool, parts: Parts) -> None:
        self.params = parts.params
        named = frozenset(bound_names("value_and_grad", axis_name))
        self.reduction = Reduction(named, mean, name, tuple(parts.paths))
        bound = compat.bound_axis_names()
        meshes, self.lanes = meshes_and_lanes(bound)
        self.entry = named, frozenset(bound)
        self.from_types = tuple(n for n in meshes if compat.varying(jax.lax.axis_index(n)))
        self.types = FromTypes(self.from_types)
        self.gathered = Recorded(Gathered())
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
        over = self._in_order(self.cast_over)
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
        apart = self._varying(loss) - self.reduction.named
        return bool(self.lanes or self.from_dataflow or apart)

    def reduced(self, evaluated: Evaluated) -> tuple[Leaf, list[Leaf]]:
        """The loss and its gradients, reduced over all axes."""
        loss, crossed, name = evaluated.loss, evaluated.crossed, self.reduction.name
        values = [*evaluated.grads, loss]
        # Over these axes types do not tell what differs: a `Pending` is decided by a `vmap` or by a walk.
        lanes = [((lane,), True, True) for lane in self.lanes]
        walked = [(mark.axis_names, mark.lanes, False) for mark in self.from_dataflow]
        for axis_names, are_lanes, vmapped in (*lanes, *walked):
            over = crossed()
            if inside := self.own & over:
                raise _loss_exchanged_inside(name, sorted(inside, key=str))
            own = self.own | (frozenset(axis_names) - over) if are_lanes else self.own
            if left := tuple(n for n in axis_names if n in self.reduction.named or n not in own):
                pending = Pending(self.reduction, left, are_lanes, over)
                # A derivative taken outside of a map differentiates what was decided inside.
                within = [names for _, names in gradients_around.get() if names.issuperset(left)]
                values = pending([*self.params, loss], values, vmapped, reverse=len(within))
        if self.from_types:
            axes, over = frozenset(self.from_types), self._varying(loss)
            pairs = zip(self.params, self.reduction.params, strict=True)
            params = [self._param_varying(x, path) | (self.own & axes) for x, path in pairs]
            self.reduction.check(over, params, self.from_types)
            # Over these axes each shard has a loss and parameters of its own.
            apart = over - self.reduction.named
            if apart and (shared := apart & crossed()):
                if inside := shared & self.own:
                    raise _loss_exchanged_inside(name, self._in_order(inside))
                raise errors.loss_exchanged(name, self._in_order(shared))
            # JAX's types let the cotangent of a loss that all shards share pass to each of them without an
            # error.
            same = (self.own & axes) - over
            if same and (inside := same & jaxprs.exchanged_over(evaluated.program())):
                raise _loss_exchanged_inside(name, self._in_order(inside))
            plans = [self.reduction.typed(param, over, axes) for param in params]
            plans.append(self.reduction.of_loss(over, axes))
            values = self.reduction.with_names(reduce_on_mesh(values, plans, self.from_types))
        if evaluated.dtypes is not None:
            narrowed = zip(values, evaluated.dtypes, strict=True)
            values = [x.astype(dtype) for x, dtype in narrowed]
        *grads, loss = values
        return loss, grads

    def _varying(self, x: Leaf) -> Axes:
        """The mesh axes over which a value may differ, by its type or by what is recorded of it."""
        (axes,) = self.types.of([x])
        return axes

    def _param_varying(self, x: Leaf, path: str) -> Axes:
        """The same of a parameter. One that `all_gather` made whole has a type that varies, yet one value.

        A cast is the word of whoever wrote it: then each shard has a parameter of its own.
        """
        axes = self._varying(x)
        reduced = self._in_order(self.reduction.named & compat.varying(x))
        if not reduced:
            return axes
        whole = whole_over(self.gathered.of(x)) if compat.under_jit() else NO_AXES
        name_varying(x, reduced, whole, path)
        return axes - whole

    def _in_order(self, axes: Axes) -> tuple[AxisName, ...]:
        return tuple(name for name in self.from_types if name in axes)


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
            raise error_listing(
                StructureError,
                f"value_and_grad: {self.name} must return {expected} with the model that it was given, a "
                f"{type(model).__name__}, but returned {what} in its place",
                [*missing, *added],
                "Return the model as it came in, or with what was written to its states. What else is "
                "returned goes beside the loss: pass `has_aux=True` and return ((loss, aux), model).",
            )
        loss, aux = value if self.has_aux else (value, None)
        if isinstance(loss, np.ndarray | np.generic | float):
            loss = jnp.asarray(loss)
        is_array = isinstance(loss, jax.Array)
        if not is_array or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise StructureError(
                f"{_loss(self.name)} must be one real floating number, but is {describe(loss)}. Reduce it: "
                "`loss.mean()`."
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
        skeleton, made = taken_apart(rest, kept)
        results[:] = [skeleton]
        return loss, made

    with scope.casting():
        params = scope.cast(parts.params)
        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
    (result,) = results

    def loss_and_made(params: list[Leaf]) -> tuple[Array, list[Array]]:
        # The same results as of the first run, even if JAX now gives other arrays for some of the arguments.
        loss, rest = run(params)
        leaves = tree_util.tree_leaves(rest)
        return loss, [jnp.asarray(leaves[i]) for i in result.positions]

    # Few cases need it, and only these trace it.
    program = functools.cache(lambda: jaxprs.open_jaxpr(jax.make_jaxpr(loss_and_made)(params)))
    return Evaluated(loss, grads, result.filled(scope.restored(made, program)), crossed, program)


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
