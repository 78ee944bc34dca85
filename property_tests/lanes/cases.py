"""Draws programs over lanes: which axis of each array has the lanes, and how states get theirs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from ..plain.cases import Known, Maker
from ..programs import INT, Axes, Case, Index, Leaf, MeshShape, Output, Slot, Write
from ..strategies import templates
from ..trees import KINDS


Axis: TypeAlias = int | None
COUNTS = (1, 2, 3, 4, 8)
SIDES = ((1,), (3,), (2, 3), (3, 1))
STACKING = ("warn", "ignore")


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A leaf that all lanes share on the way in, and that leaves with an axis for the lanes.

    If `declared`, `state_out_axes` names this axis. Otherwise lanes wrote the state unexpectedly.
    """

    slot: int
    leaf: int
    axis: int
    declared: bool


@dataclasses.dataclass(frozen=True)
class LaneCase:
    """A program over the last axis of a mesh, which stands for the lanes.

    In `case` an array that differs between lanes has one entry per lane on axis 0, and an output has the
    values of its lanes one after the other. The attributes here name the axes that the call really uses.

    **Attributes:**

    - `inputs`, `slots`, `outputs`: the axis of the lanes of each, or `None` where all lanes share it. All
        arrays of the model outside States have the same axis.
    - `state_out_axes`: the states that the option of this name declares, each with its axis.
    - `stacked`: the leaves of these states, and of states that lanes write unexpectedly.
    - `unexpected`: the option `unexpected_out_state_mapping`.
    - `form`: how inputs are passed: one by one (`'each'`), in a `'tree'`, or the last by `'keyword'`.
    """

    case: Case
    inputs: tuple[Axis, ...]
    slots: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    state_out_axes: tuple[tuple[int, Axis], ...] = ()
    stacked: tuple[Stacked, ...] = ()
    unexpected: str = "raise"
    form: str = "each"

    @property
    def lanes(self) -> str:
        """The name of the lanes' axis."""
        return self.case.mesh.axis_names[-1]

    @property
    def count(self) -> int:
        return self.case.mesh.sizes[-1]

    @property
    def outer(self) -> MeshShape | None:
        """The mesh whose shards the lanes run on, if any."""
        mesh = self.case.mesh
        return MeshShape(mesh.sizes[:-1], mesh.explicit) if len(mesh.sizes) > 1 else None

    @property
    def arrays(self) -> Axis:
        """The axis of the lanes in the model's arrays outside States."""
        pairs = zip(self.case.slots, self.slots, strict=True)
        return next((axis for slot, axis in pairs if slot.kind == "array"), None)


@st.composite
def lane_cases(draw: st.DrawFn, *, nested: bool = False, smooth: bool = False) -> LaneCase:
    """Models, numbers of lanes, axes and programs.

    If `nested`, the lanes run on each of two shards, and leaves may be split over these too. If `smooth`, the
    program has floats and differentiable functions only.
    """
    count = draw(st.sampled_from(COUNTS[: 3 if nested else None]))
    mesh = MeshShape((2, count), draw(st.booleans())) if nested else MeshShape((count,))
    side = draw(st.sampled_from(SIDES))
    maker = _LaneMaker(draw, mesh, side, ((),) * len(side), False, smooth)
    # Arrays of every rank have these axes.
    maker.arrays = draw(st.sampled_from([None, 0, -1]))
    maker.unexpected = draw(st.sampled_from(["raise", *STACKING]))
    inputs = tuple(maker.leaf(per_shard=draw(st.booleans())) for _ in range(maker.some(2)))
    palette = draw(st.lists(st.sampled_from([*KINDS, "array"]), min_size=1, max_size=2))
    slots = tuple(maker.slot(palette) for _ in range(maker.some(3)))
    maker.read(inputs, slots)
    for _ in range(maker.some(4)):
        maker.operate()
    outputs = tuple(maker.output() for _ in range(maker.some(2)))
    writes = tuple(write for k, slot in enumerate(slots) for write in maker.writes(k, slot))
    case = Case(
        mesh,
        len(side),
        inputs,
        slots,
        draw(templates(count=len(slots))),
        tuple(maker.steps),
        writes,
        outputs,
        passed=draw(st.sampled_from(["", "map"])),
    )
    return LaneCase(
        case,
        tuple(maker.axis(leaf) for leaf in inputs),
        tuple(maker.arrays if slot.kind == "array" else maker.axis(*slot.leaves) for slot in slots),
        tuple(maker.out_axes),
        tuple(maker.state_out_axes.items()),
        tuple(maker.stacked),
        maker.unexpected,
        draw(st.sampled_from(["each", "tree", "keyword"])),
    )


