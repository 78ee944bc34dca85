"""Mapped calls of losses' gradients: the spec of each array, and which of its axes has the lanes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.arrays import Array
from ..base.models import (
    SlotNumber,
    mesh_of,
    model_of,
    partition_spec,
    positions_of,
    units_of,
    with_units,
)
from ..programs import Axes, MeshShape, Spec
from ..trees import grow
from .layers import LossCase
from .mapped import gradient, unsplit_axes


HOW = {
    "mesh": ("checked", "unchecked"),
    "lanes": ("vmap2", "pmap2"),
    "both": ("checked", "unchecked"),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a mapped call takes or returns an array.

    **Attributes:**

    - `spec`: its spec, without the axis of the lanes.
    - `axis`: the axis of its lanes.
    - `cut`: whether this axis was made by cutting another in two.
    """

    spec: Spec
    axis: int | None = None
    cut: bool = False

    @property
    def partition_spec(self) -> PartitionSpec:
        return partition_spec(self.spec)


def form(loss: LossCase, spec: Spec, copies: Axes = ()) -> Form:
    """The form of an array with this spec, after a leading axis for each of `copies`."""
    entries: Spec = (*((name,) for name in copies), *spec)
    for k, names in enumerate(entries):
        if loss.lane in names:
            cut = k >= len(copies)
            rest = (tuple(name for name in names if name != loss.lane),) if cut else ()
            return Form((*entries[:k], (), *rest, *entries[k + 1 :]), k, cut)
    return Form(entries)


def cut(loss: LossCase, spec: Spec, x: Array) -> Array:
    """An array with an additional axis for the lanes."""
    at = form(loss, spec)
    if at.axis is None:
        return x
    return x.reshape(*x.shape[: at.axis], loss.mesh.sizes[-1], -1, *x.shape[at.axis + 1 :])


def joined(at: Form, x: Array) -> Array:
    """An array without the additional axis for the lanes."""
    if not at.cut:
        return x
    assert at.axis is not None
    return x.reshape(*x.shape[: at.axis], -1, *x.shape[at.axis + 2 :])


def loss_model(loss: LossCase, slots: Sequence[Array]) -> Any:
    """The model in the form that the call takes."""
    leaves = [slot.leaves[0] for slot in loss.case.slots]
    arrays = [cut(loss, leaf.spec, x) for leaf, x in zip(leaves, slots, strict=True)]
    return model_of(loss.case, [[x] for x in arrays])


def results(loss: LossCase) -> tuple[Form, list[Form], list[Form], list[Form]]:
    """The forms of the loss, the rows' losses, the gradients, and what is the same everywhere."""
    lead: Spec = ((),) if loss.around in ("scan", "vmap") else ()
    trained = [loss.params[k] for k in loss.chosen]
    return (
        form(loss, lead, unsplit_axes(loss, ())),
        [form(loss, (*lead, loss.rows), unsplit_axes(loss, loss.rows))] if loss.aux else [],
        [form(loss, (*lead, *leaf.spec), unsplit_axes(loss, tuple(leaf.axes))) for leaf in trained],
        [] if loss.separate else [Form(lead)] * (1 + sum(not leaf.axes for leaf in trained)),
    )


@functools.cache
def mapping(loss: LossCase, how: str) -> sm.StatefulMapping:
    """The gradient of a loss: the same mapping for every example with it, so that it compiles once."""
    typed = how == "checked"
    program: Any = functools.partial(gradient, loss, typed)
    slots = loss.case.slots
    forms = [form(loss, slot.leaves[0].spec) for slot in slots]
    x = form(loss, loss.case.inputs[0].spec)
    outputs = results(loss)
    if loss.lane is not None:
        states: dict[int, Any] = {}
        for k, at in enumerate(forms):
            if at.axis is not None and slots[k].kind != "array":
                states.setdefault(at.axis, []).append(f"s{k}")
        arrays = _of_arrays(loss, [at.axis for at in forms])
        program = getattr(sm, how if how in HOW["lanes"] else "vmap2")(
            program,
            axis_name=loss.lane,
            axis_size=loss.mesh.sizes[-1],
            in_axes=(arrays, x.axis, None),
            out_axes=(_each(outputs, "axis"), arrays),
            state_in_axes=states or None,
        )
        if how in HOW["lanes"]:
            lanes: sm.StatefulMapping = program
            return lanes
    outer = loss.mesh
    if loss.lane is not None:
        outer = MeshShape(loss.mesh.sizes[:-1], loss.mesh.explicit)
    specs = {
        f"s{k}": at.partition_spec
        for k, at in enumerate(forms)
        if slots[k].declared and slots[k].kind == "ParamState"
    }
    arrays = _of_arrays(loss, [at.partition_spec for at in forms])
    mapped: sm.StatefulMapping = sm.shard_map(
        program,
        mesh_of(outer),
        (arrays, x.partition_spec, PartitionSpec()),
        (_each(outputs, "partition_spec"), arrays),
        state_in_specs=specs or None,
        check_vma=typed,
    )
    return mapped


def _each(outputs: tuple[Any, ...], what: str) -> Any:
    return jax.tree.map(
        lambda at: getattr(at, what), outputs, is_leaf=lambda x: isinstance(x, Form)
    )


def _of_arrays(loss: LossCase, each: Sequence[Any]) -> Any:
    """A tree of the model's structure with these entries for arrays outside States, and `None` elsewhere."""
    kinds = [slot.kind for slot in loss.case.slots]
    positions = enumerate(positions_of(loss.case))
    arrays = {at: each[k] for k, at in positions if kinds[k] == "array"}
    tree = grow(loss.case.tree, SlotNumber)
    return with_units(tree, dict.fromkeys(range(len(units_of(tree)))) | arrays)
