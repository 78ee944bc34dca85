"""Every word of a report of `locate`."""

from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from .. import _errors as errors
from .._program._numbers import distances, numbers
from .._types import AnyLeaf, Numbers
from ._graph import Node
from ._lines import Line
from ._relations import Relation


_OPERATIONS: Mapping[str, str] = {
    "dot_general": "a matrix product",
    "conv_general_dilated": "a convolution",
    "reduce_sum": "a sum",
    "reduce_max": "a maximum",
    "reduce_min": "a minimum",
    "psum": "a sum over shards",
    "pmax": "a maximum over shards",
    "pmin": "a minimum over shards",
    "all_gather": "a gathering from all shards",
    "reduce_scatter": "a sum over shards, scattered",
    "ppermute": "a move between shards",
    "all_to_all": "an exchange between shards",
    "axis_index": "the index of a shard",
    "random_bits": "random numbers",
    "random_fold_in": "a new key",
    "random_split": "new keys",
    "random_wrap": "a key",
    "iota": "numbers counted from 0",
    "split": "an argument, split by its in spec",
    "join": "a result, put together by its out spec",
    "add": "a sum of two",
    "add_any": "a sum of two",
    "sub": "a difference",
    "mul": "a product",
    "div": "a quotient",
    "select_n": "a choice",
    "gather": "an indexing",
    "dynamic_slice": "an indexing",
    "scan": "a loop",
    "while": "a loop",
    "cond": "a branch",
}

_PARTIAL: Mapping[str, str] = {
    "sum": "the sum over {} of what shards have is the value on one device",
    "mean": "the mean over {} of what shards have is the value on one device",
    "max": "the maximum over {} of what shards have is the value on one device",
    "min": "the minimum over {} of what shards have is the value on one device",
    "turned": "shards along {} have the parts of other shards",
    "one": "one shard along {} has the value on one device",
}


def operation(node: Node) -> str:
    """What a node computes."""
    # In checked programs some collectives have a name of their own.
    name = _OPERATIONS.get(node.name.removesuffix("_invariant"), f"`{node.name}`")
    inside = f", in `{node.caller.lstrip('_')}`" if node.caller else ""
    return (
        f"{name}{inside}, in the derivative of this line" if node.transposed else f"{name}{inside}"
    )


def partial(known: Relation) -> str:
    """What a value is that is no part of the value on one device."""
    words = [_PARTIAL[kind].format(repr(name)) for name, kind, _ in known.kinds if kind in _PARTIAL]
    if known.factor != 1:
        words.append(f"shards have {known.factor:.6g} times the value on one device")
    return "; ".join(words)


def shapes(got: Sequence[int], want: Numbers | None) -> tuple[str, str]:
    """What shards have and what one device has, where nobody knows which part of it each should have."""
    there = "nothing that belongs to it" if want is None else _array(want.shape)
    return f"{_array(got)} on each shard", there


def most_off(got: Numbers, want: Numbers, names: Collection[Hashable]) -> tuple[str, str, str]:
    """What some shards have where they are most off, what they should have, and which shards these are.

    **Arguments:**

    - `names`: the mesh axes, which both arrays have in front.
    """
    if not want.size:
        return "an empty array", "an empty array", ""
    off = distances(got, want)
    worst = np.unravel_index(int(np.argmax(off)), off.shape)
    count = len(names)
    local = tuple(map(int, worst[count:]))
    at = f" at {list(local)}" if local else ""
    shards = sorted(np.ndindex(got.shape[:count]), key=lambda shard: -off[(*shard, *local)])[:2]
    shards.sort()
    values = [f"{_shown(got[(*k, *local)])} on {_shard(names, k)}" for k in shards]
    goals = list(dict.fromkeys(_shown(want[(*k, *local)]) for k in shards))
    return ", ".join(values) + at, " and ".join(goals), "; ".join(_shard(names, k) for k in shards)


RESULT_LENGTH = "the length of axis {} of the result"


def typed(spec: PartitionSpec) -> str:
    """A spec as it is typed."""
    return f"P({', '.join(map(repr, spec))})"


A_RESULT = "this result, made by no line of yours"


def whole_values(values: Sequence[AnyLeaf], types: Sequence[AnyLeaf]) -> tuple[str, str]:
    """A result on the mesh and on one device: their types if these differ, or else what they are."""
    if (types[0].shape, types[0].dtype) != (types[1].shape, types[1].dtype):
        got, want = (f"{kind.dtype}{list(kind.shape)}" for kind in types)
        return got, want
    got, want = map(numbers, values)
    off = np.asarray(got != want)
    at = tuple(map(int, np.unravel_index(int(np.argmax(off)), off.shape)))
    index = f" at {list(at)}" if at else ""
    return _shown(got[at]) + index, _shown(want[at])


def _shard(names: Collection[Hashable], index: Sequence[int]) -> str:
    return errors.axes_str(dict(zip(names, map(int, index), strict=True))) or "one device"


def _shown(x: Numbers) -> str:
    return f"{x:.6g}" if x.dtype.kind == "f" else str(x)


def _array(shape: Sequence[int]) -> str:
    return f"an array [{', '.join(map(str, shape))}]"


def confirmed(what: str, lines: Sequence[Line]) -> str:
    """A change that puts all results right, at one line or another."""
    first, *others = lines
    more = [str(line.number) if line.file == first.file else str(line) for line in others]
    return f"{what} at {' or '.join([str(first), *more])}, all results are right"


def reduced(collective: str, name: Hashable) -> str:
    return f"with jax.lax.{collective}(..., {name!r})"


def scaled(size: int, up: bool) -> str:
    return f"{'multiplied' if up else 'divided'} by the number of shards, {size},"


def moved(name: Hashable, shift: int) -> str:
    how = {0: "no move", 1: "a move to the next shard", -1: "a move to the shard before"}[shift]
    return f"with {how} along {name!r}"


def indexed(name: Hashable) -> str:
    return f"with jax.lax.axis_index({name!r})"


def offset(length: int, name: Hashable) -> str:
    times = {1: "", -1: "-"}.get(length, f"{length} * ")
    return f"with {times}jax.lax.axis_index({name!r}) added"
