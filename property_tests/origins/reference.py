"""The reference of programs whose states change positions: a loop over the shards, in NumPy.

A written state carries the number of the state that it was set from. When it leaves, the policy gets the old
value of that state, at whatever position the written state is.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..base.arrays import Array
from ..programs import Coordinate, MeshShape
from .cases import Moves, Sources, Write


@dataclasses.dataclass(frozen=True)
class Held:
    """The values of all shards at a position, the state they continue, and the axes over which they vary."""

    origin: int
    at: dict[Coordinate, Array]
    axes: frozenset[str] = frozenset()


Parts = dict[Coordinate, Array]


def run(
    moves: Moves, states: Sequence[Array], arrays: Sequence[Array], x: Array, on: np.bool_
) -> tuple[list[Array], list[Array]]:
    """One call: the new states and arrays, in the order of their positions."""
    mesh, wide = moves.mesh, [np.asarray(value, np.float64) for value in (*states, *arrays)]
    shards = list(mesh.coordinates())
    each = len(x) // mesh.size(moves.split)
    parts = {c: x[_rows(mesh, moves, c, each)].astype(np.float64) for c in shards}
    held = []
    for k, whole in enumerate(wide):
        split = moves.split_arrays and k >= len(states)
        side = len(whole) // mesh.size(moves.split) if split else 0
        at = {c: whole[_rows(mesh, moves, c, side)] if split else whole for c in shards}
        held.append(Held(k, at, frozenset(moves.split if split else ())))
    if moves.moved == "before":
        held = [held[k] for k in moves.sources]
    held = _wrapped(moves, moves.wraps, moves.inner[0], held, parts, on)
    if moves.moved == "after":
        held = [held[k] for k in moves.sources]
    count = len(states)
    left = [_merged(moves, wide[one.origin], one) for one in held[:count]]
    return left, [_joined(moves, one) for one in held[count:]]


def _rows(mesh: MeshShape, moves: Moves, at: Coordinate, each: int) -> slice:
    first = mesh.index(at, moves.split) * each
    return slice(first, first + each)


def _wrapped(
    moves: Moves,
    wraps: tuple[str, ...],
    way: Sources,
    held: list[Held],
    parts: Parts,
    on: np.bool_,
) -> list[Held]:
    if not wraps:
        return [
            _written(moves, write, held, held[source], parts)
            for write, source in zip(moves.writes, way, strict=True)
        ]
    match wraps[0]:
        case "cond":
            return _wrapped(moves, wraps[1:], moves.inner[0 if on else 1], held, parts, on)
        case "scan":
            for row in range(len(parts[(0,) * len(moves.mesh.sizes)])):
                one = {c: part[row : row + 1] for c, part in parts.items()}
                held = _wrapped(moves, wraps[1:], way, held, one, on)
            return held
        case _:
            return _wrapped(moves, wraps[1:], way, held, parts, on)


def _written(moves: Moves, write: Write, held: list[Held], old: Held, parts: Parts) -> Held:
    if write.adds is None:
        return old
    terms = [old] if write.keeps else []
    terms += [held[write.reads]] if write.reads is not None else []
    axes = frozenset().union(*(term.axes for term in terms))
    axes |= frozenset(moves.split if write.adds == "own" else ())
    at = {}
    for c, before in old.at.items():
        value = np.zeros_like(before) + write.bias
        for term in terms:
            value = value + term.at[c]
        group = [c] if write.adds == "own" else moves.mesh.group(c, moves.split)
        for member in group if write.adds else ():
            value = value + parts[member].sum()
        at[c] = value
    return Held(old.origin, at, axes)


def _merged(moves: Moves, old: Array, one: Held) -> Array:
    """The one value that is written back, merged by the policy where shards may differ."""
    shards = list(one.at)
    if not one.axes:
        assert all(np.array_equal(one.at[c], one.at[shards[0]]) for c in shards)
        return one.at[shards[0]]
    each = np.stack([one.at[c] for c in moves.mesh.group(shards[0], tuple(one.axes))])
    match moves.policy:
        case "sum":
            return np.asarray(old + (each - old).sum(0))
        case "mean":
            return np.asarray(each.mean(0))
        case "max":
            return np.asarray(each.max(0))
        case policy:
            assert policy == "range"
            return np.asarray(old + each.max(0) - each.min(0))


def _joined(moves: Moves, one: Held) -> Array:
    shards = list(one.at)
    if not moves.split_arrays:
        return one.at[shards[0]]
    parts = {moves.mesh.index(c, moves.split): one.at[c] for c in shards}
    return np.concatenate([parts[k] for k in sorted(parts)])
