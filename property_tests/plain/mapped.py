"""Runs programs over shards with statemesh, their body in `jax.numpy`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import statemesh as sm

from .. import programs
from ..base.models import (
    arrays_of,
    mesh_of,
    partition_spec,
    positions_of,
    slot_spec,
    slot_value,
    units_of,
    with_units,
)
from ..programs import Case
from ..trees import Setting


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
    """The same mapping for every example with this case, so that it compiles once."""
    return mapping_of(case)


def run_body(case: Case, model: Any, setting: Setting, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
    if case.forget:
        model = jax.tree.map(lambda leaf: leaf, model)
    old = arrays_of(case, model)
    values: list[Any] = []
    for step in case.steps:
        match step:
            case programs.Input(index):
                value = _lifted(inputs[index], case.rank)
            case programs.Read(slot, leaf):
                value = _lifted(old[slot][leaf], case.rank)
            case programs.Gain():
                value = jnp.full((1,) * case.rank, setting.gain, jnp.float32)
            case programs.Index(axes):
                value = jnp.full((1,) * case.rank, sm.axis_index(axes), jnp.int32)
            case programs.Unary(op, arg):
                value = _UNARY[op](values[arg])
            case programs.Binary(op, left, right):
                value = _BINARY[op](values[left], values[right])
            case programs.Fold(op, arg, axis):
                value = getattr(jnp, op)(values[arg], axis=axis, keepdims=True)
            case programs.Collect(op, arg, axes):
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
    units, positions = units_of(model), positions_of(case)
    changed = {}
    for k, arrays in new.items():
        unit, value = units[positions[k]], slot_value(arrays)
        changed[positions[k]] = unit.set(value) if sm.is_state(unit) else value
    written = with_units(model, changed)
    return jax.tree.map(lambda leaf: leaf, written) if case.forget else written


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
