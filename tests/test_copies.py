"""Copies that devices hold of one part of an array."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import _errors as errors
from statemesh.testing._equivalent._copies import Copies, copies_of

from .helpers import make_mesh


jnp: Any = jax.numpy
NAN, INF = np.nan, np.inf
REPLICATED = P()


def held(
    copies: list[Any], spec: P = REPLICATED, mesh: Mesh | None = None, shape: Any = None
) -> Any:
    """An array of which each device holds what is given for it."""
    mesh = mesh or make_mesh(str(len(copies)))
    arrays = [
        jax.device_put(x, SingleDeviceSharding(device))
        for x, device in zip(copies, mesh.devices.flat, strict=True)
    ]
    shape = np.shape(copies[0]) if shape is None else shape
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), arrays)


def found(array: Any) -> Copies:
    copies = copies_of("step(...)", array)
    assert copies is not None
    return copies


def spread(*copies: Any) -> list[float]:
    value: list[float] = found(held([jnp.asarray(x) for x in copies])).spread.tolist()
    return value


def test_difference_of_the_largest_and_the_smallest() -> None:
    assert spread([1.0, 5.0], [1.0, 7.0], [3.0, 2.0], [1.0, 2.0]) == [2.0, 5.0]
    assert spread([1.0, 5.0], [1.0, 5.0]) == [0.0, 0.0]
    assert found(held([jnp.array(1.0), jnp.array(1.5)])).spread == 0.5


def test_values_that_are_not_finite() -> None:
    assert spread([NAN, NAN, 1], [NAN, 1, NAN]) == [0, INF, INF]
    assert spread([INF, INF, -INF, INF], [INF, 1, INF, NAN]) == [0, INF, INF, INF]
    assert spread([NAN, 0], [NAN, 1], [NAN, 3], [NAN, -1]) == [0, 4]
    assert spread([0.0], [-0.0]) == [0]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "uint8", "int32"]
)
def test_every_dtype(dtype: str) -> None:
    assert spread(jnp.array([1, 2], dtype), jnp.array([1, 4], dtype)) == [0, 2]


def test_integers_are_exact() -> None:
    low, high = np.int32(-(2**31)), np.int32(2**31 - 1)
    assert spread([low, high], [high, high - 1]) == [2.0**32 - 1, 1]
    assert spread([np.uint32(2**32 - 1)], [np.uint32(0)]) == [2.0**32 - 1]
    assert spread([True, False], [True, True]) == [0, 1]
    with jax.enable_x64(True):
        assert spread(np.array([-(2**63)]), np.array([2**63 - 1])) == [2.0**64]
        assert spread(np.array([2**64 - 1], "uint64"), np.array([0], "uint64")) == [2.0**64]
        assert spread(np.array([2**62]), np.array([2**62 + 1])) == [1]


def test_complex_numbers() -> None:
    assert spread([1 + 1j, 2j], [1 + 3j, 2j], [2 + 1j, 2j], [1 + 1j, 2j]) == [2, 0]
    assert spread([complex(0, NAN)], [0j]) == [INF]


def test_keys() -> None:
    one, two = jax.random.split(jax.random.key(0), 2), jax.random.split(jax.random.key(1), 2)
    two = two.at[0].set(one[0])
    copies = found(held([one, two]))
    assert copies.spread[0] == 0 and copies.spread[1] > 0
    worst = copies.worst()
    assert worst is not None and worst.index == (1,)
    data = [str(jax.random.key_data(keys)[1].tolist()) for keys in (one, two)]
    assert sorted(worst.values) == sorted(data)


def test_parts_of_a_split_array() -> None:
    # Along x the rows are split, along y there are two copies of each row.
    rows = [jnp.full((1, 2), v) for v in (1.0, 1.0, 2.0, 5.0, 3.0, 3.0, 4.0, 4.5)]
    array = held(rows, P("x"), make_mesh("4x2"), (4, 2))
    copies = found(array)
    assert copies.spread.tolist() == [[0, 0], [3, 3], [0, 0], [0.5, 0.5]]
    worst = copies.worst()
    assert worst is not None
    assert worst.index == (1, 0) and worst.axis_names == ("y",)
    assert worst.shards == ("x=1, y=0", "x=1, y=1") and worst.values == ("2", "5")


def test_arrays_without_copies() -> None:
    mesh = make_mesh("4")
    assert copies_of("x", jax.device_put(np.ones(8), NamedSharding(mesh, P("x")))) is None
    assert copies_of("x", jnp.ones(3)) is None
    assert copies_of("x", np.ones(3)) is None
    assert copies_of("x", jax.device_put(1.0, NamedSharding(make_mesh("1"), P()))) is None
    assert copies_of("x", "text") is None


def test_empty_arrays() -> None:
    assert found(held([jnp.ones((0, 2))] * 2)).worst() is None


def test_worst_is_what_exceeds_by_most_what_is_allowed() -> None:
    copies = found(held([jnp.array([0.0, 0.0, 1.0]), jnp.array([8.0, 2.0, 1.0])]))
    assert copies.worst().index == (0,)  # type: ignore[union-attr]
    assert copies.worst([8.0, 0.5, 0.0]).index == (1,)  # type: ignore[union-attr]
    assert copies.worst([4.0, 0.5, 0.0]).index == (1,)  # type: ignore[union-attr]
    assert copies.worst([8.0, 2.0, 0.0]) is None
    assert copies.worst(8.0) is None
    assert copies.worst(NAN) is not None
    not_numbers = found(held([jnp.array([0.0, NAN]), jnp.array([8.0, 1.0])]))
    assert not_numbers.worst(100.0).index == (1,)  # type: ignore[union-attr]
    assert not_numbers.worst([0.0, INF]).index == (0,)  # type: ignore[union-attr]


def test_shards_are_those_farthest_apart() -> None:
    worst = found(held([jnp.array(x) for x in (1.0, -1.0, 3.0, 2.0)])).worst()
    assert worst is not None
    assert worst.shards == ("x=1", "x=2") and worst.values == ("-1", "3") and worst.amount == 4


def test_results_of_an_unchecked_call() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.psum(x.sum(), "x") + jax.lax.axis_index("x"), jax.lax.psum(x.sum(), "x")

    mapped = sm.shard_map(fun, make_mesh("4"), P("x"), (P(), P()), check_vma=False)
    wrong, right = mapped(np.arange(8, dtype=np.float32))
    worst = found(wrong).worst()
    assert worst is not None and found(right).worst() is None
    assert errors.unequal_copies_line(worst) == (
        "  - step(...): float32[] with spec P() has one value for all shards along 'x', but it is 28 on "
        "shard x=0 and 31 on shard x=3 (off by 3)."
    )


def test_text_with_an_index_and_an_allowance() -> None:
    worst = found(held([jnp.array([0.0, 0.0]), jnp.array([0.0, 2.0])])).worst(1e-7)
    assert worst is not None
    assert errors.unequal_copies_line(worst) == (
        "  - step(...): float32[2] with spec P() has one value for all shards along 'x', but at [1] it is "
        "0 on shard x=0 and 2 on shard x=1 (off by 2, 1e-07 would be rounding)."
    )


def test_values_of_other_kinds_as_they_are_shown() -> None:
    def shown(*copies: Any) -> tuple[str, str]:
        worst = found(held([jnp.asarray(x) for x in copies])).worst()
        assert worst is not None
        return worst.values

    assert shown(True, False) == ("True", "False")
    assert shown(3, -4) == ("3", "-4")
    assert shown(1 + 2j, 1j) == ("1+2j", "0+1j")
    assert shown(NAN, INF) == ("nan", "inf")
