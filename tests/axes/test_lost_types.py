"""Gradients through what JAX's types lose: right, or refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._jax import _typed_right as typed_right
from tests.helpers import counted, make_mesh, slow


ROWS = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
WEIGHTS = np.arange(1.0, 5.0, dtype=np.float32)
FACTORS = np.arange(4, dtype=np.float32)

# The loss of one shard from the weights, which all share, and its row.
Loss = Callable[[Any, Any], Any]


def order(x: Any) -> Any:
    return jnp.argsort(x)


def on_host(x: Any) -> Any:
    return np.float32(np.asarray(x).sum())


def called(x: Any) -> Any:
    total = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(on_host, total, x, vmap_method="sequential")


def key(x: Any) -> Any:
    return jax.random.fold_in(jax.random.key(0), (jnp.abs(x[0]) * 1000).astype(jnp.uint32))


def rounds(x: Any) -> Any:
    return lax.while_loop(lambda i: i < 10 * jnp.abs(x).sum(), lambda i: i + 1, 0)


def in_scan(w: Any, x: Any) -> Any:
    return lax.scan(lambda c, k: (c + w[order(x)[k]], None), 0 * x[0], jnp.arange(4))[0]


LOSSES: dict[str, Loss] = {
    "argsort": lambda w, x: w[order(x)] @ FACTORS,
    "sort_key_val": lambda w, x: lax.sort_key_val(x, w)[1] @ FACTORS,
    "sort": lambda w, x: lax.sort((FACTORS // 2, x, w), num_keys=2)[2] @ FACTORS,
    "permutation": lambda w, x: jax.random.permutation(key(x), w) @ FACTORS,
    "choice": lambda w, x: jax.random.choice(key(x), w, (3,), replace=False) @ FACTORS[:3],
    "frexp": lambda w, x: (w * jnp.frexp(8 * x)[1]).sum(),
    "callback": lambda w, x: called(x) * w.sum(),
    "while": lambda w, x: rounds(x) * w.sum(),
    "cond": lambda w, x: lax.cond(x[0] > x[1], lambda: 1.0, lambda: 2.0) * w.sum(),
    "cond that reads no weights": lambda w, x: (
        lax.cond(x[0] > x[1], lambda w: 1.0, lambda w: 2.0, w) * w.sum()
    ),
    "in jit": lambda w, x: jax.jit(LOSSES["argsort"])(w, x),
    "in checkpoint": lambda w, x: jax.checkpoint(LOSSES["argsort"])(w, x),
    "in vmap": lambda w, x: jax.vmap(LOSSES["argsort"], (None, 0))(w, jnp.stack([x, -x])).sum(),
    "in scan": in_scan,
    # JAX runs the body's jaxpr again to differentiate it, with the casts that are in it.
    "while in scan": lambda w, x: lax.scan(lambda c, v: (c + rounds(x) * v, None), 0 * x[0], w)[0],
    "while in checkpoint": lambda w, x: jax.checkpoint(LOSSES["while"])(w, x),
}


WHOLE = P()


def mapped(fun: Callable[..., Any], out_specs: Any = WHOLE) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (None, P("x")), out_specs)


def gradients(losses: dict[str, Loss], x: Any, w: Any = WEIGHTS) -> Any:
    return {name: jax.grad(loss)(jnp.asarray(w), x) for name, loss in losses.items()}


@pytest.fixture(scope="module")
def expected() -> Any:
    """The gradients of the sum of all shards' losses."""
    each = jax.jit(lambda rows: [gradients(LOSSES, row) for row in rows])(ROWS)
    return jax.tree.map(lambda *values: np.sum(values, axis=0), *each)


def first_of(tree: Any) -> Any:
    """What the first shard has of values that all should have."""
    is_first = lax.axis_index("x") == 0
    return lax.psum(jax.tree.map(lambda x: jnp.where(is_first, x, 0), tree), "x")


def assert_right(results: Any, expected: Any) -> None:
    for name, result in results.items():
        for shard in result.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[name], rtol=1e-5, err_msg=name)


def test_gradients_taken_inside_are_summed(expected: Any) -> None:
    def inside(w: Any, x: Any) -> Any:
        return first_of(gradients(LOSSES, x[0], w))

    fun, count = counted(inside)
    call = mapped(fun)
    for _ in range(2):
        assert_right(call(WEIGHTS, ROWS), expected)
    assert count.times == 2


def test_gradients_taken_around_are_summed(expected: Any) -> None:
    total = lambda w, x: {name: lax.psum(loss(w, x[0]), "x") for name, loss in LOSSES.items()}
    assert_right(jax.jacrev(mapped(total))(WEIGHTS, ROWS), expected)


def test_a_step_of_value_and_grad_is_what_it_was(expected: Any) -> None:
    def loss_fn(w: Any, x: Any) -> Any:
        return LOSSES["argsort"](w, x[0]), w

    step = sm.value_and_grad(loss_fn, axis_name="x", reduce="sum")
    assert_right({"argsort": mapped(lambda w, x: step(w, x)[1])(WEIGHTS, ROWS)}, expected)


def test_what_the_user_has_cast_is_traced_once(expected: Any) -> None:
    def inside(w: Any, x: Any) -> Any:
        cast = lax.pcast(order(x[0]), "x", to="varying")
        return jax.grad(lambda w: w[cast] @ FACTORS)(w)

    fun, count = counted(inside)
    assert_right({"argsort": mapped(fun)(WEIGHTS, ROWS)}, expected)
    assert count.times == 1


