"""`gather`: split parameters made whole inside a mapped call, and `scatter`, which puts the parts back."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import bound_names, gradients_around, meshes_and_lanes
from .._axes._wide import is_narrow
from .._base import _compat as compat
from .._base import errors
from .._base._checks import required_names
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._nodes import is_state
from .._base._paths import path_str
from .._base._specs import is_spec, mentioned
from .._base._types import NO_AXES, Array, Axes, AxisName, Leaf, PyTree, SeveralAxes, SpecTree
from .._model._kinds import ParamState
from ._split import SplitArray, axes_of, is_plain_parameter, spec_without, specs_of


@without_own_frames
def gather(tree: PyTree, axis_name: SeveralAxes) -> Any:
    """The tree with the parameters whole that `fsdp` split over mesh axes.

    It stands inside a mapped call: for the whole model, or in each layer for its own parameters, also inside
    `jax.checkpoint` and loops. One collective gathers all arrays of one dtype that are split over the same
    mesh axes.

    In the loss of a `value_and_grad` that names the axis, the transpose is one reduce-scatter: each shard
    gets the sum of its part. Gradients of float16 and bfloat16 are summed in float32 there. Anywhere else the
    whole parameters are the same on all shards, in type too: a `value_and_grad` of them gives whole
    gradients, reduced over all shards.

    **Arguments:**

    - `tree`: a model that has been through `fsdp`, or a layer of it. Every `ParamState` whose spec names one
        of the mesh axes is gathered, who ever wrote the spec.
    - `axis_name`: the mesh axis, or a tuple of several in any order.

    **Returns:** the tree with the same structure, except that parameters which were outside any State are
    arrays again, and that the specs of what was gathered no longer name the axes. Outside any mapped call
    all values are those that were given.

    **Raises:** `StructureError` for parameters that are whole already; `StatemeshError` for an axis name that
    is not bound inside a mapped call, or that is of lanes.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> def loss_fn(model, x):
        ...     whole = sm.gather(model, "data")
        ...     return ((x @ whole["w"]) ** 2).mean(), model
        >>> step = sm.grad(loss_fn, axis_name="data")
        >>> model = sm.fsdp({"w": jnp.ones((32, 64))}, mesh, "data")
        >>> grads, model = sm.shard_map(step, mesh, (None, P("data")), P())(model, jnp.ones((8, 32)))
        >>> grads["w"].spec, grads["w"].value.shape
        (P(None, 'data'), (32, 64))

        ```

    Source: the third stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    axis_names = required_names("gather", axis_name)
    bound = bound_names("gather", axis_name)
    # The lanes of `pmap2` are on a mesh.
    lanes = {name for mark in compat.axes_from_dataflow() if mark.lanes for name in mark.axis_names}
    lanes |= frozenset(meshes_and_lanes(bound)[1])
    if of_lanes := [name for name in axis_names if name in lanes]:
        raise errors.gather_in_lanes(of_lanes[0])
    flat, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    named = [(path_str(keys, "tree"), unit) for keys, unit in flat]
    if bound:
        _check(named, bound)
    summed = NO_AXES.union(*(names for names, _ in gradients_around.get()))
    steps: dict[tuple[int, int], list[_Step]] = {}
    values: dict[int, list[Leaf]] = {}
    for number, (path, unit) in enumerate(named):
        if isinstance(unit, ParamState):
            values[number] = tree_util.tree_leaves(unit.value)
            specs = specs_of(unit, path)
            for k, (x, spec) in enumerate(zip(values[number], specs, strict=True)):
                if own := list(_steps_of(spec, jnp.ndim(x), bound, summed)):
                    steps[number, k] = own
    while steps:
        at = list(steps)
        parts = [(values[number][k], steps[number, k].pop(0)) for number, k in at]
        for (number, k), whole in zip(at, _joined(parts, summed), strict=True):
            values[number][k] = whole
        steps = {place: own for place, own in steps.items() if own}
    units = [
        _rebuilt(unit, values[number], axis_names) if number in values else unit
        for number, (_, unit) in enumerate(named)
    ]
    return treedef.unflatten(units)


@without_own_frames
def scatter(whole: PyTree, model: PyTree) -> Any:
    """A gathered model with all of its parameters as they were before `gather`.

    It is for models whose layers write states: what the layers return has whole parameters, and what the
    loss returns must have the parts. Parameters that `fsdp` left whole come back too, so that a model may be
    cast to another dtype before `gather`. Nothing is computed or sent.

    **Arguments:**

    - `whole`: what `gather` made of `model`, with any other states written.
    - `model`: the model before, of the same structure.

    **Returns:** `whole`, in which every `ParamState` and every array of floats outside any State is that of
    `model`.

    **Raises:** `StructureError` where the trees have other structures.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = sm.fsdp({"w": jnp.ones((32, 64)), "steps": sm.State(0)}, mesh, "data")
        >>> whole = sm.gather(model, "data")
        >>> whole = {**whole, "steps": whole["steps"].set(1)}
        >>> model = sm.scatter(whole, model)
        >>> model["w"].spec, model["steps"]
        (P(None, 'data'), State(int32(1)))

        ```
    """
    new, treedef = tree_util.tree_flatten_with_path(whole, is_leaf=is_state)
    old, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    paths, paths_before = ([path_str(keys, "model") for keys, _ in flat] for flat in (new, old))
    if paths != paths_before:
        raise errors.scatter_structure(
            [path for path in paths_before if path not in paths],
            [path for path in paths if path not in paths_before],
        )
    pairs = zip(new, old, strict=True)
    return treedef.unflatten([y if _is_parameter(y) else x for (_, x), (_, y) in pairs])


_Step = tuple[int, tuple[AxisName, ...], Axes]
"""An axis of an array, the mesh axes to gather along it, and all mesh axes that split the array."""


def _steps_of(
    spec: SpecTree, ndim: int, bound: Sequence[AxisName], summed: Axes
) -> Iterator[_Step]:
    """How an array becomes whole over the mesh axes `bound`, the most minor ones first.

    One collective gathers over axes of which all are in `summed`, or none.
    """
    for axis, names in enumerate(axes_of(spec, ndim)):
        named = [name for name in reversed(names) if name in bound]
        for _, together in itertools.groupby(named, key=summed.__contains__):
            yield axis, tuple(together)[::-1], mentioned(spec)


def _check(named: Sequence[tuple[str, PyTree]], names: tuple[AxisName, ...]) -> None:
    """Refuse parameters that are whole, and those that are split in a way that `gather` cannot join."""
    whole, inner, same = [], [], []
    typed = compat.varying(jax.lax.axis_index(names))
    for path, unit in named:
        if is_plain_parameter(unit) or (isinstance(unit, ParamState) and unit.spec is None):
            whole.append((path, unit))
        if not isinstance(unit, ParamState):
            continue
        leaves = tree_util.tree_leaves(unit.value)
        for x, spec in zip(leaves, specs_of(unit, path), strict=True):
            for entry in axes_of(spec, jnp.ndim(x)):
                split = [name for name in entry if name in names]
                if split and entry[-len(split) :] != tuple(split):
                    inner.append((path, spec))
                if typed.intersection(split) - compat.varying(x):
                    same.append((path, spec))
    if whole:
        raise errors.gather_whole(names, whole)
    if inner:
        raise errors.gather_major(names, inner)
    if same:
        raise errors.gather_replicated(names, same)


def _joined(parts: Sequence[tuple[Leaf, _Step]], summed: Axes) -> list[Array]:
    """The arrays after one step each, by one collective for each dtype and set of mesh axes."""
    groups: dict[object, list[int]] = {}
    for k, (x, (_, names, over)) in enumerate(parts):
        groups.setdefault((names, jnp.dtype(x.dtype), over, compat.varying(x)), []).append(k)
    whole: list[Array] = [x for x, _ in parts]
    for members in groups.values():
        names = parts[members[0]][1][1]
        fronts = [jnp.moveaxis(parts[k][0], parts[k][1][0], 0) for k in members]
        flat = (
            jnp.concatenate([x.ravel() for x in fronts]) if len(fronts) > 1 else fronts[0].ravel()
        )
        rows, start = _of_all(flat, names, summed), 0
        for k, front in zip(members, fronts, strict=True):
            own = rows[:, start : start + front.size]
            start += front.size
            whole[k] = jnp.moveaxis(own.reshape(-1, *front.shape[1:]), 0, parts[k][1][0])
    return whole


def _of_all(part: Array, names: tuple[AxisName, ...], summed: Axes) -> Any:
    """The parts of all shards, one in each row."""
    if compat.varying(part).issuperset(names) and summed.isdisjoint(names):
        # No `value_and_grad` around sums the parts of the gradient. One further in takes a parameter whose
        # type varies for the shard's own, and would leave its gradient as it is.
        return jax.lax.all_gather(part, names, to="invarying")
    if not is_narrow(part.dtype):
        return jax.lax.all_gather(part, names)

    @jax.custom_vjp
    def narrow(x: Array) -> Any:
        return jax.lax.all_gather(x, names)

    narrow.defvjp(lambda x: (narrow(x), None), lambda _, rows: (_summed(rows, names),))
    return narrow(part)


def _summed(rows: Array, names: tuple[AxisName, ...]) -> Any:
    """This shard's row of the sum over shards, taken in float32."""
    wide = jax.lax.psum_scatter(rows.astype(jnp.float32), names)
    return wide.astype(rows.dtype)


def _rebuilt(state: ParamState, leaves: Sequence[Leaf], names: Sequence[AxisName]) -> PyTree:
    value = tree_util.tree_structure(state.value).unflatten(leaves)
    if isinstance(state, SplitArray):
        return value
    specs, structure = tree_util.tree_flatten(state.spec, is_leaf=is_spec)
    left = [spec_without(spec, names) for spec in specs]
    if left == specs:
        return state
    spec = structure.unflatten(left) if any(one is not None for one in left) else None
    return state.replace(value=value, spec=spec)


def _is_parameter(unit: PyTree) -> bool:
    return isinstance(unit, ParamState) or is_plain_parameter(unit)
