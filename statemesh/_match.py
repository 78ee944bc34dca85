"""Which entering state each returned state was made from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._base._compat import tree_util
from ._base._types import KeyPath
from ._model._state import State, origin
from ._resolve._specs import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Entered:
    """A state of the arguments inside one instance of the call."""

    mark: object
    path: str
    keys: KeyPath
    # As it came in, and as the function saw it after `enter`.
    old: State
    seen: State
    # One placement, and one index among the program's inputs, for each of its leaves.
    placements: tuple[Placement, ...]
    inputs: tuple[int, ...]


def match(
    returned: Sequence[tuple[KeyPath, State]], entered: Sequence[Entered]
) -> list[Entered | None]:
    """The entering state that each returned one continues; `None` for a state made inside.

    A state that was written with `set` or `replace` remembers where it came from. Passing through
    `jax.tree.map`, `scan` or `cond` makes it forget; then the end of its path tells: `[1].bn.mean` in
    the result continues `[0].bn.mean` of the arguments. Where several fit equally well (two models
    of one class), they are taken in order.
    """
    by_mark = {id(one.mark): one for one in entered}
    found: list[Entered | None] = []
    taken: dict[tuple[int, ...], int] = {}
    for keys, state in returned:
        marked = by_mark.get(id(origin(state)))
        found.append(marked or _by_path(keys, state, entered, taken))
    return found


def _by_path(
    keys: KeyPath,
    state: State,
    entered: Sequence[Entered],
    taken: dict[tuple[int, ...], int],
) -> Entered | None:
    fits = [i for i, one in enumerate(entered) if _fits(state, one.old)]
    scores = {i: _common_end(keys, entered[i].keys) for i in fits}
    best = max(scores.values(), default=0)
    ties = tuple(i for i in fits if scores[i] == best)
    if not ties or (best == 0 and len(ties) > 1):
        return None
    # The k-th returned state of these continues the k-th that entered.
    k = taken.get(ties, 0)
    taken[ties] = k + 1
    return entered[ties[min(k, len(ties) - 1)]]


def _fits(state: State, old: State) -> bool:
    return (
        type(state) is type(old)
        and state._meta == old._meta
        and tree_util.tree_structure(state.value) == tree_util.tree_structure(old.value)
    )


def _common_end(a: KeyPath, b: KeyPath) -> int:
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count


def values(state: State) -> list[Any]:
    """The leaves of a state's value."""
    return list(tree_util.tree_leaves(state.value))


def leaves_of(state: State) -> list[Any]:
    """All leaves of a state: its value's, then those of whatever its kind keeps beside it."""
    return list(tree_util.tree_leaves(state))