@pytest.mark.parametrize(
    "name", ["argsort", "callback", "in jit", slow("while"), slow("cond"), slow("in scan")]
)
def test_without_compiling_they_are_right_or_refused(name: str, expected: Any) -> None:
    def options() -> Any:
        return {"mesh": make_mesh("4"), "in_specs": (None, P("x")), "jit": False}

    def inside(w: Any, x: Any) -> Any:
        return gradients({name: LOSSES[name]}, x[0], w)

    def total(w: Any, x: Any) -> Any:
        return {name: lax.psum(LOSSES[name](w, x[0]), "x")}

    around = jax.jacrev(sm.shard_map(total, out_specs=P(), **options()))
    assert_right(around(WEIGHTS, ROWS), expected)
    fun = sm.shard_map(inside, out_specs=P(), **options())
    if name == "in scan":  # The types of its carry are those of `x`, so JAX sums.
        assert_right(fun(WEIGHTS, ROWS), expected)
    else:
        with pytest.raises(sm.StatemeshError, match="leave as one copy differ between shards"):
            fun(WEIGHTS, ROWS)
        with jax.disable_jit(), pytest.raises(sm.StatemeshError, match="leave as one copy differ"):
            mapped(inside)(WEIGHTS, ROWS)
    # What is right is not refused: not the parts of a sum, nor equal keys, nor NaN.
    keys = lambda w, x: (jax.random.split(w), jnp.nan * lax.psum(x, "x"), lax.psum(x, "x"))
    made = sm.shard_map(keys, out_specs=P(), **options())(jax.random.key(1), ROWS)
    np.testing.assert_allclose(made[2], ROWS.sum(axis=0, keepdims=True), rtol=1e-5)


def test_nothing_else_is_typed_otherwise() -> None:
    """JAX's own calls, before and after, have the types that JAX gives them."""
    argsort = jax.shard_map(
        lambda x: jnp.argsort(x[0]), mesh=make_mesh("4"), in_specs=P("x"), out_specs=P()
    )
    before = str(jax.make_jaxpr(argsort)(ROWS))
    mapped(lambda w, x: lax.pmean(gradients({"": LOSSES["argsort"]}, x[0], w), "x"))(WEIGHTS, ROWS)
    jax.clear_caches()
    assert str(jax.make_jaxpr(argsort)(ROWS)) == before
    assert "pvary" not in before
    assert not typed_right.active()


# What cannot be typed right.


def doubled(w: Any) -> Any:
    return 2 * w


def halved(w: Any) -> Any:
    return w / 2


def of_cond(w: Any, x: Any) -> Any:
    return lax.cond(x[0] > x[1], doubled, halved, w) @ FACTORS


def of_loop(w: Any, x: Any) -> Any:
    """Its carry begins as one value, and is permuted by each shard in its own way."""
    return lax.scan(lambda c, _: (c[order(x)], None), w, length=2)[0] @ FACTORS


COND = "The predicate of a jax.lax.cond or switch differs between shards over 'x'"


@pytest.mark.parametrize("loss", [of_cond, of_loop])
def test_gradients_that_would_lack_a_sum_are_right_or_refused(loss: Loss) -> None:
    def inside(w: Any, x: Any) -> Any:
        return first_of(jax.grad(loss)(w, x[0]))

    def total(w: Any, x: Any) -> Any:
        return lax.psum(loss(w, x[0]), "x")

    right = sum(jax.grad(loss)(WEIGHTS, row) for row in jnp.asarray(ROWS))
    # Without a gradient both run.
    value = mapped(total)(WEIGHTS, ROWS)
    np.testing.assert_allclose(
        value, sum(loss(WEIGHTS, row) for row in jnp.asarray(ROWS)), rtol=1e-5
    )
    for fun in (mapped(inside), jax.grad(mapped(total)), jax.grad(jax.jit(mapped(total)))):
        if loss is of_loop:
            assert_right({"": fun(WEIGHTS, ROWS)}, {"": right})
            continue
        with pytest.raises(sm.StatemeshError) as raised:
            fun(WEIGHTS, ROWS)
        assert str(raised.value).startswith(COND)


@pytest.mark.parametrize("loss", [of_cond, of_loop])
def test_their_remedy_is_right(loss: Loss) -> None:
    def remedied(w: Any, x: Any) -> Any:
        return loss(lax.pcast(w, "x", to="varying"), x)

    inside = mapped(lambda w, x: first_of(jax.grad(remedied)(w, x[0])))
    outside = jax.grad(mapped(lambda w, x: lax.psum(remedied(w, x[0]), "x")))
    right = sum(jax.grad(loss)(WEIGHTS, row) for row in jnp.asarray(ROWS))
    for fun in (inside, outside):
        assert_right({"": fun(WEIGHTS, ROWS)}, {"": right})


def test_a_gathered_value_is_still_one() -> None:
    """It is typed as one that varies, and its order as one that does not, in a program that loses more."""

    def fun(w: Any, x: Any) -> Any:
        whole = lax.all_gather(x[0], "x")[0]
        return order(whole), lax.psum(w[order(x[0])], "x")

    first, _ = mapped(fun, (P(), P()))(WEIGHTS, ROWS)
    for shard in first.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.argsort(ROWS[0]))


def test_a_gradient_that_is_made_of_constants_is_summed() -> None:
    """Nothing that differs between shards is among what makes this gradient."""
    added = lambda w, x: (w + order(x)).sum()
    inside = mapped(lambda w, x: jax.grad(added)(w, x[0]))
    np.testing.assert_array_equal(inside(WEIGHTS, ROWS), np.full(4, 4.0))
    in_jit = mapped(lambda w, x: jax.jit(jax.grad(added))(w, x[0]))
    np.testing.assert_array_equal(in_jit(WEIGHTS, ROWS), np.full(4, 4.0))
