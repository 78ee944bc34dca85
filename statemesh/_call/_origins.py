"""Which of the entering states each returned state continues."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import TypeAlias

import jax
from jax import Array

from .._base._errors import StructureError, error_listing
from .._base._specs import Placement
from .._base._trees import is_state, path_str
from .._base._types import Key, KeyPath, Leaf, PyTree, PyTreeDef
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import ClosedJaxpr, Equation, tree_util
from .._jax._dataflow import DataflowOfSets
from .._jax._jaxprs import REBUILT, Links, link_made
from .._state._state import NEW, State, Unknown, origin, origins, with_origins


# Numbers of arguments: none where nothing is known, several where it may be any of them.
Sources: TypeAlias = frozenset[int]


class _Continued(DataflowOfSets[int]):
    """The arguments that a value may continue."""

    def own_rule(self, eqn: Equation, facts: Sequence[Sources]) -> Sequence[Sources] | None:
        if (link := link_made(eqn)) is None:
            return None
        new, old = facts
        # A `cond` that returns one state or another is rebuilt as the one that its first branch returns.
        return [old | new if link == REBUILT else old]

    def plain(self, eqn: Equation, facts: Sequence[Sources]) -> Sequence[Sources]:
        inner = jaxprs.jaxprs_of(eqn)
        if [(len(j.invars), len(j.outvars)) for j in inner] == [(len(facts), len(eqn.outvars))]:
            return self.through(inner[0], facts)
        if len(eqn.outvars) == 1 and jaxprs.forwards(eqn):
            return [self.join(facts)]
        return [self.nothing] * len(eqn.outvars)

    def stacked(self, part: Sources) -> Sources:
        return self.nothing


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
    by_mark = {id(entry.mark): i for i, entry in enumerate(entered)}
    # By returned state: the entering ones that it may continue, where the program shows several.
    shown: dict[int, list[int]] = {}
    by_arrays = {_arrays(entry.seen): i for i, entry in enumerate(entered) if values(entry.seen)}
    forms: list[Hashable] = [_form(entry.seen) for entry in entered]
    sources: list[int | None] = []
    for k, (_, state) in enumerate(returned):
        mark = origin(state)
        i = by_mark.get(id(mark))
        if i is None and (same := by_arrays.get(_arrays(state))) is not None:
            i = same if _form(state) == forms[same] else None
        if i is None and isinstance(mark, Unknown):
            shown[k] = [by_mark[id(other)] for other in mark.marks if id(other) in by_mark]
        sources.append(i)
    # The others are compared by their paths with the states that they may continue.
    alike: dict[Hashable, list[int]] = {}
    for i, form in enumerate(forms):
        alike.setdefault(form, []).append(i)
    # Steps of paths as numbers, the last one first: in a large model very many pairs are compared.
    numbers: dict[Key, int] = {}
    ends = [_numbered(entry.keys, numbers) for entry in entered]
    scores = {
        k: _scores(_numbered(keys, numbers), shown.get(k) or alike.get(_form(state), []), ends)
        for k, (keys, state) in enumerate(returned)
        if sources[k] is None and origin(state) is not NEW
    }
    taken = {i for i in sources if i is not None}
    _fill_by_path(scores, sources, taken)
    unsure: list[str] = []
    for k, fits in scores.items():
        if (i := sources[k]) is None:
            continue
        if k in shown:
            # The program shows that it continues one of several; its path only guesses which.
            left = [j for j in fits if j != i and (shown[k] or j not in taken)]
            unlike = any(_leave_apart(entered[i], entered[j]) for j in left)
        else:
            left = [j for j, score in fits.items() if score >= fits[i] and j not in taken]
            unlike = any(
                donating
                or entered[i].old.reduce is not None
                or entered[i].placements != entered[j].placements
                for j in left
            )
        if unlike:
            path = path_str(returned[k][0], f"{fun_name}(...)")
            several = " or ".join(entered[j].path for j in sorted([i, *left]))
            unsure.append(f"{path} may be {several}")
    if unsure:
        raise error_listing(
            StructureError,
            f"{fun_name}: these states differ only in where they came from, and nothing shows which of them "
            "each result continues",
            unsure,
            "That is lost if the branches of a `cond` return different states, or if a loop exchanges them. "
            "Distinguish them by a name or tag: State(value, name='a'); or write the values into the states "
            "that came in, after the `cond` or loop: `state.set(new.value)`.",
        )
    return [None if i is None else entered[i] for i in sources]


def _fill_by_path(
    scores: Mapping[int, Mapping[int, int]], sources: list[int | None], taken: set[int]
) -> None:
    """Fill in what is not found yet: the pairs whose paths agree best first, each entering state once."""
    # Paths without a common end are no evidence, unless there is only one candidate.
    pairs = [
        (-score, k, i)
        for k, fits in scores.items()
        for i, score in fits.items()
        if score > 0 or len(fits) == 1
    ]
    for _, k, i in sorted(pairs):
        if sources[k] is None and i not in taken:
            sources[k] = i
            taken.add(i)
    for k, fits in scores.items():
        # It may be a state that was returned twice, if at least the last step of its path agrees.
        best = max(fits, key=lambda i: fits[i], default=None)
        if sources[k] is None and best is not None and fits[best] > 1:
            sources[k] = best


def _arrays(state: State) -> tuple[int, ...]:
    return tuple(map(id, leaves_of(state)))


def _leave_apart(a: Entered, b: Entered) -> bool:
    """Whether it makes a difference to a written state which of two it continues."""
    return a.old.needs_old or b.old.needs_old or a.placements != b.placements


def links_for(entered: Sequence[Entered]) -> Links | None:
    """Links for states that only their origin tells apart, where it makes a difference which is which.

    `None` where there are no such states.
    """
    alike: dict[Hashable, list[Entered]] = {}
    for entry in entered:
        # A random state needs no link: its key carries its stream along.
        if not entry.old.always_replicated:
            alike.setdefault(_form(entry.seen), []).append(entry)
    followed = [
        (type(first.seen), first.seen._meta)
        for first, *others in alike.values()
        if any(_leave_apart(first, entry) for entry in others)
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
        if end[:1] != path[:1]:  # In a large model that is so of nearly all pairs.
            scores[i] = int(not end)
            continue
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


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A tree whose arrays are taken out, to be made again from these or other arrays.

    `taken_apart` leaves none of the arrays in it: JAX reports a tracer that is kept as a leak.

    **Attributes:**

    - `leaves`: the tree's leaves, with `None` for each array that is taken out.
    - `marks`: for each state in the tree a mark of the state that it continues.
    - `positions`: where the arrays stand among the leaves.
    """

    leaves: list[Leaf]
    treedef: PyTreeDef
    marks: list[object]
    positions: list[int]

    def filled(self, arrays: Sequence[Leaf]) -> PyTree:
        """The tree with these arrays in it."""
        leaves = list(self.leaves)
        for i, x in zip(self.positions, arrays, strict=True):
            leaves[i] = x
        return with_origins(self.treedef.unflatten(leaves), self.marks)


