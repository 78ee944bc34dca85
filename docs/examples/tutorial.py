"""The model of the tutorial, on one or several processes: `python docs/examples/tutorial.py [--processes N]`.

The script starts N processes, which share eight simulated devices and train together. On a cluster a
launcher starts the processes, and `jax.distributed.initialize()` needs no arguments.
"""

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import statemesh as sm


DEVICES, STEPS = 8, 100
OPTIMIZER = optax.adam(3e-2)


class Net(sm.Module):
    up: sm.ParamState
    down: sm.ParamState
    mean: sm.BatchState
    var: sm.BatchState
    rng: sm.RandomState


def make() -> Net:
    first, second, stream = jax.random.split(jax.random.key(0), 3)
    return Net(
        up=sm.ParamState(jax.random.normal(first, (4, 32)) / 2),
        down=sm.ParamState(jax.random.normal(second, (32,)) / 6),
        mean=sm.BatchState(jnp.zeros(4)),
        var=sm.BatchState(jnp.ones(4)),
        rng=sm.RandomState(stream),
    )


def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = sm.pmean(x.mean(0), "data")
    return mean, sm.pmean(((x - mean) ** 2).mean(0), "data")


def forward(net: Net, x: jax.Array) -> tuple[jax.Array, Net]:
    mean, var = statistics(x)
    hidden = jnp.tanh((x - mean) / jnp.sqrt(var + 1e-3) @ net.up.value)
    keys, rng = net.rng.rows(len(x), "data")
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (32,)))(keys)
    out = jnp.where(kept, hidden, 0) @ net.down.value
    return out, net.replace(
        mean=0.9 * net.mean.value + 0.1 * mean, var=0.9 * net.var.value + 0.1 * var, rng=rng
    )


def loss_fn(net: Net, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Net]:
    out, net = forward(net, x)
    return ((out - y) ** 2).mean(), net


def step(
    net: Net, slots: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, Net, optax.OptState]:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="data")(net, x, y)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, eqx.apply_updates(net, updates), slots


def train(address: str, processes: int, process: int) -> None:
    """Train as one of the processes."""
    if processes > 1:
        jax.distributed.initialize(address, processes, process)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))  # of the devices of all processes
    rows = P("data")
    step_on = sm.shard_map(step, mesh, in_specs=(None, None, rows, rows), out_specs=P())
    x: Any = np.random.default_rng(0).normal(3, (1, 2, 3, 4), (32, 4)).astype(np.float32)
    y: Any = np.tanh(x[:, 0] - x[:, 1] / 2)
    net = make()
    slots, losses = OPTIMIZER.init(sm.trainable(net)), []
    for _ in range(STEPS):
        loss, net, slots = step_on(net, slots, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    here = f"process {process} has {jax.local_device_count()} of {jax.device_count()} devices"
    learned = f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} in the end"
    # In one piece, because all processes write to one place.
    print(f"{here}, {learned}\n", end="", flush=True)


def launch(processes: int) -> int:
    """Start the processes, wait for them, and return the largest exit status."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    command = [sys.executable, __file__, "--processes", str(processes), "--address", address]
    started = [
        subprocess.Popen([*command, "--process", str(i)], env={**os.environ, "XLA_FLAGS": flags})
        for i in range(processes)
    ]
    return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process is None:
        sys.exit(launch(asked.processes))
    train(asked.address, asked.processes, asked.process)
