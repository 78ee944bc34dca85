"""Collectives over lanes inside a `shard_map`: JAX's own types have no word for them where it checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh


LANES, SHARDS, WIDTH = 3, 4, 2

DATA = np.sin(np.arange(LANES * SHARDS * WIDTH, dtype=np.float32)).reshape(LANES, -1)


COLUMNS = P(None, "x")


def over_mesh(fun: Callable[..., Any], check_vma: bool = True, out: Any = COLUMNS) -> Any:
    """`fun` of each shard's columns of the data."""
    mesh = make_mesh("4", AxisType.Explicit if check_vma else AxisType.Auto)
    return sm.shard_map(fun, mesh, COLUMNS, out, check_vma=check_vma)


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: jax.lax.psum(x, "b"),
    "pmax": lambda x: jax.lax.pmax(x, "b"),
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


def test_collectives_of_jax_run_unchecked() -> None:
    def lane(x: jax.Array) -> Any:
        return [fun(x) for fun in COLLECTIVES.values()]

    got = over_mesh(sm.vmap2(lane, axis_name="b"), check_vma=False)(DATA)
    # Nothing runs over the mesh, so that all shards together are one `vmap`.
    wanted = jax.vmap(lane, axis_name="b")(DATA)
    for name, a, b in zip(COLLECTIVES, got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)


BOTH: dict[str, Callable[[Any], Any]] = {
    "both at once": lambda x: jax.lax.psum(x, ("b", "x")),
    "one after another": lambda x: jax.lax.psum(jax.lax.pmean(x, "x"), "b"),
}


@pytest.mark.parametrize("name", [*COLLECTIVES, *BOTH])
def test_it_is_refused_where_types_are_checked(name: str) -> None:
    def step(x: jax.Array) -> Any:
        return (COLLECTIVES | BOTH)[name](x)

    assert_says(lambda: over_mesh(sm.vmap2(step, axis_name="b"))(DATA), sm.StatemeshError, INSTEAD)


def total(old: Any, new: Any, axes: Any) -> Any:
    return old + jax.lax.psum(new - old, axes)


def test_a_policy_that_is_a_function() -> None:
    def by_policy(x: jax.Array) -> Any:
        mapped = sm.vmap2(lambda s, x: s.set(s.value + x), in_axes=(None, 0), axis_name="b")
        return mapped(sm.State(jnp.ones(WIDTH), reduce=total), x).value

    merged = over_mesh(by_policy, check_vma=False, out=P("x"))(DATA)
    np.testing.assert_allclose(merged, 1 + DATA.sum(0), rtol=1e-5)
    text = (
        "State: inside a checked shard_map the function reduce=total cannot merge what the lanes of vmap2 "
        "('b') wrote, because JAX has no collectives over lanes there. Write instead:\n"
        "  1. a named policy: reduce='mean', or 'sum', 'max', 'min';\n"
        "  2. one value for each lane, with state_out_axes={0: ...}, and merge them after vmap2, as with "
        "jnp.mean(state.value, axis=0)."
    )
    assert_says(lambda: over_mesh(by_policy, out=P("x"))(DATA), sm.StatemeshError, text)


def closing_over(x: jax.Array) -> Any:
    """A collective of lanes that close over a value of the shard."""
    return sm.vmap2(lambda row: sm.psum(jnp.sin(row) * x[0], "b"), axis_name="b")(x)[0]


def test_a_gradient_reaches_what_lanes_close_over() -> None:
    want = jax.grad(lambda x: (jnp.sin(x) * x[0]).sum())(DATA)
    inside = over_mesh(jax.grad(lambda x: closing_over(x).sum()))
    outside = jax.grad(lambda x: over_mesh(closing_over, out=P("x"))(x).sum())
    for gradient in (inside, jax.jit(inside), outside):
        np.testing.assert_allclose(gradient(DATA), want, atol=1e-6)


def test_what_a_user_gets_wrong_stays_their_error() -> None:
    def fails(x: jax.Array) -> Any:
        raise AssertionError

    with pytest.raises(AssertionError):
        over_mesh(sm.vmap2(fails, axis_name="b"))(DATA)
    with pytest.raises(sm.StatemeshError, match="no axis is called 'nope' here"):
        over_mesh(sm.vmap2(lambda x: sm.psum(x, "nope"), axis_name="b"))(DATA)
    with pytest.raises(TypeError, match="cannot reshape"):
        over_mesh(sm.vmap2(lambda x: x.reshape(77), axis_name="b"))(DATA)
