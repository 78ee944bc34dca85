"""Meshes, specs and models of statemesh, made from their plain descriptions."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import statemesh as sm

from ..programs import Case, MeshShape, Slot, Spec
from ..trees import KINDS, grow
from .arrays import Array


@functools.cache
def mesh_of(shape: MeshShape) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape.sizes))]).reshape(shape.sizes)
    kind = AxisType.Explicit if shape.explicit else AxisType.Auto
    return Mesh(devices, shape.axis_names, axis_types=(kind,) * len(shape.sizes))


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in spec))


def slot_spec(slot: Slot) -> Any:
    """The spec of a state: one for all leaves where they agree, else a tree of specs."""
    specs = [
        sm.PerShard(*leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
        for leaf in slot.leaves
    ]
    return specs[0] if all(s == specs[0] for s in specs) else slot_value(specs)


def declared_specs(case: Case) -> dict[str, Any] | None:
    """The specs of the states that have none of their own."""
    return {f"s{k}": slot_spec(s) for k, s in enumerate(case.slots) if s.declared} or None


def slot_value(leaves: Sequence[Any]) -> Any:
    """The tree that a state has as its value: the one leaf itself, or a dictionary of two."""
    return leaves[0] if len(leaves) == 1 else dict(zip("ab", leaves, strict=True))


def added_range(old: Any, new: Any, axis_names: Any) -> Any:
    """A write policy of the user's: the range of the new values is added to the old value."""
    return old + jax.lax.pmax(new, axis_names) - jax.lax.pmin(new, axis_names)


def model_of(case: Case, values: Sequence[Sequence[Array]], seed: int = 0) -> Any:
    """The model with these values in its slots, and beside it a stream where there is noise."""

    def filled(k: int) -> Any:
        slot = case.slots[k]
        arrays = [jnp.asarray(x) for x in values[k]]
        if slot.kind == "array":
            return arrays[0]
        return KINDS[slot.kind](
            slot_value(arrays),
            # Only states that a filter must name have a tag. Only their paths distinguish the others.
            tag=f"s{k}" if slot.declared else None,
            spec=None if slot.declared else slot_spec(slot),
            reduce=added_range if slot.reduce == "range" else slot.reduce,
        )

    model = grow(case.tree, filled)
    return [model, sm.RandomState(jax.random.key(seed))] if case.noisy else model


def arrays_of(case: Case, model: Any) -> list[list[Any]]:
    """The arrays in each slot of a model."""
    units = units_of(model)
    return [jax.tree.leaves(units[k]) for k in positions_of(case)]


def is_unit(x: Any) -> bool:
    return x is None or sm.is_state(x)


def units_of(model: Any) -> list[Any]:
    """The leaves of a model. A State is one leaf, and so is `None`."""
    return jax.tree.leaves(model, is_leaf=is_unit)


def with_units(model: Any, new: dict[int, Any]) -> Any:
    """The model with other units at these positions."""
    units, treedef = jax.tree.flatten(model, is_leaf=is_unit)
    return jax.tree.unflatten(treedef, [new.get(i, unit) for i, unit in enumerate(units)])


class SlotNumber:
    """Stands for a slot in a tree. A number would be a leaf like others."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


def positions_of(case: Case) -> list[int]:
    """For each slot, which of the model's units it is."""
    units = enumerate(units_of(grow(case.tree, SlotNumber)))
    found = {unit.slot: i for i, unit in units if isinstance(unit, SlotNumber)}
    return [found[k] for k in range(len(found))]
