"""Collectives over lanes inside a `shard_map`: JAX's own types have no word for them where it checks."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh


LANES, SHARDS, WIDTH = 3, 4, 2

DATA = np.sin(np.arange(LANES * SHARDS * WIDTH, dtype=np.float32)).reshape(LANES, -1)


COLUMNS = P(None, "x")


def over_mesh(fun: Callable[..., Any], check_vma: bool = True, out: Any = COLUMNS) -> Any:
    """`fun` of each shard's columns of the data."""
    return sm.shard_map(fun, make_mesh("4"), COLUMNS, out, check_vma=check_vma)


def parts() -> list[np.ndarray]:
    return np.split(DATA, SHARDS, axis=1)


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: jax.lax.psum(x, "b"),
    "pmean": lambda x: jax.lax.pmean(x, "b"),
    "pmax": lambda x: jax.lax.pmax(x, "b"),
    "pmin": lambda x: jax.lax.pmin(x, "b"),
    "all_gather": lambda x: jax.lax.all_gather(x, "b").sum(0) + x,
    "ppermute": lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 0)]),
    "psum_scatter": lambda x: jax.lax.psum_scatter(jnp.stack([x, 2 * x, 3 * x]), "b"),
    "all_to_all": lambda x: jax.lax.all_to_all(jnp.stack([x, 2 * x, 3 * x]), "b", 0, 0).sum(0),
    "in jit": lambda x: jax.jit(lambda x: jax.lax.psum(x, "b"))(x),
    "in scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.pmean(c, "b"), None), x, None, length=2
    )[0],
    "its gradient": jax.grad(lambda x: jax.lax.pmean(jnp.sin(x), "b").sum()),
}

INSTEAD = (
    "step: inside a checked shard_map JAX has no collectives over the lanes of a vmap ('b'). Write instead:\n"
    "  1. statemesh's own, which run over lanes there: sm.psum(x, 'b'), or sm.pmean, sm.pmax, sm.pmin, "
    "sm.all_gather, sm.axis_index;\n"
    "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges the lanes' "
    "writes;\n"
    "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as with "
    "jnp.sum(out, axis=0)."
)


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_a_collective_of_jax_runs_unchecked(name: str) -> None:
    fun = COLLECTIVES[name]
    got = over_mesh(lambda x: sm.vmap2(fun, axis_name="b")(x), check_vma=False)(DATA)
    # Nothing runs over the mesh, so that all shards together are one `vmap`.
    wanted = jax.vmap(fun, axis_name="b")(DATA)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


BOTH: dict[str, Callable[[Any], Any]] = {
    "both at once": lambda x: jax.lax.psum(x, ("b", "x")),
    "one after another": lambda x: jax.lax.psum(jax.lax.pmean(x, "x"), "b"),
}


@pytest.mark.parametrize("name", [*COLLECTIVES, *BOTH])
def test_it_is_refused_where_types_are_checked(name: str) -> None:
    def step(x: jax.Array) -> Any:
        return (COLLECTIVES | BOTH)[name](x)

    call = over_mesh(lambda x: sm.vmap2(step, axis_name="b")(x))
    assert_says(lambda: call(DATA), sm.StatemeshError, INSTEAD)


def test_lanes_know_their_number_and_how_many_they_are() -> None:
    def lane(x: jax.Array) -> Any:
        return x * jax.lax.axis_index("b") / jax.lax.psum(1, "b")

    got = over_mesh(lambda x: sm.vmap2(lane, axis_name="b")(x))(DATA)
    np.testing.assert_allclose(got, DATA * np.arange(LANES)[:, None] / LANES, rtol=1e-6)


def normalise(mean: sm.State, rng: sm.RandomState, x: jax.Array) -> Any:
    """What a layer does that knows its lanes by name."""
    here = sm.pmean(x, "b")
    spread = sm.pmean((x - here) ** 2, "b")
    key, rng = rng.split()
    noise = jax.random.uniform(key)
    return (x - here) / jnp.sqrt(spread + 1e-3), noise, mean.set(0.5 * mean.value + here), rng


def normalised(x: Any) -> Any:
    here = x.mean(0)
    return (x - here) / jnp.sqrt(((x - here) ** 2).mean(0) + 1e-3)


