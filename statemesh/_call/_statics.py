"""The leaves of a call's arguments that are constants of its program."""

import functools
from collections.abc import Sequence
from operator import is_

from .._arguments import Arguments
from .._base import errors
from .._base._tokens import Unknowable, may_change, token
from .._base._types import Leaf


class Statics:
    """The static leaves of one call, and how those of a later call are compared with them.

    **Arguments:**

    - `name`: the name of the mapped function, for messages.
    - `arguments`: the structure of the arguments.
    - `positions`: where static leaves stand among all leaves.
    - `leaves`: all leaves of the call.
    """

    def __init__(
        self, name: str, arguments: Arguments, positions: Sequence[int], leaves: Sequence[Leaf]
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.positions = positions
        self.values = [leaves[i] for i in positions]
        # Their owner may have changed these since. They are compared at every call, by what is in them.
        self.changing = [i for i in positions if may_change(leaves[i])]
        self.fixed_at = [i for i in positions if i not in self.changing]
        self.fixed = [leaves[i] for i in self.fixed_at]
        self.tokens = self.tokens_of(leaves)
        self.changing_tokens = self._tokens_at(self.changing, leaves)

    def tokens_of(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """What static leaves are compared by.

        **Raises:** `StructureError` for a leaf that nothing can be compared by.
        """
        return self._tokens_at(self.positions, leaves)

    def _tokens_at(self, positions: Sequence[int], leaves: Sequence[Leaf]) -> list[Leaf]:
        try:
            return [token(leaves[position]) for position in positions]
        except Unknowable as error:
            raise self._unknowable(leaves) from error

    def _unknowable(self, leaves: Sequence[Leaf]) -> errors.StatemeshError:
        paths, bad = self.arguments.paths(), []
        for position in self.positions:
            try:
                token(leaves[position])
            except Unknowable as error:
                bad.append((paths[position], leaves[position], error.value))
        return errors.unknowable_statics(self.name, bad)

    def same(self, leaves: Sequence[Leaf]) -> bool:
        """Whether a call has the same static leaves, and nobody has changed them."""
        if not all(map(is_, map(leaves.__getitem__, self.fixed_at), self.fixed)):
            return False
        return not self.changing or self._tokens_at(self.changing, leaves) == self.changing_tokens

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """The static leaves as they are now, by position, for messages."""
        return {i: repr(leaf) for i, leaf in zip(self.positions, self.values, strict=True)}

    def changing_of(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The static leaves that may be other objects at each call."""
        return [leaves[position] for position in self.changing]
