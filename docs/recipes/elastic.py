"""Train on two processes, lose one, and go on: `python docs/recipes/elastic.py [--out PATH.png]`.

The script supervises two processes with two devices each. It kills one, waits until JAX ends the other, and
starts one process on a mesh of two devices, which loads the newest checkpoint. A batch depends on nothing
but its step, so that the losses go on as if nobody had been killed.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # for each process

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import statemesh as sm
from statemesh.checkpoint import Checkpoints


STEPS, SAVE_EVERY, KILL_AT, SECONDS = 60, 5, 22, 10
OPTIMIZER = optax.adam(3e-3)


def make() -> dict[str, Any]:
    keys, shapes = jax.random.split(jax.random.key(0), 3), [(64, 64), (64, 10)]
    weights = [
        jax.random.normal(key, shape) / 8 for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    dropout = sm.nn.Dropout(0.2, keys[0], axis_name="data")
    return {"weights": [sm.ParamState(w) for w in weights], "dropout": dropout}


def loss_fn(model: dict[str, Any], images: jax.Array, digits: jax.Array) -> Any:
    first, last = (weight.value for weight in model["weights"])
    x, dropout = model["dropout"](jax.nn.silu(images @ first))
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ last, digits)
    return losses.mean(), {**model, "dropout": dropout}


def step(model: dict[str, Any], slots: Any, images: jax.Array, digits: jax.Array) -> Any:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="data")(model, images, digits)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, (eqx.apply_updates(model, updates), slots)


def train(folder: str, process: int, count: int, port: int) -> None:
    """Train as one of several processes, from the newest checkpoint if there is one."""
    if count > 1:  # After so many seconds without a sign of one process, JAX ends the others.
        limits = {"heartbeat_timeout_seconds": SECONDS, "shutdown_timeout_seconds": SECONDS}
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process, **limits)
    mesh, data, model = jax.make_mesh((jax.device_count(),), ("data",)), load_digits(), make()
    step_on = sm.shard_map(step, mesh, (None, None, P("data"), P("data")), out_specs=P())
    training = model, OPTIMIZER.init(sm.trainable(model))
    with Checkpoints(folder, keep=2) as checkpoints:
        start = 0 if checkpoints.latest is None else checkpoints.latest + 1
        training = checkpoints.load(training, mesh=mesh) if start else sm.place(training, mesh)
        for i in range(start, STEPS):
            rows = np.random.default_rng(i).choice(len(data.target), 96, replace=False)
            batch = np.float32(data.data[rows] / 16), np.int32(data.target[rows])
            loss, training = jax.block_until_ready(step_on(*training, *batch))
            print("step", i, "devices", mesh.size, "loss", float(loss), flush=True)
            if i % SAVE_EVERY == 0:
                checkpoints.save(i, training)


def supervise(folder: str) -> dict[str, dict[int, float]]:
    """Train with two processes, kill one, and train with one. Returns the losses of both."""
    curves = {}
    for count in (2, 1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            setup = [str(count), str(probe.getsockname()[1]), "--folder", folder]
        commands = [[sys.executable, __file__, "--train", str(i), *setup] for i in range(count)]
        started = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
        losses: dict[int, float] = {}
        for words in map(str.split, started[0].stdout or ()):
            if words[0] == "step":
                print(*words, flush=True)
                losses[int(words[1])] = float(words[-1])
            if count == 2 and KILL_AT in losses:
                started[1].kill()
        print("processes ended with", *[process.wait() for process in started], flush=True)
        curves[f"{2 * count} devices"] = losses
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=tempfile.mkdtemp(), help="where checkpoints are saved")
    parser.add_argument("--out", default=os.devnull, help="path of a picture of the losses")
    parser.add_argument("--train", nargs=3, type=int, metavar=("PROCESS", "COUNT", "PORT"))
    options = parser.parse_args()
    if options.train:
        train(options.folder, *options.train)
    else:
        axes = (figure := Figure()).subplots(subplot_kw={"xlabel": "step", "ylabel": "loss"})
        for name, losses in supervise(options.folder).items():
            axes.plot(list(losses), list(losses.values()), label=name)
        axes.legend()
        figure.savefig(options.out, format="png")
