"""Equinox's example of stateful operations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


TITLE = "Equinox: stateful operations"
PROJECT, LICENCE = "Equinox", "Apache-2.0"
REPOSITORY, COMMIT = "patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d"
PATH = "docs/examples/stateful.ipynb"
WHAT = """
`BatchNorm` keeps running statistics and `SpectralNorm` two vectors, in an `equinox.nn.State` that is
threaded through every call. Adam trains on all rows at once.
"""
ADAPTED = """
Its cells are one file here, its loop is cut into `start`, `batch` and `step`, and it has 64 rows in the
place of 10.
"""
CHANGES = """
`BatchNorm` gets the mesh axis beside its own, so that its statistics are those of all rows; `sm.grad`
takes the place of `eqx.filter_grad` and reduces the gradients once; the step is mapped. `eqx.nn.State`
stays.
"""
NAIVE = """
The rows are split, and nothing else is changed. Each device then normalizes with the statistics of its
own 8 rows, keeps its own running statistics, and takes a step with the gradient of its own rows.
"""
MEASURE = "Loss"
STEPS, TIMED = 40, 30
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {"meshes": [{"data": 2}, {"data": 4}], "steps": 2}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.make_step(*carry, *batch)


def measure(program: Any, carry: Any) -> float:
    model, state, _ = jax.device_get(carry)
    xs, ys = jax.device_get(program.batch(0))
    return float(jnp.mean((program.evaluate(model, state, xs) - ys) ** 2))


def specs(batch: Any, axis: str) -> Any:
    return P(axis), P(axis)


def mapped(program: Any) -> Any:
    return program.make_step


def arguments(program: Any) -> Any:
    return *program.start(), *program.batch(0)
