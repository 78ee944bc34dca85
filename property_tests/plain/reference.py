"""The reference of programs over shards: a loop over the coordinates of a mesh, in NumPy.

Nothing here knows JAX or statemesh. All shards take each step together, so that a reduction over shards is a
loop over the shards of a group. Floats are in double precision. Each carries a bound on the error of single
precision, which rounds once in each operation and once for each term of a sum.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import programs
from ..base.arrays import EPS, Array, Global, widen
from ..programs import Axes, Case, Coordinate, Leaf, MeshShape, Slot, Spec


# XLA's tanh is exact to a few units in the last place, and its results are at most one.
TANH = 8 * EPS


@dataclasses.dataclass(frozen=True)
class Shards:
    """A value of every shard, the mesh axes over which it may differ, and its error."""

    at: dict[Coordinate, Array]
    axes: frozenset[str]
    error: float = 0.0

    def is_float(self) -> bool:
        return all(x.dtype == np.float64 for x in self.at.values())


# The random number for all shards (`None`), or those of so many rows.
Drawn: TypeAlias = Callable[[int | None], Array]


def run(
    case: Case,
    gain: float,
    slots: Sequence[Sequence[Global]],
    inputs: Sequence[Array],
    drawn: Drawn | None = None,
) -> tuple[list[Global], list[list[Global]]]:
    """One call: the outputs and the model's new values."""
    mesh = case.mesh
    arguments = [
        cut(Global(widen(x)), leaf, mesh) for x, leaf in zip(inputs, case.inputs, strict=True)
    ]
    old = [
        [cut(value, leaf, mesh) for value, leaf in zip(values, slot.leaves, strict=True)]
        for values, slot in zip(slots, case.slots, strict=True)
    ]
    values: list[Shards] = []
    for step in case.steps:
        match step:
            case programs.Input(index):
                value = _each(arguments[index], _lifted(case.rank))
            case programs.Read(slot, leaf):
                value = _each(old[slot][leaf], _lifted(case.rank))
            case programs.Gain():
                number = np.full((1,) * case.rank, gain, np.float64)
                value = Shards(dict.fromkeys(mesh.coordinates(), number), frozenset())
            case programs.Index(axes):
                value = _index(mesh, axes, case.rank)
            case programs.Unary(op, arg):
                value = _unary(op, values[arg])
            case programs.Binary(op, left, right):
                value = _binary(op, values[left], values[right])
            case programs.Fold(op, arg, axis):
                value = _fold(op, values[arg], axis)
            case programs.Collect(op, arg, axes):
                value = _collect(op, values[arg], axes, mesh)
            case programs.Dot(left, right, axis):
                value = _fold("sum", _binary("gate", values[left], values[right]), axis)
            case programs.Rows(arg, axis, axes):
                count = _size(values[arg], axis)
                every = np.arange(count * mesh.size(axes))
                value = _rows(every, case.rank, axis, axes, mesh)
            case programs.Noise(arg, axis, axes):
                assert drawn is not None
                rows = None if arg is None else _size(values[arg], axis) * mesh.size(axes)
                value = _rows(drawn(rows), case.rank, axis, axes, mesh)
            case programs.Gather():
                value = _gathered(step, values[step.arg], mesh)
            case programs.Exchange():
                value = _exchanged(step, values[step.arg], mesh)
            case programs.Control():
                value = _controlled(step, values, mesh)
        values.append(value)
    new = [list(leaves) for leaves in old]
    for write in case.writes:
        before = old[write.slot][write.leaf]
        new[write.slot][write.leaf] = _shaped_like(values[write.step], before)
    written, sources = case.written(), dict(case.moves)
    leaving = [
        _leave(slot, old[i], new[i], mesh) if i in written else list(slots[i])
        for i, slot in enumerate(case.slots)
    ]
    # A state is merged with its own old value, wherever it is returned.
    after = [list(leaving[sources.get(i, i)]) for i in range(len(leaving))]
    results = []
    for output in case.outputs:
        value = values[output.step]
        results.append(join(value, output.spec, (), mesh))
    return results, after


def cut(whole: Global, leaf: Leaf, mesh: MeshShape) -> Shards:
    """The part of an array that each shard sees."""
    parts = {}
    for at in mesh.coordinates():
        part = whole.value
        if leaf.per_shard:
            part = part[mesh.index(at, leaf.per_shard)]
        for axis, axes in enumerate(leaf.spec):
            part = np.split(part, mesh.size(axes), axis)[mesh.index(at, axes)]
        parts[at] = part
    return Shards(parts, leaf.axes, whole.error)


