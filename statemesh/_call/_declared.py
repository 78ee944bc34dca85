"""What the author of a mapped call declared."""

import dataclasses
from typing import Any

from .._base._checks import check_function
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
        check_function(self.transform, self.fun)
        self.rules.check()
