"""Runs programs over lanes with `vmap2` and `pmap2`."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.models import arrays_of, mesh_of, model_of, partition_spec
from ..plain.mapped import run_body
from ..programs import Case, Spec
from ..trees import Setting
from .cases import Axis, LaneCase


TRANSFORMS = ("vmap2", "pmap2", "pmap2 backwards")


def mapping_of(lane: LaneCase, transform: str) -> sm.StatefulMapping:
    """The program, not yet called. If it has a mesh, the lanes run on each of its shards."""
    name, _, backwards = transform.partition(" ")
    given: dict[str, Any] = {"devices": jax.devices()[::-1]} if backwards else {}
    inner: sm.StatefulMapping = getattr(sm, name)(
        functools.partial(_program, lane.case),
        axis_name=lane.lanes,
        axis_size=lane.count,
        unexpected_out_state_mapping=lane.unexpected,
        **_axes(lane),
        **_state_axes(lane),
        **given,
    )
    return inner if lane.outer is None else _on_shards(lane, inner)


def _program(case: Case, model: Any, setting: Setting, *inputs: Any, **last: Any) -> Any:
    several = inputs[0].values() if inputs and isinstance(inputs[0], dict) else inputs
    return run_body(case, model, setting, *several, *last.values())


def passed(lane: LaneCase, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs in the form in which they are passed."""
    if lane.form == "tree":
        return [{f"x{i}": x for i, x in enumerate(inputs)}], {}
    if _by_keyword(lane):
        return list(inputs[:-1]), {"last": inputs[-1]}
    return list(inputs), {}


def _by_keyword(lane: LaneCase) -> bool:
    return lane.form == "keyword" and lane.inputs[-1] == 0 and lane.outer is None


def _axes(lane: LaneCase) -> dict[str, Any]:
    own: Any = lane.inputs[:-1] if _by_keyword(lane) else lane.inputs
    if lane.form == "tree":
        own = ({f"x{i}": axis for i, axis in enumerate(own)},)
    return {"in_axes": (lane.arrays, None, *own), "out_axes": (lane.outputs, lane.arrays)}


def _state_axes(lane: LaneCase) -> dict[str, Any]:
    slots = [k for k, slot in enumerate(lane.case.slots) if slot.kind != "array"]
    per_lane = [(k, lane.slots[k]) for k in slots if lane.slots[k] is not None]
    # A state that enters by an axis leaves by it, whether the option says so or not. Of several filters the
    # first match counts. A last filter makes the rest the same in all lanes, unless unexpected writes stack.
    enter = _filters(per_lane)
    if all(s.declared for s in lane.stacked):
        enter[None] = ...
    leave = dict(per_lane) | dict(lane.state_out_axes)
    return {"state_in_axes": enter, "state_out_axes": _filters(leave.items())}


def _filters(pairs: Iterable[tuple[int, Axis]]) -> dict[Axis, Any]:
    tags: dict[Axis, Any] = {}
    for k, axis in pairs:
        tags.setdefault(axis, []).append(f"s{k}")
    return tags


def _on_shards(lane: LaneCase, inner: sm.StatefulMapping) -> sm.StatefulMapping:
    assert lane.outer is not None

    def spec(own: Spec, axis: Axis, rank: int) -> PartitionSpec:
        entries = [tuple(name for name in names if name != lane.lanes) for names in own]
        entries += [()] * (rank - len(entries))
        if axis is not None:
            entries.insert(axis % (rank + 1), ())
        return partition_spec(tuple(entries))

    case = lane.case
    inputs: Any = tuple(
        spec(leaf.spec, axis, len(leaf.shape))
        for leaf, axis in zip(case.inputs, lane.inputs, strict=True)
    )
    if lane.form == "tree":
        inputs = ({f"x{i}": one for i, one in enumerate(inputs)},)
    outputs = tuple(
        spec(output.spec, axis, case.rank)
        for output, axis in zip(case.outputs, lane.outputs, strict=True)
    )
    states = {}
    for k, slot in enumerate(case.slots):
        if slot.kind != "array":
            specs = [spec(leaf.spec, lane.slots[k], len(leaf.shape)) for leaf in slot.leaves]
            states[f"s{k}"] = specs[0] if len(specs) == 1 else dict(zip("ab", specs, strict=True))
    mapped: sm.StatefulMapping = sm.shard_map(
        inner,
        mesh_of(lane.outer),
        (None, None, *inputs),
        (outputs, PartitionSpec()),
        state_in_specs=states or None,
    )
    return mapped


def with_axes(values: Sequence[Any], axes: Sequence[Axis]) -> list[Any]:
    """Arrays with lanes on axis 0, changed to the form that a call takes."""
    return [_moved(x, 0, axis) for x, axis in zip(values, axes, strict=True)]


def slots_with_axes(lane: LaneCase, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [
        [_moved(x, 0, axis) for x in leaves]
        for leaves, axis in zip(values, lane.slots, strict=True)
    ]


def lanes_first(lane: LaneCase, outputs: Sequence[Any]) -> list[Any]:
    """Outputs with the values of the lanes one after the other."""
    first = [_moved(x, axis, 0) for x, axis in zip(outputs, lane.outputs, strict=True)]
    return [
        x if axis is None else x.reshape(-1, *x.shape[2:])
        for x, axis in zip(first, lane.outputs, strict=True)
    ]


def slots_lanes_first(lane: LaneCase, slots: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The arrays of a call's new model, with lanes on axis 0."""
    stacked = {(s.slot, s.leaf): s.axis for s in lane.stacked}
    return [
        [_moved(x, stacked.get((k, n), axis), 0) for n, x in enumerate(leaves)]
        for k, (leaves, axis) in enumerate(zip(slots, lane.slots, strict=True))
    ]


def as_in_the_reference(lane: LaneCase, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` on arrays in the reference's form. Stacked states are among its outputs."""
    case = lane.case

    def same(model: Any, setting: Setting, *inputs: Any) -> tuple[list[Any], Any]:
        before = arrays_of(case, model)
        args, kwargs = passed(lane, with_axes(inputs, lane.inputs))
        model = model_of(case, slots_with_axes(lane, before))
        outputs, model = call(model, setting, *args, **kwargs)
        outputs, after = lanes_first(lane, outputs), slots_lanes_first(lane, arrays_of(case, model))
        for s in lane.stacked:
            x = after[s.slot][s.leaf]
            sides = x.shape[1:] or (1,) * case.rank
            outputs.append(x.reshape(-1, *sides[1:]))
            after[s.slot][s.leaf] = before[s.slot][s.leaf]
        return outputs, model_of(case, after)

    return same


def _moved(x: Any, source: Axis, to: Axis) -> Any:
    if source is None or to is None:
        return x
    return (np if isinstance(x, np.ndarray) else jnp).moveaxis(x, source, to)
