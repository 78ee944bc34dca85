"""Step 2: the record of one input of a program."""

import dataclasses

from .._base._specs import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the arguments that is an input of the program.

    **Attributes:**

    - `position`: its position among the leaves.
    - `path`: its path, for messages.
    - `placement`: where it lies.
    - `kind`: its type.
    - `strong`: whether it loses a weak type. What it becomes in the result is then no news to the compiler
        when it is fed back.
    - `stateful`: whether it is a leaf of a State.
    """

    position: int
    path: str
    placement: Placement
    kind: type
    strong: bool
    stateful: bool
