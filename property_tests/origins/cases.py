"""Draws programs in which states change positions, as plain data that prints like the code it stands for.

All states of a program have the same kind, shape, dtype and metadata. Only their origin distinguishes them.
"""

import dataclasses
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from ..base.arrays import Array
from ..programs import Axes, Branch, MeshShape
from ..strategies import templates
from ..trees import KINDS, grow, typed, walk


# How many rows a shard has. With an odd number, a pair that is exchanged at every row ends up exchanged.
ROWS = 3
MESHES = ((2,), (1,), (4,), (2, 2))
POLICIES = ("sum", "range", "mean", "max", None)
# The policies that use the old value.
OF_THE_OLD = ("sum", "range")
WRAPS = ("jit", "checkpoint", "cond", "scan", "gradient")
STYLES = ("set", "replace", "map states", "map leaves")
HOWS = ("shard_map", "jit", "vmap2", "pmap2", "packed", "unsharded")
LANES = ("vmap2", "pmap2")

Sources: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Write:
    """What is written at a position, apart from the position that it continues.

    **Attributes:**

    - `adds`: which sum of rows is added: of a shard's `'own'` rows, of the `'whole'` array, the same from
        `'gathered'` rows, or none (`''`). With `None` the leaf is returned as it is.
    - `keeps`: whether the old value is added.
    - `reads`: a position whose value is also added.
    - `bias`: a number that is added.
    """

    adds: str | None = "own"
    keeps: bool = True
    reads: int | None = None
    bias: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Moves:
    """A program that writes states and arrays at other positions than they came from.

    **Attributes:**

    - `split`: the mesh axes that split the rows.
    - `tree`: containers that hold the numbers of all states, then of all arrays.
    - `states`, `arrays`: what is written at each position.
    - `sources`: for each position of both, the position that it continues.
    - `other`: the sources in the other branch of a `cond`.
    - `wraps`: the transformations around the function, the outermost first.
    - `moved`: whether leaves change positions `'inside'` of these, `'before'` or `'after'`.
    - `style`: how states are written.
    - `split_arrays`: whether arrays outside States are split like the rows, instead of replicated.
    - `check`: what `check_vma` is.
    """

    mesh: MeshShape
    split: Axes
    tree: Branch
    states: tuple[Write, ...]
    sources: Sources
    policy: str | None = "sum"
    wraps: tuple[str, ...] = ()
    moved: str = "inside"
    style: str = "set"
    kind: str = "State"
    shape: tuple[int, ...] = ()
    arrays: tuple[Write, ...] = ()
    other: Sources | None = None
    split_arrays: bool = False
    check: bool = True

    @property
    def writes(self) -> tuple[Write, ...]:
        return (*self.states, *self.arrays)

    @property
    def still(self) -> Sources:
        """Sources that leave every leaf where it was."""
        return tuple(range(len(self.writes)))

    @property
    def inner(self) -> tuple[Sources, Sources]:
        """The sources inside of all wraps, and those of the other branch."""
        if self.moved != "inside":
            return self.still, self.still
        return self.sources, self.sources if self.other is None else self.other

    @property
    def paths(self) -> list[str]:
        """For each position, its path as one would type it after the model's name."""
        found = {number: typed(path) for path, number in walk(grow(self.tree, int))}
        return [found[k] for k in self.still]

    def unknown(self) -> list[tuple[str, str]]:
        """Pairs of states such that only a run can tell which of the two a written state continues.

        Where the policy needs the old value, the call may fail with an error that names such a pair.
        """
        if self.policy not in OF_THE_OLD:
            return []
        yes, no = self.inner
        pairs = [(a, b) for a, b in zip(yes, no, strict=True) if "cond" in self.wraps]
        if "scan" in self.wraps:
            pairs += [(k, source) for way in (yes, no) for k, source in enumerate(way)]
        paths = self.paths[: len(self.states)]
        return [(paths[a], paths[b]) for a, b in pairs if a != b and max(a, b) < len(paths)]

    def __repr__(self) -> str:
        paths = [f"m.{path}" if path[0] != "[" else f"m{path}" for path in self.paths]
        flags = {"check_vma=False": not self.check, "arrays split": self.split_arrays}
        lines = [
            f"Moves on {self.mesh}, rows over {self.split}"
            + "".join(f", {name}" for name, on in flags.items() if on),
            f"  {len(self.states)} of sm.{self.kind}(zeros({self.shape}), reduce={self.policy!r}) "
            f"and {len(self.arrays)} arrays in {self.tree}",
            f"  {' of '.join((*self.wraps, 'step'))}; positions change {self.moved}; by {self.style}",
        ]
        for name, way in (("step", self.sources), ("in the other branch", self.other)):
            lines += [f"  {name}:"] if way else []
            lines += [
                f"    {path} = {_text(write, source, paths)}"
                for path, write, source in zip(paths, self.writes, way or (), strict=False)
            ]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


_ADDED = {"own": "x.sum()", "whole": "psum(x.sum())", "gathered": "all_gather(x, tiled=True).sum()"}


def _text(write: Write, source: int, paths: list[str]) -> str:
    if write.adds is None:
        return paths[source]
    terms = [f"{paths[source]}.value"] if write.keeps else []
    terms += [f"{paths[write.reads]}.value"] if write.reads is not None else []
    terms += [_ADDED[write.adds]] if write.adds else []
    return f"{paths[source]}.set({' + '.join([*terms, str(write.bias)])})"


@dataclasses.dataclass(frozen=True)
class Given:
    """What a program runs on: its states, its arrays, and for each call the rows and the branch."""

    states: list[Array]
    arrays: list[Array]
    calls: list[tuple[Array, np.bool_]]


