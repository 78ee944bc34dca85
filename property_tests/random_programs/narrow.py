"""Random programs in another dtype of floats than the one that they are written in."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .source import Program, executed


class _Random:
    """`jax.random`, whose draws are of one dtype of floats."""

    def __init__(self, dtype: str) -> None:
        self.dtype = jnp.dtype(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.random, name)

    def uniform(self, key: Any, shape: Any = ()) -> Any:
        return jax.random.uniform(key, shape, self.dtype)

    def normal(self, key: Any, shape: Any = ()) -> Any:
        return jax.random.normal(key, shape, self.dtype)


class _Jax:
    """`jax`, whose random floats are of one dtype."""

    def __init__(self, dtype: str) -> None:
        self.random = _Random(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def step_in(program: Program, dtype: str) -> Callable[..., Any]:
    """The function of one shard, whose floats are of this dtype."""
    if dtype == "float32":
        return program.fun
    # A product of integers with a number of Python is in float32.
    definitions = program.code.definitions.replace("% 13 * 0.25", "% 13 * jnp.float32(0.25)")
    definitions = re.sub(r"(\w+) \* 0\.05", r"\1 * jnp.float32(0.05)", definitions)
    definitions = definitions.replace("float32", dtype)
    step: Callable[..., Any] = executed(definitions, jax=_Jax(dtype))["step"]
    return step


def args_in(program: Program, dtype: str) -> tuple[Any, ...]:
    """The arguments, whose floats are of this dtype."""

    def leaf(x: Any) -> Any:
        is_float = isinstance(x, np.ndarray | np.generic | jax.Array) and x.dtype == np.float32
        return jnp.asarray(x, dtype) if is_float else x

    args: tuple[Any, ...] = jax.tree.map(leaf, program.args)
    return args
