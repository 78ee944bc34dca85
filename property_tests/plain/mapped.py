"""Programs run by statemesh: a model with its states, and a body in `jax.numpy`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import statemesh as sm

from ..programs import (
    Binary,
    Case,
    Collect,
    Fold,
    Gain,
    Index,
    Input,
    MeshShape,
    Read,
    Slot,
    Spec,
    Unary,
)
from ..trees import KINDS, Setting, grow
from .reference import Array


@functools.cache
def mesh_of(shape: MeshShape) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape.sizes))]).reshape(shape.sizes)
    kind = AxisType.Explicit if shape.explicit else AxisType.Auto
    return Mesh(devices, shape.axis_names, axis_types=(kind,) * len(shape.sizes))


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in spec))


def slot_spec(slot: Slot) -> Any:
    """The spec of a state: one for all leaves where they agree, else a tree of them."""
    specs = [
        sm.PerShard(*leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
        for leaf in slot.leaves
    ]
    return specs[0] if all(s == specs[0] for s in specs) else dict(zip("ab", specs, strict=True))


def added_range(old: Any, new: Any, axis_names: Any) -> Any:
    """A write policy of the user's own: the range of the new values is added to the old one."""
    return old + jax.lax.pmax(new, axis_names) - jax.lax.pmin(new, axis_names)


def model_of(case: Case, values: Sequence[Sequence[Array]]) -> Any:
    """The model with these values in its slots."""

    def filled(k: int) -> Any:
        slot = case.slots[k]
        arrays = [jnp.asarray(x) for x in values[k]]
        if slot.kind == "array":
            return arrays[0]
        return KINDS[slot.kind](
            arrays[0] if len(arrays) == 1 else dict(zip("ab", arrays, strict=True)),
            # Only where it is needed: the others have nothing to be told apart by but their paths.
            tag=f"s{k}" if slot.declared else None,
            spec=None if slot.declared else slot_spec(slot),
            reduce=added_range if slot.reduce == "range" else slot.reduce,
        )

    return grow(case.tree, filled)


def arrays_of(case: Case, model: Any) -> list[list[Any]]:
    """The arrays in a model's slots."""
    units = _units(model)
    found: dict[int, list[Any]] = {}
    for k, place in _places(case).items():
        found[k] = jax.tree.leaves(units[place])
    return [found[k] for k in range(len(case.slots))]


def mapping_of(case: Case) -> sm.StatefulMapping:
    """The program under `shard_map`, not yet called."""
    declared = {f"s{k}": slot_spec(s) for k, s in enumerate(case.slots) if s.declared}
    mapping: sm.StatefulMapping = sm.shard_map(
        functools.partial(run_body, case),
        mesh_of(case.mesh),
        (None, None, *(partition_spec(leaf.spec) for leaf in case.inputs)),
        (tuple(partition_spec(output.spec) for output in case.outputs), PartitionSpec()),
        state_in_specs=declared or None,
    )
    return mapping


@functools.cache
def mapping(case: Case) -> sm.StatefulMapping:
    """The same, one for each case: what it has compiled serves every example with that case."""
    return mapping_of(case)


def run_body(case: Case, model: Any, setting: Setting, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
    if case.forget:
        model = jax.tree.map(lambda leaf: leaf, model)
    old = arrays_of(case, model)
    values: list[Any] = []
    for step in case.steps:
        match step:
            case Input(index):
                value = _lifted(inputs[index], case.rank)
            case Read(slot, leaf):
                value = _lifted(old[slot][leaf], case.rank)
            case Gain():
                value = jnp.full((1,) * case.rank, setting.gain, jnp.float32)
            case Index(axes):
                value = jnp.full((1,) * case.rank, jax.lax.axis_index(axes), jnp.int32)
            case Unary(op, arg):
                value = _UNARY[op](values[arg])
            case Binary(op, left, right):
                value = _BINARY[op](values[left], values[right])
            case Fold(op, arg, axis):
                value = getattr(jnp, op)(values[arg], axis=axis, keepdims=True)
            case Collect(op, arg, axes):
                value = getattr(jax.lax, f"p{op}")(values[arg], axes)
        values.append(value)
    model = _written(case, model, old, values)
    return tuple(values[output.step] for output in case.outputs), model


def _lifted(value: Any, rank: int) -> Any:
    return value if value.ndim else value.reshape((1,) * rank)


def _written(case: Case, model: Any, old: list[list[Any]], values: list[Any]) -> Any:
    new: dict[int, list[Any]] = {}
    for write in case.writes:
        before, value = old[write.slot][write.leaf], values[write.step]
        value = jnp.broadcast_to(value, before.shape) if before.ndim else value.reshape(())
        new.setdefault(write.slot, list(old[write.slot]))[write.leaf] = value
    places = _places(case)
    units, treedef = jax.tree.flatten(model, is_leaf=sm.is_state)
    for k, arrays in new.items():
        unit = units[places[k]]
        value = arrays[0] if len(arrays) == 1 else dict(zip("ab", arrays, strict=True))
        units[places[k]] = unit.set(value) if sm.is_state(unit) else value
    written = jax.tree.unflatten(treedef, units)
    return jax.tree.map(lambda leaf: leaf, written) if case.forget else written


def _units(model: Any) -> list[Any]:
    return jax.tree.leaves(model, is_leaf=sm.is_state)


def _places(case: Case) -> dict[int, int]:
    """For each slot, which of the model's units it is."""
    marked = grow(case.tree, _Mark)
    return {u.slot: i for i, u in enumerate(jax.tree.leaves(marked)) if isinstance(u, _Mark)}


class _Mark:
    def __init__(self, slot: int) -> None:
        self.slot = slot


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "half": lambda x: x * 0.5,
    "wrap": lambda x: x % 101 - 50,
    "float": lambda x: x.astype(jnp.float32),
    "tanh": jnp.tanh,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "gate": lambda a, b: jnp.tanh(a) * jnp.tanh(b),
}