def shard(mean: sm.State, rng: sm.RandomState, x: jax.Array) -> Any:
    mapped = sm.vmap2(normalise, in_axes=(None, None, 0), axis_name="b")
    out, noise, mean, rng = mapped(mean, rng, x)
    return out, noise, mean.set(jax.lax.pmean(mean.value, "x")), rng


def layer() -> Any:
    specs = (P(), P(), P(None, "x"))
    out = (P(None, "x"), P("x"), P(), P())
    return sm.shard_map(shard, make_mesh("4"), in_specs=specs, out_specs=out)


def test_a_layer_that_names_its_lanes() -> None:
    rng = sm.RandomState(jax.random.key(0))
    out, noise, mean, after = layer()(sm.State(jnp.ones(WIDTH), reduce="mean"), rng, DATA)
    np.testing.assert_allclose(out, normalised(DATA), rtol=1e-4, atol=1e-5)
    wanted = 0.5 + np.mean([part.mean(0) for part in parts()], 0)
    np.testing.assert_allclose(mean.value, wanted, rtol=1e-5)
    assert len(np.unique(noise)) == LANES * SHARDS
    once = sm.RandomState(jax.random.key(0)).split()[1]
    assert (jax.random.key_data(after.value) == jax.random.key_data(once.value)).all()


@pytest.mark.parametrize("jit", [False, True])
def test_its_gradient_from_outside(jit: bool) -> None:
    weights = np.cos(np.arange(DATA.size, dtype=np.float32)).reshape(DATA.shape)
    call, rng = layer(), sm.RandomState(jax.random.key(0))
    mean = sm.State(jnp.ones(WIDTH), reduce="mean")
    got = jax.grad(lambda x: (call(mean, rng, x)[0] * weights).sum())
    want = jax.grad(lambda x: (normalised(x) * weights).sum())
    got = jax.jit(got) if jit else got
    np.testing.assert_allclose(got(DATA), want(DATA), atol=1e-5)


def closing_over(x: jax.Array) -> Any:
    """A collective of lanes that close over a value of the shard."""
    return sm.vmap2(lambda row: sm.psum(jnp.sin(row) * x[0], "b"), axis_name="b")(x)[0]


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_reaches_what_lanes_close_over(jit: bool) -> None:
    def inside(x: jax.Array) -> Any:
        return jax.grad(lambda x: closing_over(x).sum())(x)

    call = over_mesh(inside)
    got = jax.jit(call)(DATA) if jit else call(DATA)
    want = jax.grad(lambda x: (jnp.sin(x) * x[0]).sum())(DATA)
    np.testing.assert_allclose(got, want, atol=1e-6)
    outside = jax.grad(lambda x: over_mesh(closing_over, out=P("x"))(x).sum())(DATA)
    np.testing.assert_allclose(outside, want, atol=1e-6)


def moments(old: Any, new: Any, axes: Any) -> Any:
    """A policy with all that a policy may have: constants, branches, several leaves."""
    mean = jax.lax.pmean(new["mean"], axes)
    spread = jax.lax.pmean((new["mean"] - mean) ** 2, axes)
    count = jax.lax.psum(jnp.ones(()), axes)
    bonus = jax.lax.cond(count > 2, lambda: 1.0, lambda: 0.0)
    return {
        "mean": jnp.where(count > 100, jnp.zeros(WIDTH), mean) + old["mean"],
        "spread": jax.nn.softplus(spread) + old["spread"] + bonus,
    }


def moments_alone(old: Any, new: Any) -> Any:
    mean = new["mean"].mean(0)
    spread = ((new["mean"] - mean) ** 2).mean(0)
    return {"mean": mean + old["mean"], "spread": jax.nn.softplus(spread) + old["spread"] + 1.0}


def written(state: sm.State, x: jax.Array) -> Any:
    return state.set({"mean": state.value["mean"] * x, "spread": state.value["spread"]})


def by_policy(start: jax.Array, x: jax.Array) -> Any:
    value = {"mean": start, "spread": jnp.full(WIDTH, 0.5)}
    mapped = sm.vmap2(written, in_axes=(None, 0), axis_name="b")
    after = mapped(sm.State(value, reduce=moments), x).value
    return after["mean"] * 2 + after["spread"] ** 2


def unmapped(start: Any, x: Any) -> Any:
    after = moments_alone({"mean": start, "spread": jnp.full(WIDTH, 0.5)}, {"mean": start * x})
    return after["mean"] * 2 + after["spread"] ** 2


