"""NaN, infinities, zeros of both signs and the largest values of a dtype give what NumPy gives in every map.

The reference is NumPy in double precision, rounded to the dtype once.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh

from .base.settings import fewer


pytestmark = pytest.mark.slow


WAYS = ("mesh", "unchecked", "Explicit mesh", "pmap2", "vmap2")
COUNTS = (1, 2, 8)
FLOATS = {name: np.dtype(jnp.dtype(name)) for name in ("float16", "bfloat16", "float32")}
INTEGERS = {name: np.dtype(name) for name in ("int8", "int32")}
DTYPES = FLOATS | INTEGERS
POLICIES = [
    (how, name)
    for how in ("mean", "max", "min", "sum")
    for name in (FLOATS if how == "mean" else DTYPES)
]
WIDTH = 3
# NumPy's own `finfo` does not know bfloat16.
info: Callable[..., Any] = jnp.finfo
FLOAT32 = float(np.finfo(np.float32).eps)
Arrays: TypeAlias = dict[Any, Any]
Fun: TypeAlias = Callable[..., Any]


@functools.cache
def mapped(way: str, count: int, fun: Fun) -> Fun:
    """A mapped function of replicated values and of one row for each shard. Its result is replicated."""
    if way in ("pmap2", "vmap2"):

        def one(same: Any, rows: Any) -> Any:
            return fun(same, jax.tree.map(lambda x: x[None], rows))

        options = {"devices": jax.devices()[:count]} if way == "pmap2" else {}
        by: Any = getattr(sm, way)
        in_lanes: Fun = by(one, in_axes=(None, 0), out_axes=None, axis_name="x", **options)
        return in_lanes
    kind = AxisType.Explicit if way == "Explicit mesh" else AxisType.Auto
    mesh = make_mesh(str(count), kind)
    return sm.shard_map(fun, mesh, (P(), P("x")), P(), check_vma=way != "unchecked")


def write(states: Arrays, rows: Arrays) -> Arrays:
    def new(how: str, state: sm.State, row: Any) -> Any:
        return state.set(state.value + row if how == "sum" else row)

    return {(how, name): new(how, s, rows[how, name][0]) for (how, name), s in states.items()}


@functools.cache
def slopes_of(way: str, count: int) -> Any:
    """Twice the derivatives of the written states with respect to all rows."""
    call = mapped(way, count, write)

    def total(rows: Arrays) -> Any:
        states = {key: sm.State(np.zeros(WIDTH, x.dtype), reduce=key[0]) for key, x in rows.items()}
        after = call(states, rows)
        return [2 * x for x in jax.tree.leaves(after)]

    @jax.jit
    def slopes(rows: Arrays) -> Any:
        values, pull = jax.vjp(total, rows)
        return pull([jnp.ones_like(x) for x in values])[0]

    return slopes


def differentiate(params: Arrays, rows: Arrays) -> Arrays:
    """Losses whose gradients are the rows themselves."""

    def reduced(how: Any, name: str) -> Any:
        def loss(w: Any, row: Any) -> Any:
            return w * row[0, 0], w

        (value, _), grad = sm.value_and_grad(loss, axis_name="x", reduce=how)(
            params[name], rows[how, name]
        )
        return value, grad

    return {key: reduced(*key) for key in rows}


@st.composite
def entries(draw: st.DrawFn, how: str, name: str, count: int) -> Any:
    """A row for each shard. It is drawn from few edge values, so that some values repeat."""
    dtype = DTYPES[name]
    if name in INTEGERS:
        ends = np.iinfo(dtype)
        pool = [0, 1, -1, 3, ends.min, ends.max]
    else:
        most = float(info(dtype).max)
        # If a sum of these overflowed float32, the order of its terms would change the result.
        most /= 32 if name == "float32" or (how, name) == ("sum", "bfloat16") else 1
        finite = [0.0, -0.0, 1.0, -1.5, most, most, -most, most / 2]
        pool = draw(st.sampled_from([finite, [*finite, np.nan, np.inf, -np.inf]]))
    values = st.lists(st.sampled_from(pool), min_size=count * WIDTH, max_size=count * WIDTH)
    return np.array(draw(values)).astype(dtype).reshape(count, WIDTH)


def merged(how: str, x: Any, old: Any) -> Any:
    """What a policy makes of rows in the dtype of `x`."""
    is_float = x.dtype in FLOATS.values()
    wide = x.astype(np.float64 if is_float else np.int64)
    with np.errstate(all="ignore"):
        match how:
            case "mean":
                found = wide.mean(0)
            case "max" | "min":
                found = getattr(wide, how)(0)
                if is_float:
                    # NumPy returns either zero. The positive zero counts as larger.
                    negative = (np.all if how == "max" else np.any)(np.signbit(wide), 0)
                    found = np.where(found == 0, np.where(negative, -0.0, 0.0), found)
            case _:
                # Each shard has rounded its own value.
                new = (wide + old.astype(wide.dtype)).astype(x.dtype).astype(wide.dtype)
                found = old.astype(wide.dtype) + (new - old.astype(wide.dtype)).sum(0)
        return found.astype(x.dtype)


def assert_equal(got: Any, wanted: Any, size: Any, what: Any) -> None:
    """Equal, or for sums of floats as close as rounding in float32 and in the dtype allows."""
    got = np.asarray(got)
    assert got.dtype == wanted.dtype, what
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    if got.dtype in INTEGERS.values() or what[0] in ("max", "min"):
        np.testing.assert_array_equal(a, b, str(what))
        np.testing.assert_array_equal(np.signbit(a)[b == 0], np.signbit(b)[b == 0], str(what))
        return
    eps = info(got.dtype).eps
    near = np.isclose(a, b, rtol=eps, atol=16 * FLOAT32 * size, equal_nan=True)
    assert np.all(near), (what, got, wanted)


def total_size(x: Any) -> Any:
    wide = x.astype(np.float64)
    return np.where(np.isfinite(wide), np.abs(wide), 0).sum(0)


@fewer(0.6)
@given(st.data(), st.sampled_from(WAYS), st.sampled_from(COUNTS))
def test_policies(data: st.DataObject, way: str, count: int) -> None:
    rows = {key: data.draw(entries(*key, count), str(key)) for key in POLICIES}
    old = data.draw(st.sampled_from([0, 1, 5]), "old")
    olds = {(how, name): np.full(WIDTH, old, DTYPES[name]) for how, name in POLICIES}
    states = {key: sm.State(jnp.asarray(olds[key]), reduce=key[0]) for key in POLICIES}
    after = mapped(way, count, write)(states, rows)
    for key in POLICIES:
        wanted = merged(key[0], rows[key], olds[key])
        assert_equal(after[key].value, wanted, total_size(rows[key]), key)


@given(st.data(), st.sampled_from(WAYS), st.sampled_from(COUNTS))
def test_losses_and_gradients(data: st.DataObject, way: str, count: int) -> None:
    keys = [(how, name) for how in ("mean", "sum") for name in FLOATS]
    rows = {key: data.draw(entries(*key, count), str(key)) for key in keys}
    params = {name: np.ones((), dtype) for name, dtype in FLOATS.items()}
    found = mapped(way, count, differentiate)(params, rows)
    for key in keys:
        x = rows[key][:, 0]
        wanted = merged(key[0], x, np.zeros((), x.dtype))
        for got in found[key]:
            assert_equal(got, wanted, total_size(x), key)


@given(st.data(), st.sampled_from(WAYS), st.sampled_from(COUNTS))
def test_derivatives_of_extremes(data: st.DataObject, way: str, count: int) -> None:
    keys = [(how, name) for how in ("max", "min") for name in FLOATS]
    rows = {key: data.draw(entries(*key, count), str(key)) for key in keys}

    slopes = slopes_of(way, count)(rows)
    for how, name in keys:
        x = rows[how, name].astype(np.float64)
        best = getattr(x, how)(0)
        hit = (x == best) | (np.isnan(x) & np.isnan(best))
        wanted = 2 * hit / hit.sum(0)
        slope = np.asarray(slopes[how, name]).astype(np.float64)
        eps = 2 * info(DTYPES[name]).eps
        np.testing.assert_allclose(slope, wanted, rtol=eps, err_msg=str((how, name)))
