"""States that all microbatches have written, merged by their policies."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from .._axes._mesh_and_lanes import MICROBATCHES, varying_over
from .._base import _compat as compat
from .._base import errors
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._outside import run_varying, traced_outside
from .._base._types import Array, Leaf, PyTree, PyTreeDef
from .._leave._origins import leaves_of, values
from .._leave._policies import all_left, filled
from .._model._origin import mark_origin, origin
from .._model._state import State
from ._microbatch_states import Continued


_NAMES = (MICROBATCHES,)
# It stands for an array among the leaves of a state.
_ARRAY = object()


@dataclasses.dataclass(frozen=True)
class _Written:
    """A written state, and which of its leaves hold the values of all microbatches along their first axis."""

    state: State
    old: State | None
    path: str
    stacked: list[bool]

    @property
    def leaves(self) -> list[tuple[Leaf, bool]]:
        """The state's leaves, each with whether it holds the values of all microbatches."""
        return list(zip(leaves_of(self.state), self.stacked, strict=True))

    @property
    def shared(self) -> list[Array]:
        """The arrays that all microbatches share: of the state, then of the one that it continues."""
        old = [] if self.old is None else leaves_of(self.old)
        mine = [x for x, hit in self.leaves if not hit]
        return [x for x in (*mine, *old) if isinstance(x, jax.Array)]

    def rebuilt(
        self, stacks: Iterator[Array], shared: Iterator[Array]
    ) -> tuple[State, State | None]:
        """The state of one microbatch and the one that it continues, of other arrays in the same order."""
        leaves = [
            next(stacks) if hit else next(shared) if isinstance(x, jax.Array) else x
            for x, hit in self.leaves
        ]
        state, old = filled(self.state, leaves), self.old
        if (mark := origin(self.state)) is not None:
            state = mark_origin(state, mark)
        if old is not None:
            own = [next(shared) if isinstance(x, jax.Array) else x for x in leaves_of(old)]
            old = filled(old, own)
        return state, old

    @property
    def over(self) -> list[tuple[str, ...]]:
        """For each leaf of the value whether it is merged. A function sees all leaves, or none."""
        here = self.stacked[: len(values(self.state))]
        if not isinstance(self.state.reduce, str):
            here = [any(here)] * len(here)
        return [_NAMES if hit else () for hit in here]

    @property
    def has_own_way(self) -> bool:
        """Whether its kind merges microbatches in another way than shards."""
        own_way = type(self.state)._of_microbatches is not State._of_microbatches
        return own_way and any(self.over)

    @property
    def has_no_policy(self) -> bool:
        own_way = self.has_own_way or type(self.state).leave is not State.leave
        return any(self.over) and self.state.reduce is None and not own_way


def merged(name: str, model: PyTree, differs: PyTree, continued: Continued) -> PyTree:
    """The model that all microbatches together have made.

    **Arguments:**

    - `model`: with the values of all microbatches along the first axis of the leaves that may differ.
    - `differs`: the model with `True` in place of these leaves.
    """
    units, treedef = tree_util.tree_flatten(model, is_leaf=is_state)
    hits = tree_util.tree_leaves(differs, is_leaf=is_state)
    known = iter(zip(continued.written, continued.olds, strict=True))
    writing: list[tuple[int, _Written]] = []
    arrays: list[tuple[str, object]] = []
    for i, (unit, hit, path) in enumerate(zip(units, hits, continued.paths, strict=True)):
        if is_state(unit):
            written, old = next(known)
            if written:
                stacked = [x is True for x in leaves_of(hit)]
                writing.append((i, _Written(unit, old, path, stacked)))
        elif hit is True:
            arrays.append((path, jax.ShapeDtypeStruct(unit.shape[1:], unit.dtype)))
    bad = [(one.path, _one_of(one)) for _, one in writing if one.has_no_policy]
    if bad or arrays:
        raise errors.microbatches_diverged(name, bad, arrays)
    states = _merged_states(name, [one for _, one in writing])
    for (i, one), state in zip(writing, states, strict=True):
        # Where nothing shows what it continues, the surrounding call is not to take it for known.
        mark = origin(one.old) if one.old is not None and origin(one.state) is not None else None
        units[i] = state if mark is None else mark_origin(state, mark)
    return treedef.unflatten(units)


def _merged_states(name: str, writing: Sequence[_Written]) -> list[State]:
    # JAX's collectives, which a function may call, fail over lanes inside a checked `shard_map`.
    checked = compat.inside_checked_shard_map()
    outside = [checked and callable(one.state.reduce) for one in writing]
    done = {
        hit: iter(
            _merged_alike(
                name, [one for one, own in zip(writing, outside, strict=True) if own is hit], hit
            )
        )
        for hit in (False, True)
    }
    return [next(done[hit]) for hit in outside]


def _merged_alike(name: str, writing: Sequence[_Written], outside: bool) -> list[State]:
    """States merged as they stand, or by a program that is traced outside of any mapped call."""
    stacks = [x for one in writing for x, hit in one.leaves if hit]
    shared = [x for one in writing for x in one.shared]
    # The structures of the merged states, and their leaves, with `_ARRAY` in place of each array.
    found: list[tuple[PyTreeDef, list[Leaf]]] = []

    def merge(stacks: list[Array], shared: list[Array]) -> list[Array]:
        mine, others = iter(stacks), iter(shared)
        found.clear()
        bad: list[tuple[str, str]] = []
        made: list[Array] = []
        for one in writing:
            state, old = one.rebuilt(mine, others)
            if one.has_own_way:
                state = state._of_microbatches(old, _NAMES)
            else:
                (state,) = all_left([(state, old)], [one.over])
            leaves = leaves_of(state)
            own = [x for x in leaves if isinstance(x, jax.Array)]
            # Without stacks no axis of microbatches is bound, and nothing differs.
            if stacks and any(varying_over(own, _NAMES)):
                bad.append((one.path, errors.policy_name(one.state)))
            made += own
            rest = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
            found.append((tree_util.tree_structure(state), rest))
        if bad:
            raise errors.microbatch_policies_diverged(name, bad)
        return made

    if not writing:
        return []
    run = merge
    if stacks:
        run = jax.vmap(merge, in_axes=(0, None), out_axes=None, axis_name=MICROBATCHES)
    if outside:
        program = traced_outside(run, stacks, shared)
        arrays = iter(run_varying(program, [*stacks, *shared]))
    else:
        arrays = iter(run(stacks, shared))
    return [
        treedef.unflatten([next(arrays) if x is _ARRAY else x for x in leaves])
        for treedef, leaves in found
    ]


def _one_of(one: _Written) -> State:
    """The state of one microbatch, for messages."""
    leaves = [
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if hit else x
        for x, hit in zip(leaves_of(one.state), one.stacked, strict=True)
    ]
    return filled(one.state, leaves)
