"""Parameters that `all_gather` made whole before the gradient: reduced gradients, or an error."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")

W = np.linspace(-1, 1, 4, dtype=np.float32)
X = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)
WANTED = jax.grad(lambda w: jnp.mean((X @ w) ** 2))(W)
UNSUMMED = r"(?s)does not sum the gradients.*w: over 'x'"


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2), w


def gradient() -> Callable[[Any, Any], Any]:
    """A function that no other test has traced: JAX would not trace it again."""
    return lambda w, x: sm.grad(loss, axis_name="x")(w, x)[0]


def own_part(whole: Any, count: int) -> Any:
    size = whole.size // count
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("x") * size, size)


def invarying(w: Any, axis: str, tiled: bool) -> Any:
    return jax.lax.all_gather(w, axis, tiled=tiled, to="invarying")


def changed(w: Any, axis: str, tiled: bool) -> Any:
    return 2 * sm.all_gather(w, axis, tiled=tiled) / 2


def mapped(gather: Any, take: Any, mesh: str = "4", **options: Any) -> Any:
    """The gradient, by `take`, of parameters that `gather` makes whole."""

    def within(w: Any, x: Any) -> Any:
        return own_part(take(gather(w, "x", tiled=True), x), jax.lax.axis_size("x"))

    return sm.shard_map(within, make_mesh(mesh), (P("x"), P("x")), P("x"), **options)(W, X)


def carried(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda w, _: (w, gradient()(w, x)), w, None, length=1)[1][0]


WAYS = {
    "jit": lambda w, x: jax.jit(gradient())(w, x),
    "checkpoint": lambda w, x: jax.checkpoint(gradient())(w, x),
    "scan": carried,
}


# With `jit=False` there is no program to look into; values tell then.
@pytest.mark.parametrize(
    ("way", "gather", "jit"),
    [(way, gather, True) for way in WAYS for gather in (sm.all_gather, jax.lax.all_gather)]
    + [(way, gather, False) for way in ("directly", "jit") for gather in (sm.all_gather, changed)],
)
def test_gathered_parameters_are_refused(way: str, gather: Any, jit: bool) -> None:
    with pytest.raises(sm.StatemeshError, match=UNSUMMED):
        mapped(gather, WAYS.get(way, gradient()), jit=jit)


@pytest.mark.parametrize(
    ("gather", "mesh", "jit"),
    [(invarying, "4", True), (invarying, "4", False), (sm.all_gather, "1", True)],
    ids=["invarying", "invarying, not compiled", "one shard"],
)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_error_recommends_and_one_shard(
    way: str, gather: Any, mesh: str, jit: bool
) -> None:
    np.testing.assert_allclose(mapped(gather, WAYS[way], mesh, jit=jit), WANTED, rtol=1e-5)


def test_without_a_program_parameters_in_states_are_refused() -> None:
    def within(w: Any, x: Any) -> Any:
        model = sm.ParamState(sm.all_gather(w.value, "x", tiled=True))
        grads, _ = sm.grad(lambda m, x: (loss(m.value, x)[0], m), axis_name="x")(model, x)
        return w.set(own_part(grads.value, 4))

    step = sm.shard_map(within, make_mesh("4"), (None, P("x")), P("x"), jit=False)
    with pytest.raises(sm.StatemeshError, match=r"m: over 'x'"):
        step(sm.ParamState(W, spec=P("x")), X)


@pytest.mark.parametrize("jit", [True, False])
def test_gathered_beside_the_gradient_in_one_inner_function(jit: bool) -> None:
    inner = jax.jit(lambda w, x: gradient()(sm.all_gather(w, "x", tiled=True) * 1, x))

    def within(w: Any, x: Any) -> Any:
        return own_part(inner(w, x), 4)

    got = sm.shard_map(within, make_mesh("4"), (P("x"), P("x")), P("x"), jit=jit)(W, X)
    np.testing.assert_allclose(got, WANTED, rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("way", ["directly", *WAYS])
def test_parameters_of_each_shard_keep_their_gradients(way: str, jit: bool) -> None:
    take = WAYS.get(way, gradient())

    def split(w: Any, x: Any) -> Any:
        return take(w, x)

    def cast(w: Any, x: Any) -> Any:
        return take(jax.lax.pcast(w[:4], "x", to="varying") * 2 / 2, x)

    mesh = make_mesh("4")
    ws = np.tile(W, 4)
    # The loss is the mean over shards.
    wanted = [jax.grad(lambda w, x=x: jnp.mean((x @ w) ** 2) / 4)(W) for x in X[:, None]]
    for fun, spec in ((split, P("x")), (cast, P())):
        got = sm.shard_map(fun, mesh, (spec, P("x")), P("x"), jit=jit)(ws, X)
        np.testing.assert_allclose(got, np.concatenate(wanted), rtol=1e-5)
