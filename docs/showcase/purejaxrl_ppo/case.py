"""PureJaxRL's PPO."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


TITLE = "PureJaxRL: PPO"
PROJECT, LICENCE = "PureJaxRL", "Apache-2.0"
REPOSITORY, COMMIT = "luchris429/purejaxrl", "31756b197773a52db763fdbe6d635e4b46522a73"
PATH = "purejaxrl/ppo_continuous_action.py"
WHAT = """
64 environments step together, and running statistics normalize their observations and rewards. A policy
learns from each rollout by PPO, in four epochs of four minibatches, with the advantages of each normalized.
"""
ADAPTED = """
Its wrappers stand in the same file. A pendulum with Gymnax's interface takes the place of Brax, and ten lines
that of Distrax. The pendulum has friction, and a motor that can lift it: with the classic one rounding errors
grew a hundredfold every five updates, so that no two meshes could agree for long. `train` is cut into `start`
and `_update_step`. There are 64 environments with 32 steps in each update, the layers are 64 wide, and
`GAMMA` is 0.9.
"""
CHANGES = """
The statistics of observations, rewards and advantages are those of all devices. Random numbers are drawn for
all environments, and each device takes its own. The rollout is gathered once in each update, so that a
minibatch has rows of any environment, as before; each device takes its share of it. `sm.value_and_grad`
reduces the gradients once, inside both loops. The step is mapped. `TrainState` stays.
"""
NAIVE = """
The environments are split, and nothing else is changed. All devices draw the same noise, each normalizes by
the statistics of its own 8 environments, and each trains a policy of its own on them. So there are 8
policies, and the first is what one gets. The curve rises too, only later.
"""
MEASURE = "Mean reward"
STEPS, TIMED = 40, 12
MESHES = [{"data": 8}, {"data": 2}, {"data": 4, "model": 2}]
CHECK: dict[str, Any] = {"meshes": [{"data": 2}, {"data": 4}], "steps": 2, "gradients": False}


def start(program: Any) -> Any:
    return program.start(jax.random.PRNGKey(30)), None


def batch(program: Any, k: int) -> Any:
    return ()


def step(program: Any, carry: Any, batch: Any) -> Any:
    return program.step(carry[0], None)


def measure(program: Any, carry: Any) -> float:
    return float(np.mean(jax.device_get(carry[1]["reward"])))


def specs(batch: Any, axis: str) -> Any:
    return ()


def carried(program: Any, axis: str) -> Any:
    envs = program.NormalizeVecObsEnvState(P(axis), P(axis), P(), P(axis))
    envs = program.NormalizeVecRewEnvState(P(), P(), P(), P(axis), envs)
    return (P(), envs, P(axis), P()), None


def mapped(program: Any) -> Any:
    return program.step


def arguments(program: Any) -> Any:
    return program.start(jax.random.PRNGKey(30)), None
