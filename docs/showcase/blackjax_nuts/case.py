"""BlackJAX's example of several chains."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


TITLE = "BlackJAX: chains of NUTS"
PROJECT, LICENCE = "BlackJAX", "Apache-2.0"
REPOSITORY, COMMIT = "blackjax-devs/blackjax", "1b8ee70f40605bfe3eee36ba8d528ede494bd333"
PATH = "docs/examples/howto_sample_multiple_chains.md"
WHAT = """
Chains of NUTS sample the mean and the scale of a normal distribution. In a `jax.vmap` every chain waits
for the one with the longest trajectory; on a mesh only those on one device wait for each other.
"""
ADAPTED = """
Its cells are one file here, with the way that uses `jax.vmap`. There are 16 chains, the sampler's steps
are longer, the data have a seed, and the samples come in pieces of 5.
"""
CHANGES = """
The step is mapped, and each device takes the keys of its own chains. `jax.shard_map` refuses the loops
of NUTS, so the example's own sharded version turns the check of types off; here it stays on.
"""
NAIVE = """
The chains are split, and each device draws keys for as many chains as it has. All devices draw the same
ones: all chains started at one point, so there are 2 different chains on 8 devices, where one thinks
that there are 16.
"""
MEASURE = "Spread of the chains"
STEPS, TIMED = 30, 12
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {"meshes": [{"data": 2}, {"data": 4}], "steps": 1}


def start(program: Any) -> Any:
    return program.start()


def batch(program: Any, k: int) -> Any:
    return ()


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.step(*carry)


def measure(program: Any, carry: Any) -> float:
    """The standard deviation of the scale's logarithm over chains."""
    return float(np.std(jax.device_get(carry[1].position["log_scale"])))


def specs(batch: Any, axis: str) -> Any:
    return ()


def carried(program: Any, axis: str) -> Any:
    return P(), P(axis)


def mapped(program: Any) -> Any:
    return program.step


def arguments(program: Any) -> Any:
    return program.start()
