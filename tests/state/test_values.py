"""The allowed values of a State, and how a written value conforms to the old one."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


structure: Any = jax.tree.structure


NUMBERS: list[tuple[Any, Any]] = [
    (True, np.bool_),
    (3, np.int32),
    (1.5, np.float32),
    (1j, np.complex64),
    (np.bool_(True), np.bool_),
    (np.uint16(3), np.uint16),
    (np.float16(1.5), np.float16),
    (np.float64(1.5), np.float32),
    (np.int64(3), np.int32),
    (np.complex128(1j), np.complex64),
    (np.arange(6, dtype=np.uint8).reshape(2, 3), np.uint8),
    (np.zeros((0, 2)), np.float32),
    (np.ones(2, jnp.bfloat16), jnp.bfloat16),
    (np.ones(2, jnp.float8_e4m3fn), jnp.float8_e4m3fn),
    (np.arange(12.0).reshape(3, 4)[::2, ::-1], np.float32),
]


def is_strong(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.weak_type


def test_numbers_become_strong_arrays() -> None:
    for given, dtype in NUMBERS:
        nested = sm.State({"a": given, "b": [(given, None)]}).value
        for value in (
            sm.State(given).value,
            sm.State(0).replace(value=given).value,
            nested["a"],
            nested["b"][0][0],
        ):
            assert is_strong(value)
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, np.asarray(given).astype(dtype))
        assert nested["b"][0][1] is None


def test_python_numbers_are_wide_under_x64() -> None:
    with jax.enable_x64(True):
        assert sm.State(1.5).value.dtype == np.float64
        assert sm.State(3).value.dtype == np.int64
        assert sm.State(np.float32(1)).value.dtype == np.float32
        assert sm.State(np.float64(1)).value.dtype == np.float64


def test_weak_arrays_become_strong() -> None:
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert is_strong(sm.State(weak).value)
    assert is_strong(sm.State(0.0).set(weak).value)
    assert is_strong(sm.State(0).replace(value=weak).value)
    assert is_strong(jax.jit(lambda x: sm.State(x * 1.0))(1.0).value)
    assert is_strong(jax.jit(lambda s, x: s.set(x * 2))(sm.State(0.0), 1.0).value)


def test_arrays_of_jax_are_kept_and_those_of_numpy_copied() -> None:
    x, key = jnp.ones(3), jax.random.key(0)
    assert sm.State(x).value is x
    assert sm.State({"k": key}).value["k"] is key
    assert sm.State(jnp.zeros(3)).set(x).value is x
    host = np.zeros(64, np.float32)
    state, written = sm.State(host), sm.State(np.ones(64, np.float32)).set(host)
    host[:] = 7
    np.testing.assert_array_equal(state.value, 0)
    np.testing.assert_array_equal(written.value, 0)


NARROWED: list[tuple[Any, Any, Any]] = [
    (np.float16(0), 1, np.float16),
    (np.float16(0), 1.5, np.float16),
    (jnp.bfloat16(0), 1.5, jnp.bfloat16),
    (np.float32(0), jnp.asarray(2), np.float32),
    (np.float16(0), jnp.asarray(2.5), np.float16),
    (np.zeros(3, np.float16), jax.lax.full((3,), 2.0), np.float16),
    (np.complex64(0), 2j, np.complex64),
    (np.int8(0), 7, np.int8),
    (np.int32(0), 2.0, np.int32),
    (np.int32(0), True, np.int32),
    (np.bool_(False), True, np.bool_),
    (np.uint32(0), 2**32 - 1, np.uint32),
]


def test_python_and_weak_numbers_take_the_old_dtype() -> None:
    for old, new, dtype in NARROWED:
        value = sm.State(old).set(new).value
        assert is_strong(value)
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, np.asarray(new).astype(dtype))


OTHERS: list[tuple[Any, Any]] = [
    (0, 1.5),
    (0, float("nan")),
    (0.0, 1j),
    (False, 2),
    (0, np.float32(2)),
    (np.float16(0), np.float32(2)),
    (0, np.int8(2)),
    (np.zeros(3), 1.0),
    (0.0, np.zeros(1, np.float32)),
    (np.zeros(3), np.zeros((3, 1), np.float32)),
    (jax.random.key(0), jax.random.PRNGKey(0)),
    (0, jax.random.key(0)),
    (jax.random.key(0), jax.random.key(0, impl="rbg")),
]
PAIR = {"a": 1.0, "b": 2.0}
OTHER_STRUCTURES: list[Any] = [
    {"a": 1.0},
    PAIR | {"c": 3.0},
    [1.0, 2.0],
    {"a": 1.0, "b": None},
    None,
]


def test_another_shape_dtype_or_structure_is_refused() -> None:
    for old, new in OTHERS:
        with pytest.raises(sm.StructureError, match="different shape or dtype"):
            sm.State(old).set(new)
    for new in OTHER_STRUCTURES:
        with pytest.raises(sm.StructureError, match="structure"):
            sm.State(PAIR).set(new)


def test_set_under_a_trace_checks_too() -> None:
    with pytest.raises(sm.StructureError, match="different shape or dtype"):
        jax.jit(lambda s, x: s.set(x))(sm.State(0), jnp.ones(()) * 1.5)
    with pytest.raises(sm.StructureError, match="different shape or dtype"):
        jax.vmap(lambda s: s.set(s.value[:1]))(sm.State(np.zeros((2, 3))))
    done = jax.jit(lambda s: s.set(s.value + 1))(sm.State(np.int8(1)))
    assert (done.value.dtype, int(done.value)) == (np.int8, 2)


def test_set_of_what_was_there_is_equal() -> None:
    state = sm.State({"a": np.ones(2, np.float16), "b": [1, True, 2.5]}, tag="t")
    same = state.set(state.value)
    assert structure(same) == structure(state)
    assert all(map(operator.is_, jax.tree.leaves(same), jax.tree.leaves(state)))


def test_policy_without_meaning_for_the_dtype_is_refused() -> None:
    makers: list[Callable[[Any, Any], Any]] = [
        lambda reduce, value: sm.State(value, reduce=reduce),
        lambda reduce, value: sm.State(value).replace(reduce=reduce),
        lambda reduce, value: sm.State(1.0, reduce=reduce).replace(value=value),
    ]
    cases: list[tuple[Any, Any]] = [
        ("mean", 1),
        ("mean", {"a": 1.0, "b": [1]}),
        ("sum", True),
        ("max", 1j),
        ("min", True),
        ("max", jax.random.key(0)),
    ]
    for reduce, value in cases:
        for make in makers:
            with pytest.raises(sm.StatemeshError, match="dtype"):
                make(reduce, value)
        assert sm.State(value, reduce=lambda old, new, axis_names: new).reduce is not None


def test_a_leaf_that_is_no_array_is_refused() -> None:
    no_arrays = ["text", jnp.tanh, object(), np.array(["a"]), np.array([None])]
    no_arrays += [np.datetime64("2020-01-01"), jax.ShapeDtypeStruct((2,), np.float32)]
    state = sm.ParamState(1.0)
    refused = [(leaf, "array") for leaf in no_arrays]
    refused += [(held, "cannot hold a State") for held in (state, [state], {"a": (1, state)})]
    makers: list[Callable[[Any], Any]] = [
        sm.State,
        lambda v: sm.State({"a": 1, "b": v}),
        sm.State(0).set,
        lambda v: sm.State(0).replace(value=v),
    ]
    for leaf, text in refused:
        for make in makers:
            with pytest.raises(TypeError, match=text):
                make(leaf)


def test_one_numpy_array_with_x64_on_and_off() -> None:
    x, mesh = np.arange(8.0), make_mesh()
    calls = [
        sm.shard_map(lambda x: x * 2, mesh, P("x"), P("x")),
        sm.pmap2(lambda x: x * 2, "x"),
    ]
    for on in (True, False, True, False):
        with jax.enable_x64(on):
            expected = jax.dtypes.canonicalize_dtype(x.dtype)
            for call in calls:
                y = call(x)
                assert y.dtype == expected
                np.testing.assert_array_equal(y, x.astype(expected) * 2)
