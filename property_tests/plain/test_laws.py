"""Laws of trees and states: partition, combine, filters, `set` and `replace`."""

from typing import Any

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm
from statemesh.testing import arrays, states

from ..picks import picks
from ..strategies import trees
from ..trees import KINDS, same, structure, walk
from .laws import check_filter, check_partition, check_replace, check_set


@given(st.data())
def test_partition_and_combine(data: st.DataObject) -> None:
    tree = data.draw(trees(), "tree")
    check_partition(tree, data.draw(st.lists(picks(tree=tree), max_size=3), "filters"))


@given(st.data())
def test_filters_are_their_predicates(data: st.DataObject) -> None:
    tree = data.draw(trees(min_states=1), "tree")
    # Drawing a tree takes longer than drawing a filter.
    for pick in data.draw(st.lists(picks(tree=tree), min_size=1, max_size=8), "filters"):
        check_filter(tree, pick)


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
    check_set(state, first, second)
    name, tag = (data.draw(st.sampled_from("abc"), what) for what in ("name", "tag"))
    check_replace(state, name, tag, second)


@given(trees())
def test_models_of_equal_structure_have_equal_treedefs(tree: Any) -> None:
    again = jax.tree.map(lambda leaf: leaf, tree)
    assert structure(again) == structure(tree)
    assert hash(structure(again)) == hash(structure(tree))
    assert same(again, tree)


@given(trees())
def test_tree_map_keeps_kinds_and_metadata(tree: Any) -> None:
    numbered = jax.tree.map(lambda leaf: object(), tree)
    pairs = zip(walk(numbered), walk(tree), strict=True)
    for (path, new), (before, old) in pairs:
        assert path == before
        if sm.is_state(old):
            assert type(new) is type(old)
            for field in ("name", "tag", "spec", "reduce"):
                assert getattr(new, field) == getattr(old, field)
            assert structure(new) == structure(old)
