"""Translates a call with packed arguments to a call with their models, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._base._errors import (
    SpecError,
    error_listing,
    sizes_str,
    spec_str,
)
from .._base._specs import Placement
from .._base._trees import is_packed, is_state, is_state_or_packed
from .._base._types import AxisName, Leaf, PyTree
from .._jax._compat import tree_util
from ._arguments import Call
from ._packed import (
    Contents,
    Form,
    Group,
    Packed,
    shapes_of,
    with_models,
)
from ._placement import Input
from ._specs import SpecPlacement
from ._write_back import Forwarded, Output, WriteBack


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """The source of an unpacked leaf: a leaf of the arguments, or one array in a buffer."""

    position: int
    group: Group | None = None
    slot: int = 0


class Packing:
    """A call's arguments with each `Packed` replaced by its model.

    **Arguments:**

    - `call`: the arguments.

    **Attributes:**

    - `given`: the arguments without their arrays.
    - `call`: the arguments unpacked. In the place of an array in a buffer stands its shape.
    - `positions`: for each of these leaves the leaf of the arguments that it is, or is in.
    - `origins`: for each of them what it is, if anything is packed.
    - `forms`: of what is packed.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.given = call.without_arrays()
        self.origins: list[_At] = []
        self.positions: Sequence[int] = range(len(call.leaves))
        nodes = tree_util.tree_leaves((call.args, call.kwargs), is_leaf=is_state_or_packed)
        self.forms = list(dict.fromkeys(n._form for n in nodes if is_packed(n)))
        if not self.forms:
            return
        marked = self.given.treedef.unflatten(map(_At, range(len(call.leaves))))
        self.origins = tree_util.tree_leaves(with_models(marked, _marks))
        self.positions = [at.position for at in self.origins]
        args, kwargs = with_models((call.args, call.kwargs), shapes_of)
        self.call = Call.of(call.fun, args, kwargs)

    def check(self, name: str, unpacked: Sequence[Input], sizes: Any) -> None:
        """Refuse what was packed for other sizes of the mesh's axes, or for other placements."""
        if not self.forms:
            return
        for form in self.forms:
            packed = dict(form.contents.sizes)
            used = {axis for group in form.part.groups for axis in group.names}
            if any(sizes.get(axis) != packed[axis] for axis in used):
                raise _packed_for_other_sizes(name, packed, dict(sizes))
        moved = [
            (x.path, at.group.slots[at.slot].placement.spec, x.placement.spec)
            for x in unpacked
            if (at := self.origins[x.position]).group is not None
            and not _lies(at.group.slots[at.slot].placement, x.placement)
        ]
        if moved:
            raise _packed_with_other_specs(name, moved)

    def inputs(self, unpacked: Sequence[Input], call: Call) -> Sequence[Input]:
        """A record of each real input of the call: of a buffer in place of its arrays."""
        if not self.forms:
            return unpacked
        placed: dict[int, tuple[Placement, str]] = {}
        for x in unpacked:
            at = self.origins[x.position]
            placement = x.placement if at.group is None else _of_buffer(at.group, x.placement)
            placed[at.position] = placement, x.placed_by
        return [
            unit.input(position, call.leaves[position], *placed[position])
            for unit in self.given.flat_units()
            for position in unit.positions
            if position in placed
        ]


def _marks(group: Group, at: _At) -> list[_At]:
    return [_At(at.position, group, k) for k in range(len(group.slots))]


def _lies(packed: Placement, wanted: Placement) -> bool:
    """Whether an array has the placement that it was packed for; all replicated placements are one."""
    return packed == wanted or not (packed.axis_names or wanted.axis_names)


def _of_buffer(group: Group, placement: Placement) -> Placement:
    """The placement of a buffer one of whose arrays is placed so.

    Lanes place what is whole in their own way.
    """
    return group.placement if group.names or isinstance(placement, SpecPlacement) else placement


class Repacking:
    """The work of one instance around the function: split buffers into arrays, and join arrays again.

    **Arguments:**

    - `packing`: of the arguments.
    - `unpacked`: the unpacked inputs.
    - `number`: the number of each true input, by position.
    """

    def __init__(
        self, packing: Packing, unpacked: Sequence[Input], number: Mapping[int, int]
    ) -> None:
        self.forms = packing.forms
        self.placements = [x.placement for x in unpacked]
        self.origins = [packing.origins[x.position] for x in unpacked if self.forms]
        self.inputs = [number[at.position] for at in self.origins] or list(range(len(unpacked)))

    def split(self, parts: Sequence[Leaf]) -> Sequence[Leaf]:
        """One part for each unpacked input, from the parts of the real ones."""
        if not self.forms:
            return parts
        kept: dict[int, list[Leaf]] = {}
        found: list[Leaf] = []
        for at, k in zip(self.origins, self.inputs, strict=True):
            if at.group is not None and k not in kept:
                kept[k] = at.group.split(parts[k])
            found.append(parts[k] if at.group is None else kept[k][at.slot])
        return found

    def join(
        self, own: Sequence[Leaf], outputs: list[Leaf], back: WriteBack
    ) -> tuple[list[Leaf], WriteBack]:
        """The outputs, with models packed again that have the structure of a packed argument.

        **Arguments:**

        - `own`: the parts of the unpacked inputs.
        - `outputs`, `back`: what the function's result became.
        """
        if not self.forms:
            return outputs, back
        joining = _Joining(self, own, outputs, back)
        result = joining.tree(back.result)
        return joining.outputs, WriteBack(
            result,
            joining.placements,
            list(dict.fromkeys(self.inputs[k] for k in back.rewritten)),
            joining.written,
            [(path, tuple(self.inputs[k] for k in ks)) for path, ks in back.stacked],
            back.merged,
        )


