"""Gradients summed a second time are found in every mode of a mapped call, and nothing else is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._axes._equations import shard_map_equation
from statemesh._axes._summed_twice import summed_twice
from tests.helpers import make_mesh


def psum(x: Any, axis: Any = "x") -> Any:
    return jax.lax.psum(x, axis)


def slope(w: Any, x: Any) -> Any:
    """Of `w`, reduced over "x"."""
    grads, _ = sm.grad(lambda w, x: (jnp.mean((x @ w - 1) ** 2), w), axis_name="x")(w, x)
    return grads


def found(body: Callable[[Any, Any], Any], split: bool = False) -> list[tuple[str, Any]]:
    """What is found in the program of a shard; `body` is given `w`, whole or split over "y", and its rows."""
    specs = (P("y") if split else P(), P("x"))
    mapped = jax.shard_map(body, mesh=make_mesh("4x2"), in_specs=specs, out_specs=P(("x", "y")))
    x = np.ones((8, 2 if split else 4), np.float32)
    traced = jax.jit(mapped).trace(jnp.ones(4), x)
    return summed_twice(shard_map_equation(traced.jaxpr))


def in_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c - psum(slope(c, x)), None), w, None, length=2)[0]


def in_cond(w: Any, x: Any) -> Any:
    return jax.lax.cond(w[0] > 0, lambda w: psum(slope(w, x)), lambda w: w, w)


def in_while(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda w: w[0] > 0, lambda w: w - 1 - psum(slope(w, x)), w)


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "as it is": lambda w, x: psum(slope(w, x)),
    "times a number": lambda w, x: psum(-3.0 * slope(w, x)),
    "in another dtype and shape": lambda w, x: psum(
        slope(w, x).astype(jnp.bfloat16).reshape(2, 2)
    ).reshape(4),
    "among others": lambda w, x: psum([x, slope(w, x)])[1],
    "in scan": in_scan,
    "in cond": in_cond,
    "in while": in_while,
    "in jit": lambda w, x: jax.jit(lambda w: psum(slope(w, x)))(w),
    "in remat": lambda w, x: jax.checkpoint(lambda w: psum(slope(w, x)))(w),
    "in vmap": lambda w, x: jax.vmap(lambda k: psum(slope(k * w, x)))(jnp.ones(2)).sum(0),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_found(name: str) -> None:
    assert found(SUMS[name]) == [("gradient of w", "x")]


def test_it_is_found_by_the_path_of_its_parameter() -> None:
    def body(w: Any, x: Any) -> Any:
        def loss(net: Any) -> Any:
            return jnp.mean(x @ net["a"][1].value), net

        grads, _ = sm.grad(loss, axis_name="x")({"a": [0, sm.ParamState(w)]})
        return psum(grads["a"][1].value)

    assert found(body) == [("gradient of net['a'][1]", "x")]


def test_every_axis_is_named() -> None:
    assert found(lambda w, x: psum(slope(w, x), ("x", "y"))) == [
        ("gradient of w", "x"),
        ("gradient of w", "y"),
    ]


LET_THROUGH: dict[str, Callable[[Any, Any], Any]] = {
    "its mean": lambda w, x: jax.lax.pmean(slope(w, x), "x"),
    "its mean in scan": lambda w, x: jax.lax.map(
        lambda k: jax.lax.pmean(slope(k * w, x), "x"), jnp.ones(2)
    ).sum(0),
    "its mean by hand": lambda w, x: psum(slope(w, x)) / 4,
    "its greatest": lambda w, x: jax.lax.pmax(slope(w, x), "x"),
    "a gradient by JAX": lambda w, x: psum(jax.grad(lambda w: jnp.mean(x @ w))(w)),
    "what is made of it and of the rows": lambda w, x: psum(slope(w, x) * x[0]),
    "the rows": lambda w, x: psum(x)[0] + slope(w, x),
}


@pytest.mark.parametrize("name", LET_THROUGH)
def test_other_reductions_are_let_through(name: str) -> None:
    assert found(LET_THROUGH[name]) == []


def test_a_sum_over_the_axis_that_a_parameter_is_split_over_is_let_through() -> None:
    assert found(lambda w, x: psum(slope(w, x), "y"), split=True) == []
    assert found(lambda w, x: psum(slope(w, x), "x"), split=True) == [("gradient of w", "x")]


OUT_OF_SIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "handed to jit": lambda w, x: jax.jit(psum)(slope(w, x)),
    "handed to scan": lambda w, x: jax.lax.scan(
        lambda c, _: (c + psum(c), None), slope(w, x), None, length=1
    )[0],
}


@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_a_gradient_is_followed(name: str) -> None:
    assert found(OUT_OF_SIGHT[name]) == [("gradient of w", "x")]


MEANS = {
    "times the part": lambda w, x: 0.25 * psum(slope(w, x)),
    "of parts": lambda w, x: psum(slope(w, x) / 4),
    "divided in another dtype": lambda w, x: psum(slope(w, x)).astype(jnp.bfloat16) / 4,
    "scaled too": lambda w, x: 0.3 * psum(-slope(w, x)) / 4,
    "divided outside of a jit": lambda w, x: jax.jit(psum)(slope(w, x)) / 4,
    "of a half each": lambda w, x: psum(slope(w, x) / 2) / 4,
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_in_other_words_is_let_through(name: str) -> None:
    assert found(MEANS[name]) == []


def step(w: Any, x: Any) -> Any:
    return psum(slope(w, x))


def as_mean(w: Any, x: Any) -> Any:
    return jax.lax.pmean(slope(w, x), "x")


def called(fun: Any, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), **options)


def lanes(fun: Any) -> Callable[[Any, Any], Any]:
    mapped = sm.pmap2(fun, axis_name="x", in_axes=(None, 0), out_axes=None)
    return lambda w, x: mapped(w, x.reshape(4, 2, 4))


def by_gradient(call: Any) -> Any:
    return jax.grad(lambda w, x: call(w, x).sum())


MODES: dict[str, Callable[[Any], Any]] = {
    "checked": called,
    "unchecked": lambda fun: called(fun, check_vma=False),
    "checked, donating": lambda fun: called(fun, donate="all"),
    "unchecked, donating": lambda fun: called(fun, check_vma=False, donate="all"),
    "checked in jit": lambda fun: jax.jit(called(fun)),
    "unchecked in jit": lambda fun: jax.jit(called(fun, check_vma=False)),
    "checked in scan": lambda fun: (
        lambda w, x: jax.lax.scan(lambda w, _: (called(fun)(w, x), None), w, None, length=2)[0]
    ),
    "checked in grad": lambda fun: by_gradient(called(fun)),
    "unchecked in grad": lambda fun: by_gradient(called(fun, check_vma=False)),
    "checked in grad in jit": lambda fun: jax.jit(by_gradient(called(fun))),
    "unchecked in jit in grad": lambda fun: by_gradient(jax.jit(called(fun, check_vma=False))),
    "checked in vmap": lambda fun: (
        lambda w, x: jax.vmap(called(fun), (0, None))(jnp.stack([w, w]), x)
    ),
    "checked in remat": lambda fun: jax.jit(by_gradient(jax.checkpoint(called(fun)))),
    "pmap2": lanes,
    "pmap2 in jit": lambda fun: jax.jit(lanes(fun)),
}

ROWS = np.ones((8, 4), np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_it_is_refused_in_every_mode(mode: str) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        MODES[mode](step)(jnp.ones(4), ROWS)
    assert str(raised.value) == (
        "step: gradients that value_and_grad has already reduced over shards are summed over them again, "
        "which makes them too large by a factor of the number of shards:\n"
        "  - the gradient of w: over 'x'\n"
        "Leave `jax.lax.psum` out; value_and_grad has reduced them once."
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_mean_is_let_through_in_every_mode(mode: str) -> None:
    got, wanted = (MODES[mode](fun)(jnp.ones(4), ROWS) for fun in (as_mean, slope))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["unchecked", "pmap2"])
def test_a_second_derivative_is_let_through(mode: str) -> None:
    """Its own sums are of cotangents that look like gradients."""

    def second(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return 0.5 * (slope(w, x) ** 2).sum(), w

        return sm.grad(loss, axis_name="x")(w)[0]

    MODES[mode](second)(jnp.ones(4), ROWS)


def test_what_is_not_shown() -> None:
    """By a function that runs eagerly, and by the lanes of a `vmap`."""
    wanted = 4 * slope_alone()
    eager = called(step, jit=False)(jnp.ones(4), ROWS)
    np.testing.assert_allclose(eager, wanted, rtol=1e-6)
    mapped = sm.vmap2(step, axis_name="x", in_axes=(None, 0), out_axes=None)
    np.testing.assert_allclose(mapped(jnp.ones(4), ROWS.reshape(4, 2, 4)), wanted, rtol=1e-6)


def slope_alone() -> Any:
    return jax.grad(lambda w: jnp.mean((ROWS @ w - 1) ** 2))(jnp.ones(4))


def test_lanes_that_are_not_named_may_be_summed() -> None:
    def own(w: Any, x: Any) -> Any:
        del x
        return psum(sm.grad(lambda w: ((w**2).sum(), w))(w)[0])

    np.testing.assert_allclose(lanes(own)(jnp.ones(4), ROWS), 8 * np.ones(4))
