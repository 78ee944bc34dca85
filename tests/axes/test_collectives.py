"""The collectives that need no mapped call: one shard outside, JAX's own inside, lanes among types; and JAX's
own over the lanes of a `vmap` inside a `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


LANES, SHARDS = 3, 4
DATA = np.sin(np.arange(LANES * SHARDS * 2, dtype=np.float32)).reshape(LANES, -1)
COLUMNS = P(None, "x")
ROWS = np.arange(8, dtype=np.float32)

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
    "one copy": (lambda x, name: sm.all_gather(x, name, to="invarying"), lambda x: x),
}


@pytest.mark.parametrize("axis_name", [("y", "x"), None])
def test_outside_any_map_there_is_one_shard(axis_name: Any) -> None:
    tree = {"a": jnp.array([1.0, 2.0]), "b": [np.array([[3, 4]]), jnp.array([True])]}
    every = jax.jit(lambda tree: {name: ours(tree, axis_name) for name, (ours, _) in OURS.items()})
    for name, results in every(tree).items():
        ours, on_all = OURS[name]
        theirs = getattr(jax.lax, "all_gather" if name not in dir(jax.lax) else name)
        dtypes: Any = jax.vmap(lambda x, fun=theirs: fun(x, "i"), axis_name="i", out_axes=None)
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(tree), strict=True):
            np.testing.assert_array_equal(x, on_all(jnp.asarray(y)[None]))
            assert x.dtype == jax.eval_shape(dtypes, jnp.asarray(y)[None]).dtype
        grad = jax.grad(lambda x, ours=ours: (ours(x, axis_name) ** 2).sum())(tree["a"])
        np.testing.assert_allclose(grad, [2, 4])
    assert sm.axis_index(axis_name) == 0 and sm.axis_size(axis_name) == 1


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_gathered_leaves_as_one_copy(check_vma: bool) -> None:
    def shard(x: jax.Array) -> Any:
        gathered = sm.all_gather(x, "x", tiled=True, to="invarying")
        lanes: Any = jax.vmap(lambda x: sm.all_gather(x, ("b", "x"), to="invarying"), axis_name="b")
        return gathered, lanes(x)[:1]

    call = sm.shard_map(shard, make_mesh("4"), P("x"), P(), check_vma=check_vma)
    whole, lanes = call(ROWS)
    np.testing.assert_array_equal(whole, ROWS)
    np.testing.assert_array_equal(lanes[0], ROWS.reshape(4, 2).T.ravel())


def over_mesh(fun: Callable[..., Any], out: Any = COLUMNS) -> Any:
    return sm.shard_map(fun, make_mesh("4", AxisType.Explicit), COLUMNS, out)


def test_over_lanes_and_a_mesh_in_a_checked_shard_map() -> None:
    def lane(x: jax.Array) -> Any:
        over_lanes = [ours(x, "b").sum() + x for ours, _ in OURS.values()]
        over_both = [ours(x, ("b", "x"))[None] for ours, _ in OURS.values()]
        # One after the other too: each alone could not be traced without types.
        return over_lanes, over_both, sm.psum(sm.psum(x, "x"), "b")

    call = over_mesh(lambda x: jax.vmap(lane, axis_name="b")(x), (COLUMNS, COLUMNS, P()))
    over_lanes, over_both, sums = call(DATA)
    parts = np.split(DATA, SHARDS, axis=1)
    rows = jnp.stack(parts, 1).reshape(-1, 2)
    for (_, on_all), lanes, both in zip(OURS.values(), over_lanes, over_both, strict=True):
        wanted = [on_all(jnp.asarray(part)).sum() + part for part in parts]
        np.testing.assert_allclose(lanes, np.concatenate(wanted, 1), rtol=1e-5)
        for of_one in np.asarray(both).reshape(LANES * SHARDS, *both.shape[2:]):
            np.testing.assert_allclose(of_one, on_all(rows), rtol=1e-5)
    np.testing.assert_allclose(sums, np.tile(rows.sum(0), (LANES, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_over_lanes_among_types() -> None:
    """As in two nested maps without types, taken within lanes and around them."""

    def within(axis_name: Any) -> Any:
        return jax.vmap(jax.grad(lambda x: loss(x, axis_name)), axis_name="b")

    def around(x: Any) -> Any:
        return jax.grad(lambda x: jax.vmap(lambda x: loss(x, "b"), axis_name="b")(x).sum())(x)

    def loss(x: jax.Array, axis_name: Any) -> Any:
        return jnp.sin(sm.psum(jnp.sin(x), axis_name)).sum() * (2 + jnp.cos(x)).sum()

    # Around lanes and over shards, the gradient of one shard's loss is another thing with types.
    gradients: list[Any] = [within("b"), within(("b", "x")), around]
    every: Any = lambda x: [gradient(x) for gradient in gradients]
    parts = jnp.stack(np.split(DATA, SHARDS, axis=1))
    wanted = jax.vmap(every, axis_name="x")(parts)
    for got, of_parts in zip(over_mesh(every)(DATA), wanted, strict=True):
        np.testing.assert_allclose(got, jnp.concatenate(list(of_parts), 1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_gradient_reaches_what_lanes_close_over() -> None:
    def closing_over(x: jax.Array) -> Any:
        return sm.vmap2(lambda row: sm.psum(jnp.sin(row) * x[0], "b"), axis_name="b")(x)[0]

    want = jax.grad(lambda x: (jnp.sin(x) * x[0]).sum())(DATA)
    inside = over_mesh(jax.grad(lambda x: closing_over(x).sum()))
    outside = jax.grad(lambda x: over_mesh(closing_over, P("x"))(x).sum())
    for gradient in (inside, outside):
        np.testing.assert_allclose(gradient(DATA), want, atol=1e-6)


# Collectives of JAX over lanes: its types have no word for them where it checks.


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: jax.lax.psum(x, "b"),
    "pmax": lambda x: jax.lax.pmax(x, "b"),
    "all_gather": lambda x: jax.lax.all_gather(x, "b").sum(0) + x,
    "ppermute": lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 0)]),
    "psum_scatter": lambda x: jax.lax.psum_scatter(jnp.stack([x, 2 * x, 3 * x]), "b"),
    "all_to_all": lambda x: jax.lax.all_to_all(jnp.stack([x, 2 * x, 3 * x]), "b", 0, 0).sum(0),
    "in scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.pmean(c, "b"), None), x, None, length=2
    )[0],
    "its gradient": jax.grad(lambda x: jax.lax.pmean(jnp.sin(x), "b").sum()),
}


@pytest.mark.slow
def test_collectives_of_jax_run_unchecked() -> None:
    def lane(x: jax.Array) -> Any:
        return [fun(x) for fun in COLLECTIVES.values()]

    mapped = sm.vmap2(lane, axis_name="b")
    got = sm.shard_map(mapped, make_mesh("4"), COLUMNS, COLUMNS, check_vma=False)(DATA)
    # Nothing runs over the mesh, so that all shards together are one `vmap`.
    wanted = jax.vmap(lane, axis_name="b")(DATA)
    for name, a, b in zip(COLLECTIVES, got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)


def test_they_are_refused_where_types_are_checked() -> None:
    both: dict[str, Callable[[Any], Any]] = {
        "both at once": lambda x: jax.lax.psum(x, ("b", "x")),
        "one after another": lambda x: jax.lax.psum(jax.lax.pmean(x, "x"), "b"),
    }
    for fun in (COLLECTIVES | both).values():
        call = over_mesh(sm.vmap2(lambda x, fun=fun: fun(x), axis_name="b"))
        with pytest.raises(
            sm.StatemeshError, match="JAX has no collectives over the lanes of a vmap"
        ):
            call(DATA)


def total(old: Any, new: Any, axes: Any) -> Any:
    return old + jax.lax.psum(new - old, axes)


def test_a_policy_that_is_a_function() -> None:
    def by_policy(x: jax.Array) -> Any:
        mapped = sm.vmap2(lambda s, x: s.set(s.value + x), in_axes=(None, 0), axis_name="b")
        return mapped(sm.State(jnp.ones(2), reduce=total), x).value

    unchecked = sm.shard_map(by_policy, make_mesh("4"), COLUMNS, P("x"), check_vma=False)
    np.testing.assert_allclose(unchecked(DATA), 1 + DATA.sum(0), rtol=1e-5)


def test_what_a_user_gets_wrong_stays_their_error() -> None:
    def fails(x: jax.Array) -> Any:
        raise AssertionError

    with pytest.raises(AssertionError):
        over_mesh(sm.vmap2(fails, axis_name="b"))(DATA)
    with pytest.raises(TypeError, match="cannot reshape"):
        over_mesh(sm.vmap2(lambda x: x.reshape(77), axis_name="b"))(DATA)
