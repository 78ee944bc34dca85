"""Reductions that travel together: to the same bits as one by one, in few collectives."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, slow


N = 8
DTYPES = {
    "mean": (*("float16", "bfloat16", "float32"), "complex64"),
    "sum": ("float16", "bfloat16", "float32", "complex64", "int8", "uint32"),
    "max": ("float16", "bfloat16", "float32", "int8", "uint32"),
}
DTYPES["min"] = DTYPES["max"]


def values(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    """For each shard values of all magnitudes, with infinities, NaN and both zeros where there are such."""
    rng = np.random.default_rng(seed)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(rng.integers(0, 100, (N, *shape)), dtype)
    x = rng.normal(size=(N, *shape)) * 10.0 ** rng.integers(-3, 4, (N, *shape))
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    flat = x.reshape(-1)
    for value in special[: flat.size // 4]:
        flat[rng.integers(flat.size)] = value
    return jnp.asarray(x, dtype)


def wide(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype in (np.float16, jnp.bfloat16) else x


# What each policy makes of one array by itself: sums of narrow floats are wide.
ALONE: dict[str, Any] = {
    "mean": lambda old, new: jax.lax.pmean(wide(new), "x").astype(new.dtype),
    "sum": lambda old, new: (wide(old) + jax.lax.psum(wide(new) - wide(old), "x")).astype(
        new.dtype
    ),
    "max": lambda old, new: sm.pmax(new, "x"),
    "min": lambda old, new: sm.pmin(new, "x"),
}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_the_bits_are_those_of_separate_reductions(check_vma: bool) -> None:
    """States of every dtype and policy, beside a function that reduces each array by itself."""
    cases = [
        (how, dtype, shape)
        for how, dtypes in DTYPES.items()
        for dtype in dtypes
        for shape in ((), (0,), (5,), (3, 7))
    ]
    news = [values(dtype, shape, k) for k, (_, dtype, shape) in enumerate(cases)]
    states = [sm.State(jnp.ones(shape, dtype), reduce=how) for how, dtype, shape in cases]

    def write(states: Any, news: Any) -> Any:
        return [s.set(x[0]) for s, x in zip(states, news, strict=True)]

    def alone(olds: Any, news: Any) -> Any:
        return [ALONE[how](s, x[0]) for (how, *_), s, x in zip(cases, olds, news, strict=True)]

    mesh, specs = make_mesh("8", AxisType.Explicit), (P(), P("x"))
    call = sm.shard_map(write, mesh, specs, P(), check_vma=check_vma)
    by_hand = jax.jit(
        jax.shard_map(alone, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )
    placed = sm.place([s.value for s in states], mesh), sm.place(news, mesh, P("x"))
    wanted = by_hand(*placed)
    for state, other, case in zip(call(states, news), wanted, cases, strict=True):
        got, want = np.asarray(state.value), np.asarray(other)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes(), case


def test_large_arrays_go_alone_and_others_in_as_few_as_memory_allows() -> None:
    def collectives(*sizes: int) -> int:
        call = sm.shard_map(
            lambda states, x: [s.set(s.value + x.sum()) for s in states],
            make_mesh(),
            (P(), P("x")),
            P(),
        )
        states = [sm.State(np.zeros(size, np.float32), reduce="mean") for size in sizes]
        text: str = call.lower(states, np.ones(N)).as_text()
        return text.count("stablehlo.all_reduce")

    kib = 2**10 // 4
    assert collectives(*[kib] * 150) == 1
    assert collectives(*[kib] * 150, 128 * kib, 128 * kib) == 3
    # Six times 100 KiB are more than what is copied at once.
    assert collectives(*[100 * kib] * 6) == 2


def test_nothing_is_joined_where_one_device_reduces() -> None:
    """Along an axis of one device too, beside one of several."""

    def copies(mesh: str, spec: Any) -> int:
        call = sm.shard_map(
            lambda states, x: [s.set(s.value + x.sum()) for s in states],
            *(make_mesh(mesh), (P(), spec), P()),
        )
        states = [sm.State(np.zeros(4, np.float32), reduce="mean") for _ in range(3)]
        for after in call(states, np.ones(N, np.float32)):
            np.testing.assert_array_equal(after.value, np.full(4, N / make_mesh(mesh).size))
        text: str = call.lower(states, np.ones(N)).as_text()
        return text.count("stablehlo.concatenate")

    assert copies("8", P("x")) == 1
    assert copies("1", P("x")) == 0


def test_states_that_a_vmap_does_not_batch_stay_unbatched() -> None:
    def fun(model: Any, x: Any, y: Any) -> Any:
        return [model[0].set(x.sum()), model[1].set(y.sum())]

    model = [sm.State(jnp.zeros(()), reduce="mean") for _ in range(2)]
    inner = sm.shard_map(fun, make_mesh(), (P(), P("x"), P("x")), P())
    mapped = jax.vmap(inner, in_axes=(None, 0, None), out_axes=[0, None])
    x = np.arange(3.0 * N, dtype=np.float32).reshape(3, N)
    first, second = mapped(model, x, np.ones(N, np.float32))
    np.testing.assert_array_equal(first.value, x.mean(1))
    assert second.value.shape == () and float(second.value) == 1


@pytest.mark.parametrize(("how", "check_vma"), [("mean", True), ("sum", False), ("max", True)])
def test_derivatives_are_those_of_each_array(how: str, check_vma: bool) -> None:
    def fun(model: Any, x: Any) -> Any:
        return [model[0].set((2 * x).sum(0)), model[1].set((x * x).sum())]

    model = [sm.State(jnp.zeros(2), reduce=how), sm.State(jnp.zeros(()), reduce=how)]
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P(), check_vma=check_vma)
    weights = np.array([3.0, 5.0])
    x = np.random.default_rng(0).normal(size=(N, 2))

    def total(x: Any) -> Any:
        a, b = call(model, x)
        return (a.value * weights).sum() + 7 * b.value

    slopes = jax.grad(total)(jnp.asarray(x, jnp.float32))
    whole = 2 * weights + 14 * x
    if how == "max":
        top = x == x.max(0)
        best = np.square(x).sum(1) == np.square(x).sum(1).max()
        whole = 2 * weights * top + 14 * x * best[:, None]
    np.testing.assert_allclose(slopes, whole / (N if how == "mean" else 1), rtol=1e-5)


# Numbers of float32, from 64 B to 4 MiB: reductions of small arrays are joined, large ones stand alone.
SIZES = (16, 2**14, 2**16, 2**18, 2**20)


@pytest.mark.slow
def test_arrays_of_every_size_are_merged_alike() -> None:
    policies = ("mean", "sum", "max", "split", "gradient")
    cases = list(itertools.product(SIZES, policies))

    def start(size: int) -> Any:
        """Small whole numbers, whose sums and means over a power of two are exact."""
        return (np.arange(size) % 64).astype(np.float32)

    def state(size: int, policy: str) -> sm.State:
        if policy == "gradient":
            return sm.ParamState(start(size))
        if policy == "split":
            return sm.State(start(size), spec=P("x"))
        return sm.State(start(size), reduce=policy)

    def loss(states: Any, x: Any) -> Any:
        params = [s.value for s in states if isinstance(s, sm.ParamState)]
        new = [s if isinstance(s, sm.ParamState) else s.set(s.value + x.sum()) for s in states]
        return sum(((w * x.sum()).sum() for w in params), jnp.float32(0)), new

    def step(states: Any, x: Any) -> Any:
        (_, states), grads = sm.value_and_grad(loss, axis_name="x")(states, x)
        pairs = zip(states, grads, strict=True)
        return [s if g is None else s.set(s.value + g.value) for s, g in pairs]

    mesh = make_mesh("8", AxisType.Explicit)
    call = sm.shard_map(step, mesh, (None, P("x")), P(), donate="states")
    states, shards = [state(*case) for case in cases], np.arange(N, dtype=np.float32)
    for turn in (1, 2):
        states = jax.block_until_ready(call(states, shards))
        for (size, policy), after in zip(cases, states, strict=True):
            added: Any = {
                "mean": shards.mean(),
                "gradient": shards.mean(),
                "sum": shards.sum(),
                "max": shards.max(),
                "split": np.repeat(shards, size // N),
            }[policy]
            np.testing.assert_array_equal(after.value, start(size) + turn * added)
