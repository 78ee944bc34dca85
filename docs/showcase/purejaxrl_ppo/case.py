"""PureJaxRL's PPO."""

from typing import Any

import jax
import jax.random as jr
import numpy as np


TITLE = "PureJaxRL: PPO"
PROJECT, LICENCE = "PureJaxRL", "Apache-2.0"
REPOSITORY, COMMIT = "luchris429/purejaxrl", "31756b197773a52db763fdbe6d635e4b46522a73"
PATH = "purejaxrl/ppo_continuous_action.py"
WHAT = """
64 environments run in lanes, observations and rewards are normalized by running statistics, and a policy
learns by PPO.
"""
ADAPTED = """
x
"""
CHANGES = """
x
"""
NAIVE = """
x
"""
MEASURE = "Mean reward"
STEPS, TIMED = 40, 12
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {"meshes": [{"data": 2}, {"data": 4}], "steps": 2, "gradients": False}
SHARDED = False


def start(program: Any) -> Any:
    return program.start(jr.PRNGKey(30)), None


def batch(program: Any, k: int) -> Any:
    return ()


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.step(carry[0], None)


def measure(program: Any, carry: Any) -> float:
    return float(np.mean(jax.device_get(carry[1]["reward"])))


def specs(batch: Any, axis: str) -> Any:
    return ()


def mapped(program: Any) -> Any:
    return program.step


def arguments(program: Any) -> Any:
    return program.start(jr.PRNGKey(30)), None
