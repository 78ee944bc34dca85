"""Train on two processes, lose one, and go on: `python docs/recipes/elastic.py [--out PATH.png]`.

The script starts two processes with two devices each, kills one, waits until JAX ends the other, and starts
one, on a mesh of two devices, from the newest checkpoint. The losses go on as if nobody had been killed.
"""

import argparse
import os
import socket
import sys
import tempfile
from subprocess import PIPE, Popen
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import statemesh as sm
from statemesh.checkpoint import Checkpoints


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # read by JAX at first use
STEPS, SAVE_EVERY, KILL_AT = 60, 5, 22
LIMITS: dict[str, Any] = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
OPTIMIZER = optax.adam(3e-3)


def make() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    first, last = (jax.random.normal(keys[i], (64, n)) / 8 for i, n in enumerate((64, 10)))
    dropout = sm.nn.Dropout(0.2, keys[2], axis_name="data")
    return {"first": sm.ParamState(first), "last": sm.ParamState(last), "dropout": dropout}


def loss_fn(model: dict[str, Any], images: jax.Array, digits: jax.Array) -> Any:
    x, dropout = model["dropout"](jax.nn.silu(images @ model["first"].value))
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ model["last"].value, digits)
    return losses.mean(), {**model, "dropout": dropout}


def step(model: dict[str, Any], slots: Any, images: jax.Array, digits: jax.Array) -> Any:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="data")(model, images, digits)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, (eqx.apply_updates(model, updates), slots)


def train(folder: str, count: int, port: int, process: int) -> None:
    """Train from the newest checkpoint. JAX ends all processes 10 s after the last sign of one of them."""
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process, **LIMITS)
    mesh, data, model = jax.make_mesh((jax.device_count(),), ("data",)), load_digits(), make()
    step_on = sm.shard_map(step, mesh, (None, None, P("data"), P("data")), out_specs=P())
    training: Any = model, OPTIMIZER.init(sm.trainable(model))
    with Checkpoints(folder, keep=2) as checkpoints:
        start = 0 if checkpoints.latest is None else checkpoints.latest + 1
        training = checkpoints.load(training, mesh=mesh) if start else sm.place(training, mesh)
        for i in range(start, STEPS):
            rows = np.random.default_rng(i).choice(len(data.target), 96, replace=False)
            batch: Any = np.float32(data.data[rows] / 16), np.int32(data.target[rows])
            loss, training = jax.block_until_ready(step_on(*training, *batch))
            print("step", i, "devices", mesh.size, "loss", float(loss), flush=True)
            if i % SAVE_EVERY == 0:
                checkpoints.save(i, training)


def supervise(folder: str, picture: str) -> None:
    """Train with two processes, kill one, and train with one. Draws the losses."""
    axes: Any = Figure().subplots(subplot_kw={"xlabel": "step", "ylabel": "loss"})
    curves: dict[int, dict[int, float]] = {2: {}, 1: {}}
    for count, losses in curves.items():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        command = [sys.executable, __file__, "--train", folder, str(count), port]
        started = [Popen([*command, str(i)], stdout=PIPE, text=True) for i in range(count)]
        for words in map(str.split, started[0].stdout or ()):
            if words[:1] == ["step"]:
                print(*words, flush=True)
                losses[int(words[1])] = float(words[-1])
            if count == 2 and KILL_AT in losses:
                started[1].kill()
        print("processes ended with", *[process.wait() for process in started], flush=True)
        axes.plot(list(losses), list(losses.values()), label=f"{2 * count} devices")
    axes.legend().figure.savefig(picture, format="png")
    print(f"loss {curves[2][0]:.4f} -> {curves[1][STEPS - 1]:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.devnull, help="path of a picture of the losses")
    parser.add_argument("--train", nargs=4, metavar=("FOLDER", "COUNT", "PORT", "PROCESS"))
    options = parser.parse_args()
    if options.train:
        train(options.train[0], *map(int, options.train[1:]))
    else:
        supervise(tempfile.mkdtemp(), options.out)
