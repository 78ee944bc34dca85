"""Train on several processes, each of which reads only its own rows.

The script starts two processes with two devices each, and one mesh goes over all of them. Its axis "data"
splits the rows. Each process reads one file, and its rows become the part of the batch that its own devices
hold, so no row is sent. A step sends one sum, of the gradients and the loss. In the end one process reads
both files and must find the same losses.
"""

import os
import socket
import sys
import tempfile
from subprocess import Popen
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # in each process

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


PROCESSES, ROWS_OF_A_FILE, STEPS = 2, 48, 60
SPECS: dict[str, Any] = {"in_specs": (None, None, P("data")), "out_specs": P()}
OPTIMIZER = optax.adam(3e-3)


def make() -> tuple[eqx.nn.MLP, optax.OptState]:
    net = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    return net, OPTIMIZER.init(sm.trainable(net))


def loss_fn(net: eqx.nn.MLP, rows: jax.Array) -> tuple[jax.Array, eqx.nn.MLP]:
    """A row has 64 pixels and the digit that they show."""
    logits, digits = jax.vmap(net)(rows[:, :64]), rows[:, 64].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean(), net


def step(net: eqx.nn.MLP, slots: optax.OptState, rows: jax.Array) -> Any:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="data")(net, rows)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, eqx.apply_updates(net, updates), slots


def train(files: list[str]) -> list[float]:
    """Train on all devices of all processes. This process has the rows of these files."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    by_rows, sources = NamedSharding(mesh, P("data")), [np.load(file) for file in files]

    def batch(turn: int) -> Any:
        order = np.random.default_rng(turn).permutation(len(sources[0]))[:ROWS_OF_A_FILE]
        own = np.concatenate([source[order] for source in sources])
        return jax.make_array_from_process_local_data(by_rows, own)

    train_on = sm.shard_map(step, mesh, **SPECS, donate="states")
    net, slots, rows = train_on.place(*make(), batch(0))
    summary = assert_budget(train_on, net, slots, rows, collectives={"psum": 1}, moved=0)
    if jax.process_count() > 1 and jax.process_index() == 0:
        own = sum(shard.data.nbytes for shard in rows.addressable_shards)
        print(summary, f"a process holds {own} of {rows.nbytes} bytes of the batch", sep="\n")
    losses: list[jax.Array] = []
    for turn in range(STEPS):
        loss, net, slots = train_on(net, slots, batch(turn))
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    return [float(loss) for loss in losses]


def main() -> None:
    folder, data = tempfile.mkdtemp(), load_digits()
    rows = np.column_stack([data.data / 16, data.target]).astype(np.float32)
    assert_equivalent(step, (*make(), rows[:8]), meshes=[{"data": 2}], steps=2, **SPECS)
    print("two devices agree with one", flush=True)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        command = [sys.executable, __file__, str(probe.getsockname()[1])]
    files = [f"{folder}/{i}.npy" for i in range(PROCESSES)]
    for file, part in zip(files, np.split(rows[:1600], PROCESSES), strict=True):
        np.save(file, part)
    started = [Popen([*command, str(i), file]) for i, file in enumerate(files)]
    np.testing.assert_equal([process.wait() for process in started], [0] * PROCESSES)
    found, losses = [np.load(f"{file}.losses.npy") for file in files], train(files)
    np.testing.assert_allclose(found, [losses] * PROCESSES, rtol=1e-3)
    print(f"two processes agree with one\nloss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        port, process, file = sys.argv[1:]
        jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, int(process))
        np.save(f"{file}.losses.npy", train([file]))
    else:
        main()
