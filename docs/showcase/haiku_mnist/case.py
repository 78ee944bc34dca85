"""Haiku's MNIST example."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


TITLE = "Haiku: MNIST with averaged parameters"
PROJECT, LICENCE = "Haiku", "Apache-2.0"
REPOSITORY, COMMIT = "google-deepmind/dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae"
PATH = "examples/mnist.py"
WHAT = """
A network of three layers, weight decay in the loss, Adam, and a moving average of the parameters. All
that changes stands in one `NamedTuple`.
"""
ADAPTED = """
The digits of scikit-learn take the place of MNIST, `main` is cut into `start`, `batch` and `update`, a
batch has 256 rows, the layers are smaller, the average is faster, and the decay is 0.01 in the place of
0.0001.
"""
CHANGES = """
The loss returns the parameters beside its value, `sm.grad` takes the place of `jax.grad`, and the step
is mapped. The `NamedTuple` stays.
"""
NAIVE = """
The rows are split, and gradients are summed over devices with `psum`, as many programs do. The loss is a
mean over the rows of a device, so the sum is eight times the gradient. Adam divides by its size, which
hides most of it: the curve falls as it should, but `eps` and what follows the size of the gradient are
off.
"""
MEASURE = "Loss of the averaged parameters"
STEPS, TIMED = 60, 40
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {
    "meshes": [{"data": 2}, {"data": 4}],
    "steps": 2,
    "keep": ["args[1].label"],
}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.update(carry, batch)


def measure(program: Any, carry: Any) -> float:
    params = jax.device_get(carry.avg_params)
    value = program.loss(params, program.Batch(program.images, program.labels))
    return float(np.ravel(jax.tree.leaves(value)[0])[0])


def specs(batch: Any, axis: str) -> Any:
    return type(batch)(P(axis), P(axis))


def mapped(program: Any) -> Any:
    return program.update


def arguments(program: Any) -> Any:
    return program.start(), program.batch(0)
