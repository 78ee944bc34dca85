"""The leaves of a call's arguments that are constants of its program."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from operator import is_

from .._arguments import Arguments, Call
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._paths import path_str
from .._base._tokens import is_hashable, may_change, token
from .._base._types import KeyPath, Leaf, PyTree, PyTreeDef


class Statics:
    """The static leaves of one call, and how those of a later call are compared with them.

    **Arguments:**

    - `positions`: where static leaves stand among all leaves.
    - `leaves`: all leaves of the call.
    """

    def __init__(self, positions: Sequence[int], leaves: Sequence[Leaf]) -> None:
        self.positions = positions
        self.values = [leaves[i] for i in positions]
        # Their owner may have changed these since, so that they are hashed at every call.
        self.changing = [i for i in positions if may_change(leaves[i])]
        self.changing_values = self.changing_of(leaves)
        self.fixed_at = [i for i in positions if i not in self.changing]
        self.fixed = [leaves[i] for i in self.fixed_at]
        self.tokens = self.tokens_of(leaves)
        self.changing_tokens = self._tokens_at(self.changing, leaves)

    def tokens_of(self, leaves: Sequence[Leaf]) -> list[Leaf] | None:
        """What static leaves are compared by; `None` if one of them cannot be hashed."""
        return self._tokens_at(self.positions, leaves)

    def _tokens_at(self, positions: Sequence[int], leaves: Sequence[Leaf]) -> list[Leaf] | None:
        try:
            return [token(leaves[position]) for position in positions]
        except TypeError:
            return None

    def same(self, leaves: Sequence[Leaf]) -> bool:
        """Whether a call has the same static leaves, and nobody has changed them."""
        if not all(map(is_, map(leaves.__getitem__, self.fixed_at), self.fixed)):
            return False
        return not self.changing or self._tokens_at(self.changing, leaves) == self.changing_tokens

    def other_in(self, leaves: Sequence[Leaf]) -> list[int]:
        """The positions of static leaves that differ in another call."""
        pairs = zip(self.positions, self.tokens or (), strict=True)
        return [i for i, known in pairs if self._tokens_at([i], leaves) != [known]]

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """The static leaves as they are now, by position, for messages."""
        return {i: repr(leaf) for i, leaf in zip(self.positions, self.values, strict=True)}

    def changing_of(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The static leaves that may be other objects at each call."""
        return [leaves[position] for position in self.changing]


def has_unhashable_node(treedef: PyTreeDef) -> bool:
    """Whether a tree has a node, such as a Module with a static field, whose metadata cannot be hashed."""
    kind, metadata = treedef.node_data() or (None, None)
    # The keys of a dictionary are its metadata, in a list.
    if kind is not dict and not is_hashable(metadata):
        return True
    return any(map(has_unhashable_node, treedef.children()))


def unhashable(arguments: Arguments, call: Call) -> list[tuple[str, PyTree]]:
    """The static leaves and fields of a call that cannot be hashed, with their paths."""
    return [
        (path_str(keys, name), value)
        for name, tree in arguments.named(call.args, call.kwargs)
        for keys, value in _unhashable(tree, ())
    ]


def _unhashable(node: Leaf, keys: KeyPath) -> Iterator[tuple[KeyPath, PyTree]]:
    parts = tree_util.default_registry.flatten_one_level_with_keys(node)
    if parts is None:
        if not (is_shaped(node) or is_hashable(node)):
            yield keys, node
        return
    children, metadata = parts
    if type(node) is not dict and not is_hashable(metadata):
        fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
        of_children = {getattr(key, "name", None) for key, _ in children}
        static = [
            (f.name, getattr(node, f.name, None)) for f in fields if f.name not in of_children
        ]
        bad = [(tree_util.GetAttrKey(name), x) for name, x in static if not is_hashable(x)]
        yield from [((*keys, key), x) for key, x in bad] or [(keys, metadata)]
    for key, child in children:
        yield from _unhashable(child, (*keys, key))
