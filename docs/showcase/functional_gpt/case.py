"""awf's functional transformer."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P


TITLE = "A transformer in plain JAX"
PROJECT, LICENCE = "awf's functional transformer", "MIT"
REPOSITORY, COMMIT = (
    "awf/functional-transformer",
    "2181ecb3222544e4fff9e52fef503988ab9182f1",
)
PATH = "transformer.py"
WHAT = """
A transformer in a hundred lines of JAX. Its parameters are nested dictionaries and lists, its own Adam is a
class that changes itself, and it learns to guess the next letter of a text.
"""
ADAPTED = """
`main.py`, which trains it, stands in the same file, cut into `start`, `batch` and `step`, without flags, logs
and type checks. `ParamsDict` and `Adam` are written anew with the same interface, because they are those of
another repository. Adam is a pytree here, so that `jax.jit` compiles it with the gradient. The text is that
of scikit-learn's descriptions of its data sets; there are 2 layers with 2 heads of 16, and sequences of 32.
"""
CHANGES = """
The loss returns the parameters beside its value, `sm.value_and_grad` takes the place of
`jax.value_and_grad`, and the step is mapped. The dictionaries and Adam stay.
"""
NAIVE = """
The rows are split, and nothing else is changed. Each device takes a step with the gradient of its own 8
rows, so there are 8 transformers, and the first is what one gets. It has seen an eighth of the rows, and its
loss stays above that of the original.
"""
MEASURE = "Loss"
STEPS, TIMED = 80, 20
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {
    "meshes": [{"data": 2}, {"data": 4}],
    "steps": 2,
    "gradients": False,
    "keep": ["args[2]"],
}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return program.batch(k)


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.step(*carry, batch)


def measure(program: Any, carry: Any) -> float:
    """The loss of sequences that stay the same."""
    loss = program.loss_batch(program.cfg, jax.device_get(carry[0]), program.test_data)
    return float(jax.tree.leaves(loss)[0])


def specs(batch: Any, axis: str) -> Any:
    return P(axis)


def mapped(program: Any) -> Any:
    return program.step


def arguments(program: Any) -> Any:
    return *program.start(), program.batch(0)[:16]
