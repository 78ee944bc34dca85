"""Packing as another model is packed, for a mesh of any size."""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from .._base._compat import tree_util
from .._base._nodes import is_state_or_packed
from .._base._types import PyTree
from .._resolve._mesh import check_specs, manual_names
from .._resolve._specs import SpecPlacement
from ._contents import Contents, Group
from ._pack import buffer_of, known, part_of
from ._packed import Packed


def packed_placements(tree: PyTree) -> list[Sequence[SpecPlacement] | None]:
    """For each unit of the unpacked tree the placements with which its arrays are packed.

    A unit is a State, or a leaf outside of any State. It is `None` for one that is not packed.
    """
    found: list[Sequence[SpecPlacement] | None] = []
    for node in tree_util.tree_leaves(tree, is_leaf=is_state_or_packed):
        if not isinstance(node, Packed):
            found.append(None)
            continue
        contents = node._form.part
        slots = [group.slots for group in contents.groups]
        found += [one and [slots[g][k].where for g, k in one[1]] for one in contents.states]
    return found


def repack(packed: Packed, model: PyTree, mesh: Mesh) -> Packed:
    """Pack a model of the same structure as `packed` is, for a mesh.

    **Raises:** `SpecError` for placements that do not fit the mesh.
    """
    form = packed._form
    check_specs(
        [
            (f"the spec of {slot.path}", slot.where.spec)
            for group in form.contents.groups
            for slot in group.slots
        ],
        mesh,
        manual_names(mesh, ()),
    )
    form = dataclasses.replace(form, contents=known(_for_mesh(form.contents, mesh)))
    arrays, rest = form.part.arrays(model)
    pairs = zip(form.part.groups, arrays, strict=True)
    return Packed.of([buffer_of(group, own, mesh) for group, own in pairs], rest, form)


def _for_mesh(contents: Contents, mesh: Mesh) -> Contents:
    groups = tuple(_group_for(group, mesh) for group in contents.groups)
    return dataclasses.replace(contents, groups=groups, sizes=tuple(mesh.shape.items()))


def _group_for(group: Group, mesh: Mesh) -> Group:
    names = tuple(name for name in mesh.axis_names if name in group.names)
    slots, start = [], 0
    for old in group.slots:
        shape = old.shape
        if old.where.axis is not None:
            # The first axis has an entry for each shard.
            shape = (math.prod(mesh.shape[name] for name in old.where.axes[0]), *shape[1:])
        slot = dataclasses.replace(
            old, shape=shape, start=start, part=part_of(shape, old.where, mesh)
        )
        slots.append(slot)
        start += slot.size
    counts = tuple(mesh.shape[name] for name in names)
    return Group(group.dtype, names, counts, tuple(slots))
