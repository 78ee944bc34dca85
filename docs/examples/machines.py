"""Train on several machines: parameters are split within each, rows over all of them.

    srun python machines.py FOLDER                             # on a cluster, once on each machine
    python docs/examples/machines.py FOLDER --machines 4       # here: four processes stand for machines

A launcher starts this file on each machine, and `jax.distributed.initialize()` learns from it who the others
are. The folder is one that all machines see. The second command is such a launcher, for this machine: it
gives each process the variables that Slurm would give it, and shares eight simulated devices out.

Run it again, with another number of machines if you like, and it goes on from the newest checkpoint.
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.checkpoint import Checkpoints


DEVICES, ROWS, STEPS = 8, 64, 20
ALL = ("machine", "device")
OPTIMIZER = optax.adam(3e-3)


def make(mesh: Mesh) -> dict[str, Any]:
    net = eqx.nn.MLP(16, 1, width_size=64, depth=2, activation=jnp.tanh, key=jax.random.key(0))
    # Each machine has all parameters, and each of its devices a part of them. Slots lie as parameters do.
    net = sm.fsdp(net, mesh, "device", min_size=64)
    return {"net": net, "slots": OPTIMIZER.init(sm.trainable(net)), "turn": jnp.int32(0)}


def loss_fn(net: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
    whole = sm.gather(net, "device")  # over the quick links alone
    error = jax.vmap(whole)(rows[:, :16])[:, 0] - rows[:, 16]
    return jnp.mean(error**2), net


def step(state: dict[str, Any], rows: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name=ALL)(state["net"], rows)
    updates, slots = OPTIMIZER.update(grads, state["slots"])
    return loss, {
        "net": eqx.apply_updates(net, updates),
        "slots": slots,
        "turn": state["turn"] + 1,
    }


def rows_of(turn: int, machine: int, machines: int) -> np.ndarray:
    """The rows that one machine reads. They follow from the turn, which is all that a checkpoint needs."""
    x = np.random.default_rng(turn).normal(size=(ROWS, 16))
    rows = np.column_stack([x, np.tanh(x.sum(1) / 4)]).astype(np.float32)
    return np.split(rows, machines)[machine]


def train(folder: str) -> None:
    machine, machines = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((machines, jax.device_count() // machines), ALL)
    # A row of the mesh is one machine, or collectives over "device" would go over the slow links.
    assert all(len({device.process_index for device in row}) == 1 for row in mesh.devices)

    def batch(turn: int) -> jax.Array:
        own = rows_of(turn, machine, machines)
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P(ALL)), own)

    train_on = sm.shard_map(step, mesh, in_specs=(None, P(ALL)), out_specs=P(), donate="states")
    with Checkpoints(folder, keep=2) as checkpoints:
        state = make(mesh)
        if checkpoints.latest is not None:
            state = checkpoints.load(state, mesh=mesh)
        first, losses = int(state["turn"]), []
        state, rows = train_on.place(state, batch(first))
        explained = train_on.explain(state, rows)  # as any call, it is made by all of them
        if machine == 0:
            for row in explained.collectives:
                print(f"{row.operation} over {row.axes}: {row.bytes} bytes")
        for turn in range(first, first + STEPS):
            loss, state = train_on(state, batch(turn))
            losses.append(loss)
        checkpoints.save(first + STEPS, state)
    if machine == 0:
        print(
            f"steps {first} to {first + STEPS} on {machines} machines of {mesh.shape['device']} devices"
        )
        print("losses", *(f"{float(loss):.5f}" for loss in losses))


def launch(folder: str, machines: int) -> None:
    """Start the processes as Slurm would."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES // machines}"
    common = {
        "XLA_FLAGS": flags,
        "JAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(machines),
        "SLURM_LOCALID": "0",
    }
    started = [
        subprocess.Popen(
            [sys.executable, __file__, folder],
            env=os.environ | common | {"SLURM_PROCID": str(machine)},
        )
        for machine in range(machines)
    ]
    if codes := [code for process in started if (code := process.wait())]:
        raise SystemExit(f"processes ended with {codes}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("folder", help="where checkpoints are; all machines see it")
    options.add_argument("--machines", type=int, help="1, 2, 4 or 8 processes on this machine")
    chosen = options.parse_args()
    if chosen.machines:
        launch(chosen.folder, chosen.machines)
    else:
        jax.distributed.initialize()
        train(chosen.folder)


if __name__ == "__main__":
    main()