@dataclasses.dataclass
class _LaneMaker(Maker):
    arrays: Axis = None
    unexpected: str = "raise"
    out_axes: list[Axis] = dataclasses.field(default_factory=list)
    state_out_axes: dict[int, Axis] = dataclasses.field(default_factory=dict)
    stacked: list[Stacked] = dataclasses.field(default_factory=list)

    @property
    def lanes(self) -> str:
        return self.mesh.axis_names[-1]

    @property
    def nested(self) -> bool:
        return len(self.mesh.sizes) > 1

    def some(self, most: int) -> int:
        return self.draw(st.integers(1, most))

    def new_axis(self, rank: int) -> int:
        """An index for a new axis of an array of this rank, counted from the front or from the end."""
        return self.draw(st.integers(-(rank + 1), rank))

    def axis(self, *leaves: Leaf) -> Axis:
        """One axis for the lanes of all these leaves."""
        per_lane = self.lanes in leaves[0].per_shard
        return self.new_axis(min(len(leaf.shape) for leaf in leaves)) if per_lane else None

    def some_axes(self, of: Iterable[str] = ()) -> Axes:
        # Inside a `shard_map` JAX reduces over mesh axes only, so that policies reduce over lanes.
        return self.mesh.axis_names[:1]

    def exchange(self, at: int) -> int:
        return self.collect(self.reduction(at), at, self.some_axes())

    def decision(self, axes: frozenset[str]) -> int | None:
        return None if self.nested else super().decision(axes)

    def leaf(self, *, whole: bool = False, per_shard: bool = False) -> Leaf:
        """A leaf that all lanes share, or with `per_shard` one entry for each lane."""
        leaf = super().leaf(whole=True)
        split = self.draw(st.integers(-1, len(leaf.shape) - 1)) if self.nested and not whole else -1
        if split >= 0:
            shape, spec = list(leaf.shape), list[Axes]([()] * len(leaf.shape))
            shape[split] *= self.mesh.sizes[0]
            spec[split] = self.mesh.axis_names[:1]
            leaf = dataclasses.replace(leaf, shape=tuple(shape), spec=tuple(spec))
        return dataclasses.replace(leaf, per_shard=(self.lanes,) if per_shard else ())

    def slot(self, palette: Sequence[str]) -> Slot:
        slot = super().slot(palette)
        is_array = slot.kind == "array"
        per_lane = self.arrays is not None if is_array else self.draw(st.booleans())
        leaves = tuple(
            dataclasses.replace(leaf, per_shard=(self.lanes,) if per_lane else ())
            for leaf in slot.leaves
        )
        reduce = slot.reduce
        if self.nested and not per_lane and not is_array:
            # A value that differs between lanes needs a policy. Inside a checked `shard_map` only the named
            # ones merge lanes.
            reduce = "sum" if reduce in (None, "range") else reduce
        return Slot(slot.kind, leaves, reduce, declared=not is_array)

    def read(self, inputs: Sequence[Leaf], slots: Sequence[Slot]) -> None:
        super().read(inputs, slots)
        if self.nested and not self.smooth:
            rank, bound = len(self.side), self.mesh.sizes[-1]
            known = Known((False,) * rank, INT, frozenset([self.lanes]), bound)
            self.pool.append(self.add(Index((self.lanes,)), known))

    def output(self) -> Output:
        at = self.draw(st.sampled_from(self.pool))
        varies = self.known[at].axes
        per_lane = self.lanes in varies or self.draw(st.booleans())
        self.out_axes.append(self.new_axis(len(self.side)) if per_lane else None)
        names: Axes = (self.lanes,) if per_lane else ()
        names += tuple(name for name in self.mesh.axis_names[:-1] if name in varies)
        return Output(at, (names,) if names else ())

    def writes(self, k: int, slot: Slot) -> list[Write]:
        if self.lanes in slot.leaves[0].per_shard:
            return super().writes(k, slot)
        if self.nested:
            return super().writes(k, slot) if slot.reduce else []
        if slot.kind == "array":
            return super().writes(k, slot)
        stacks = self.unexpected in STACKING and slot.reduce is None
        match self.choose("merged", "state_out_axes", "shared", *["unexpected"] * stacks):
            case "state_out_axes":
                self.state_out_axes[k] = axis = self.new_axis(
                    min(len(leaf.shape) for leaf in slot.leaves)
                )
                writes = self.unmerged(k, slot)
                leaves = range(len(slot.leaves)) if writes else ()
                self.stacked += [Stacked(k, n, axis, True) for n in leaves]
            case "unexpected":
                writes = self.unmerged(k, slot)
                self.stacked += [
                    Stacked(k, write.leaf, 0, False)
                    for write in writes
                    if self.lanes in self.known[write.step].axes
                ]
            case "shared":
                self.state_out_axes[k] = None
                writes = super().writes(k, slot)
            case _:
                writes = super().writes(k, slot)
        return writes

    def unmerged(self, k: int, slot: Slot) -> list[Write]:
        """Writes that may differ between lanes, as if there were a policy to merge them."""
        writes = super().writes(k, dataclasses.replace(slot, reduce="sum"))
        # A leaf that is returned as it was read does not count as written.
        return [write for write in writes if write.step != self.raw[k, write.leaf]]
