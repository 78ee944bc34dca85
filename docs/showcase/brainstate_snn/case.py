"""brainstate's spiking network."""

from typing import Any

from jax.sharding import PartitionSpec as P


TITLE = "brainstate: a spiking network"
PROJECT, LICENCE = "brainstate", "Apache-2.0"
REPOSITORY, COMMIT = "chaobrain/brainstate", "e5eb83cd342b685c4fffaa3d55dd10467f9c5daf"
PATH = "docs/examples/brain_dynamics/snn_training.ipynb"
WHAT = """
Neurons integrate their input, leak, and fire when they reach a threshold. A network of them learns to tell 64
random spike trains apart, by Adam and a surrogate of the derivative of a spike. Parameters, potentials,
currents and what Adam keeps are brainstate's States, and some of them have units.
"""
ADAPTED = """
The cells are one file without plots, there is a seed, and 50 time steps and 64 rows take the place of 200 and
256. The training loop is cut into `start`, `batch` and `step`, which puts values into the States and takes
them out. `Adam` gets `betas`, since `beta1` and `beta2` are deprecated. It needs `braintools` and `brainpy`.
"""
CHANGES = """
`sm.value_and_grad` takes the place of brainstate's `grad`, and the step is mapped in the place of
brainstate's `jit`. Potentials and currents start from zeros that all devices share, and brainstate's Euler
step differentiates by them. JAX sums such a derivative over the devices, so the zeros are cast to values of
each device. Without these two lines the loss is off by 6e-2, and `assert_equivalent` says: *Tried: divided
by the number of shards, 2, at port.py:74, all results are right.*
"""
NAIVE = """
The rows are split, and nothing else is changed. Each device takes a step with the gradient of its own 8
rows. What comes back is the first device's: parameters that learned 8 of the 64 rows, and the loss of these.
That loss looks better than the original's. Over all rows these parameters have a loss of 0.71, which is more
than at the start.
"""
MEASURE = "Training loss"
STEPS, TIMED = 120, 30
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {
    "meshes": [{"data": 2}, {"data": 4}],
    "steps": 2,
    "gradients": False,
    "keep": ["args[2]"],
}


def start(program: Any) -> Any:
    return program.start(), None


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.step(carry[0], *batch)


def measure(program: Any, carry: Any) -> float:
    return float(carry[1])


def specs(batch: Any, axis: str) -> Any:
    return P(None, axis), P(axis)


def mapped(program: Any) -> Any:
    return program.step


def arguments(program: Any) -> Any:
    return program.start(), *program.batch(0)
