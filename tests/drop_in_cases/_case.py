"""What a user's code computes with a given `shard_map`, and one that has a State beside."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm


jnp: Any = jax.numpy
Map = Callable[..., Any]

CASES: dict[str, Callable[[Map], Any]] = {}


def case(run: Callable[[Map], Any]) -> Callable[[Map], Any]:
    """What a user's code computes with a given `shard_map`."""
    CASES[run.__name__] = run
    return run


class Counter(sm.Module):
    count: sm.State


def beside_a_state(fun: Any = None, **options: Any) -> Any:
    """`shard_map` of the same function with a state that counts its calls, an argument and a result more."""
    if fun is None:
        return functools.partial(beside_a_state, **options)

    def step(model: Counter, *args: Any) -> Any:
        return fun(*args), model.replace(count=model.count.value + 1)

    in_specs = options.pop("in_specs", None)
    if in_specs is not None:
        options["in_specs"] = (None, *in_specs) if isinstance(in_specs, tuple) else in_specs
    out_specs = (options.pop("out_specs"), P())
    mapped = sm.shard_map(step, out_specs=out_specs, **options)

    def call(*args: Any) -> Any:
        result, model = mapped(Counter(sm.State(0)), *args)
        if not isinstance(model.count.value, jax.core.Tracer):
            assert model.count.value == 1
        return result

    return functools.update_wrapper(call, fun)


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) / 7
