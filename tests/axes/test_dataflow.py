"""Parameters that a loss returns are known to be the same on all shards, whatever they passed through."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


X = np.arange(4, dtype=np.float32)
# Three parameters of one form.
PARAMS = [np.arange(9, dtype=np.float32).reshape(3, 3) + 10 * k for k in range(3)]


@jax.custom_jvp
def with_own_jvp(x: Any) -> Any:
    return x


with_own_jvp.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


def in_while(a: Any, b: Any, c: Any) -> Any:
    """`b` goes around unchanged, `a` and `c` change places."""
    body = lambda x: (x[0] + 1, x[3], x[2], x[1])
    return lax.while_loop(lambda x: x[0] < 3, body, (0, a, b, c))[1:]


def in_scan(a: Any, b: Any, c: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return (carry[0], carry[1] + c), carry[0][0]

    (a, b), stacked = lax.scan(body, (a, b), None, length=3)
    return a, b, stacked


def entries_handed_on(a: Any, b: Any, c: Any) -> Any:
    body = jax.checkpoint(lambda before, x: (x, (x, before, x + 0)))
    return lax.scan(body, a[0], b, reverse=True)[1]


def entries_of_an_outer_scan(a: Any, b: Any, c: Any) -> Any:
    inner = jax.checkpoint(lambda x, y: (x, (x, y)))

    def body(carry: Any, x: Any) -> Any:
        # The entry `x` three times, and all entries of `b`.
        _, (repeated, handed_on) = lax.scan(inner, x, b)
        return (repeated, handed_on), (repeated[0], x)

    (repeated, whole), (_, rows) = lax.scan(jax.checkpoint(body), (a, b), a)
    return repeated, whole, rows


# What is made of three parameters, and which of them each result is known to be.
ROUTES: dict[str, tuple[Callable[..., Any], list[int | None]]] = {
    "itself": (lambda a, b, c: (c, a), [2, 0]),
    "computed": (lambda a, b, c: (a + 0, b), [None, 1]),
    "jit": (lambda a, b, c: jax.jit(lambda x, y: (y, x * 2))(a, b), [1, None]),
    "remat": (lambda a, b, c: jax.checkpoint(lambda x: (x, x + c))(b), [1, None]),
    "custom_jvp": (lambda a, b, c: [with_own_jvp(c)], [2]),
    "one in all branches": (
        lambda a, b, c: lax.cond(a.sum() > 0, lambda x, y: (x, y), lambda x, y: (x, x), b, c),
        [1, None],
    ),
    "while": (in_while, [None, 1, None]),
    "scan": (in_scan, [0, None, None]),
    "entries of a scan": (entries_handed_on, [1, None, None]),
    "entries of an outer scan": (entries_of_an_outer_scan, [None, 1, 0]),
    "nested": (
        lambda a, b, c: [
            jax.jit(lambda x, y: lax.cond(y.sum() > 0, lambda x: x, lambda x: x, x))(c, a)
        ],
        [2],
    ),
}


def results(name: str, params: Any, x: Any) -> Any:
    """What a route makes of parameters, as auxiliary results of a loss."""
    route, _ = ROUTES[name]

    def loss(params: Any, x: Any) -> Any:
        return (sum(w.sum() for w in params) * x.sum(), list(route(*params))), params

    ((_, made), _), _ = sm.value_and_grad(loss, axis_name="x", has_aux=True)(params, x)
    return made


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_made_of_parameters_is_the_same_on_all_shards(name: str) -> None:
    mapped = sm.shard_map(functools.partial(results, name), make_mesh("4"), (P(), P("x")), P())
    made, (route, _) = mapped(PARAMS, X), ROUTES[name]
    for result, expected in zip(made, route(*PARAMS), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ROUTES)
def test_which_results_are_known_to_be_parameters_without_a_program(name: str) -> None:
    """With `jit=False` only what is a parameter is known to be the same on all shards."""
    wanted = ROUTES[name][1]

    def pick(which: list[int], params: Any, x: Any) -> Any:
        return [results(name, params, x)[k] for k in which]

    def mapped(which: list[int]) -> Any:
        fun = functools.partial(pick, which)
        return sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), jit=False)

    known = [k for k, source in enumerate(wanted) if source is not None]
    for result, k in zip(mapped(known)(PARAMS, X), known, strict=True):
        np.testing.assert_array_equal(result, PARAMS[wanted[k] or 0])
    for k in {*range(len(wanted))} - {*known}:
        with pytest.raises(sm.SpecError, match="varies over 'x'"):
            mapped([k])(PARAMS, X)
