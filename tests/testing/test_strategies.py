"""The strategies of `statemesh.testing`: what one may ask of them, and what they refuse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import arrays, emulate, filters, meshes, modules, shapes, specs, states
from tests.helpers import assert_says, make_mesh


MESH = AbstractMesh((4, 2), ("x", "y"))
SETTINGS = settings(max_examples=500, derandomize=True, database=None, deadline=None)
ANY: Callable[[Any], bool] = lambda value: True


def first(strategy: st.SearchStrategy[Any], shows: Callable[[Any], Any] = ANY) -> Any:
    """The simplest value that shows something."""
    return find(strategy, lambda value: bool(shows(value)), settings=SETTINGS)


# Others are in the table of all keywords.
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: meshes(axis_names=()),
        sm.StatemeshError,
        "meshes: axis_names is empty. Name an axis, or leave it out for axes called 'x', 'y' and 'z'.",
    ),
    (
        lambda: shapes(spec=P(None, "z"), mesh=MESH),
        sm.SpecError,
        "shapes: P(None, 'z') names 'z', and the mesh has the axes 'x', 'y'.",
    ),
    (
        lambda: first(arrays(shape=2, dtype=st.just("complex128"))),
        sm.StatemeshError,
        "arrays: without jax_enable_x64, JAX makes complex64 of dtype complex128. Ask for complex64, or set "
        "jax.config.update('jax_enable_x64', True).",
    ),
    (
        lambda: first(arrays(shape=2, dtype="U3")),
        sm.StatemeshError,
        "arrays: JAX has no arrays of dtype <U3.",
    ),
    (
        lambda: first(arrays(shape=2, dtype=np.uint8, min_value=-5, max_value=-3)),
        sm.StatemeshError,
        "arrays: dtype uint8 has no number from -5 to -3 that is finite and not subnormal.",
    ),
    (
        lambda: first(arrays(shape=2, dtype=np.int8, min_value=0.2, max_value=0.8)),
        sm.StatemeshError,
        "arrays: dtype int8 has no number from 0.2 to 0.8 that is finite and not subnormal.",
    ),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_it_says(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    assert_says(make, error, text)


def test_strategies_are_made_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("JAX was asked for its devices")

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.setattr(jax.random, "key", refuse)
    meshes(max_devices=1000)
    made = [arrays(shape=2), states(mesh=MESH), modules(shared=True), specs(shape=(8,), mesh=MESH)]
    assert all(isinstance(strategy, st.SearchStrategy) for strategy in made)
    with pytest.raises(AssertionError, match="asked for"):
        first(meshes())


def test_meshes_have_the_axes_that_were_asked_for() -> None:
    assert first(meshes(axis_names="data", max_devices=6), lambda mesh: mesh.size > 3).shape == {
        "data": 4
    }
    asked = meshes(axis_names=["a", "b"], max_devices=2, axis_types=[AxisType.Explicit])
    mesh = first(asked, lambda mesh: mesh.shape["b"] == 2)
    assert dict(mesh.shape) == {"a": 1, "b": 2}
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_specs_and_shapes_are_those_that_were_asked_for() -> None:
    # A mesh with devices will do too.
    crossed = lambda spec: tuple(spec) == ("y", "x")
    assert first(specs(shape=[2, 4], mesh=make_mesh("4x2")), crossed) == P("y", "x")
    asked = shapes(spec=P(("x", "y")), mesh=MESH, min_rank=2, max_rank=3, max_side=5)
    assert first(asked, lambda shape: shape[0] == 40) == (40, 1)
    assert first(asked, lambda shape: len(shape) == 3 and shape[2] == 5) == (8, 1, 5)


def test_arrays_of_drawn_shapes_and_dtypes() -> None:
    drawn = arrays(
        shape=st.sampled_from([(), (3,)]), dtype=st.sampled_from(["int32", jnp.bfloat16])
    )
    x = first(drawn, lambda x: x.ndim and x.dtype == jnp.bfloat16)
    assert x.shape == (3,) and not x.any()


def test_bounds_are_those_that_a_dtype_holds() -> None:
    assert first(arrays(shape=(), dtype="uint8"), lambda x: x == 4) == 4
    wide = arrays(shape=(), dtype="int8", min_value=-1000, max_value=float("inf"))
    assert first(wide, lambda x: x > 126) == 127
    # The next number of bfloat16 below is 3.296875.
    assert first(arrays(shape=(), dtype=jnp.bfloat16, min_value=3.3, max_value=3.32)) == 3.3125
    largest = arrays(shape=(), dtype=np.float16, min_value=65_000, max_value=float("inf"))
    assert first(largest, lambda x: x > 65_400) <= np.float16(65_504)


def test_wide_types_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        tenth = arrays(shape=(), dtype=np.float64, min_value=0.1, max_value=0.1)
        assert first(tenth) == 0.1 and first(tenth).dtype == np.float64
        big = arrays(shape=(1,), dtype=np.int64, min_value=2**40, max_value=2**41)
        assert first(big).tolist() == [2**40]
        x = first(arrays(shape=(), dtype=np.complex128), lambda x: x.imag > 0.3)
        assert x.dtype == np.complex128


class Total(sm.BatchState):
    """A kind of a user's own."""

    __slots__ = ()


