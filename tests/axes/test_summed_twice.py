"""Gradients summed a second time are found in every mode of a mapped call, and nothing else is."""

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


ROWS = np.ones((8, 4), np.float32)
Body = Callable[[Callable[[Any], Any], Any, Any], Any]


def psum(x: Any, axis: Any = "x") -> Any:
    return jax.lax.psum(x, axis)


def slope(w: Any, x: Any, name: str = "w") -> Any:
    """Of a parameter with this name, reduced over "x"."""

    def loss(net: Any, x: Any) -> Any:
        return jnp.mean((x @ net[name] - 1) ** 2), net

    return sm.grad(loss, axis_name="x")({name: w}, x)[0][name]


def refusal(*items: str) -> str:
    return "\n".join(
        [
            "body: gradients that value_and_grad has already reduced over shards are summed over them again, "
            "which makes them too large by a factor of the number of shards:",
            *(f"  - the gradient of net[{item}" for item in sorted(items)),
            "Leave `jax.lax.psum` out; value_and_grad has reduced them once.",
        ]
    )


def trace(bodies: dict[str, Body], split: bool = False) -> None:
    """All bodies in one program, each with a parameter of its name, whole or split over "y"."""

    def body(w: Any, x: Any) -> Any:
        return [
            each(lambda w, x=x, name=name: slope(w, x, name), w, x)  # type: ignore[misc]
            for name, each in bodies.items()
        ]

    specs = (P("y") if split else P(), P("x"))
    mapped = sm.shard_map(body, make_mesh("4x2", AxisType.Explicit), specs, P(("x", "y")))
    jax.eval_shape(mapped, jnp.ones(4), np.ones((8, 2 if split else 4), np.float32))


def in_scan(slope: Any, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c - psum(slope(c)), None), w, None, length=2)[0]


def in_cond(slope: Any, w: Any, x: Any) -> Any:
    return jax.lax.cond(w[0] > 0, lambda w: psum(slope(w)), lambda w: w, w)


def in_while(slope: Any, w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda w: w[0] > 0, lambda w: w - 1 - psum(slope(w)), w)


def in_other_form(slope: Any, w: Any, x: Any) -> Any:
    return psum(slope(w).astype(jnp.bfloat16).reshape(2, 2)).reshape(4)


def handed_to_scan(slope: Any, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + psum(c), None), slope(w), None, length=1)[0]


SUMS: dict[str, Body] = {
    "as it is": lambda slope, w, x: psum(slope(w)),
    "times a number": lambda slope, w, x: psum(-3.0 * slope(w)),
    "in another dtype and shape": in_other_form,
    "among others": lambda slope, w, x: psum([x, slope(w)])[1],
    "in scan": in_scan,
    "in cond": in_cond,
    "in while": in_while,
    "in jit": lambda slope, w, x: jax.jit(lambda w: psum(slope(w)))(w),
    "in remat": lambda slope, w, x: jax.checkpoint(lambda w: psum(slope(w)))(w),
    "in vmap": lambda slope, w, x: jax.vmap(lambda k: psum(slope(k * w)))(jnp.ones(2)).sum(0),
    "handed to jit": lambda slope, w, x: jax.jit(psum)(slope(w)),
    "handed to scan": handed_to_scan,
}


def test_every_sum_is_found_by_the_path_of_its_parameter() -> None:
    items = [f"{name!r}]: over 'x'" for name in SUMS]
    assert_says(lambda: trace(SUMS), sm.StatemeshError, refusal(*items))


def test_every_axis_is_named_over_which_the_parameter_is_not_split() -> None:
    both: dict[str, Body] = {"w": lambda slope, w, x: psum(slope(w), ("x", "y"))}
    items = ["'w']: over 'x'", "'w']: over 'y'"]
    assert_says(lambda: trace(both), sm.StatemeshError, refusal(*items))
    apart: dict[str, Body] = {
        "over y": lambda slope, w, x: psum(slope(w), "y"),
        "over x": lambda slope, w, x: psum(slope(w), "x"),
    }
    text = refusal("'over x']: over 'x'")
    assert_says(lambda: trace(apart, split=True), sm.StatemeshError, text)


