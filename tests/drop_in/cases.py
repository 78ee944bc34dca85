"""User code that computes with a given `shard_map`, and the same code with an additional State."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm


jnp: Any = jax.numpy
Map = Callable[..., Any]

CASES: dict[str, Callable[[Map], Any]] = {}


def case(run: Callable[[Map], Any]) -> Callable[[Map], Any]:
    """User code that computes with a given `shard_map`."""
    CASES[run.__name__] = run
    return run


class Counter(sm.Module):
    count: sm.State


def counted(mapping: Map, fun: Any) -> Any:
    """The mapped function, with a state that counts its calls as its first argument and last result."""

    def step(model: Counter, *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs), model.replace(count=model.count.value + 1)

    mapped = mapping(step)

    def call(*args: Any, **kwargs: Any) -> Any:
        result, model = mapped(Counter(sm.State(0)), *args, **kwargs)
        if not isinstance(model.count.value, jax.core.Tracer):
            assert model.count.value == 1
        return result

    return functools.update_wrapper(call, fun)


def beside_a_state(fun: Any = None, **options: Any) -> Any:
    """`shard_map` of the same function with an additional state, which counts its calls."""
    if fun is None:
        return functools.partial(beside_a_state, **options)

    in_specs = options.pop("in_specs", None)
    if in_specs is not None:
        options["in_specs"] = (None, *in_specs) if isinstance(in_specs, tuple) else in_specs
    options["out_specs"] = (options["out_specs"], P())
    return counted(functools.partial(sm.shard_map, **options), fun)


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) / 7


@jax.custom_vjp
def double(x: Any) -> Any:
    """A function whose derivative is declared to differ from the true one."""
    return 2 * x


double.defvjp(lambda x: (2 * x, x), lambda x, g: (g * x,))


def plus_one_on_the_host(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(x) + 1, shape, x)


def scan_and_cond(axis_name: str, x: Any) -> Any:
    total, parts = lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like(x[0]), x)
    return lax.cond(lax.axis_index(axis_name) > 1, lambda: parts + total, lambda: parts)
