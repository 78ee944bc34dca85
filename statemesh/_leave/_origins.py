"""Which of the entering states each returned state continues."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from .._base import errors
from .._base._compat import tree_util
from .._base._links import Links
from .._base._paths import path_str
from .._base._specs import Placement
from .._base._types import Key, KeyPath, Leaf
from .._model._origin import NEW, Unknown, origin
from .._model._state import State


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


def find_origins(
    fun_name: str,
    returned: Sequence[tuple[KeyPath, State]],
    entered: Sequence[Entered],
    donating: bool,
) -> list[Entered | None]:
    """The entering state that each returned one continues; `None` for a state made inside.

    A state that was written with `set` or `replace` remembers where it came from, and one that was
    not written has the very arrays that went in. A written one that passed through `jax.tree.map`,
    `scan` or `cond` has forgotten; then the end of its path tells: `[1].bn.mean` in the result
    continues `[0].bn.mean` of the arguments. Where several fit equally well (two models of one
    class), they are taken in order.

    **Raises:** `StructureError` where fewer return than fit, and it makes a difference which: to a
    policy, to where the state goes, or to whose buffers are given up when `donating`.
    """
    by_mark = {id(one.mark): i for i, one in enumerate(entered)}
    # By returned state: the entering ones that it may continue, where the program shows several.
    shown: dict[int, list[int]] = {}
    by_arrays = {_arrays(one.seen): i for i, one in enumerate(entered) if values(one.seen)}
    forms: list[Hashable] = [_form(one.seen) for one in entered]
    found: list[int | None] = []
    for k, (_, state) in enumerate(returned):
        mark = origin(state)
        i = by_mark.get(id(mark))
        if i is None and (same := by_arrays.get(_arrays(state))) is not None:
            i = same if _form(state) == forms[same] else None
        if i is None and isinstance(mark, Unknown):
            shown[k] = [by_mark[id(one)] for one in mark.marks if id(one) in by_mark]
        found.append(i)
    # The others are compared by their paths with the states that they may continue.
    alike: dict[Hashable, list[int]] = {}
    for i, form in enumerate(forms):
        alike.setdefault(form, []).append(i)
    # Steps of paths as numbers, the last one first: in a large model very many pairs are compared.
    numbers: dict[Key, int] = {}
    ends = [_numbered(one.keys, numbers) for one in entered]
    scores = {
        k: _scores(_numbered(keys, numbers), shown.get(k) or alike.get(_form(state), []), ends)
        for k, (keys, state) in enumerate(returned)
        if found[k] is None and origin(state) is not NEW
    }
    taken = {i for i in found if i is not None}
    _fill_by_path(scores, found, taken)
    unsure: list[tuple[str, list[str]]] = []
    for k, fits in scores.items():
        if (i := found[k]) is None:
            continue
        if k in shown:
            # The program shows that it continues one of several; its path only guesses which.
            left = [j for j in fits if j != i and (shown[k] or j not in taken)]
            unlike = any(_leave_apart(entered[i], entered[j]) for j in left)
        else:
            left = [j for j, score in fits.items() if score >= fits[i] and j not in taken]
            unlike = any(donating or _differ(entered[i], entered[j]) for j in left)
        if unlike:
            path = path_str(returned[k][0], f"{fun_name}(...)")
            unsure.append((path, [entered[j].path for j in sorted([i, *left])]))
    if unsure:
        raise errors.unsure_origin(fun_name, unsure)
    return [None if i is None else entered[i] for i in found]


def _fill_by_path(
    scores: Mapping[int, Mapping[int, int]], found: list[int | None], taken: set[int]
) -> None:
    """Fill in what is not found yet: the pairs whose paths agree best first, each entering state once."""
    pairs = [(score, k, i) for k, fits in scores.items() for i, score in fits.items()]
    for score, k, i in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):
        # Paths without a common end are no evidence, unless there is only one candidate.
        if found[k] is None and i not in taken and (score > 0 or len(scores[k]) == 1):
            found[k] = i
            taken.add(i)
    for k, fits in scores.items():
        # It may be a state that was returned twice, if at least the last step of its path agrees.
        best = max(fits, key=lambda i: fits[i], default=None)
        if found[k] is None and best is not None and fits[best] > 1:
            found[k] = best


def _arrays(state: State) -> tuple[int, ...]:
    return tuple(map(id, leaves_of(state)))


def _differ(a: Entered, b: Entered) -> bool:
    return a.old.reduce is not None or a.placements != b.placements


def _leave_apart(a: Entered, b: Entered) -> bool:
    """Whether it makes a difference to a written state which of two it continues."""
    return a.old.needs_old or b.old.needs_old or a.placements != b.placements


def links_for(entered: Sequence[Entered]) -> Links | None:
    """Links for states that only their origin tells apart, where it makes a difference which is which.

    `None` where there are no such states.
    """
    alike: dict[Hashable, list[Entered]] = {}
    for one in entered:
        # A random state needs no link: its key carries its stream along.
        if not one.old.always_replicated:
            alike.setdefault(_form(one.seen), []).append(one)
    followed = [
        (type(first.seen), first.seen._meta)
        for first, *others in alike.values()
        if any(_leave_apart(first, one) for one in others)
    ]
    return Links(frozenset(followed)) if followed else None


def _form(state: State) -> Hashable:
    """What a state must have in common with one that it continues."""
    shapes = tuple((x.shape, x.dtype) for x in values(state))
    return type(state), state._meta, tree_util.tree_structure(state.value), shapes


def _numbered(keys: KeyPath, numbers: dict[Key, int]) -> tuple[int, ...]:
    return tuple(numbers.setdefault(key, len(numbers)) for key in reversed(keys))


def _scores(
    path: tuple[int, ...], candidates: Sequence[int], ends: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """For each candidate twice the number of last steps that agree, plus one if these are its whole path."""
    scores = {}
    for i in candidates:
        end, count = ends[i], 0
        for x, y in zip(path, end, strict=False):
            if x != y:
                break
            count += 1
        scores[i] = 2 * count + (count == len(end))
    return scores


def values(state: State) -> list[Leaf]:
    """The leaves of a state's value."""
    return list(tree_util.tree_leaves(state.value))


def leaves_of(state: State) -> list[Leaf]:
    """All leaves of a state: its value's, then those of whatever its kind keeps beside it."""
    return list(tree_util.tree_leaves(state))


def has_same_leaves(a: State, b: State) -> bool:
    """Whether the leaves of two states are the very same objects: neither was written after the other."""
    mine, others = leaves_of(a), leaves_of(b)
    return len(mine) == len(others) and all(x is y for x, y in zip(mine, others, strict=True))