@st.composite
def moves(
    draw: st.DrawFn,
    *,
    adds: tuple[str, ...] = ("own", "whole", ""),
    policies: tuple[str | None, ...] = POLICIES,
    most_arrays: int = 1,
    unknown: bool = False,
) -> Moves:
    """Programs whose states change positions.

    **Arguments:**

    - `adds`: which sums of rows may be added to states.
    - `policies`: what `reduce` may be.
    - `most_arrays`: the largest number of arrays outside States. If it is above one, they may be split.
    - `unknown`: whether the branches of a `cond` exchange differently, or a `scan` exchanges in its carry.
    """
    mesh = MeshShape(draw(st.sampled_from(MESHES)), draw(st.booleans()))
    policy = draw(st.sampled_from(policies))
    wraps = _wraps(draw, ("cond", "scan") if unknown else ())
    moved = draw(st.sampled_from(["inside", "before", "after"]))
    if unknown:
        moved = "inside"
    elif moved == "inside" and "scan" in wraps:
        moved = "after"
    # Without a policy nothing is merged, and the carry of a scan must keep its type.
    if policy is None:
        adds = tuple(a for a in adds if a != "own")
    elif "scan" in wraps and "own" in adds:
        adds = draw(st.sampled_from([("own",), tuple(a for a in adds if a != "own")]))
    count = draw(st.integers(2, 4))
    states = tuple(_write(draw, adds, count) for _ in range(count))
    if "scan" in wraps:
        # With one term each, floats stay exact over many rows. Two terms would double at every row.
        states = tuple(dataclasses.replace(w, keeps=w.reads is None) for w in states)
    whole = tuple(a for a in adds if a not in ("own", "gathered")) or ("whole",)
    arrays = tuple(
        dataclasses.replace(_write(draw, whole, count), reads=None)
        for _ in range(draw(st.integers(0, most_arrays)))
    )
    ways = [draw(_sources(count=count)) for _ in range(2)]
    offset = draw(st.permutations(range(len(arrays))))
    beyond = tuple(count + k for k in offset)
    names = mesh.axis_names
    split = names if len(names) == 1 else draw(st.sampled_from([names[:1], names[1:], names]))
    # With `check_vma=False` every write counts as varying over all axes, so that all of them have to vary.
    differ = split == names and policy is not None
    differ = differ and all(write.adds in ("own", None) for write in states)
    return Moves(
        mesh,
        split,
        _plain(draw(templates(count=count + len(arrays)))),
        states,
        (*ways[0], *beyond),
        policy,
        wraps,
        moved,
        draw(st.sampled_from(STYLES)),
        draw(st.sampled_from(list(KINDS))),
        draw(st.sampled_from([(), (2,)])),
        arrays,
        (*ways[1], *beyond) if unknown and "cond" in wraps else None,
        split_arrays=bool(arrays) and most_arrays > 1 and draw(st.booleans()),
        check=not (differ and draw(st.booleans())),
    )


def _wraps(draw: st.DrawFn, one_of: tuple[str, ...]) -> tuple[str, ...]:
    drawn = draw(st.lists(st.sampled_from(WRAPS), max_size=2, unique=True))
    if one_of and not set(one_of) & set(drawn):
        drawn = [*drawn[:1], draw(st.sampled_from(one_of))]
    return tuple(drawn)


def _write(draw: st.DrawFn, adds: tuple[str, ...], count: int) -> Write:
    kinds: list[str | None] = [*adds, adds[0], None]
    added = draw(st.sampled_from(kinds))
    if added is None:
        return Write(None)
    keeps = draw(st.sampled_from([True, True, False]))
    other = draw(st.none() | st.integers(0, count - 1))
    return Write(added, keeps, other, draw(st.integers(-3, 3)))


@st.composite
def _sources(draw: st.DrawFn, *, count: int) -> Sources:
    """Mostly an order. Sometimes two positions continue the same state."""
    order = draw(_orders(count))
    if draw(st.integers(0, 4)) == 4:
        return (order[1], *order[1:])
    return order


def _orders(count: int) -> st.SearchStrategy[Sources]:
    """Orders in which at least two positions are exchanged. The simplest exchanges the first two."""
    pair = (1, 0, *range(2, count))
    return st.just(pair) | st.permutations(range(count)).map(tuple).map(
        lambda order: pair if order == tuple(range(count)) else order
    )


def _plain(tree: Branch) -> Branch:
    """The tree without strings and functions, which JAX's transformations refuse."""
    kept = [child for child in tree.children if not isinstance(child, str)]
    form = "pair" if tree.form == "layer" else tree.form
    return Branch(form, tuple(_plain(c) if isinstance(c, Branch) else c for c in kept))


@st.composite
def given_to(draw: st.DrawFn, *, moves: Moves, calls: int = 2) -> Given:
    """Small whole numbers as floats, whose sums and means over powers of two are exact."""

    def filled(shape: tuple[int, ...], dtype: str = "float32") -> Array:
        size = int(np.prod(shape))
        one = st.integers(-8, 8)
        return np.array(draw(st.lists(one, min_size=size, max_size=size)), dtype).reshape(shape)

    count = moves.mesh.size(moves.split)
    side = (count * 2,) if moves.split_arrays else (2,)
    return Given(
        [filled(moves.shape) for _ in moves.states],
        [filled(side) for _ in moves.arrays],
        [(filled((count * ROWS,)), np.bool_(draw(st.booleans()))) for _ in range(calls)],
    )
