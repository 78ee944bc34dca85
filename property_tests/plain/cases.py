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
    Control,
    Dot,
    Exchange,
    Fold,
    Gain,
    Gather,
    Index,
    Input,
    Leaf,
    MeshShape,
    Noise,
    Output,
    Read,
    Rows,
    Slot,
    Spec,
    Step,
    Unary,
    Write,
)
from ..strategies import all_split, arrays, dilated, meshes, sides, specs, templates
from ..trees import KINDS


# Integers stay well inside 32 bits, where NumPy and XLA agree. Floats stay within what float16 holds.
LARGEST = {INT: 2**24, FLOAT: 2**10}
WRAPPED = 50
PASSED = ("", "", "map", "jit", "checkpoint", "cond", "scan", "gradient")


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
    calls_ = [(gain, [filled(leaf) for leaf in case.inputs]) for gain in gains]
    return Values(slots, calls_, draw(st.integers(0, 2**31 - 1)) if case.noisy else 0)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    portable: bool = False,
    smooth: bool = False,
    noisy: bool = True,
    mesh: MeshShape | None = None,
) -> Case:
    """Models, meshes and programs.

    A `portable` program computes the same on any number of shards: where it reduces over an array axis, the
    program or a state's policy also reduces over the mesh axes that split it. A `smooth` program has floats
    and differentiable functions only. A `noisy` one may draw random numbers.
    """
    mesh = mesh or draw(meshes())
    side = draw(st.integers(1, 2).flatmap(lambda rank: sides(rank=rank)))
    layout = draw(specs(axes=mesh.axis_names, rank=len(side)))
    maker = Maker(draw, mesh, side, layout, portable, smooth)
    inputs = tuple(maker.leaf() for _ in range(draw(st.integers(1, 2))))
    palette = draw(st.lists(st.sampled_from([*KINDS, "array"]), min_size=1, max_size=2))
    slots = tuple(maker.slot(palette) for _ in range(draw(st.integers(2, 5))))
    moves: tuple[tuple[int, int], ...] = ()
    if slots[0].kind != "array" and not slots[0].declared and draw(st.booleans()):
        # Two or three states that only their paths tell apart change places.
        twins = (0, *(len(slots) + k for k in range(draw(st.integers(1, 2)))))
        slots += (slots[0],) * (len(twins) - 1)
        moves = tuple(zip(twins, (*twins[1:], twins[0]), strict=True))
    maker.noisy = noisy and draw(st.booleans())
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
        draw(st.sampled_from(PASSED)),
        moves,
        maker.noisy,
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
    noisy: bool = False

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
        # What has no policy is merged by the program itself.
        policies: list[str | None] = [None, "sum", "sum"]
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
        bound = 4 if leaf.dtype == FLOAT else WRAPPED
        return Known(tuple(n > 1 for n in local), leaf.dtype, leaf.axes, bound)

    def operate(self) -> None:
        """Adds one operation, which may take several steps."""
        at = self.draw(st.sampled_from(self.pool))
        known = self.known[at]
        is_float = known.dtype == FLOAT
        kinds = ["unary", "binary", "binary", "fold", "control", "control"]
        kinds += ["dot"] if is_float else []
        # Along which array axes the whole is known to be what all shards have together.
        ordered = [d for d, split in enumerate(self.layout) if set(split) <= known.axes]
        split = [d for d in ordered if self.layout[d]]
        kinds += ["gather"] if split else []
        kinds += ["rows"] if ordered and not self.smooth else []
        kinds += ["noise"] * 2 if ordered and self.noisy else []
        if not self.portable:
            kinds += ["collect", "exchange"] if known.axes else ["collect"]
        match self.choose(*kinds):
            case "unary":
                ops = ["neg", "turned"] + ["abs"] * (not self.smooth)
                ops += ["half", "tanh", "sin"] if is_float else []
                at = self.unary(self.choose(*ops), at)
            case "binary":
                at = self.binary(at, self.draw(st.sampled_from(self.pool)))
            case "fold":
                axis = self.draw(st.integers(0, len(self.side) - 1))
                at = self.fold(self.reduction(at), at, axis, collect=self.portable)
            case "dot":
                at = self.dot(at)
            case "gather":
                axis = self.draw(st.sampled_from(split))
                at = self.gather(at, axis)
            case "rows" | "noise" as kind:
                axis = self.draw(st.sampled_from(ordered))
                at = self.numbers(kind, at, axis)
            case "exchange":
                at = self.exchange(at)
            case "control":
                at = self.control(at)
            case _:
                # JAX refuses a reduction over an axis over which the value does not vary.
                at = self.collect(self.reduction(at), at, self.some_axes(known.axes))
        if self.known[at].bound > LARGEST[self.known[at].dtype]:
            at = self.unary("tanh" if self.known[at].dtype == FLOAT else "wrap", at)
        self.pool.append(at)

    def reduction(self, at: int) -> str:
        smooth = ("sum", "mean") if self.known[at].dtype == FLOAT else ("sum",)
        op = self.choose(*smooth, *(() if self.smooth else ("max", "min")))
        terms = max(self.side) * self.mesh.size(self.mesh.axis_names)
        small = self.known[at].bound * terms <= LARGEST[INT]
        return op if op != "sum" or small else "max"

    def like(self, at: int) -> list[int]:
        """Steps that fit into a carry of this value's type."""
        known = self.known[at]
        return [
            k
            for k in self.pool
            if self.known[k].dtype == known.dtype
            and self.known[k].axes <= known.axes
            and all(a or not b for a, b in zip(known.full, self.known[k].full, strict=True))
        ]

    def dot(self, left: int) -> int:
        floats = [k for k in self.pool if self.known[k].dtype == FLOAT]
        right = self.draw(st.sampled_from(floats))
        axis = self.draw(st.integers(0, len(self.side) - 1))
        a, b = self.known[left], self.known[right]
        full = tuple(
            (x or y) and d != axis for d, (x, y) in enumerate(zip(a.full, b.full, strict=True))
        )
        known = Known(full, FLOAT, a.axes | b.axes, self.side[axis])
        return self.over_layout("sum", self.add(Dot(left, right, axis), known), axis, self.portable)

    def gather(self, at: int, axis: int) -> int:
        known, axes = self.known[at], self.layout[axis]
        row = self.draw(st.none() | st.integers(0, self.mesh.size(axes) - 1))
        if row is not None:
            full = tuple(f and d != axis for d, f in enumerate(known.full))
            known = dataclasses.replace(known, full=full, axes=known.axes - frozenset(axes))
        return self.add(Gather(at, axis, axes, row), known)

    def numbers(self, kind: str, at: int, axis: int) -> int:
        """The numbers of rows, or random ones."""
        axes, none = self.layout[axis], (False,) * len(self.side)
        if kind == "noise" and self.draw(st.integers(0, 3)) == 3:
            return self.add(Noise(None, 0, ()), Known(none, FLOAT, frozenset(), 1))
        full = tuple(d == axis and self.known[at].full[axis] for d in range(len(self.side)))
        if kind == "noise":
            return self.add(Noise(at, axis, axes), Known(full, FLOAT, frozenset(axes), 1))
        bound = self.side[axis] * self.mesh.size(axes)
        return self.add(Rows(at, axis, axes), Known(full, INT, frozenset(axes), bound))

    def exchange(self, at: int) -> int:
        known = self.known[at]
        op = self.choose("ppermute", "psum_scatter", "all_to_all", "all_gather")
        name = self.choose(*sorted(known.axes))
        bound = known.bound * self.mesh.size((name,)) ** 2
        return self.add(Exchange(op, at, name), dataclasses.replace(known, bound=bound))

    def control(self, at: int) -> int:
        """A value in control flow. Where shards take branches or rounds of their own, nothing is reduced."""
        kind = self.choose("jit", "checkpoint", "vmap", "cond", "fori_loop", "scan", "while_loop")
        if self.smooth and kind == "while_loop":
            kind = "scan"
        known = self.known[at]
        on, apart = None, False
        if kind in ("cond", "while_loop") or (
            kind == "fori_loop" and not self.smooth and self.draw(st.booleans())
        ):
            apart = not self.portable and self.draw(st.booleans())
            on = self.decision(known.axes if apart else frozenset())
            if on is None:
                kind = "jit"
        other = None
        if kind != "vmap" and self.draw(st.booleans()):
            other = self.draw(st.sampled_from(self.like(at)))
        axis = None
        fitting = [d for d, names in enumerate(self.layout) if set(names) <= known.axes]
        if kind != "vmap" and not apart and fitting and self.draw(st.booleans()):
            axis = self.draw(st.sampled_from(fitting))
        axes = () if axis is None else self.layout[axis]
        times = self.draw(st.integers(2, 3)) if kind in ("fori_loop", "scan") else 1
        bound = 1 if known.dtype == FLOAT else WRAPPED
        # A loop may make no round at all.
        known = dataclasses.replace(known, bound=max(bound, known.bound))
        return self.add(Control(kind, at, other, axis, axes, on, times), known)

    def decision(self, axes: frozenset[str]) -> int | None:
        """A whole number on which control flow depends, the same on all shards but along these axes."""
        integers = [k for k in self.pool if self.known[k].dtype == INT]
        if not integers:
            return None
        at = self.draw(st.sampled_from(integers))
        for axis in range(len(self.side)):
            at = self.fold("max", at, axis, collect=self.portable)
        left = tuple(n for n in self.mesh.axis_names if n in self.known[at].axes - axes)
        return self.collect("max", at, left) if left else at

    def unary(self, op: str, at: int) -> int:
        known = self.known[at]
        if op == "wrap":
            known = dataclasses.replace(known, bound=WRAPPED)
        if op in ("tanh", "sin"):
            known = dataclasses.replace(known, bound=1)
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
        return self.over_layout(op, folded, axis, collect)

    def over_layout(self, op: str, at: int, axis: int, collect: bool) -> int:
        """The same reduction over the shards that have the other parts of an array axis."""
        split = self.layout[axis]
        # A part of size one does not count as `full`, but the whole axis may still be longer.
        if collect and split and set(split) <= self.known[at].axes:
            return self.collect(op, at, split)
        return at

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
        if self.draw(st.integers(0, 4)) == 0:
            return []
        written = [n for n in range(len(slot.leaves)) if n == 0 or self.draw(st.booleans())]
        return [Write(k, n, self.fitted(k, n, slot)) for n in written]

    def fitted(self, k: int, n: int, slot: Slot) -> int:
        """A step whose value fits this leaf."""
        leaf, reduce = slot.leaves[n], slot.reduce
        pool = [at for at in self.pool if leaf.dtype in (FLOAT, self.known[at].dtype)]
        differ = [at for at in pool if self.known[at].axes - leaf.axes]
        # A policy has something to do where shards differ.
        pool = differ if differ and reduce is not None else pool
        at = self.draw(st.sampled_from(pool))
        at = self.as_float(at) if leaf.dtype == FLOAT else self.unary("wrap", at)
        if leaf.dtype == INT and reduce is not None and self.known[at].axes:
            at = self.unary("untyped", at) if self.draw(st.integers(0, 2)) == 2 else at
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
