"""Which steps of two flat programs belong together."""

import difflib
from collections.abc import Hashable, Sequence
from typing import Any

from ._flat import Step


def pairs(mesh: Sequence[Step], one: Sequence[Step]) -> dict[int, int]:
    """For steps of the program on a mesh, the numbers of the same steps of the program on one device.

    The programs are nearly the same. Where they are not, because the code looks at the size of an axis, these
    are the longest runs of steps that both have.
    """
    left, right = [_key(step) for step in mesh], [_key(step) for step in one]
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    end = 0
    while end < min(len(left), len(right)) - start and left[-1 - end] == right[-1 - end]:
        end += 1
    found = {i: i for i in range(start)}
    found |= {len(left) - k: len(right) - k for k in range(1, end + 1)}
    numbers: dict[Hashable, int] = {}
    middle = [
        [numbers.setdefault(key, len(numbers)) for key in keys[start : len(keys) - end]]
        for keys in (left, right)
    ]
    for block in difflib.SequenceMatcher(
        None, middle[0], middle[1], autojunk=False
    ).get_matching_blocks():
        for k in range(block.size):
            found[start + block.a + k] = start + block.b + k
    return found


def _key(step: Step) -> Hashable:
    def kind(var: Any) -> Hashable:
        return str(var.aval.dtype), len(var.aval.shape)

    kinds = tuple(map(kind, step.eqn.outvars)) if step.kind == "run" else ()
    return step.name, step.line, step.transposed, step.caller, kinds
