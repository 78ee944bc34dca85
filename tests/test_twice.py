"""Gradients summed a second time are found wherever the types of a program tell, and nothing else is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._base import _jaxprs as jaxprs
from statemesh._twice import summed_twice
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
    return summed_twice(jaxprs.shard_map_body(traced.jaxpr), {"x": 4, "y": 2})


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
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_in_other_words_is_let_through(name: str) -> None:
    assert found(MEANS[name]) == []
