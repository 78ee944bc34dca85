"""Mapped calls of losses' gradients: the spec of each array."""

import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.models import (
    SlotNumber,
    mesh_of,
    partition_spec,
    positions_of,
    units_of,
    with_units,
)
from ..programs import Axes, Spec
from ..trees import grow
from .layers import LossCase
from .mapped import gradient, unsplit_axes


HOW = ("checked", "unchecked")


def results(loss: LossCase) -> Any:
    """The specs of the loss, the rows' losses, the gradients, and what is the same everywhere.

    All but the last have an axis for each mesh axis over which their copies should be equal.
    """
    lead: Spec = ((),) if loss.around in ("scan", "vmap") else ()
    trained = [loss.params[k] for k in loss.chosen]

    def copied(spec: Spec, axes: Axes) -> PartitionSpec:
        return partition_spec((*((name,) for name in unsplit_axes(loss, axes)), *lead, *spec))

    return (
        copied((), ()),
        [copied((loss.rows,), loss.rows)] if loss.aux else [],
        [copied(leaf.spec, tuple(leaf.axes)) for leaf in trained],
        [partition_spec(lead)] * (1 + sum(not leaf.axes for leaf in trained)),
    )


@functools.cache
def mapping(loss: LossCase, how: str) -> sm.StatefulMapping:
    """The gradient of a loss: the same mapping for every example with it, so that it compiles once."""
    slots = loss.case.slots
    each = [partition_spec(slot.leaves[0].spec) for slot in slots]
    declared = {
        f"s{k}": spec
        for k, spec in enumerate(each)
        if slots[k].declared and slots[k].kind == "ParamState"
    }
    arrays = _of_arrays(loss, each)
    (x,) = loss.case.inputs
    mapped: sm.StatefulMapping = sm.shard_map(
        functools.partial(gradient, loss, how == "checked"),
        mesh_of(loss.mesh),
        (arrays, partition_spec(x.spec), PartitionSpec()),
        (results(loss), arrays),
        state_in_specs=declared or None,
        check_vma=how == "checked",
    )
    return mapped


def _of_arrays(loss: LossCase, each: Sequence[Any]) -> Any:
    """A tree of the model's structure with these entries for arrays outside States, and `None` elsewhere."""
    kinds = [slot.kind for slot in loss.case.slots]
    positions = enumerate(positions_of(loss.case))
    arrays = {at: each[k] for k, at in positions if kinds[k] == "array"}
    tree = grow(loss.case.tree, SlotNumber)
    return with_units(tree, dict.fromkeys(range(len(units_of(tree)))) | arrays)