def join(shards: Shards, spec: Spec, per_shard: Axes, mesh: MeshShape) -> Global:
    """The array that the shards' parts form. Parts that should be copies have to be equal."""
    whole = None
    for at, part in shards.at.items():
        if whole is None:
            shape = [n * mesh.size(axes) for n, axes in zip(part.shape, spec, strict=False)]
            shape += part.shape[len(spec) :]
            whole = np.zeros([mesh.size(per_shard), *shape] if per_shard else shape, part.dtype)
            filled = np.zeros(whole.shape, bool)
        place: list[Any] = [mesh.index(at, per_shard)] if per_shard else []
        for n, axes in zip(part.shape, spec, strict=False):
            start = n * mesh.index(at, axes)
            place.append(slice(start, start + n))
        where = tuple(place)
        assert np.array_equal(whole[where][filled[where]], part[filled[where]]), "copies differ"
        whole[where] = part
        filled[where] = True
    assert whole is not None
    assert filled.all()
    return Global(whole, shards.error)


def _leave(
    slot: Slot, old: Sequence[Shards], new: Sequence[Shards], mesh: MeshShape
) -> list[Global]:
    """The leaves of a written state, each merged over the axes that its placement does not mention."""
    after = []
    for leaf, before, value in zip(slot.leaves, old, new, strict=True):
        over = tuple(name for name in mesh.axis_names if name in value.axes - leaf.axes)
        if over and slot.reduce is not None:
            value = _merge(slot.reduce, before, value, over, mesh)
        assert value.axes <= leaf.axes, f"{slot} is written differently over {over}"
        after.append(join(value, leaf.spec, leaf.per_shard, mesh))
    return after


def _merge(reduce: str, old: Shards, new: Shards, over: Axes, mesh: MeshShape) -> Shards:
    match reduce:
        case "sum":
            return _binary("add", old, _collect("sum", _binary("sub", new, old), over, mesh))
        case "range":
            top, bottom = (_collect(op, new, over, mesh) for op in ("max", "min"))
            return _binary("add", old, _binary("sub", top, bottom))
        case _:
            return _collect(reduce, new, over, mesh)


def _lifted(rank: int) -> Callable[[Array], Array]:
    return lambda x: x if x.ndim else x.reshape((1,) * rank)


def _index(mesh: MeshShape, axes: Axes, rank: int) -> Shards:
    parts = {at: np.full((1,) * rank, mesh.index(at, axes), np.int64) for at in mesh.coordinates()}
    return Shards(parts, frozenset(axes))


def _size(value: Shards, axis: int) -> int:
    return int(next(iter(value.at.values())).shape[axis])


def _rows(whole: Array, rank: int, axis: int, axes: Axes, mesh: MeshShape) -> Shards:
    """A vector along an axis of every shard, split over these axes."""
    shape = tuple(-1 if k == axis else 1 for k in range(rank))
    spec = tuple(axes if k == axis else () for k in range(rank))
    wide = Global(widen(whole).reshape(shape))
    return cut(wide, Leaf(wide.value.shape, spec=spec), mesh)


def _each(value: Shards, fun: Callable[[Array], Array], error: float | None = None) -> Shards:
    at = {c: fun(x) for c, x in value.at.items()}
    return Shards(at, value.axes, value.error if error is None else error)


def _largest(at: dict[Coordinate, Array]) -> float:
    return max(float(np.max(np.abs(x))) for x in at.values())


def _unary(op: str, value: Shards) -> Shards:
    match op:
        case "neg":
            return _each(value, np.negative)
        case "abs":
            return _each(value, np.abs)
        case "half":
            return _each(value, lambda x: x * 0.5)
        case "wrap":
            return _each(value, lambda x: x % 101 - 50)
        case "float":
            return _each(value, lambda x: x.astype(np.float64), EPS * _largest(value.at))
        case "untyped" | "turned":
            return value
        case _:
            assert op in ("tanh", "sin")
            return _each(value, getattr(np, op), value.error + TANH)


def _binary(op: str, left: Shards, right: Shards) -> Shards:
    fun: Callable[[Array, Array], Array]
    error = left.error + right.error
    match op:
        case "max":
            fun = np.maximum
        case "min":
            fun = np.minimum
        case "gate":
            fun = lambda a, b: np.tanh(a) * np.tanh(b)
            error += 3 * TANH
        case _:
            fun = {"add": np.add, "sub": np.subtract}[op]
    at = {c: fun(left.at[c], right.at[c]) for c in left.at}
    if op in ("add", "sub") and left.is_float():
        error += EPS * _largest(at)
    return Shards(at, left.axes | right.axes, error)


