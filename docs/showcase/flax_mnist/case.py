"""Flax's MNIST tutorial."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P


TITLE = "Flax: the MNIST tutorial"
PROJECT, LICENCE = "Flax", "Apache-2.0"
REPOSITORY, COMMIT = "google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0"
PATH = "docs_nnx/mnist_tutorial.md"
WHAT = """
Two convolutions with `BatchNorm` and `Dropout` learn digits. AdamW trains, an `nnx.MultiMetric` sums loss and
accuracy, and an `nnx.Rngs` counts draws. All of them are objects that the step updates in place.
"""
ADAPTED = """
The digits of scikit-learn take the place of MNIST, with 8 by 8 pixels, and the layers have 8, 16 and 64
channels in the place of 32, 64 and 256. The cells are one file, the loop is cut into `start`, `batch` and
`train_step`, and plots, TensorBoard and the export are left out. `conv2` has no bias: `batch_norm2` takes
away what a bias adds, so its gradient is nothing but rounding, of which AdamW makes full steps. With the
bias the test loss was off by 6e-3.
"""
CHANGES = """
`BatchNorm` gets the mesh axis, and a `Dropout` of three lines draws the mask of all rows on each device. The
mapped step takes the modules as they are, because they are pytrees, and returns them; `sm.value_and_grad`
reduces the gradients once, and the metrics get the logits of all rows.
"""
NAIVE = """
The rows are split, and nothing else is changed. Each device normalizes with the statistics of its own 4
rows, draws the mask that all others draw too, counts its own rows in the metrics, and takes a step with the
gradient of its own rows. It returns its modules, as any mapped step must.
"""
MEASURE = "Loss on the test set"
STEPS, TIMED = 80, 20
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {
    "meshes": [{"data": 2}, {"data": 4}],
    "steps": 2,
    "gradients": False,
    "keep": ["args[4]['label']"],
}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.train_step(*carry, batch) or carry  # Flax updates in place.


def measure(program: Any, carry: Any) -> float:
    return float(program.evaluate(jax.device_get(carry[0]))["loss"])


def specs(batch: Any, axis: str) -> Any:
    return {"image": P(axis), "label": P(axis)}


def mapped(program: Any) -> Any:
    return program.train_step


def arguments(program: Any) -> Any:
    return *program.start(), program.batch(0)
