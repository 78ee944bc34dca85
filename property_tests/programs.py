"""Small programs over shards as plain data: one description that JAX and NumPy can both run.

Nothing here knows JAX or statemesh. A program is a list of steps in the order in which they run; a
step names earlier steps by their number. Inside a shard every value has the same rank: a scalar is
read with axes of size one.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, TypeAlias


Axes: TypeAlias = tuple[str, ...]
# For each array axis the mesh axes that split it, major to minor. Left-out axes at the end are whole.
Spec: TypeAlias = tuple[Axes, ...]
Coordinate: TypeAlias = tuple[int, ...]

FLOAT, INT = "float32", "int32"
NAMES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The sizes of a mesh, and whether its axes are Explicit."""

    sizes: tuple[int, ...]
    explicit: bool = False

    @property
    def axis_names(self) -> Axes:
        return NAMES[: len(self.sizes)]

    def size(self, axes: Axes) -> int:
        """How many parts a split over `axes` makes."""
        return math.prod(self.sizes[self.axis_names.index(name)] for name in axes)

    def coordinates(self) -> Iterator[Coordinate]:
        return itertools.product(*map(range, self.sizes))

    def index(self, at: Coordinate, axes: Axes) -> int:
        """The place of a shard along `axes`, major to minor."""
        place = 0
        for name in axes:
            k = self.axis_names.index(name)
            place = place * self.sizes[k] + at[k]
        return place

    def group(self, at: Coordinate, axes: Axes) -> list[Coordinate]:
        """The shards that differ from `at` along `axes` only."""
        fixed = [k for k, name in enumerate(self.axis_names) if name not in axes]
        return [c for c in self.coordinates() if all(c[k] == at[k] for k in fixed)]

    def __repr__(self) -> str:
        kind = "explicit" if self.explicit else "auto"
        return f"Mesh({'x'.join(map(str, self.sizes))}, {kind})"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One global array and where it lies. `per_shard` names the axes of a `PerShard` placement; then
    `shape` is that of one entry."""

    shape: tuple[int, ...]
    dtype: str = FLOAT
    spec: Spec = ()
    per_shard: Axes = ()

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that this placement mentions."""
        return frozenset(itertools.chain(self.per_shard, *self.spec))

    def global_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        return (mesh.size(self.per_shard), *self.shape) if self.per_shard else self.shape

    def local_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        spec = (*self.spec, *((),) * (len(self.shape) - len(self.spec)))
        return tuple(n // mesh.size(axes) for n, axes in zip(self.shape, spec, strict=True))


@dataclasses.dataclass(frozen=True)
class Slot:
    """One State of the model, or with `kind="array"` an array outside any State.

    With two leaves its value is `{'a': …, 'b': …}`. `declared` says that `state_in_specs` places it,
    not its own spec.
    """

    kind: str
    leaves: tuple[Leaf, ...]
    reduce: str | None = None
    declared: bool = False


@dataclasses.dataclass(frozen=True)
class Branch:
    """A node of the model's tree: a container of branches, slot numbers and static leaves."""

    form: str
    children: tuple["Branch | int | str | None", ...]


@dataclasses.dataclass(frozen=True)
class Input:
    index: int


@dataclasses.dataclass(frozen=True)
class Read:
    slot: int
    leaf: int = 0


@dataclasses.dataclass(frozen=True)
class Gain:
    """A Python number that the model holds as a static leaf."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Where the shard stands on the mesh."""

    axes: Axes


@dataclasses.dataclass(frozen=True)
class Unary:
    op: str
    arg: int


@dataclasses.dataclass(frozen=True)
class Binary:
    op: str
    left: int
    right: int


@dataclasses.dataclass(frozen=True)
class Fold:
    """A reduction of the shard's own part along one axis, which is kept."""

    op: str
    arg: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Collect:
    """A reduction over shards."""

    op: str
    arg: int
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Dot:
    """A product of the shard's own parts, summed along one axis, which is kept. Both are damped before."""

    left: int
    right: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each entry along an axis of a value stands in the whole array, which `axes` split there."""

    arg: int
    axis: int
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Noise:
    """A random number for each of these rows, or one that all shards get (`arg=None`)."""

    arg: int | None
    axis: int
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Gather:
    """Of a whole axis, which `axes` split: one `row`, or without it for each row the next one, around."""

    arg: int
    axis: int
    axes: Axes
    row: int | None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a shard gets of the others along one mesh axis.

    With `op="ppermute"` the value of the shard before it, with `"all_gather"` that of the last one. With
    `"psum_scatter"` and `"all_to_all"` shards send their value times one to the first, times two to the next.
    """

    op: str
    arg: int
    axis_name: str


@dataclasses.dataclass(frozen=True)
class Control:
    """A body of `c` in control flow: `c + other`, and its mean or maximum along an array axis, damped.

    **Attributes:**

    - `kind`: `'jit'`, `'checkpoint'` or `'vmap'` (once), `'cond'` (once or `-c`), or `'fori_loop'`,
        `'while_loop'` or `'scan'` (several times).
    - `arg`: the first `c`.
    - `axis`, `axes`: this array axis, and the mesh axes that split it.
    - `on`: an integer that says which branch is taken, or how often the body runs.
    - `times`: how often the body runs where `on` does not say it.
    """

    kind: str
    arg: int
    other: int | None = None
    axis: int | None = None
    axes: Axes = ()
    on: int | None = None
    times: int = 1


Step: TypeAlias = (
    Input
    | Read
    | Gain
    | Index
    | Unary
    | Binary
    | Fold
    | Collect
    | Dot
    | Rows
    | Noise
    | Gather
    | Exchange
    | Control
)


@dataclasses.dataclass(frozen=True)
class Write:
    """A new value for one leaf of a state, broadcast to the shape it has."""

    slot: int
    leaf: int
    step: int


@dataclasses.dataclass(frozen=True)
class Output:
    step: int
    spec: Spec


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """A model's layout, a mesh and a program.

    **Attributes:**

    - `portable`: the program means the same on any number of shards.
    - `passed`: what the model goes through on its way: `'map'` (`jax.tree.map`), `'jit'`, `'checkpoint'`,
        `'cond'`, `'scan'`, `'gradient'` or nothing. All of them make new State objects of all states.
    - `moves`: states that are returned at another position: that position, and the one from which they come.
    - `noisy`: a `RandomState` stands beside the model.
    """

    mesh: MeshShape
    rank: int
    inputs: tuple[Leaf, ...]
    slots: tuple[Slot, ...]
    tree: Branch
    steps: tuple[Step, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Output, ...]
    portable: bool = False
    passed: str = ""
    moves: tuple[tuple[int, int], ...] = ()
    noisy: bool = False

    def written(self) -> frozenset[int]:
        return frozenset(write.slot for write in self.writes)

    def changed(self) -> frozenset[int]:
        """The slots that get another leaf."""
        return self.written() | {slot for slot, _ in self.moves}

    def __repr__(self) -> str:
        flags = [name for name in ("portable", "noisy") if getattr(self, name)]
        flags += [f"passed through {self.passed}"] if self.passed else []
        lines = [f"Case on {self.mesh}, rank {self.rank} {' '.join(flags)}", f"  tree {self.tree}"]
        lines += [f"  x{i}: {leaf}" for i, leaf in enumerate(self.inputs)]
        lines += [f"  s{i}: {slot}" for i, slot in enumerate(self.slots)]
        lines += [f"  v{i} = {step}" for i, step in enumerate(self.steps)]
        lines += [f"  s{w.slot}.{'ab'[w.leaf]} = v{w.step}" for w in self.writes]
        lines += [f"  s{slot} is s{source}" for slot, source in self.moves]
        lines += [f"  out{i} = v{o.step} as {o.spec}" for i, o in enumerate(self.outputs)]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis would print every field.
        printer.text(repr(self))