def taken_apart(
    tree: PyTree, kept: Mapping[int, Leaf] = MappingProxyType({})
) -> tuple[Skeleton, list[Array]]:
    """A tree as its skeleton and its arrays.

    **Arguments:**

    - `kept`: by the identity of an array the one that stays in the skeleton for it. JAX returns other arrays
        for results that are arguments: so arguments are not to be results.
    """
    leaves, treedef = tree_util.tree_flatten(tree)
    leaves = [kept.get(id(x), x) for x in leaves]
    stays = {id(x) for x in kept.values()}
    positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and id(x) not in stays]
    arrays = [leaves[i] for i in positions]
    for i in positions:
        leaves[i] = None
    return Skeleton(leaves, treedef, origins(tree), positions), arrays


@dataclasses.dataclass(frozen=True)
class Traced:
    """The program of a function of trees.

    **Attributes:**

    - `closed`: its jaxpr, from the arrays in the operands to those in the result.
    - `arguments`: the arrays in the operands.
    - `skeleton`: the result without its arrays.
    """

    closed: ClosedJaxpr
    arguments: list[Array]
    skeleton: Skeleton


def trace(
    fun: Callable[..., PyTree],
    operands: Sequence[PyTree],
    mark: compat.FollowedAxes | None,
    links: Links | None,
) -> Traced:
    """Trace a function.

    **Arguments:**

    - `mark`: names the axes along which the program will be walked; `None` for none.
    - `links`: for the states that the function is given, where it matters which of them its results continue.
    """
    inside, arguments = taken_apart(operands)
    results: list[tuple[Skeleton, list[tuple[range, bool | None]]]] = []

    def traced(*arrays: Array) -> list[Array]:
        with nullcontext() if links is None else links.linking():
            result = fun(*inside.filled(arrays))
        skeleton, outputs = taken_apart(result)
        states = _states_and_arrays(result)
        results[:] = [(skeleton, [(at, _rebuilt(state, links)) for state, at in states])]
        return outputs

    bound: list[compat.FollowedAxes | compat.FollowedStates] = [] if mark is None else [mark]
    if links is not None:
        bound.append(compat.FollowedStates())
    closed = compat.trace_marked(traced, arguments, bound)
    ((skeleton, returned),) = results
    if links is not None and None in skeleton.marks:
        marks = _recovered(closed, skeleton.marks, operands, returned)
        skeleton = dataclasses.replace(skeleton, marks=marks)
    return Traced(closed, arguments, skeleton)


def _states_and_arrays(tree: PyTree) -> list[tuple[State, range]]:
    """Each state of a tree, with the numbers of its arrays among all arrays of the tree."""
    states = []
    start = 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_state):
        arrays = [x for x in tree_util.tree_leaves(node) if isinstance(x, jax.Array)]
        if is_state(node):
            states.append((node, range(start, start + len(arrays))))
        start += len(arrays)
    return states


def _rebuilt(state: State, links: Links | None) -> bool | None:
    """Whether JAX, not the user, has made this State; `None` for one without links."""
    if links is None or (type(state), state._meta) not in links.followed:
        return None
    return state._meta.token is not None


def _recovered(
    closed: ClosedJaxpr,
    marks: Sequence[object],
    operands: Sequence[PyTree],
    returned: Sequence[tuple[range, bool | None]],
) -> list[object]:
    """The marks of the result's states. That of a State that JAX made is read off the program's links."""
    marks_at = {i: origin(state) for state, at in _states_and_arrays(operands) for i in at}
    program = jaxprs.open_jaxpr(closed)
    sources = _Continued().through(program, [frozenset([i]) for i in range(len(program.invars))])
    recovered: list[object] = []
    for mark, (at, by_jax) in zip(marks, returned, strict=True):
        if mark is None and by_jax is not None:
            arguments = sorted(frozenset[int]().union(*(sources[k] for k in at)))
            several = dict.fromkeys(marks_at[i] for i in arguments if marks_at.get(i) is not None)
            if len(several) == 1:
                (mark,) = several
            elif several or by_jax:
                mark = Unknown(tuple(several))
        recovered.append(mark)
    return recovered