class _Joining:
    """The outputs of one instance, with models joined into buffers."""

    def __init__(
        self, repacking: Repacking, own: Sequence[Leaf], outputs: list[Leaf], back: WriteBack
    ) -> None:
        self.repacking, self.own = repacking, own
        self.given, self.given_placements = outputs, back.placements
        self.paths: dict[int, list[str]] = {}
        for index, path in back.written:
            self.paths.setdefault(index, []).append(path)
        self.outputs: list[Leaf] = []
        self.placements: list[Placement] = []
        self.written: list[tuple[int, str]] = []

    def tree(self, result: PyTree) -> Any:
        found: dict[int, Form] = {}

        def fits(node: PyTree) -> bool:
            if (form := self._fitting(node)) is not None:
                found[id(node)] = form
            return id(node) in found

        def one(node: PyTree) -> Any:
            form = found.get(id(node))
            return self.leaf(node) if form is None else self.packed(node, form)

        return tree_util.tree_map(one, result, is_leaf=fits)

    def _fitting(self, node: PyTree) -> Form | None:
        """The form in which a node of the result can be packed: that of an argument with its structure."""
        form: Form
        for form in self.repacking.forms:
            if type(node) is form.contents.root and self._fits(node, form.part):
                return form
        return None

    def _fits(self, node: PyTree, contents: Contents) -> bool:
        units, structure = tree_util.tree_flatten(node, is_leaf=is_state)
        if structure != contents.unit_def:
            return False
        for unit, one in zip(units, contents.states, strict=True):
            if one is None:
                continue
            leaves, own = tree_util.tree_flatten(unit)
            if own != one[0]:
                return False
            for (g, k), leaf in zip(one[1], leaves, strict=True):
                if not self._is_array_of(contents.groups[g], k, leaf):
                    return False
        return True

    def _is_array_of(self, group: Group, k: int, source: Leaf) -> bool:
        slot = group.slots[k]
        match source:
            case Output(index):
                x, placement = self.given[index], self.given_placements[index]
            case Forwarded(index):
                x, placement = self.own[index], self.repacking.placements[index]
            case _:
                return False
        return (x.shape, x.dtype) == (slot.part, group.dtype) and _lies(slot.placement, placement)

    def packed(self, node: PyTree, form: Form) -> Packed:
        sources, units = form.part.arrays(node)
        rest = [tree_util.tree_map(self.leaf, unit) for unit in units]
        pairs = zip(form.part.groups, sources, strict=True)
        return Packed.of([self.buffer(*pair) for pair in pairs], rest, form)

    def buffer(self, group: Group, sources: Sequence[Leaf]) -> Output | Forwarded:
        """A buffer of the result: the one that came in, if none of its arrays was written."""
        if (source := self._whole(group, sources)) is not None:
            return Forwarded(source)
        parts: list[Leaf] = []
        paths: list[str] = []
        for source in sources:
            match source:
                case Output(index):
                    parts.append(self.given[index])
                    paths += self.paths.get(index, [])
                case Forwarded(index):
                    parts.append(self.own[index])
        placement = _of_buffer(group, self._place(sources[0]))
        return self.emit(group.join(parts), placement, paths)

    def _place(self, source: Output | Forwarded) -> Placement:
        made = isinstance(source, Output)
        return (self.given_placements if made else self.repacking.placements)[source.index]

    def _whole(self, group: Group, sources: Sequence[Leaf]) -> int | None:
        """The number of the buffer that holds exactly these arrays, in this order."""
        if not all(isinstance(source, Forwarded) for source in sources):
            return None
        origins = [self.repacking.origins[source.index] for source in sources]
        if any(at.group is not group or at.slot != k for k, at in enumerate(origins)):
            return None
        numbers = {self.repacking.inputs[source.index] for source in sources}
        return numbers.pop() if len(numbers) == 1 else None

    def leaf(self, source: Leaf) -> Any:
        """A leaf of the result that is in no buffer."""
        match source:
            case Output(index):
                paths = self.paths.get(index, [])
                return self.emit(self.given[index], self.given_placements[index], paths)
            case Forwarded(index) if self.repacking.origins[index].group is None:
                return Forwarded(self.repacking.inputs[index])
            case Forwarded(index):
                return self.emit(self.own[index], self.repacking.placements[index], [])
            case _:
                return source

    def emit(self, x: Leaf, placement: Placement, paths: Sequence[str]) -> Output:
        self.outputs.append(x)
        self.placements.append(placement)
        number = len(self.outputs) - 1
        self.written += [(number, path) for path in paths]
        return Output(number)


def _packed_for_other_sizes(
    name: str, packed: Mapping[AxisName, int], sizes: Mapping[AxisName, int]
) -> SpecError:
    return SpecError(
        f"{name}: a model is packed for a mesh with {sizes_str(packed) or 'no axes'}, but this call is on "
        f"{sizes_str(sizes) or 'no axes'}. Pack it for the mesh of this call: "
        "statemesh.pack(packed.unpack(), mesh)."
    )


def _packed_with_other_specs(name: str, found: Sequence[tuple[str, object, object]]) -> SpecError:
    return error_listing(
        SpecError,
        f"{name}: these states are packed with other specs than this call has for them",
        [
            f"{path}: packed with {spec_str(packed)}, but this call has {spec_str(needed)}"
            for path, packed, needed in found
        ],
        "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in state_in_specs.",
    )
