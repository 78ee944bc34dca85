"""`gather`: split parameters made whole inside a mapped call, and `scatter`, which puts the parts back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import bound_names, meshes_and_lanes
from .._axes._wide import is_narrow
from .._base import _compat as compat
from .._base import errors
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._nodes import is_state
from .._base._paths import path_str
from .._base._specs import is_spec, mentioned
from .._base._types import Array, AxisName, Leaf, PyTree
from .._model._kinds import ParamState
from ._split import SplitArray, axes_of, is_plain_parameter, spec_without, specs_of


@without_own_frames
def gather(tree: PyTree, axis_name: AxisName) -> Any:
    """The tree with the parameters whole that `fsdp` split over a mesh axis.

    It stands inside a mapped call: for the whole model, or in each layer for its own parameters, also inside
    `jax.checkpoint` and loops. One collective gathers all arrays of one dtype that are split over the same
    mesh axes, and the transpose, in the gradient, is one reduce-scatter: each shard gets the sum of its part.
    Gradients of float16 and bfloat16 are summed in float32.

    **Arguments:**

    - `tree`: a model that has been through `fsdp`, or a layer of it. Every `ParamState` whose spec names the
        mesh axis is gathered, who ever wrote the spec.
    - `axis_name`: the mesh axis.

    **Returns:** the tree with the same structure, except that parameters which were outside any State are
    arrays again, and that the specs of what was gathered no longer name the axis. Outside any mapped call
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
    bound = bound_names("gather", axis_name)
    # The lanes of `pmap2` are on a mesh.
    lanes = [name for mark in compat.axes_from_dataflow() if mark.lanes for name in mark.axis_names]
    if meshes_and_lanes(bound)[1] or axis_name in lanes:
        raise errors.gather_in_lanes(axis_name)
    flat, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    named = [(path_str(keys, "tree"), unit) for keys, unit in flat]
    if bound:
        _check(named, axis_name)
    places: list[tuple[int, int]] = []
    parts: list[_Part] = []
    values: dict[int, list[Leaf]] = {}
    for number, (path, unit) in enumerate(named):
        if isinstance(unit, ParamState):
            values[number] = tree_util.tree_leaves(unit.value)
            specs = specs_of(unit, path)
            for k, (x, spec) in enumerate(zip(values[number], specs, strict=True)):
                axes = [axis_name in names for names in axes_of(spec, jnp.ndim(x))]
                if bound and any(axes):
                    places.append((number, k))
                    parts.append((x, axes.index(True), mentioned(spec)))
    for (number, k), whole in zip(places, _joined(parts, axis_name), strict=True):
        values[number][k] = whole
    units = [
        _rebuilt(unit, values[number], axis_name) if number in values else unit
        for number, (_, unit) in enumerate(named)
    ]
    return treedef.unflatten(units)


@without_own_frames
def scatter(whole: PyTree, model: PyTree) -> Any:
    """A gathered model with the parts of its parameters again, as they were before `gather`.

    It is for models whose layers write states: what the layers return has whole parameters, and what the
    loss returns must have the parts. Nothing is computed or sent.

    **Arguments:**

    - `whole`: what `gather` made of `model`, with any other states written.
    - `model`: the model before, of the same structure.

    **Returns:** `whole`, in which the parameters that `gather` made whole are those of `model`.

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
    return treedef.unflatten([y if _was_gathered(x, y) else x for (_, x), (_, y) in pairs])


_Part = tuple[Leaf, int, frozenset[AxisName]]
"""A shard's part of an array, the axis along which it is split, and all mesh axes that split it."""


def _check(named: Sequence[tuple[str, PyTree]], name: AxisName) -> None:
    """Refuse parameters that are whole, and those that are split in a way that `gather` cannot join."""
    whole, inner, same = [], [], []
    typed = bool(compat.varying(jax.lax.axis_index(name)))
    for path, unit in named:
        if is_plain_parameter(unit) or (isinstance(unit, ParamState) and unit.spec is None):
            whole.append((path, unit))
        if not isinstance(unit, ParamState):
            continue
        leaves = tree_util.tree_leaves(unit.value)
        for x, spec in zip(leaves, specs_of(unit, path), strict=True):
            entry = next((names for names in axes_of(spec, jnp.ndim(x)) if name in names), ())
            if entry and entry[-1] != name:
                inner.append((path, spec))
            if entry and typed and name not in compat.varying(x):
                same.append((path, spec))
    if whole:
        raise errors.gather_whole(name, whole)
    if inner:
        raise errors.gather_major(name, inner)
    if same:
        raise errors.gather_replicated(name, same)


def _joined(parts: Sequence[_Part], name: AxisName) -> list[Array]:
    """The whole arrays, by one collective for each dtype and set of mesh axes."""
    groups: dict[object, list[int]] = {}
    for k, (x, _, over) in enumerate(parts):
        groups.setdefault((jnp.dtype(x.dtype), over, compat.varying(x)), []).append(k)
    whole: list[Array] = [parts[k][0] for k in range(len(parts))]
    for members in groups.values():
        fronts = [jnp.moveaxis(parts[k][0], parts[k][1], 0) for k in members]
        flat = (
            jnp.concatenate([x.ravel() for x in fronts]) if len(fronts) > 1 else fronts[0].ravel()
        )
        rows, start = _of_all(flat, name), 0
        for k, front in zip(members, fronts, strict=True):
            own = rows[:, start : start + front.size]
            start += front.size
            whole[k] = jnp.moveaxis(own.reshape(-1, *front.shape[1:]), 0, parts[k][1])
    return whole


def _of_all(part: Array, name: AxisName) -> Any:
    """The parts of all shards, one in each row."""
    if not is_narrow(part.dtype):
        return jax.lax.all_gather(part, name)

    @jax.custom_vjp
    def narrow(x: Array) -> Any:
        return jax.lax.all_gather(x, name)

    narrow.defvjp(lambda x: (narrow(x), None), lambda _, rows: (_summed(rows, name),))
    return narrow(part)


def _summed(rows: Array, name: AxisName) -> Any:
    """This shard's row of the sum over shards, taken in float32."""
    wide = jax.lax.psum_scatter(rows.astype(jnp.float32), name)
    return wide.astype(rows.dtype)


def _rebuilt(state: ParamState, leaves: Sequence[Leaf], name: AxisName) -> PyTree:
    value = tree_util.tree_structure(state.value).unflatten(leaves)
    if isinstance(state, SplitArray):
        return value
    specs, structure = tree_util.tree_flatten(state.spec, is_leaf=is_spec)
    left = [spec_without(spec, name) for spec in specs]
    if left == specs:
        return state
    spec = structure.unflatten(left) if any(one is not None for one in left) else None
    return state.replace(value=value, spec=spec)


def _was_gathered(new: PyTree, old: PyTree) -> bool:
    if isinstance(old, SplitArray):
        return not is_state(new)
    return isinstance(old, ParamState) and is_state(new) and new.spec != old.spec
