"""What the author of a mapped call declared."""

import dataclasses
from typing import Any

from .._base import _errors as errors
from .._base._types import Fun
from ._rules import Rules


DONATE = ("none", "states", "all")


@dataclasses.dataclass(frozen=True)
class Declared:
    """The arguments of a mapped call, checked as far as they can be without a call.

    **Attributes:**

    - `transform`: what the author wrote: `shard_map`, `pmap2`, `vmap2`.
    - `rules`: where arguments and results go.
    - `donate`: whose memory is given up: a word, or the positions of arguments.
    """

    transform: str
    fun: Fun
    name: str
    rules: Rules
    donate: Any = "none"
    jit: bool = True

    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""
        if not callable(self.fun):
            raise errors.not_callable(self.transform, self.fun)
        if isinstance(self.donate, str) and self.donate not in DONATE:
            raise errors.unknown_donate(self.donate, DONATE)
        self.rules.check()
