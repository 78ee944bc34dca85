"""Translates a call with packed arguments to a call with their models, and back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from .._axes._joined import written_end_to_end
from .._base._errors import SpecError, error_listing, sizes_str, spec_str
from .._base._specs import Placement
from .._base._trees import is_state, is_state_or_packed
from .._base._types import Leaf, PyTree
from .._jax._compat import tree_util
from ._arguments import Call, Input
from ._packed import Contents, Group, Packed, shapes_of, with_models
from ._per_shard import Instance
from ._specs import SpecPlacement
from ._varying import VaryingAxes
from ._write_back import Forwarded, Output, WriteBack


RunInstance: TypeAlias = Callable[[Sequence[Leaf], VaryingAxes], tuple[list[Leaf], WriteBack]]
"""Runs one instance on its parts of the inputs; returns its outputs and how the result is put together."""


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """The source of an unpacked leaf: a leaf of the arguments, or one array in a buffer."""

    position: int
    group: Group | None = None
    slot: int = 0


class Packing:
    """A call's arguments with each `Packed` replaced by its model. Calls without any have no `Packing`.

    **Arguments:**

    - `call`: the arguments.

    **Attributes:**

    - `origins`: for each leaf of the unpacked arguments what it is.
    - `models`: what is packed, without arrays, and its contents.
    - `placements`: that of each unpacked input, once the inputs are placed.
    - `sources`: what each unpacked input is.
    - `numbers`: the number of the input that each unpacked input is, or is in.
    """

    def __init__(self, call: Call) -> None:
        marked = call.treedef.unflatten(map(_At, range(len(call.leaves))))
        nodes = tree_util.tree_leaves(marked, is_leaf=is_state_or_packed)
        self.models = [(n, n._present_contents) for n in nodes if isinstance(n, Packed)]
        self.origins: list[_At] = tree_util.tree_leaves(with_models(marked, _marks))

    def unpacked(self, call: Call) -> Call:
        """The arguments unpacked. In the place of an array in a buffer stands its shape."""
        return Call(call.fun, *with_models((call.args, call.kwargs), shapes_of))

    def place(
        self, name: str, unpacked: Sequence[Input], sizes: Mapping[Any, int], call: Call
    ) -> list[Input]:
        """A record of each input of the call: of a buffer in place of its arrays.

        **Raises:** `SpecError` for what was packed for other sizes of the mesh, or for other placements.
        """
        self.placements = [x.placement for x in unpacked]
        self.sources = [self.origins[x.position] for x in unpacked]
        for _, contents in self.models:
            packed = dict(contents.sizes)
            used = {axis for group in contents.groups for axis in group.names}
            if any(sizes.get(axis) != packed[axis] for axis in used):
                raise SpecError(
                    f"{name}: a model is packed for a mesh with {sizes_str(packed) or 'no axes'}, but this "
                    f"call is on {sizes_str(sizes) or 'no axes'}. Pack it for the mesh of this call: "
                    "statemesh.pack(packed.unpack(), mesh)."
                )
        moved: list[str] = []
        placed: dict[int, tuple[Placement, str]] = {}
        for x, at in zip(unpacked, self.sources, strict=True):
            placement = x.placement
            if at.group is not None:
                placement = _of_buffer(at.group, x.placement)
                packed_for = at.group.slots[at.slot].placement
                if not _lies(packed_for, x.placement):
                    moved.append(
                        f"{x.path}: packed with {spec_str(packed_for.spec)}, but this call has "
                        f"{spec_str(x.placement.spec)}"
                    )
            placed[at.position] = placement, x.placed_by
        if moved:
            raise error_listing(
                SpecError,
                f"{name}: these states are packed with other specs than this call has for them",
                moved,
                "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in "
                "state_in_specs.",
            )
        inputs = [
            unit.input(position, call.leaves[position], *placed[position])
            for unit in call.flat_units()
            for position in unit.positions
            if position in placed
        ]
        numbers = {x.position: k for k, x in enumerate(inputs)}
        self.numbers = [numbers[at.position] for at in self.sources]
        return inputs

    def around(self, instance: Instance) -> RunInstance:
        """An instance that takes parts of buffers, and returns models packed again.

        A model is packed again if it has the structure of a packed argument.
        """

        def run(parts: Sequence[Leaf], varying: VaryingAxes) -> tuple[list[Leaf], WriteBack]:
            unpacked = self._split(parts)
            joining = _Joining(self, unpacked, *instance(unpacked, varying))
            return joining.outputs, joining.back

        return run

    def _split(self, parts: Sequence[Leaf]) -> Sequence[Leaf]:
        """The part of each unpacked input, from an instance's parts of the inputs."""
        split: dict[int, list[Leaf]] = {}
        unpacked: list[Leaf] = []
        for at, number in zip(self.sources, self.numbers, strict=True):
            if at.group is not None and number not in split:
                split[number] = at.group.split(parts[number])
            unpacked.append(parts[number] if at.group is None else split[number][at.slot])
        return unpacked


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


