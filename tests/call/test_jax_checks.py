"""Programs run under the checks that JAX can be asked for: of keys, ranks, dtypes, NaN, types and tracers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
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


CHECKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "key reuse": lambda: jax.debug_key_reuse(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "nan": lambda: jax.debug_nans(True),
    "checks": lambda: jax.enable_checks(True),
    "leaks": jax.checking_leaks,
}
# The other checks look at single operations, which other tests run as well.
each_check = pytest.mark.parametrize(
    "check", [check if check in ("key reuse", "leaks") else slow(check) for check in CHECKS]
)


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


def layered(layer: Any, x: Any) -> Any:
    return layer(x)


def cached(cache: nn.KVCache, x: Any) -> Any:
    tokens = jnp.ones((2, 2, 3))
    (keys, _, mask), cache = cache(tokens, 2 * tokens)
    return x + keys.sum() + mask.sum().astype(x.dtype), cache


def merged(model: Any, x: Any) -> Any:
    return x, {name: state.set(state.value + x.sum(0)) for name, state in model.items()}


def trained(model: Any, x: Any) -> Any:
    def loss(model: Any, x: Any) -> Any:
        seen = model["seen"].set(model["seen"].value + x.sum())
        return jnp.square(x @ model["w"].value).mean(), {**model, "seen": seen}

    (value, model), grads = sm.value_and_grad(loss, axis_name="data")(model, x)
    return x + value + grads["w"].value.sum(), model


def trained_on_noise(model: Any, x: Any) -> Any:
    def loss(model: Any, x: Any) -> Any:
        rows, rng = model["rng"].rows(len(x), "data")
        key, rng = rng.split()
        noise = jax.vmap(jax.random.normal)(rows)[:, None] + jax.random.normal(key)
        return jnp.square((x + noise) @ model["w"].value).mean(), {**model, "rng": rng}

    (value, model), grads = sm.value_and_grad(loss, axis_name="data", microbatches=2)(model, x)
    return x + value + grads["w"].value.sum(), model


def key() -> Any:
    return jax.random.key(0)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "draws": (drawn, lambda: sm.RandomState(key())),
    "draws of rbg": (drawn, lambda: sm.RandomState(jax.random.key(0, impl="rbg"))),
    "draws in branches and loops": (branched, lambda: sm.RandomState(key())),
    "Dropout": (layered, lambda: nn.Dropout(0.5, key(), axis_name="data")),
    "BatchNorm": (layered, lambda: nn.BatchNorm(3, axis_name="data")),
    "KVCache": (cached, lambda: nn.KVCache(8, 2, 3)),
    "policies": (
        merged,
        lambda: {k: sm.State(jnp.zeros(3), reduce=k) for k in ("sum", "mean", "max", "min")},
    ),
    "gradients": (
        trained,
        lambda: {"w": sm.ParamState(jnp.ones(3)), "seen": sm.State(0.0, reduce="sum")},
    ),
    "draws in microbatches": (
        trained_on_noise,
        lambda: {"w": sm.ParamState(jnp.ones(3)), "rng": sm.RandomState(key())},
    ),
}


@each_check
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [
        pytest.param(AxisType.Explicit, True, id="explicit"),
        pytest.param(AxisType.Auto, False, id="auto, unchecked", marks=pytest.mark.slow),
    ],
)
def test_mapped_over_shards(check: str, program: str, kind: AxisType, check_vma: bool) -> None:
    fun, make = PROGRAMS[program]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = np.arange(48, dtype=np.float32).reshape(16, 3) / 8

    def run() -> list[Any]:
        mapped = sm.shard_map(
            lambda model, x: fun(model, x),
            mesh,
            (None, P("data")),
            (P("data"), P()),
            check_vma=check_vma,
        )
        results, model = [], make()
        for _ in range(3):
            y, model = mapped(model, x)
            results.append(y)
        return results

    expected = run()
    with CHECKS[check]():
        found = run()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


class Noisy(sm.Module):
    rng: sm.RandomState
    noise: sm.State | None = None

    def init_state(self) -> "Noisy":
        drawn, rng = self.rng.split()
        return self.replace(rng=rng, noise=sm.State(jax.random.normal(drawn)))


@each_check
def test_lanes_and_what_they_create(check: str) -> None:
    def lane(rng: sm.RandomState, x: Any) -> Any:
        drawn, rng = rng.split()
        return x + jax.random.normal(drawn), rng

    with CHECKS[check]():
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
        made: Any = sm.Map(Noisy(sm.RandomState(key())), 4).init_all_states()
        assert made.module.noise.value.shape == (4,)


@each_check
def test_explained(check: str) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    mapped = sm.shard_map(drawn, mesh, (None, P("data")), (P("data"), P()))

    def looped(rng: sm.RandomState, xs: Any) -> Any:
        # Two calls of one array in a body that JAX traces several times.
        def body(rng: sm.RandomState, x: Any) -> Any:
            y, rng = mapped(rng, x)
            z, rng = mapped(rng, x)
            return rng, y + z

        return sm.scan(body, rng, xs)

    args = sm.RandomState(key()), jnp.ones((2, 16, 3))
    expected = sm.explain(looped, *args)
    with CHECKS[check]():
        found = sm.explain(looped, *args)
    assert found.leaves == expected.leaves
    # The second call has the key that the first one left.
    assert [leaf.path for leaf in found.leaves] == ["rng", "rng", "x"]


def test_a_stream_that_is_drawn_from_twice_is_still_found() -> None:
    rng = sm.RandomState(key())
    with jax.debug_key_reuse(True):
        rng.split()
        with pytest.raises(jax.errors.KeyReuseError):
            rng.split()
