"""What `locate` returns, and the words of its report."""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np

from ..._base._libraries import cell_of, shown
from .. import _errors as errors
from .._program._numbers import distances, numbers
from .._types import AnyLeaf, Numbers
from ._graph import Node
from ._relations import Relation


_NOT_KNOWN = "what shards should have here is not known"


@dataclasses.dataclass(frozen=True)
class Place:
    """A line at which shards stop having what one device has.

    **Attributes:**

    - `file`, `line`, `source`: the line, and its text. Where no line of the user's makes a result, the source
        is the path of the result, its write policy or a spec, and the others are empty.
    - `operation`: what it computes there.
    - `got`: what some shards have where they are most off; empty where nobody knows what they should have.
    - `want`: what they should have.
    - `shards`: which shards these are.
    - `step`: inside a loop the number of the first round in which it happens.
    - `note`: what else is known about the value.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> located = locate(centred, jnp.arange(8.0))
        >>> place = located.places[0]
        >>> place.line, place.source
        (2, 'mean = x.mean(0)')

        ```
    """

    file: str
    line: int
    source: str
    operation: str
    got: str
    want: str
    shards: str
    step: int | None = None
    note: str = ""

    def __str__(self) -> str:
        at = f", first in round {self.step} of the loop" if self.step is not None else ""
        numbers = f"{self.got}, and should be {self.want}" if self.got else _NOT_KNOWN
        what = f"{self.operation}{at}: {numbers}"
        return f"{self.where}\n    {what}"

    @property
    def where(self) -> str:
        """The line as one line of text."""
        at = cell_of(self.file) or self.file
        return f"{at}:{self.line}: {self.source}" if at else self.source


@dataclasses.dataclass(frozen=True)
class Located:
    """Where a call on a mesh stops computing what it computes on one device.

    **Attributes:**

    - `places`: at most three lines, the likeliest first.
    - `matched`: whether the two programs have the same steps. Where they have not, some values are not
        compared.
    - `cause`: what puts all results right, if running the program so has confirmed it.
    - `gradient`: whether the results agree, and only the derivatives differ.
    - `rounding`: whether all agrees in double precision, and differs only in the dtypes of the program.
    - `other_floats`: whether all agrees for the floats of the arguments, and differs for others of the same
        shapes.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> located = locate(centred, jnp.arange(8.0))
        >>> located.matched, located.gradient, len(located.places)
        (True, False, 2)

        ```
    """

    places: tuple[Place, ...]
    matched: bool
    cause: str | None = None
    gradient: bool = False
    rounding: bool = False
    other_floats: bool = False

    @property
    def line(self) -> str:
        """The file and the number of the likeliest line; empty if no line of the user's is named."""
        first = self.places[0]
        return f"{shown(first.file)}:{first.line}" if first.file else ""

    def __str__(self) -> str:
        first, *others = self.places
        what = "The derivatives stop" if self.gradient else "Values stop"
        lines = [f"{what} being those of one device here:", f"  {first}"]
        if first.note:
            lines.append(f"    In other words: {first.note}.")
        if self.cause:
            lines.append(f"    Tried: {self.cause}.")
        if others:
            lines.append("or, less likely, here:")
            lines += [f"  {place.where}" for place in others]
        if self.rounding:
            lines.append("In double precision all agrees: numbers overflow or are rounded.")
        if self.other_floats:
            lines.append(
                "With the floats of these arguments the results agree: others show the mistake."
            )
        if not self.matched:
            lines.append("The programs have different steps: some values could not be compared.")
        return "\n".join(lines)


# What a place says of values

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
    "name": "a derivative that is handed on",
}

# Nodes that no equation of the program makes.
_OF_SPECS = {
    "split": "an argument, split by its in spec",
    "join": "a result, put together by its out spec",
}

_PARTIAL: Mapping[str, str] = {
    "sum": "the sum over {} of what shards have is the value on one device",
    "mean": "the mean over {} of what shards have is the value on one device",
    "max": "the maximum over {} of what shards have is the value on one device",
    "min": "the minimum over {} of what shards have is the value on one device",
    "turned": "shards along {} have the parts of other shards",
    "one": "of each number one shard along {} has the value on one device",
}


def name_of_operation(node: Node) -> str:
    """What a node computes."""
    # In checked programs some collectives have a name of their own.
    name = _OPERATIONS.get(node.name.removesuffix("_invariant"), f"`{node.name}`")
    name = _OF_SPECS.get(node.kind, name)
    inside = f", in `{node.caller.lstrip('_')}`" if node.caller else ""
    return (
        f"{name}{inside}, in the derivative of this line" if node.transposed else f"{name}{inside}"
    )


def relation_in_words(known: Relation) -> str:
    """What a value is that is no part of the value on one device."""
    words = [_PARTIAL[kind].format(repr(name)) for name, kind, _ in known.kinds if kind in _PARTIAL]
    if known.factor != 1:
        words.append(f"shards have {known.factor:.6g} times the value on one device")
    return "; ".join(words)


def shapes_in_words(got: Sequence[int], want: Numbers | None) -> tuple[str, str]:
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
    shown = [_shown_apart(got[(*k, *local)], want[(*k, *local)]) for k in shards]
    values = [f"{x} on {_shard(names, k)}" for k, (x, _) in zip(shards, shown, strict=True)]
    goals = list(dict.fromkeys(goal for _, goal in shown))
    return ", ".join(values) + at, " and ".join(goals), "; ".join(_shard(names, k) for k in shards)


def whole_values(values: Sequence[AnyLeaf], types: Sequence[AnyLeaf]) -> tuple[str, str]:
    """A result on the mesh and on one device: their types if these differ, or else what they are."""
    if (types[0].shape, types[0].dtype) != (types[1].shape, types[1].dtype):
        got, want = (f"{kind.dtype}{list(kind.shape)}" for kind in types)
        return got, want
    got, want = map(numbers, values)
    off = distances(got, want)
    at = tuple(map(int, np.unravel_index(int(np.argmax(off)), off.shape)))
    index = f" at {list(at)}" if at else ""
    shown = _shown_apart(got[at], want[at])
    return shown[0] + index, shown[1]


def _shard(names: Collection[Hashable], index: Sequence[int]) -> str:
    return errors.axes_str(dict(zip(names, map(int, index), strict=True))) or "one device"


def _shown_apart(got: Numbers, want: Numbers) -> tuple[str, str]:
    """Two numbers, with as many digits as it takes to see that they differ."""
    digits = next((n for n in (6, 9, 12) if _shown(got, n) != _shown(want, n)), 17)
    return _shown(got, digits), _shown(want, digits)


def _shown(x: Numbers, digits: int) -> str:
    return f"{x:.{digits}g}" if x.dtype.kind == "f" else str(x)


def _array(shape: Sequence[int]) -> str:
    return f"an array [{', '.join(map(str, shape))}]"