# An array of an instance, its placement, and the paths of the written states that it belongs to.
Leaving: TypeAlias = tuple[Any, Placement, Sequence[str]]


class _Joining:
    """The outputs of one instance, with models joined into buffers.

    **Attributes:**

    - `outputs`, `back`: the outputs, and how the result is put together.
    """

    def __init__(
        self, packing: Packing, unpacked: Sequence[Leaf], outputs: list[Leaf], back: WriteBack
    ) -> None:
        paths: list[list[str]] = [[] for _ in outputs]
        for index, path in back.written:
            paths[index].append(path)
        self.packing = packing
        self.inputs: list[Leaving] = [
            (x, placement, ()) for x, placement in zip(unpacked, packing.placements, strict=True)
        ]
        self.unjoined: list[Leaving] = list(zip(outputs, back.placements, paths, strict=True))
        self.joined: list[Leaving] = []
        result = tree_util.tree_map(
            self._node, back.result, is_leaf=lambda node: self._like(node) is not None
        )
        numbers = packing.numbers
        self.outputs = [x for x, *_ in self.joined]
        self.back = WriteBack(
            result,
            [placement for _, placement, _ in self.joined],
            list(dict.fromkeys(numbers[k] for k in back.rewritten)),
            [(k, path) for k, (*_, paths) in enumerate(self.joined) for path in paths],
            [(path, tuple(numbers[k] for k in ks)) for path, ks in back.stacked],
            back.merged,
        )

    def _node(self, node: PyTree) -> Any:
        like = self._like(node)
        if like is None:
            return self._leaf(node)
        packed, contents = like
        sources, units = contents.arrays(node)
        rest = [tree_util.tree_map(self._leaf, unit) for unit in units]
        buffers = [self._buffer(*pair) for pair in zip(contents.groups, sources, strict=True)]
        return packed._refilled(buffers, rest)

    def _like(self, node: PyTree) -> tuple[Packed, Contents] | None:
        """The packed argument as which a node of the result can be packed: one of its structure."""
        for packed, contents in self.packing.models:
            if type(node) is contents.root and self._fits(node, contents):
                return packed, contents
        return None

    def _fits(self, node: PyTree, contents: Contents) -> bool:
        units, structure = tree_util.tree_flatten(node, is_leaf=is_state)
        if structure != contents.unit_def:
            return False
        for unit, packed in zip(units, contents.states, strict=True):
            if packed is None:
                continue
            leaves, treedef = tree_util.tree_flatten(unit)
            if treedef != packed[0]:
                return False
            for (g, k), source in zip(packed[1], leaves, strict=True):
                if not isinstance(source, Output | Forwarded):
                    return False
                group = contents.groups[g]
                slot = group.slots[k]
                x, placement, _ = self._array(source)
                if (x.shape, x.dtype) != (slot.part, group.dtype):
                    return False
                if not _lies(slot.placement, placement):
                    return False
        return True

    def _array(self, source: Output | Forwarded) -> Leaving:
        """An array of the unpacked result."""
        return (self.unjoined if isinstance(source, Output) else self.inputs)[source.index]

    def _buffer(self, group: Group, sources: Sequence[Leaf]) -> Output | Forwarded:
        """A buffer of the result: the one that came in, if none of its arrays was written."""
        packing = self.packing
        numbers = [source.index for source in sources if isinstance(source, Forwarded)]
        slots = [packing.sources[k].slot for k in numbers if packing.sources[k].group is group]
        whole = {packing.numbers[k] for k in numbers}
        if slots == list(range(len(sources))) and len(whole) == 1:
            return Forwarded(whole.pop())
        parts, placements, paths = zip(*map(self._array, sources), strict=True)
        placement = _of_buffer(group, placements[0])
        return self._emit(written_end_to_end(parts), placement, [*chain(*paths)])

    def _leaf(self, source: Leaf) -> Any:
        """A leaf of the result that is in no buffer."""
        if not isinstance(source, Output | Forwarded):
            return source
        packing = self.packing
        if isinstance(source, Forwarded) and packing.sources[source.index].group is None:
            return Forwarded(packing.numbers[source.index])
        return self._emit(*self._array(source))

    def _emit(self, x: Leaf, placement: Placement, paths: Sequence[str]) -> Output:
        self.joined.append((x, placement, paths))
        return Output(len(self.joined) - 1)
