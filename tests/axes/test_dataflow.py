"""The walk along jaxprs: how operands map to the jaxprs that an equation runs, shown by what is forwarded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from statemesh._axes._dataflow import forwarded
from statemesh._base import _jaxprs as jaxprs


def same(x: Any) -> Any:
    return x


@jax.custom_jvp
def own(x: Any) -> Any:
    return x


own.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


def in_while(a: Any, b: Any, c: Any) -> Any:
    """`b` goes around unchanged, `a` and `c` change places."""
    return jax.lax.while_loop(
        lambda x: x[0] < 3, lambda x: (x[0] + 1, x[3], x[2], x[1]), (0.0, a, b, c)
    )[1:]


def in_scan(a: Any, b: Any, c: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return (carry[0], carry[1] + c), carry[0]

    (a, b), stacked = jax.lax.scan(body, (a, b), None, length=3)
    return a, b, stacked


def scanned(a: Any, b: Any, c: Any) -> Any:
    del a, b
    return jax.lax.scan(lambda carry, x: (carry, x), 0.0, jnp.stack([c, c]))[1]


CASES: dict[str, tuple[Callable[..., Any], list[int | None]]] = {
    "itself": (lambda a, b, c: (c, a), [2, 0]),
    "computed": (lambda a, b, c: (a + 0, b), [None, 1]),
    "a literal": (lambda a, b, c: (1.0, b), [None, 1]),
    "jit": (lambda a, b, c: jax.jit(lambda x, y: (y, x * 2))(a, b), [1, None]),
    "remat": (lambda a, b, c: jax.checkpoint(lambda x: (x, x + c))(b), [1, None]),
    "custom_jvp": (lambda a, b, c: own(c), [2]),
    "one in all branches": (
        lambda a, b, c: jax.lax.cond(a > 0, lambda x, y: (x, y), lambda x, y: (x, x), b, c),
        [1, None],
    ),
    "while": (in_while, [None, 1, None]),
    "scan": (in_scan, [0, None, None]),
    "scanned": (scanned, [None]),
    "nested": (
        lambda a, b, c: jax.jit(lambda x, y: jax.lax.cond(y > 0, same, same, x))(c, a),
        [2],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_forwarded(name: str) -> None:
    fun, wanted = CASES[name]
    closed = jax.make_jaxpr(fun)(1.0, 2.0, 3.0)
    assert forwarded(jaxprs.open_jaxpr(closed)) == wanted


def test_entries_that_a_scan_hands_on_are_the_array() -> None:
    @jax.checkpoint
    def body(before: Any, x: Any) -> Any:
        return x, (x, before, x + 0)

    closed = jax.make_jaxpr(lambda a, b: jax.lax.scan(body, a[0], b, reverse=True)[1])(
        jnp.ones((3, 3)), jnp.ones((3, 3))
    )
    assert forwarded(jaxprs.open_jaxpr(closed)) == [1, None, None]


def test_an_entry_of_an_outer_scan_is_stacked_by_an_inner_one() -> None:
    inner = jax.checkpoint(lambda x, y: (x, (x, y)))

    def body(carry: Any, x: Any) -> Any:
        # The entry `x` three times, and all entries of `rows`.
        _, (repeated, handed_on) = jax.lax.scan(inner, x, rows)
        return (repeated, handed_on), (repeated[0], x)

    def nested(a: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(body), (a, rows), a)

    rows = jnp.ones((3, 3))
    closed = jax.make_jaxpr(lambda a, b: nested(a))(rows, rows)
    assert forwarded(jaxprs.open_jaxpr(closed)) == [None, None, None, 0]
