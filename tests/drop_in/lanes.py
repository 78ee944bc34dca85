"""Code written for `jax.pmap`, with one function for each of its features."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from tests.drop_in.cases import Map, jnp, numbers


LANES: dict[str, Callable[[Map], Any]] = {}


def case(run: Callable[[Map], Any]) -> Callable[[Map], Any]:
    """User code that computes with a given `pmap`."""
    LANES[run.__name__] = run
    return run


@case
def a_share_of_the_sum(pmap: Map) -> Any:
    return pmap(lambda x: x / lax.psum(x, "i"), axis_name="i")(numbers(8, 3) + 1)


@case
def trees_and_axes(pmap: Map) -> Any:
    def fun(tree: Any, y: Any) -> Any:
        return {"a": tree["a"] + y, "b": tree["b"] * lax.axis_index("i")}

    mapped = pmap(fun, "i", in_axes=({"a": 1, "b": 0}, None), out_axes={"a": 1, "b": 0})
    return mapped({"a": numbers(3, 8), "b": numbers(8, 2)}, numbers(3))


@case
def keyword_arguments(pmap: Map) -> Any:
    return pmap(lambda x, y: x + y)(numbers(8), y=numbers(8, 2).sum(axis=1))


@case
def an_argument_that_is_static(pmap: Map) -> Any:
    mapped = pmap(lambda x, n: x.reshape(n, -1), static_broadcasted_argnums=1)
    return mapped(numbers(8, 6), 2)


@case
def arguments_given_up(pmap: Map) -> Any:
    return pmap(lambda x, y: x + y, donate_argnums=(0,))(numbers(8, 2), numbers(8, 2))


@case
def a_size_and_devices_that_are_given(pmap: Map) -> Any:
    sized = pmap(lambda x: x + lax.axis_index("i"), "i", axis_size=4)
    backwards = pmap(lambda x: x - lax.pmean(x, "i"), "i", devices=jax.devices()[:4][::-1])
    of_platform = pmap(lambda x: x + 1, backend="cpu")
    return [mapped(numbers(4, 2)) for mapped in (sized, backwards, of_platform)]


@case
def fewer_lanes_than_devices(pmap: Map) -> Any:
    return pmap(lambda x: lax.all_gather(x, "i"), "i")(numbers(3, 2))


@case
def collectives(pmap: Map) -> Any:
    def fun(x: Any) -> Any:
        around = lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)])
        return around, lax.pmax(x, "i"), lax.all_to_all(x, "i", 0, 0), lax.psum_scatter(x, "i")

    return pmap(fun, "i")(numbers(8, 8))


@case
def gradients_outside_and_inside(pmap: Map) -> Any:
    def inside(w: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(lambda w: ((x * w) ** 2).sum())(w), "i")

    args = numbers(3), numbers(8, 3)
    mapped = pmap(lambda w, x: jnp.sin(x * w), in_axes=(None, 0))
    outside = jax.grad(lambda w, x: mapped(w, x).sum(), (0, 1))(*args)
    return outside, pmap(inside, "i", in_axes=(None, 0))(*args)


@case
def inside_jit(pmap: Map) -> Any:
    mapped = pmap(lambda x: x - lax.pmean(x, "i"), "i")
    return jax.jit(lambda x: mapped(2 * x).sum(axis=0))(numbers(8, 2))


@case
def a_vmap_around(pmap: Map) -> Any:
    return jax.vmap(pmap(lambda x: x - lax.pmean(x, "i"), "i"))(numbers(3, 8))


@case
def a_vmap_inside(pmap: Map) -> Any:
    inner = jax.vmap(lambda x: x - lax.psum(x, "i") * lax.pmean(x, "j"), axis_name="j")
    return pmap(inner, "i")(numbers(8, 3))


@case
def zero_size_arrays(pmap: Map) -> Any:
    return pmap(lambda x, y: (x, y + x.sum()))(jnp.zeros((8, 0)), numbers(8))


@case
def shapes_only(pmap: Map) -> Any:
    shape = jax.eval_shape(pmap(lambda x: x.astype(int)), jax.ShapeDtypeStruct((8, 2), np.float32))
    return np.zeros(shape.shape, shape.dtype)


@case
def in_double_precision(pmap: Map) -> Any:
    with jax.enable_x64(True):
        return np.asarray(pmap(lambda x: x / 3)(np.arange(8.0)))