@pytest.mark.parametrize("jit", [True, False])
def test_a_policy_that_is_a_function_runs_unchecked(jit: bool) -> None:
    start = jnp.array([1.0, 2.0])
    call = sm.shard_map(by_policy, make_mesh("4"), (P(), COLUMNS), P("x"), check_vma=False, jit=jit)
    wanted = np.concatenate([unmapped(start, part) for part in parts()])
    np.testing.assert_allclose(call(start, DATA), wanted, rtol=1e-5)


def test_it_is_refused_for_lanes_where_types_are_checked() -> None:
    call = sm.shard_map(by_policy, make_mesh("4"), (P(), COLUMNS), P("x"))
    assert_says(
        lambda: call(jnp.array([1.0, 2.0]), DATA),
        sm.StatemeshError,
        "State: inside a checked shard_map the function reduce=moments cannot merge what the lanes of vmap2 "
        "('b') wrote, because JAX has no collectives over lanes there. Write instead:\n"
        "  1. a named policy: reduce='mean', or 'sum', 'max', 'min';\n"
        "  2. one value for each lane, with state_out_axes={0: ...}, and merge them after vmap2, as with "
        "jnp.mean(state.value, axis=0).",
    )


def merged_after(start: jax.Array, x: jax.Array) -> Any:
    """One value for each lane, merged after `vmap2`."""
    value = {"mean": start, "spread": jnp.full(WIDTH, 0.5)}
    mapped = sm.vmap2(written, in_axes=(None, 0), state_out_axes={0: ...})
    after = moments_alone(value, mapped(sm.State(value), x).value)
    return after["mean"] * 2 + after["spread"] ** 2


def test_what_the_message_of_policies_says_to_write() -> None:
    start = jnp.array([1.0, 2.0])
    call = sm.shard_map(merged_after, make_mesh("4"), (P(), COLUMNS), P("x"))
    wanted = np.concatenate([unmapped(start, part) for part in parts()])
    np.testing.assert_allclose(call(start, DATA), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "mended",
    [
        lambda x: jax.lax.psum(sm.vmap2(lambda x: sm.psum(x, "b"), axis_name="b")(x)[0], "x"),
        lambda x: sm.vmap2(lambda x: sm.psum(x, ("b", "x")), axis_name="b")(x)[0],
        lambda x: jax.lax.psum(jnp.sum(sm.vmap2(lambda x: x)(x), 0), "x"),
        lambda x: (
            sm.vmap2(lambda s, x: s.set(jax.lax.psum(x, "x")), in_axes=(None, 0), axis_name="b")(
                sm.State(jnp.zeros(WIDTH), reduce="sum"), x
            ).value
        ),
    ],
)
def test_what_the_message_says_to_write(mended: Callable[[Any], Any]) -> None:
    np.testing.assert_allclose(over_mesh(mended, out=P())(DATA), np.sum(parts(), (0, 1)), rtol=1e-5)


def test_what_a_user_gets_wrong_stays_their_error() -> None:
    def fails(x: jax.Array) -> Any:
        raise AssertionError

    with pytest.raises(AssertionError):
        over_mesh(lambda x: sm.vmap2(fails, axis_name="b")(x))(DATA)
    with pytest.raises(sm.StatemeshError, match="no axis is called 'nope' here"):
        over_mesh(lambda x: sm.vmap2(lambda x: sm.psum(x, "nope"), axis_name="b")(x))(DATA)
    with pytest.raises(TypeError, match="cannot reshape"):
        over_mesh(lambda x: sm.vmap2(lambda x: x.reshape(77), axis_name="b")(x))(DATA)


def test_a_layer_of_equinox_that_names_its_lanes_is_refused() -> None:
    norm = eqx.nn.BatchNorm(WIDTH, axis_name="b", mode="batch")
    state = eqx.nn.State(norm)

    def step(state: eqx.nn.State, row: jax.Array) -> Any:
        return norm(row, state, inference=False)

    def call(x: jax.Array) -> Any:
        mapped = sm.vmap2(step, in_axes=(None, 0), out_axes=(0, None), axis_name="b")
        return mapped(state, x)[0]

    assert_says(lambda: over_mesh(call)(DATA), sm.StatemeshError, INSTEAD)