LET_THROUGH: dict[str, Body] = {
    "its mean": lambda slope, w, x: jax.lax.pmean(slope(w), "x"),
    "its mean in scan": lambda slope, w, x: jax.lax.map(
        lambda k: jax.lax.pmean(slope(k * w), "x"), jnp.ones(2)
    ).sum(0),
    "its mean by hand": lambda slope, w, x: psum(slope(w)) / 4,
    "its greatest": lambda slope, w, x: jax.lax.pmax(slope(w), "x"),
    "a gradient by JAX": lambda slope, w, x: psum(jax.grad(lambda w: jnp.mean(x @ w))(w)),
    "what is made of it and of the rows": lambda slope, w, x: psum(slope(w) * x[0]),
    "the rows": lambda slope, w, x: psum(x)[0] + slope(w),
    # Its mean in other words.
    "times the part": lambda slope, w, x: 0.25 * psum(slope(w)),
    "of parts": lambda slope, w, x: psum(slope(w) / 4),
    "divided in another dtype": lambda slope, w, x: psum(slope(w)).astype(jnp.bfloat16) / 4,
    "scaled too": lambda slope, w, x: 0.3 * psum(-slope(w)) / 4,
    "divided outside of a jit": lambda slope, w, x: jax.jit(psum)(slope(w)) / 4,
    "of a half each": lambda slope, w, x: psum(slope(w) / 2) / 4,
}


def test_other_reductions_are_let_through() -> None:
    trace(LET_THROUGH)


def body(w: Any, x: Any) -> Any:
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
    "checked, donating": lambda fun: called(fun, donate="all"),
    "unchecked": lambda fun: called(fun, check_vma=False),
    "checked in scan": lambda fun: (
        lambda w, x: jax.lax.scan(lambda w, _: (called(fun)(w, x), None), w, None, length=2)[0]
    ),
    "unchecked in jit in grad": lambda fun: by_gradient(jax.jit(called(fun, check_vma=False))),
    "pmap2": lanes,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_is_refused_and_a_mean_let_through_in_every_mode(mode: str) -> None:
    call = MODES[mode](body)
    assert_says(lambda: call(jnp.ones(4), ROWS), sm.StatemeshError, refusal("'w']: over 'x'"))
    got, wanted = (MODES[mode](fun)(jnp.ones(4), ROWS) for fun in (as_mean, slope))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["unchecked", "pmap2"])
def test_what_looks_like_it_is_let_through(mode: str) -> None:
    def second(w: Any, x: Any) -> Any:
        # Its own sums are of cotangents that look like gradients.
        return sm.grad(lambda w: (0.5 * (slope(w, x) ** 2).sum(), w), axis_name="x")(w)[0]

    MODES[mode](second)(jnp.ones(4), ROWS)


@pytest.mark.slow
def test_what_is_not_shown() -> None:
    """By a function that runs eagerly, and by the lanes of a `vmap`."""
    wanted = 4 * jax.grad(lambda w: jnp.mean((ROWS @ w - 1) ** 2))(jnp.ones(4))
    eager = called(body, jit=False)(jnp.ones(4), ROWS)
    np.testing.assert_allclose(eager, wanted, rtol=1e-6)
    mapped = sm.vmap2(body, axis_name="x", in_axes=(None, 0), out_axes=None)
    np.testing.assert_allclose(mapped(jnp.ones(4), ROWS.reshape(4, 2, 4)), wanted, rtol=1e-6)


def test_lanes_that_are_not_named_may_be_summed() -> None:
    own = lambda w, x: psum(sm.grad(lambda w: ((w**2).sum(), w))(w)[0])
    np.testing.assert_allclose(lanes(own)(jnp.ones(4), ROWS), 8 * np.ones(4))
