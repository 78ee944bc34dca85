"""Diffrax's neural ODE."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


TITLE = "Diffrax: a neural ODE"
PROJECT, LICENCE = "Diffrax", "Apache-2.0"
REPOSITORY, COMMIT = "patrick-kidger/diffrax", "5ea5fcb05058bd22548300a10ea5ef5ce7fb75bb"
PATH = "docs/examples/neural_ode.ipynb"
WHAT = """
A network is the vector field of a differential equation. Each series of a batch is solved with steps of
its own size, and AdaBelief trains the network by gradients through the solver.
"""
ADAPTED = """
Its cells are one file here, its loop is cut into `start`, `batch` and `make_step`, a batch has all of 64
series with their first 20 times, and the network is 16 wide.
"""
CHANGES = """
The loss returns the model beside its value, `sm.value_and_grad` takes the place of Equinox's, and the
step is mapped. The solver's loops, which `jax.shard_map` refuses, run as they are.
"""
NAIVE = """
The series are split, and nothing else is changed. Each device then takes a step with the gradient of its
own series, and the first device's model is what comes back.
"""
MEASURE = "Loss"
STEPS, TIMED = 60, 20
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {"meshes": [{"data": 2}, {"data": 4}], "steps": 2, "keep": ["args[0]"]}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.make_step(*batch, *carry)[1:]


def measure(program: Any, carry: Any) -> float:
    return float(loss(jax.device_get(carry[0]), program.ts, program.ys))


@eqx.filter_jit
def loss(model: Any, ts: Any, ys: Any) -> Any:
    return jnp.mean((ys - jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0])) ** 2)


def specs(batch: Any, axis: str) -> Any:
    return P(), P(axis)


def mapped(program: Any) -> Any:
    return program.make_step


def arguments(program: Any) -> Any:
    return *program.batch(0), *program.start()
