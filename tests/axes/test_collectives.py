"""The collectives that need no mapped call: one shard outside, JAX's own inside, lanes among types."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh, slow


LANES, SHARDS = 3, 4
DATA = np.sin(np.arange(LANES * SHARDS * 2, dtype=np.float32)).reshape(LANES, -1)
COLUMNS = P(None, "x")

# Ours, and what it is on all shards' values, stacked along a first axis.
OURS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "psum": (sm.psum, lambda x: x.sum(0)),
    "pmean": (sm.pmean, lambda x: x.mean(0)),
    "pmax": (sm.pmax, lambda x: x.max(0)),
    "pmin": (sm.pmin, lambda x: x.min(0)),
    "all_gather": (sm.all_gather, lambda x: x),
    "new axis at the end": (
        lambda x, name: sm.all_gather(x, name, axis=-1),
        lambda x: jnp.moveaxis(x, 0, -1),
    ),
    "tiled": (
        lambda x, name: sm.all_gather(x, name, tiled=True),
        lambda x: x.reshape(-1, *x.shape[2:]),
    ),
}
NAMES = list(OURS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis_name", [("y", "x"), None])
def test_outside_any_map_there_is_one_shard(name: str, axis_name: Any) -> None:
    ours, on_all = OURS[name]
    tree = {"a": jnp.array([1.0, 2.0]), "b": [np.array([[3, 4]]), jnp.array([True])]}
    got = jax.jit(lambda tree: ours(tree, axis_name))(tree)
    theirs = getattr(jax.lax, "all_gather" if name not in dir(jax.lax) else name)
    dtypes: Any = jax.vmap(lambda x: theirs(x, "i"), axis_name="i", out_axes=None)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(x, on_all(jnp.asarray(y)[None]))
        assert x.dtype == jax.eval_shape(dtypes, jnp.asarray(y)[None]).dtype
    assert sm.axis_index(axis_name) == 0 and sm.axis_size(axis_name) == 1
    grad = jax.grad(lambda x: (ours(x, axis_name) ** 2).sum())(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(grad, [2, 4])


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_a_mesh(check_vma: bool) -> None:
    def shard(x: jax.Array) -> Any:
        index = sm.axis_index(("x", "y")) + 0 * sm.axis_size(("x", "y"))
        return {name: ours(x, ("x", "y"))[None] for name, (ours, _) in OURS.items()}, index[None]

    spec = P(("x", "y"))
    call = sm.shard_map(shard, make_mesh("4x2"), spec, spec, check_vma=check_vma)
    x = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)
    results, index = call(x)
    for name, (_, on_all) in OURS.items():
        for shard_result in np.asarray(results[name]):
            np.testing.assert_allclose(shard_result, on_all(jnp.asarray(x)[:, None]), rtol=1e-5)
    np.testing.assert_array_equal(index, np.arange(8))


def over_mesh(fun: Callable[..., Any], out: Any = COLUMNS) -> Any:
    return sm.shard_map(fun, make_mesh("4"), COLUMNS, out)


@pytest.mark.parametrize("map_lanes", [jax.vmap, sm.vmap2])
@pytest.mark.parametrize("name", NAMES)
def test_over_lanes_and_a_mesh_in_a_checked_shard_map(name: str, map_lanes: Any) -> None:
    ours, on_all = OURS[name]

    def lane(x: jax.Array) -> Any:
        # One after the other too: each alone could not be traced without types.
        apart = sm.psum(sm.psum(x, "x"), "b")
        return ours(x, "b").sum() + x, ours(x, ("b", "x"))[None], apart

    call = over_mesh(lambda x: map_lanes(lane, axis_name="b")(x), (COLUMNS, COLUMNS, P()))
    lanes, both, sums = call(DATA)
    parts = np.split(DATA, SHARDS, axis=1)
    wanted = [on_all(jnp.asarray(part)).sum() + part for part in parts]
    np.testing.assert_allclose(lanes, np.concatenate(wanted, 1), rtol=1e-5)
    rows = jnp.stack(parts, 1).reshape(-1, 2)
    for one in np.asarray(both).reshape(LANES * SHARDS, *np.asarray(both).shape[2:]):
        np.testing.assert_allclose(one, on_all(rows), rtol=1e-5)
    np.testing.assert_allclose(sums, np.tile(rows.sum(0), (LANES, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["psum", "all_gather", slow("pmean"), slow("tiled")])
def test_gradients_over_lanes_among_types(name: str) -> None:
    """As in two nested maps without types, taken within lanes and around them."""
    ours, _ = OURS[name]

    def within(axis_name: Any) -> Any:
        return jax.vmap(jax.grad(lambda x: loss(x, axis_name)), axis_name="b")

    def around(x: Any) -> Any:
        return jax.grad(lambda x: jax.vmap(lambda x: loss(x, "b"), axis_name="b")(x).sum())(x)

    def loss(x: jax.Array, axis_name: Any) -> Any:
        return jnp.sin(ours(jnp.sin(x), axis_name)).sum() * (2 + jnp.cos(x)).sum()

    # Around lanes and over shards, the gradient of one shard's loss is another thing with types.
    gradients: list[Any] = [within("b"), within(("b", "x")), around]
    every: Any = lambda x: [gradient(x) for gradient in gradients]
    parts = jnp.stack(np.split(DATA, SHARDS, axis=1))
    for got, wanted in zip(
        over_mesh(every)(DATA), jax.vmap(every, axis_name="x")(parts), strict=True
    ):
        np.testing.assert_allclose(got, jnp.concatenate(list(wanted), 1), rtol=1e-4, atol=1e-5)


def test_a_state_of_lanes_takes_what_is_the_same() -> None:
    def lane(mean: sm.State, x: jax.Array) -> Any:
        here = sm.pmean(x, "b")
        return x - here, mean.set(here)

    def shard(mean: sm.State, x: jax.Array) -> Any:
        out, mean = sm.vmap2(lane, in_axes=(None, 0), axis_name="b")(mean, x)
        return out, mean.set(sm.pmean(mean.value, "x"))

    call = sm.shard_map(shard, make_mesh("4"), (None, COLUMNS), (COLUMNS, P()))
    _, mean = call(sm.State(jnp.zeros(2), reduce="mean"), DATA)
    np.testing.assert_allclose(
        mean.value, np.mean(np.split(DATA, SHARDS, 1), (0, 1)), rtol=1e-5, atol=1e-6
    )


def test_nan_is_the_extreme_on_a_mesh_too() -> None:
    x = np.array([1.0, np.nan, 3.0, 4.0], np.float32)
    call = sm.shard_map(lambda x: (sm.pmax(x, "x"), sm.pmin(x, "x")), make_mesh("4"), P("x"), P())
    assert all(np.isnan(one).all() for one in call(x))


@pytest.mark.parametrize("name", [*NAMES[:5], "axis_index", "axis_size"])
def test_mistakes(name: str) -> None:
    fun = getattr(sm, name)
    given = () if name.startswith("axis") else (1.0,)
    assert_says(
        lambda: sm.vmap2(lambda x: fun(*given, "y"), axis_name="x")(jnp.ones(2)),
        sm.StatemeshError,
        f"{name}: no axis is called 'y' here; the axes mapped over are 'x'.",
    )
    assert_says(
        lambda: fun(*given, 0),
        TypeError,
        f"{name}: axis_name=0 is the position of an array's axis, not the name of a mapped one. Give the "
        "name, such as 'data'. To reduce over an array's own axis, use jnp.sum, jnp.mean, jnp.max or "
        "jnp.min.",
    )
