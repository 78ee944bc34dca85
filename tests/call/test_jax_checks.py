"""Programs run under the checks that JAX can be asked for: of keys, ranks, dtypes, NaN, types and tracers."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import nn
from tests.helpers import slow


@contextlib.contextmanager
def of_programs() -> Iterator[None]:
    with jax.debug_key_reuse(True), jax.checking_leaks():
        yield


@contextlib.contextmanager
def of_operations() -> Iterator[None]:
    """The checks that look at one operation by itself."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
        jax.enable_checks(True),
    ):
        yield


# Other tests run the same single operations.
each_check = pytest.mark.parametrize("checks", [of_programs, slow(of_operations)])


def drawn(rng: sm.RandomState, x: Any) -> Any:
    key, rng = rng.split()
    several, rng = rng.split(2)
    rows, rng = rng.rows(len(x), "data")
    # One key of each is drawn from once, so that a key which comes twice would be refused.
    numbers = [jax.random.normal(k) for k in (key, several[0], several[1])]
    return x + jax.vmap(jax.random.normal)(rows)[:, None] + sum(numbers), rng


def branched(rng: sm.RandomState, x: Any) -> Any:
    rng = jax.lax.cond(x.sum() > 0, lambda rng: drawn(rng, x)[1], lambda rng: rng, rng)
    rng, y = sm.scan(lambda rng, x: (drawn(rng, x[None])[1], x), rng, x)
    return y, rng


def cached(cache: nn.KVCache, x: Any) -> Any:
    tokens = jnp.ones((2, 2, 3))
    (keys, _, mask), cache = cache(tokens, 2 * tokens)
    return x + keys.sum() + mask.sum().astype(x.dtype), cache


def trained(model: Any, x: Any) -> Any:
    def loss(model: Any, x: Any) -> Any:
        rows, rng = model["rng"].rows(len(x), "data")
        key, rng = rng.split()
        noise = jax.vmap(jax.random.normal)(rows)[:, None] + jax.random.normal(key)
        seen = model["seen"].set(model["seen"].value + x.sum())
        y = (x + noise) @ model["w"].value
        return jnp.square(y).mean(), {**model, "rng": rng, "seen": seen}

    (value, model), grads = sm.value_and_grad(loss, axis_name="data", microbatches=2)(model, x)
    return x + value + grads["w"].value.sum(), model


def key() -> Any:
    return jax.random.key(0)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "draws in branches and loops": (branched, lambda: sm.RandomState(key())),
    "BatchNorm": (operator.call, lambda: nn.BatchNorm(3, axis_name="data")),
    "KVCache": (cached, lambda: nn.KVCache(8, 2, 3)),
    "gradients": (trained, lambda: trainable()),
}


def trainable() -> dict[str, sm.State]:
    seen = sm.State(0.0, reduce="sum")
    return {"w": sm.ParamState(jnp.ones(3)), "seen": seen, "rng": sm.RandomState(key())}


@pytest.mark.slow
@each_check
def test_mapped_over_shards(checks: Any) -> None:
    """Three calls in a row of all programs at once."""
    kind = AxisType.Explicit if checks is of_programs else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = np.arange(48, dtype=np.float32).reshape(16, 3) / 8

    def fun(models: Any, x: Any) -> Any:
        pairs = {name: PROGRAMS[name][0](model, x) for name, model in models.items()}
        results = {name: y for name, (y, _) in pairs.items()}
        return results, {name: model for name, (_, model) in pairs.items()}

    models = {name: make() for name, (_, make) in PROGRAMS.items()}
    check_vma = checks is of_programs
    specs: Any = ((None, P("data")), (P("data"), P()))
    mapped = sm.shard_map(fun, mesh, *specs, check_vma=check_vma)
    with checks():
        for _ in range(3):
            results, models = mapped(models, x)
    assert all(y.shape == x.shape for y in results.values())


class Noisy(sm.Module):
    rng: sm.RandomState
    noise: sm.State | None = None

    def init_state(self) -> "Noisy":
        drawn, rng = self.rng.split()
        return self.replace(rng=rng, noise=sm.State(jax.random.normal(drawn)))


@pytest.mark.slow
@each_check
def test_lanes_and_what_they_create(checks: Any) -> None:
    def lane(rng: sm.RandomState, x: Any) -> Any:
        drawn, rng = rng.split()
        return x + jax.random.normal(drawn), rng

    with checks():
        for transform in (sm.vmap2, sm.pmap2):
            rng = sm.RandomState(key())
            mapped: Any = transform(lambda rng, x: lane(rng, x), in_axes=(None, 0))
            for _ in range(3):
                y, rng = mapped(rng, np.arange(4.0, dtype=np.float32))
            assert len(set(np.asarray(y).tolist())) == 4
        for create in (sm.vmap2_new_states, sm.pmap2_new_states):
            module, _ = create(Noisy(sm.RandomState(key())), {}, axis_size=4)
            assert module.noise is not None
            assert len(set(np.asarray(module.noise.value).tolist())) == 4
        lanes: Any = sm.Map(Noisy(sm.RandomState(key())), 4).init_all_states()
        assert lanes.module.noise.value.shape == (4,)


@pytest.mark.slow
def test_explained() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    mapped = sm.shard_map(drawn, mesh, (None, P("data")), (P("data"), P()))

    def looped(rng: sm.RandomState, xs: Any) -> Any:
        # Two calls of one array in a body that JAX traces several times.
        def body(rng: sm.RandomState, x: Any) -> Any:
            y, rng = mapped(rng, x)
            z, rng = mapped(rng, x)
            return rng, y + z

        return sm.scan(body, rng, xs)

    with of_programs():
        explained = sm.explain(looped, sm.RandomState(key()), jnp.ones((2, 16, 3)))
    # The second call has the key that the first one left.
    assert [leaf.path for leaf in explained.leaves] == ["rng", "x", "rng"]


def test_a_stream_that_is_drawn_from_twice_is_still_found() -> None:
    rng = sm.RandomState(key())
    with jax.debug_key_reuse(True):
        rng.split()
        with pytest.raises(jax.errors.KeyReuseError):
            rng.split()