def _summed(op: str, value: Shards, terms: int, sizes: dict[Coordinate, Array]) -> float:
    """The error of a sum or mean; `sizes` are the sums of the terms' absolute values."""
    if not value.is_float() or op in ("max", "min"):
        return value.error
    error = terms * value.error + terms * EPS * _largest(sizes)
    return error / terms if op == "mean" else error


def _fold(op: str, value: Shards, axis: int) -> Shards:
    fun = getattr(np, op)
    at = {c: np.asarray(fun(x, axis=axis, keepdims=True)) for c, x in value.at.items()}
    sizes = {c: np.abs(x).sum(axis) for c, x in value.at.items()}
    terms = max(x.shape[axis] for x in value.at.values())
    return Shards(at, value.axes, _summed(op, value, terms, sizes))


def _collect(op: str, value: Shards, axes: Axes, mesh: MeshShape) -> Shards:
    fun = getattr(np, op)
    at, sizes = {}, {}
    for c in mesh.coordinates():
        group = np.stack([value.at[member] for member in mesh.group(c, axes)])
        at[c] = np.asarray(fun(group, axis=0))
        sizes[c] = np.abs(group).sum(0)
    terms = mesh.size(axes)
    return Shards(at, value.axes - frozenset(axes), _summed(op, value, terms, sizes))


def _gathered(step: programs.Gather, value: Shards, mesh: MeshShape) -> Shards:
    at, axis = {}, step.axis
    for c, own in value.at.items():
        group = mesh.group(c, step.axes)
        group.sort(key=lambda member: mesh.index(member, step.axes))
        whole = np.concatenate([value.at[member] for member in group], axis)
        if step.row is not None:
            at[c] = whole.take([step.row], axis)
        else:
            place = mesh.index(c, step.axes)
            at[c] = np.split(np.roll(whole, -1, axis), len(group), axis)[place]
            assert at[c].shape == own.shape
    same = frozenset(() if step.row is None else step.axes)
    return Shards(at, value.axes - same, value.error)


def _exchanged(step: programs.Exchange, value: Shards, mesh: MeshShape) -> Shards:
    """What types say of the last shard's value is not true: it is the same everywhere."""
    names = (step.axis_name,)
    size = mesh.size(names)
    if step.op == "psum_scatter":
        value = dataclasses.replace(_collect("sum", value, names, mesh), axes=value.axes)
    times = {
        c: 1 if step.op in ("ppermute", "all_gather") else 1 + mesh.index(c, names)
        for c in value.at
    }
    at = {}
    for c in value.at:
        place = mesh.index(c, names) - 1 if step.op == "ppermute" else size - 1
        (source,) = (m for m in mesh.group(c, names) if mesh.index(m, names) == place % size)
        at[c] = value.at[c if step.op == "psum_scatter" else source] * times[c]
    same = frozenset(names if step.op == "all_gather" else ())
    error = size * value.error + (size * EPS * _largest(at) if value.is_float() else 0)
    return Shards(at, value.axes - same, error)


def _controlled(step: programs.Control, values: Sequence[Shards], mesh: MeshShape) -> Shards:
    c = values[step.arg]

    def body(c: Shards, k: int | None) -> Shards:
        c = c if step.other is None else _binary("add", c, values[step.other])
        if k is not None:
            number = np.full((1,), k, np.float64 if c.is_float() else np.int64)
            c = _binary("add", c, Shards(dict.fromkeys(c.at, number), frozenset()))
        if step.axis is not None:
            op = "mean" if c.is_float() else "max"
            mine = _fold(op, c, step.axis)
            c = _binary("add", c, _collect(op, mine, step.axes, mesh) if step.axes else mine)
        return _unary("tanh" if c.is_float() else "wrap", c)

    on = None if step.on is None else values[step.on]
    if step.kind == "cond":
        assert on is not None
        yes, no = body(c, None), _unary("neg", c)
        at = {m: (yes if on.at[m].item() > 0 else no).at[m] for m in c.at}
        return Shards(at, yes.axes | on.axes, max(yes.error, no.error))
    times = dict.fromkeys(c.at, step.times)
    if on is not None:
        times = {m: int(x.item()) % 3 for m, x in on.at.items()}
    axes = frozenset() if on is None else on.axes
    for k in range(max(times.values())):
        after = body(c, k if step.kind == "scan" else None)
        at = {m: (after if k < times[m] else c).at[m] for m in c.at}
        c = Shards(at, after.axes | axes, max(after.error, c.error))
    return c


def _shaped_like(value: Shards, old: Shards) -> Shards:
    at = {}
    for c, x in value.at.items():
        shape = old.at[c].shape
        at[c] = np.broadcast_to(x, shape) if shape else x.reshape(())
    return Shards(at, value.axes, value.error)
