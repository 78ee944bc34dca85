"""Draws programs over shards. No case is filtered out, because every step fits the steps before it."""

import dataclasses
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from ..base.arrays import Array, Values
from ..programs import (
    FLOAT,
    INT,
    Axes,
    Binary,
    Case,
    Collect,
    Fold,
    Gain,
    Index,
    Input,
    Leaf,
    MeshShape,
    Output,
    Read,
    Slot,
    Spec,
    Step,
    Unary,
    Write,
)
from ..strategies import all_split, arrays, dilated, meshes, sides, specs, templates
from ..trees import KINDS


# Integers stay well inside 32 bits, where NumPy and XLA agree.
LARGEST = 2**24
WRAPPED = 50


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a step: axes longer than one, the dtype, and the mesh axes over which it varies."""

    full: tuple[bool, ...]
    dtype: str
    axes: frozenset[str]
    bound: int = 0


@st.composite
def values(draw: st.DrawFn, *, case: Case, calls: int = 3) -> Values:
    """Values for a case. A new gain compiles the program again, so that only the last call may have one."""

    def filled(leaf: Leaf) -> Array:
        return draw(arrays(shape=leaf.global_shape(case.mesh), dtype=leaf.dtype))

    slots = [[filled(leaf) for leaf in slot.leaves] for slot in case.slots]
    gains = [1.0] * (calls - 1) + [draw(st.sampled_from([1.0, -0.5]))]
    return Values(slots, [(gain, [filled(leaf) for leaf in case.inputs]) for gain in gains])


@st.composite
def cases(draw: st.DrawFn, *, portable: bool = False, smooth: bool = False) -> Case:
    """Models, meshes and programs.

    A `portable` program computes the same on any number of shards: where it reduces over an array axis, the
    program or a state's policy also reduces over the mesh axes that split it. A `smooth` program has floats
    and differentiable functions only.
    """
    mesh = draw(meshes())
    side = draw(st.integers(1, 2).flatmap(lambda rank: sides(rank=rank)))
    layout = draw(specs(axes=mesh.axis_names, rank=len(side)))
    maker = Maker(draw, mesh, side, layout, portable, smooth)
    inputs = tuple(maker.leaf() for _ in range(draw(st.integers(1, 2))))
    palette = draw(st.lists(st.sampled_from([*KINDS, "array"]), min_size=1, max_size=2))
    slots = tuple(maker.slot(palette) for _ in range(draw(st.integers(1, 4))))
    maker.read(inputs, slots)
    for _ in range(draw(st.integers(1, 6))):
        maker.operate()
    outputs = tuple(maker.output() for _ in range(draw(st.integers(1, 2))))
    writes = tuple(write for k, slot in enumerate(slots) for write in maker.writes(k, slot))
    return Case(
        mesh,
        len(side),
        inputs,
        slots,
        draw(templates(count=len(slots))),
        tuple(maker.steps),
        writes,
        outputs,
        portable,
        draw(st.booleans()),
    )


@dataclasses.dataclass
class Maker:
    draw: st.DrawFn
    mesh: MeshShape
    side: tuple[int, ...]
    # How the arrays of a portable program are split, on all axes that are not of size one.
    layout: Spec
    portable: bool
    smooth: bool
    steps: list[Step] = dataclasses.field(default_factory=list)
    known: list[Known] = dataclasses.field(default_factory=list)
    # The steps that later steps may use.
    pool: list[int] = dataclasses.field(default_factory=list)
    raw: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def choose(self, *of: str) -> str:
        return self.draw(st.sampled_from(of))

    def leaf(self, *, whole: bool = False, per_shard: bool = False) -> Leaf:
        rank = len(self.side)
        dtype = FLOAT if self.smooth else self.choose(FLOAT, FLOAT, INT)
        full = self.draw(st.tuples(*[st.booleans()] * rank))
        if self.draw(st.integers(0, 3)) == 3:
            scalar = Leaf((), dtype)
            return dataclasses.replace(scalar, per_shard=self.some_axes()) if per_shard else scalar
        if self.portable:
            spec = self.layout
            full = tuple(f and not (whole and axes) for f, axes in zip(full, spec, strict=True))
        else:
            names = () if whole or per_shard else self.mesh.axis_names
            spec = self.draw(specs(axes=names, rank=rank))
        spec = tuple(axes if f else () for f, axes in zip(full, spec, strict=True))
        side = tuple(n if f else 1 for n, f in zip(self.side, full, strict=True))
        entries = self.some_axes() if per_shard else ()
        return Leaf(dilated(side, spec, self.mesh), dtype, spec, entries)

    def some_axes(self, of: Iterable[str] = ()) -> Axes:
        names = self.draw(st.permutations(sorted(of) or self.mesh.axis_names))
        return tuple(names[: self.draw(st.integers(1, len(names)))])

    def slot(self, palette: Sequence[str]) -> Slot:
        kind = self.draw(st.sampled_from(palette))
        if kind == "array":
            return Slot(kind, (self.leaf(whole=True),))
        leaves = []
        for _ in range(self.draw(st.sampled_from([1, 1, 2]))):
            per_shard = not (self.portable or self.smooth) and self.draw(st.integers(0, 3)) == 3
            leaves.append(self.leaf(per_shard=per_shard))
        policies: list[str | None] = [None, "sum"]
        if not self.smooth:
            policies += ["max", "min"]
        if all(leaf.dtype == FLOAT for leaf in leaves):
            policies.append("mean")
        if len(leaves) == 1 and not (self.portable or self.smooth):
            policies.append("range")
        reduce = self.draw(st.sampled_from(policies))
        return Slot(kind, tuple(leaves), reduce, self.draw(st.booleans()))

    def add(self, step: Step, known: Known) -> int:
        self.steps.append(step)
        self.known.append(known)
        return len(self.steps) - 1

    def read(self, inputs: Sequence[Leaf], slots: Sequence[Slot]) -> None:
        rank = len(self.side)
        for i, leaf in enumerate(inputs):
            self.pool.append(self.add(Input(i), self.entering(leaf)))
        for k, slot in enumerate(slots):
            for n, leaf in enumerate(slot.leaves):
                self.raw[k, n] = at = self.add(Read(k, n), self.entering(leaf))
                self.pool.append(at if leaf.dtype == FLOAT else self.unary("wrap", at))
        scalar = Known((False,) * rank, FLOAT, frozenset())
        self.pool.append(self.add(Gain(), scalar))
        if not self.portable and not self.smooth:
            axes = self.some_axes()
            index = Known((False,) * rank, INT, frozenset(axes), self.mesh.size(axes))
            self.pool.append(self.add(Index(axes), index))

    def entering(self, leaf: Leaf) -> Known:
        local = leaf.local_shape(self.mesh) or (1,) * len(self.side)
        return Known(tuple(n > 1 for n in local), leaf.dtype, leaf.axes, WRAPPED)

    def operate(self) -> None:
        """Adds one operation, which may take several steps."""
        kinds = ["unary", "binary", "binary", "fold"]
        kinds += [] if self.portable else ["collect"]
        at = self.draw(st.sampled_from(self.pool))
        is_float = self.known[at].dtype == FLOAT
        match self.choose(*kinds):
            case "unary":
                ops = ["neg", "abs"] if not self.smooth else ["neg"]
                at = self.unary(self.choose(*ops, *(("half", "tanh") if is_float else ())), at)
            case "binary":
                at = self.binary(at, self.draw(st.sampled_from(self.pool)))
            case "fold":
                axis = self.draw(st.integers(0, len(self.side) - 1))
                at = self.fold(self.reduction(at), at, axis, collect=self.portable)
            case _:
                # JAX refuses a reduction over an axis over which the value does not vary.
                at = self.collect(self.reduction(at), at, self.some_axes(self.known[at].axes))
        self.pool.append(at)

    def reduction(self, at: int) -> str:
        smooth = ("sum", "mean") if self.known[at].dtype == FLOAT else ("sum",)
        op = self.choose(*smooth, *(() if self.smooth else ("max", "min")))
        terms = max(self.side) * self.mesh.size(self.mesh.axis_names)
        return "max" if op == "sum" and self.known[at].bound * terms > LARGEST else op

    def unary(self, op: str, at: int) -> int:
        known = self.known[at]
        if op == "wrap":
            known = dataclasses.replace(known, bound=WRAPPED)
        if op == "float":
            known = dataclasses.replace(known, dtype=FLOAT)
        return self.add(Unary(op, at), known)

    def as_float(self, at: int) -> int:
        return at if self.known[at].dtype == FLOAT else self.unary("float", at)

    def binary(self, left: int, right: int, op: str | None = None) -> int:
        if self.known[left].dtype != self.known[right].dtype:
            left, right = self.as_float(left), self.as_float(right)
        a, b = self.known[left], self.known[right]
        if op is None:
            ops = ["add", "sub"] if self.smooth else ["add", "sub", "max", "min"]
            op = self.choose(*ops, *(["gate"] if a.dtype == FLOAT else []))
        full = tuple(x or y for x, y in zip(a.full, b.full, strict=True))
        known = Known(full, a.dtype, a.axes | b.axes, a.bound + b.bound)
        return self.add(Binary(op, left, right), known)

    def fold(self, op: str, at: int, axis: int, *, collect: bool) -> int:
        known = self.known[at]
        full = tuple(f and d != axis for d, f in enumerate(known.full))
        bound = known.bound * self.side[axis]
        folded = self.add(Fold(op, at, axis), dataclasses.replace(known, full=full, bound=bound))
        split = self.layout[axis]
        # A part of size one does not count as `full`, but the whole axis may still be longer.
        if collect and split and set(split) <= known.axes:
            return self.collect(op, folded, split)
        return folded

    def collect(self, op: str, at: int, axes: Axes) -> int:
        known = self.known[at]
        left = known.axes - frozenset(axes)
        bound = known.bound * self.mesh.size(axes)
        return self.add(Collect(op, at, axes), dataclasses.replace(known, axes=left, bound=bound))

    def output(self) -> Output:
        at = self.draw(st.sampled_from(self.pool))
        varies = self.known[at].axes
        if self.portable:
            return Output(at, tuple(a if set(a) <= varies else () for a in self.layout))
        more = self.draw(st.sets(st.sampled_from(self.mesh.axis_names)))
        names = tuple(name for name in self.mesh.axis_names if name in varies | more)
        return Output(at, self.draw(all_split(axes=names, rank=len(self.side))))

    def writes(self, k: int, slot: Slot) -> list[Write]:
        """The writes of a state. Mostly all of its leaves are written, sometimes none."""
        if self.draw(st.integers(0, 2)) == 0:
            return []
        written = [n for n in range(len(slot.leaves)) if n == 0 or self.draw(st.booleans())]
        return [Write(k, n, self.fitted(k, n, slot)) for n in written]

    def fitted(self, k: int, n: int, slot: Slot) -> int:
        """A step whose value fits this leaf."""
        leaf, reduce = slot.leaves[n], slot.reduce
        pool = [at for at in self.pool if leaf.dtype in (FLOAT, self.known[at].dtype)]
        at = self.draw(st.sampled_from(pool))
        at = self.as_float(at) if leaf.dtype == FLOAT else self.unary("wrap", at)
        target = leaf.local_shape(self.mesh) or (1,) * len(self.side)
        merged = self.portable and reduce is not None
        for axis in range(len(self.side)):
            split = self.portable and not leaf.axes >= set(self.layout[axis])
            if target[axis] == 1 and (self.known[at].full[axis] or split):
                op = str(reduce) if merged else self.reduction(at)
                at = self.fold(op, at, axis, collect=self.portable and not merged)
        if self.portable and reduce == "sum":
            at = self.binary(self.raw[k, n], at, "add")
        over = tuple(
            name for name in self.mesh.axis_names if name in self.known[at].axes - leaf.axes
        )
        return self.collect(self.reduction(at), at, over) if over and reduce is None else at
