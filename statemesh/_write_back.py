"""Step 5: put what was written, what was not, and what is static into the result's tree."""

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A leaf that the program computes."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forwarded:
    """A leaf that comes back as the array that went in."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no array."""

    value: Any


@jax.tree_util.register_static
class WriteBack:
    """What tracing found out about the result: its tree, and where each of its leaves comes from.

    It rides out of `jax.jit` as a node without leaves, so that a call that is already compiled gets
    it back without tracing anything.

    **Arguments:**

    - `result`: the result's tree with `Output`, `Forwarded` and `Static` as leaves.
    - `specs`: where each of the program's outputs lies.
    - `rewritten`: the inputs that leaves of written states came from, for donation.
    """

    __slots__ = ("_pick", "_statics", "_treedef", "rewritten", "sources", "specs")

    def __init__(
        self, result: Any, specs: Sequence[PartitionSpec], rewritten: Sequence[int]
    ) -> None:
        self.sources, self._treedef = jax.tree_util.tree_flatten(
            result, is_leaf=lambda node: isinstance(node, Output | Forwarded | Static)
        )
        self.specs = tuple(specs)
        self.rewritten = tuple(rewritten)
        self._statics = [s.value for s in self.sources if isinstance(s, Static)]
        # One table of outputs, arguments and statics, and one pass over it in C.
        statics = iter(range(-len(self._statics), 0))
        places = [
            s.index
            if isinstance(s, Output)
            else len(self.specs) + s.index
            if isinstance(s, Forwarded)
            else next(statics)
            for s in self.sources
        ]
        self._pick = _picker(places)

    def forwarded(self) -> frozenset[int]:
        """Which inputs come back as they are."""
        return frozenset(s.index for s in self.sources if isinstance(s, Forwarded))

    def __call__(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """The result's tree."""
        return self._treedef.unflatten(self._pick([*outputs, *arguments, *self._statics]))


def _picker(places: list[int]) -> Any:
    match places:
        case []:
            return lambda table: ()
        case [one]:
            return lambda table: (table[one],)
        case _:
            return itemgetter(*places)
