"""Filters: every form, the named classes as values, and the states that each filter picks."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import statemesh as sm
from statemesh import filters as f
from tests.helpers import make_mesh


class Cell(sm.Module):
    cache: sm.HiddenState
    hits: sm.State
    width: int = 3


class Net(sm.Module):
    w: sm.ParamState
    cells: list[Cell]
    extra: dict[str, Any]


def make_net() -> Net:
    def cell(i: float) -> Cell:
        return Cell(sm.HiddenState(i, tag=("memory", "short")), sm.State(0, tag="count"))

    return Net(
        sm.ParamState(np.zeros(2), name="weight"),
        [cell(0.0), cell(1.0)],
        {
            "bn": sm.BatchState(0.0, tag="memory"),
            "rng": sm.RandomState(jax.random.key(0)),
            "n": 1.0,
        },
    )


NET = make_net()
ALL = list(sm.states(NET))
PATHS = [
    "w",
    "cells[0].cache",
    "cells[0].hits",
    "cells[1].cache",
    "cells[1].hits",
    "extra['bn']",
    "extra['rng']",
]
HIDDEN = ["cells[0].cache", "cells[1].cache"]
HITS = ["cells[0].hits", "cells[1].hits"]
BN, RNG = ["extra['bn']"], ["extra['rng']"]


FORMS: list[tuple[Any, list[str]]] = [
    (sm.HiddenState, HIDDEN),
    (sm.ShortTermState, HIDDEN),
    (sm.LongTermState, ["w", *BN]),
    (sm.State, PATHS),
    ("memory", [*HIDDEN, *BN]),
    ("count", HITS),
    (..., PATHS),
    (True, PATHS),
    (None, []),
    (False, []),
    (lambda path, state: state.name == "weight", ["w"]),
    ([sm.ParamState, (None, "count")], ["w", *HITS]),
    (f.OfType(sm.RandomState), RNG),
    (f.PathContains("cells"), [*HIDDEN[:1], *HITS[:1], *HIDDEN[1:], *HITS[1:]]),
    (f.PathContains(1), [HIDDEN[1], HITS[1]]),
    (f.Any(sm.ParamState, "count"), ["w", *HITS]),
    (f.All("memory", sm.HiddenState), HIDDEN),
    (f.All("memory", f.Not("short")), BN),
    (f.Not([sm.ParamState, f.PathContains("cells")]), [*BN, *RNG]),
    (f.Everything(), PATHS),
    (f.Nothing(), []),
    (f.Where(lambda net: net.w), ["w"]),
    (f.Where(lambda net: net.cells[-1]), [HIDDEN[1], HITS[1]]),
    (f.Where(lambda net: [cell.hits for cell in net.cells]), HITS),
    (f.Where(lambda net: (net.w, {"a": net.extra["bn"]})), ["w", *BN]),
    (f.All(f.Where(lambda net: net.cells[0]), "count"), HITS[:1]),
]


def chosen(filter: Any, tree: Any = NET) -> list[str]:
    predicate = f.to_predicate(filter, tree)
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=sm.is_state)
    hits = [bool(predicate(path, leaf)) for path, leaf in found if sm.is_state(leaf)]
    return [path for path, hit in zip(sm.states(tree), hits, strict=True) if hit]


def test_forms() -> None:
    assert ALL == PATHS
    for filter, expected in FORMS:
        assert chosen(filter) == sorted(expected, key=PATHS.index), filter
        if expected:
            assert list(sm.states(NET, filter)) == chosen(filter)


def where_w(net: Net) -> Any:
    return net.w


def test_named_filters_are_values() -> None:
    def filters() -> list[Any]:
        return [
            f.OfType(sm.State),
            f.OfType(sm.ParamState),
            f.WithTag("a"),
            f.WithTag("b"),
            f.PathContains("a"),
            f.PathContains(0),
            f.Where(where_w),
            f.Any("a", "b"),
            f.Any("b", "a"),
            f.All("a", "b"),
            f.All(),
            f.Not("a"),
            f.Not(f.Not("a")),
            f.Everything(),
            f.Nothing(),
        ]

    for i, left in enumerate(filters()):
        assert [left == right for right in filters()] == [i == j for j in range(15)]
        assert hash(left) == hash(filters()[i])
        assert left != "a"
        with pytest.raises((AttributeError, TypeError)):
            left.other = "b"
    for form, named in (
        (sm.ParamState, f.OfType(sm.ParamState)),
        (..., f.Everything()),
        (None, f.Nothing()),
        (["a", None], f.Any(f.WithTag("a"), f.Nothing())),
    ):
        assert f.to_predicate(form) == named
        assert f.Not(form) == f.Not(named)


def test_reprs() -> None:
    assert repr(f.OfType(sm.ParamState)) == "OfType(ParamState)"
    assert repr(f.PathContains("bn")) == "PathContains('bn')"
    assert repr(f.Not(f.All("a", ...))) == "Not(All(WithTag('a'), Everything()))"
    assert repr(f.Any(None, sm.State)) == "Any(Nothing(), OfType(State))"
    assert "where_w" in repr(f.Where(where_w))


def test_functions_get_the_real_key_path_and_the_state() -> None:
    seen = {}

    def look(path: Any, state: Any) -> bool:
        seen[path] = state
        return True

    sm.states(NET, look)
    assert all(a is b for a, b in zip(seen.values(), sm.states(NET).values(), strict=True))
    assert list(seen)[:2] == [
        (GetAttrKey("w"),),
        (GetAttrKey("cells"), SequenceKey(0), GetAttrKey("cache")),
    ]
    assert list(seen)[-1] == (GetAttrKey("extra"), DictKey("rng"))


IDLE: list[Any] = [
    "nowhere",
    sm.NonBatchState,
    [],
    lambda path, state: False,
    f.PathContains("mean"),
    f.All("count", sm.HiddenState),
    f.Not(sm.State),
    f.Where(lambda net: net.decoder),
    f.Where(lambda net: net.extra["missing"]),
    f.Where(lambda net: net.w.value),
    f.Where(lambda net: None),
]


def test_a_filter_without_a_match_is_an_error() -> None:
    for idle in IDLE:
        key = tuple(idle) if isinstance(idle, list) else idle
        for call in (
            lambda idle=idle: sm.states(NET, idle),
            lambda idle=idle: sm.partition(NET, ..., idle),
            lambda key=key: sm.place(NET, make_mesh(), state_specs={key: P()}),
        ):
            with pytest.raises(sm.StructureError, match="no state matches") as caught:
                call()
            assert all(path in str(caught.value) for path in PATHS)


def test_everything_and_nothing_may_match_nothing() -> None:
    bare = {"n": 1}
    for filter in (..., True, None, False, f.Everything(), f.Nothing()):
        part, rest = sm.partition(bare, filter)
        assert sm.states(part, filter) == {}
        assert rest == bare
    with pytest.raises(sm.StructureError, match="There are no states"):
        sm.partition(bare, sm.State)


def test_where_needs_a_tree() -> None:
    for filter in (f.Where(where_w), f.Not(f.Where(where_w))):
        predicate = f.to_predicate(filter)
        with pytest.raises(TypeError, match="tree"):
            predicate((GetAttrKey("w"),), NET.w)
