"""Laws of trees and states: partition, combine, filters, `set` and `replace`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm
from statemesh.testing import arrays, states

from ..base.checks import assert_equal
from ..picks import Pick, picks
from ..strategies import trees
from ..trees import KINDS, Path, same, structure, typed, walk


def owners(tree: Any, picks: Sequence[Pick]) -> list[tuple[Path, Any, int]]:
    """Each unit of a tree with its path and the number of the part that it belongs in."""
    owned = []
    for path, unit in walk(tree):
        hits = [k for k, pick in enumerate(picks) if sm.is_state(unit) and pick.matches(path, unit)]
        owned.append((path, unit, min(hits, default=len(picks))))
    return owned


def is_idle(tree: Any, pick: Pick) -> bool:
    """Whether a filter that has to match something matches nothing."""
    found = [pick.matches(path, unit) for path, unit in walk(tree) if sm.is_state(unit)]
    return not pick.may_be_idle and not any(found)


def assert_units(part: Any, want: Sequence[tuple[Path, Any]]) -> None:
    """The part holds exactly these units, at these paths."""
    got = [(path, unit) for path, unit in walk(part) if repr(unit) != "Removed"]
    assert [path for path, _ in got] == [path for path, _ in want]
    for (_, unit), (_, wanted) in zip(got, want, strict=True):
        # A part has new containers around the very leaves of the tree.
        assert type(unit) is type(wanted)
        assert same(unit, wanted)
    assert len(jax.tree.leaves(part)) == sum(len(jax.tree.leaves(unit)) for _, unit in want)


def assert_unmoved(part: Any, picks: Sequence[Pick], k: int) -> None:
    """Partitioning a part by the filters again moves nothing."""
    awake = [i for i, pick in enumerate(picks) if not is_idle(part, pick)]
    if not awake:
        return
    again = sm.partition(part, *[picks[i].filter for i in awake])
    own = awake.index(k) if k in awake else len(awake)
    for i, piece in enumerate(again):
        assert same(piece, part) if i == own else jax.tree.leaves(piece) == []


@given(st.data())
def test_partition_and_combine(data: st.DataObject) -> None:
    tree = data.draw(trees(), "tree")
    picked = data.draw(st.lists(picks(tree=tree), max_size=3), "filters")
    filters = [pick.filter for pick in picked]
    if any(is_idle(tree, pick) for pick in picked):
        with pytest.raises(sm.StructureError):
            sm.partition(tree, *filters)
        return
    parts = sm.partition(tree, *filters)
    # Without filters, `partition` returns all states, and the rest.
    shown = picked or [Pick(..., lambda path, state: True, True)]
    assert len(parts) == len(shown) + 1
    assert same(sm.combine(*parts), tree)
    assert same(sm.combine(*reversed(parts)), tree)
    expected = owners(tree, shown)
    for k, part in enumerate(parts):
        assert_units(part, [(path, unit) for path, unit, owner in expected if owner == k])
        assert_unmoved(part, shown, k)


@pytest.mark.slow
@given(st.data())
def test_filters_are_their_predicates(data: st.DataObject) -> None:
    """A filter matches what its plain predicate says, and `states` lists just that."""
    tree = data.draw(trees(min_states=1), "tree")
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=sm.is_state)[0]
    units = list(walk(tree))
    # Drawing a tree takes longer than drawing a filter.
    for pick in data.draw(st.lists(picks(tree=tree), min_size=1, max_size=8), "filters"):
        predicate = sm.filters.to_predicate(pick.filter, tree)
        for (keys, unit), (path, again) in zip(flat, units, strict=True):
            assert unit is again
            if sm.is_state(unit):
                assert bool(predicate(keys, unit)) == pick.matches(path, unit), (typed(path), unit)
        if is_idle(tree, pick):
            with pytest.raises(sm.StructureError):
                sm.states(tree, pick.filter)
            continue
        want = {
            typed(path): unit
            for path, unit in units
            if sm.is_state(unit) and pick.matches(path, unit)
        }
        listed = sm.states(tree, pick.filter)
        assert list(listed) == list(want)
        assert all(listed[path] is want[path] for path in want)


def added(old: Any, new: Any, axis_names: Any) -> Any:
    return jax.tree.map(np.add, old, new)


def values(like: Any) -> st.SearchStrategy[Any]:
    """Values with the structure, shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    drawn = [arrays(shape=x.shape, dtype=x.dtype) for x in leaves]
    return st.tuples(*drawn).map(lambda new: jax.tree.unflatten(treedef, new))


@given(st.data())
def test_set_and_replace(data: st.DataObject) -> None:
    state = data.draw(states(kinds=list(KINDS.values()), reduces=(None, "sum", added)), "state")
    first, second = (data.draw(values(state.value), name) for name in ("first", "second"))
    # `set` writes the value and nothing else, and the last of two writes counts.
    shown, leaves = repr(state), jax.tree.leaves(state)
    one = state.set(first)
    assert_equal(one.value, first)
    assert type(one) is type(state) and structure(one) == structure(state)
    for field in ("name", "tag", "spec", "reduce"):
        assert getattr(one, field) == getattr(state, field)
    for new, old in zip(jax.tree.leaves(one), leaves, strict=True):
        assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, False)
    assert_equal(one.set(second).value, state.set(second).value)
    # The state that was written to has not changed.
    assert repr(state) == shown
    assert all(a is b for a, b in zip(jax.tree.leaves(state), leaves, strict=True))
    for wrong in ((first, first), jax.tree.map(lambda x: np.stack([x, x]), first)):
        with pytest.raises(sm.StructureError):
            state.set(wrong)
    # `replace` changes what it names and keeps the rest.
    name, tag = (data.draw(st.sampled_from("abc"), what) for what in ("name", "tag"))
    renamed = state.replace(name=name, tag=tag)
    assert (renamed.name, renamed.tag) == (name, frozenset([tag]))
    assert (renamed.spec, renamed.reduce) == (state.spec, state.reduce)
    assert same(renamed.value, state.value)
    assert same(renamed.replace(name=state.name, tag=state.tag), state)
    changed = state.replace(value=second)
    assert_equal(changed.value, second)
    assert (changed.name, changed.tag, changed.reduce) == (state.name, state.tag, state.reduce)
    for field in ("value", "name", "new"):
        with pytest.raises(AttributeError):
            setattr(state, field, 1)


@given(trees())
def test_a_tree_map_keeps_structure_kinds_and_metadata(tree: Any) -> None:
    again = jax.tree.map(lambda leaf: leaf, tree)
    assert same(again, tree)
    assert hash(structure(again)) == hash(structure(tree))
    numbered = jax.tree.map(lambda leaf: object(), tree)
    for (path, new), (before, old) in zip(walk(numbered), walk(tree), strict=True):
        assert path == before
        if sm.is_state(old):
            assert type(new) is type(old)
            for field in ("name", "tag", "spec", "reduce"):
                assert getattr(new, field) == getattr(old, field)
            assert structure(new) == structure(old)
