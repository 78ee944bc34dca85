"""What the strategies promise, to what they shrink, and how often the rare cases come up."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import arrays, filters, meshes, modules, shapes, specs, states

from .deep import ONLY_DRAWN
from .lanes.cases import lane_cases
from .losses.cases import loss_cases
from .picks import matches
from .plain.cases import cases as plain_cases
from .strategies import meshes as plain_meshes
from .trees import Layer, Pair, walk


finfo: Any = jnp.finfo  # The stubs know nothing of those of JAX.
EXAMPLES = 300
MESH = AbstractMesh((4, 2), ("x", "y"))
SPLIT = P(None, ("y", "x"))
DTYPES = (
    np.bool_,
    np.int8,
    np.uint16,
    np.int32,
    np.float16,
    jnp.bfloat16,
    np.float32,
    np.complex64,
)
KINDS: tuple[type[sm.State], ...] = (
    *(sm.State, sm.ShortTermState, sm.HiddenState, sm.NonBatchState),
    *(sm.LongTermState, sm.ParamState, sm.BatchState, sm.RandomState),
)
# Every kind, tag and form of container.
MODEL = Pair(
    {"w": sm.ParamState(1.0, tag="a"), "b": [sm.State(0, name="n"), sm.ParamState(2.0)]},
    [Layer([sm.BatchState(0.0, tag=("a", "b")), 3.0]), (sm.HiddenState(1.0, tag="b"),)],
)


# What has a mesh, in other strategies of this suite.
CASES: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
    "programs of shards": plain_cases,
    "portable programs": lambda: plain_cases(portable=True, smooth=True),
    "lanes on shards": lambda: lane_cases(nested=True),
    "losses": loss_cases,
}


def of_a_model() -> st.SearchStrategy[tuple[Any, Any]]:
    trees = modules(max_states=4)
    return trees.flatmap(lambda tree: st.tuples(st.just(tree), filters(tree=tree)))


STRATEGIES: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
    "meshes": meshes,
    "specs": lambda: specs(shape=(8, 16), mesh=MESH),
    "narrow specs": lambda: specs(shape=(6, 1, 4), mesh=MESH),
    "shapes": lambda: shapes(spec=SPLIT, mesh=MESH, max_rank=3),
    "arrays": lambda: arrays(shape=st.sampled_from([(), (8, 2), (0, 3)])),
    "arrays of any dtype": lambda: arrays(shape=(8,), dtype=st.sampled_from(DTYPES)),
    "states": states,
    "placed states": lambda: states(shapes=st.just((2, 3)), mesh=MESH),
    "modules": modules,
    "shared modules": lambda: modules(min_states=1, shared=True),
    "filters": lambda: filters(tree=MODEL),
    "filters of a model": of_a_model,
    "plain meshes": plain_meshes,
    **CASES,
}


@functools.cache
def drawn(name: str, count: int = EXAMPLES) -> list[Any]:
    """The first examples of a strategy, the same in every run."""
    found: list[Any] = []

    @settings(max_examples=20, **ONLY_DRAWN)
    @given(STRATEGIES[name]())
    def gather(value: Any) -> None:
        found.append(value)

    # Many short runs: one long run varies a few of its examples over and over.
    for k in range(count // 20):
        seed(k)(gather)()
    return found


def test_meshes_are_of_the_first_devices() -> None:
    for mesh in drawn("meshes"):
        assert list(mesh.devices.flat) == jax.devices()[: mesh.size]
        assert mesh.axis_names == ("x", "y", "z")[: len(mesh.axis_names)]
        assert all(n & (n - 1) == 0 for n in mesh.shape.values())
        assert len(set(mesh.axis_types)) == 1


@pytest.mark.parametrize(("name", "shape"), [("specs", (8, 16)), ("narrow specs", (6, 1, 4))])
def test_specs_divide_their_shape(name: str, shape: tuple[int, ...]) -> None:
    for spec in drawn(name):
        # JAX refuses one that does not, or that names an axis twice.
        NamedSharding(MESH, spec).shard_shape(shape)


def test_shapes_are_divided_by_their_spec() -> None:
    for shape in drawn("shapes"):
        part = NamedSharding(MESH, SPLIT).shard_shape(shape)
        assert len(part) in (2, 3) and set(part) <= {1, 2, 3}


def test_arrays_are_finite_normal_between_their_bounds_and_held_by_jax_as_they_are() -> None:
    for x in drawn("arrays") + drawn("arrays of any dtype"):
        assert type(x) is np.ndarray
        y = np.asarray(jnp.asarray(x))
        # To the bit: -0.0 is not 0.0.
        assert (y.dtype, y.tobytes()) == (x.dtype, x.tobytes())
        for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
            wide = part.astype(np.float64)
            assert (abs(wide) <= 4).all()
            if jnp.issubdtype(part.dtype, jnp.floating):
                least = float(finfo(part.dtype).smallest_normal)
                assert ((wide == 0) | (abs(wide) >= least)).all()


@pytest.mark.slow
def test_states_have_values_that_their_policy_merges() -> None:
    for state in drawn("states"):
        dtypes = [x.dtype for x in jax.tree.leaves(state.value)]
        assert dtypes and type(state) in KINDS and state.tag <= {"a", "b"} and state.spec is None
        # Any other is refused already by `State`.
        assert state.reduce != "mean" or all(jnp.issubdtype(d, jnp.inexact) for d in dtypes)


@pytest.mark.slow
def test_a_shard_holds_what_was_asked_for_of_a_placed_state() -> None:
    is_spec = lambda node: node is None or isinstance(node, P | sm.PerShard)
    for state in drawn("placed states"):
        wanted = () if isinstance(state, sm.RandomState) else (2, 3)

        def check(spec: Any, value: Any, wanted: Any = wanted) -> None:
            for x in jax.tree.leaves(value):
                if isinstance(spec, sm.PerShard):
                    shards = math.prod(MESH.shape[name] for name in spec.axis_names)
                    assert x.shape == (shards, *wanted)
                else:
                    assert NamedSharding(MESH, spec or P()).shard_shape(x.shape) == wanted

        jax.tree.map(check, state.spec, state.value, is_leaf=is_spec)


@pytest.mark.slow
def test_modules_hold_as_many_states_as_were_asked_for_and_leaves_with_a_hash() -> None:
    for module in drawn("modules"):
        assert isinstance(module, sm.Module) and len(sm.states(module)) <= 5
        leaves = [leaf for _, leaf in walk(module) if not sm.is_state(leaf)]
        assert all(
            isinstance(leaf, jax.Array | np.ndarray) or hash(leaf) is not None for leaf in leaves
        )
    assert all(map(sm.states, drawn("shared modules")))


def nodes(tree: Any) -> Iterator[Any]:
    """All states and modules of a tree, as often as they stand in it."""
    if sm.is_state(tree) or isinstance(tree, sm.Module):
        yield tree
    if isinstance(tree, dict):
        children = list(tree.values())
    elif isinstance(tree, list | tuple):
        children = list(tree)
    elif isinstance(tree, sm.Module):
        children = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        children = []
    yield from itertools.chain.from_iterable(map(nodes, children))


def stands_twice(tree: Any, of: Callable[[Any], bool] = lambda node: True) -> bool:
    places = [id(node) for node in nodes(tree) if of(node)]
    return len(set(places)) < len(places)


@pytest.mark.slow
def test_something_is_shared_where_asked_for_and_nowhere_else() -> None:
    assert all(map(stands_twice, drawn("shared modules")))
    assert not any(map(stands_twice, drawn("modules")))


def is_idle(filter: Any) -> bool:
    """Whether a filter says outright that it matches nothing."""
    return filter is None or filter is False or isinstance(filter, sm.filters.Nothing)


@pytest.mark.slow
def test_filters_match_a_state_of_their_tree() -> None:
    pairs = [(MODEL, filter) for filter in drawn("filters", 100)]
    pairs += drawn("filters of a model", 60)
    for tree, filter in pairs:
        found = [(path, unit) for path, unit in walk(tree) if sm.is_state(unit)]
        hits = sum(matches(filter, path, state) for path, state in found)
        assert len(sm.states(tree, filter)) == hits
        assert (hits == 0) == (is_idle(filter) or not found)


SIMPLEST: dict[str, tuple[st.SearchStrategy[Any], str]] = {
    "meshes": (
        meshes().map(lambda mesh: (*mesh.shape.items(), *mesh.axis_types)),
        "(('x', 1), Auto)",
    ),
    "specs": (specs(shape=(8, 8), mesh=MESH), "P()"),
    "shapes": (shapes(spec=P("x"), mesh=MESH), "(4,)"),
    "floats": (arrays(shape=(2,)).map(np.ndarray.tolist), "[0.0, 0.0]"),
    "bounded": (arrays(shape=2, min_value=1.5).map(np.ndarray.tolist), "[2.0, 2.0]"),
    "integers": (arrays(shape=(1, 2), dtype=np.int8).map(np.ndarray.tolist), "[[0, 0]]"),
    "complex": (arrays(shape=(), dtype="complex64").map(np.ndarray.tolist), "0j"),
    "states": (states(), "State(float32(0.0))"),
    "streams": (states(kinds=[sm.RandomState]), "RandomState(key<fry>[])"),
    "modules": (modules(), "Pair(left=None, right=[])"),
    "modules with a state": (modules(min_states=1), "Pair(left=State(float32(0.0)), right=[])"),
    "filters": (filters(tree=MODEL), "Ellipsis"),
}


@pytest.mark.parametrize("name", SIMPLEST)
def test_it_shrinks_to_the_simplest(name: str) -> None:
    strategy, text = SIMPLEST[name]
    alone = settings(max_examples=100, derandomize=True, database=None)
    assert repr(find(strategy, lambda value: True, settings=alone)) == text


def entries(spec: P) -> list[tuple[str, ...]]:
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]


def has_negative_zero(x: Any) -> bool:
    return bool((np.signbit(x) & (x == 0)).any())


def shards_differ(x: Any) -> bool:
    """Whether seven of eight shards hold seven different things."""
    return x.shape == (8, 2) and len({row.tobytes() for row in x}) == 7


def alike(module: Any) -> bool:
    """Whether two states differ in nothing but their path (and the numbers in them)."""
    shown = [repr(state) for state in sm.states(module).values()]
    return len(set(shown)) < len(shown)


def depth(filter: Any) -> int:
    """How deep combinators stand in one another."""
    inner = filter if isinstance(filter, list | tuple) else getattr(filter, "filters", None)
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def mean(state: sm.State) -> bool:
    return state.reduce == "mean"


# Each case, the strategy, how many of its examples show it at least (about half of what was seen), and how
# it is known.
REACHED: list[tuple[str, str, int, Callable[[Any], Any]]] = [
    ("one device", "meshes", 1, lambda mesh: mesh.size == 1),
    ("all devices", "meshes", 10, lambda mesh: mesh.size == jax.device_count()),
    ("three axes", "meshes", 13, lambda mesh: len(mesh.shape) == 3),
    ("Explicit axes", "meshes", 11, lambda mesh: AxisType.Explicit in mesh.axis_types),
    ("Auto axes", "meshes", 11, lambda mesh: AxisType.Auto in mesh.axis_types),
    ("nothing split", "specs", 1, lambda spec: not any(entries(spec))),
    ("two axes on one", "specs", 4, lambda spec: max(map(len, entries(spec)), default=0) == 2),
    ("in another order", "specs", 1, lambda spec: ("y", "x") in entries(spec)),
    ("only a later axis split", "narrow specs", 24, lambda spec: entries(spec)[:2] == [(), ()]),
    ("an axis more than the spec has", "shapes", 8, lambda shape: len(shape) == 3),
    ("-0.0", "arrays", 18, has_negative_zero),
    ("scalars", "arrays", 17, lambda x: x.shape == ()),
    ("no numbers at all", "arrays", 18, lambda x: x.size == 0),
    ("very small numbers", "arrays", 44, lambda x: ((x != 0) & (abs(x) < 1e-30)).any()),
    ("seven different shards", "arrays", 12, shards_differ),
    *[
        (f"dtype {np.dtype(d)}", "arrays of any dtype", 6, lambda x, d=d: x.dtype == d and x.any())
        for d in DTYPES
    ],
    *[
        (kind.__name__, "states", 11, lambda state, kind=kind: type(state) is kind)
        for kind in KINDS
    ],
    ("a tree of arrays", "states", 32, lambda state: len(jax.tree.leaves(state)) == 3),
    ("two tags", "states", 33, lambda state: len(state.tag) == 2),
    ("a mean of bfloat16", "states", 3, lambda s: mean(s) and "bfloat16" in repr(s)),
    ("a mean of complex numbers", "states", 1, lambda s: mean(s) and "complex64" in repr(s)),
    ("placed whole", "placed states", 37, lambda s: s.spec is None),
    ("placed by a spec", "placed states", 16, lambda s: isinstance(s.spec, P)),
    ("placed per shard", "placed states", 12, lambda s: isinstance(s.spec, sm.PerShard)),
    ("each array its own way", "placed states", 33, lambda s: isinstance(s.spec, dict)),
    ("a stream per shard", "placed states", 3, lambda s: s.spec and isinstance(s, sm.RandomState)),
    ("no state", "modules", 15, lambda m: not sm.states(m)),
    ("many states", "modules", 10, lambda m: len(sm.states(m)) == 5),
    ("alike in all but path", "modules", 1, alike),
    ("a function", "modules", 36, lambda m: any(leaf is jnp.tanh for _, leaf in walk(m))),
    ("a string", "modules", 4, lambda m: any(type(leaf) is str for _, leaf in walk(m))),
    ("a NumPy array", "modules", 32, lambda m: any(type(x) is np.ndarray for _, x in walk(m))),
    ("None", "modules", 42, lambda m: "None" in repr(m)),
    ("a dictionary", "modules", 50, lambda m: "{" in repr(m)),
    ("three deep", "modules", 12, lambda m: any(len(path) > 3 for path, _ in walk(m))),
    ("a State in two places", "shared modules", 100, lambda m: stands_twice(m, sm.is_state)),
    ("matches nothing", "filters", 1, is_idle),
    *[
        (f"nested {n} deep", "filters", 10, lambda filter, n=n: depth(filter) == n)
        for n in range(4)
    ],
    ("a list", "filters", 3, lambda filter: isinstance(filter, list)),
    ("a tuple", "filters", 4, lambda filter: isinstance(filter, tuple)),
    ("a type", "filters", 4, lambda filter: isinstance(filter, type)),
    ("a tag", "filters", 1, lambda filter: isinstance(filter, str)),
    ("a function of path and state", "filters", 20, lambda f: "path, state" in repr(f)),
    *[
        (name, "filters", 7, lambda filter, name=name: f"{name}(" in repr(filter))
        for name in sorted(set(sm.filters.__dict__) - set(dir(object())))
        if isinstance(getattr(sm.filters, name), type)
    ],
]


def is_explicit(case: Any) -> bool:
    """Whether a mesh, or that of a case, has Explicit axes."""
    case = getattr(case, "case", case)
    mesh = getattr(case, "mesh", case)
    return AxisType.Explicit in mesh.axis_types if isinstance(mesh, Mesh) else bool(mesh.explicit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["meshes", "plain meshes", *CASES])
def test_explicit_axes_are_drawn_as_often_as_auto_ones(name: str) -> None:
    kinds = [is_explicit(case) for case in drawn(name, 60)]
    assert 0.3 < np.mean(kinds) < 0.7, f"{sum(kinds)} of {len(kinds)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "least", "shows"), REACHED, ids=[row[0] for row in REACHED]
)
def test_it_reaches_the_rare_case(
    case: str, name: str, least: int, shows: Callable[[Any], Any]
) -> None:
    seen = sum(bool(shows(value)) for value in drawn(name))
    assert seen >= least, f"{case}: {seen} of {EXAMPLES}"