class Stream(sm.RandomState):
    """A random stream of a user's own."""

    __slots__ = ()


def merged(old: Any, new: Any, axis_names: Any) -> Any:
    return new


def test_states_of_a_users_own_kinds() -> None:
    asked = states(kinds=[Total, Stream], tags=("t",), reduces=[merged], mesh=MESH)
    total = first(asked)
    assert type(total) is Total and total.reduce is merged
    stream = first(asked, lambda state: type(state) is Stream and state.spec and state.tag)
    assert stream.tag == {"t"} and stream.spec == sm.PerShard("x") and stream.value.shape == (4,)


def test_states_of_given_shapes_dtypes_and_policies() -> None:
    asked = states(
        kinds=[sm.State], shapes=st.just((3, 1)), dtypes=st.just("int8"), tags=(), reduces=("mean",)
    )
    # There is no mean of integers.
    assert repr(first(asked)) == "State(int8[3,1])"
    tree = first(asked, lambda state: isinstance(state.value, dict))
    assert repr(tree) == "State({'a': int8[3,1], 'b': (int8[3,1], int8[3,1])})"


def test_modules_of_given_states_and_leaves() -> None:
    asked = modules(
        states=st.just(sm.State(1.0, name="mine")), leaves=st.just({1}), min_states=1, max_states=1
    )
    module = first(asked, lambda module: "{1}" in repr(module))
    assert repr(module) == "Pair(left=State(float32(1.0), name='mine'), right=[{1}])"


def test_a_mapped_call_takes_leaves_that_cannot_be_hashed() -> None:
    module = first(modules(leaves=st.just({1}), min_states=1), lambda module: "{1}" in repr(module))
    step = sm.shard_map(
        lambda module, x: (x + len(module.right[0]), module),
        make_mesh("4"),
        (None, P("x")),
        (P("x"), P()),
    )
    calls: list[Callable[..., Any]] = [step, lambda *args: emulate(step, *args)]
    with pytest.warns(sm.RetracedWarning):
        results = [call(module, np.arange(4.0, dtype=np.float32)) for call in calls]
    for y, again in results:
        assert y.tolist() == [1, 2, 3, 4] and again.right == [{1}]


TREE = {"w": sm.ParamState(1.0), "n": [sm.State(0, tag="count", name="n")]}


@pytest.mark.parametrize(
    ("shows", "text"),
    [
        (ANY, "Ellipsis"),
        (lambda filter: isinstance(filter, str), "'count'"),
        (lambda filter: "'n'][0]" in repr(filter), "Where(where=lambda tree: tree['n'][0])"),
        (lambda filter: "state.name" in repr(filter), "lambda path, state: state.name == 'n'"),
        (lambda filter: isinstance(filter, sm.filters.PathContains), "PathContains('n')"),
        (lambda filter: filter is None, "None"),
    ],
)
def test_filters_print_as_they_are_typed(shows: Callable[[Any], bool], text: str) -> None:
    assert repr(first(filters(tree=TREE), shows)) == text


def test_filters_are_equal_where_they_say_the_same() -> None:
    def where(tree: Any) -> Any:
        return first(filters(tree=tree), lambda filter: isinstance(filter, sm.filters.Where))

    assert where(TREE) == where({"w": sm.State(2.0)}) and hash(where(TREE)) == hash(where(TREE))


def test_filters_of_a_tree_without_states() -> None:
    idle = filters(tree=[1.0, None])
    assert first(idle) is ... and first(idle, lambda filter: filter is None) is None
    with pytest.raises(Exception, match="lambda"):
        first(idle, lambda filter: isinstance(filter, str))
