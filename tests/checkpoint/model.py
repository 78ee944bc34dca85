"""A small model with everything in it that a checkpoint has to keep, and its training on any mesh.

As a program it saves: `python -m tests.checkpoint.model TASK FOLDER [PROCESS PROCESSES PORT]`.
"""

import functools
import itertools
import os
import pathlib
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import Checkpoints


ROWS, WIDTH, STEPS = 16, 8, 3
# The shape of each layout. All have the axes "x" and "y".
LAYOUTS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "4x2": (4, 2)}


def mesh_of(shape: tuple[int, int]) -> Mesh:
    """A mesh of this shape. The axes are Auto where it has 1 or 4 devices, and else Explicit."""
    count = shape[0] * shape[1]
    kind = AxisType.Auto if count in (1, 4) else AxisType.Explicit
    return jax.make_mesh(shape, ("x", "y"), (kind, kind), devices=jax.devices()[:count])


class Net(sm.Module):
    weight: sm.ParamState
    head: jax.Array
    mean: sm.BatchState
    rng: sm.RandomState
    seen: sm.State
    largest: sm.State
    slots: Any
    count: sm.State
    rate: float = 0.1


def make(shards: int = 1) -> Net:
    weight = jnp.linspace(-1, 1, WIDTH * 4).reshape(WIDTH, 4)
    return Net(
        weight=sm.ParamState(weight, spec=P("y")),
        head=jnp.ones(4, jnp.bfloat16),
        mean=sm.BatchState({"x": jnp.zeros(WIDTH)}, reduce="mean"),
        rng=sm.RandomState(jax.random.key(0)),
        seen=sm.State(jnp.zeros(shards, int), spec=sm.PerShard("x"), reduce="sum"),
        largest=sm.State(jnp.zeros(shards), spec=sm.PerShard("x"), reduce="max"),
        slots=(sm.State(jnp.zeros((WIDTH, 4)), spec=P("y")), {"n": jnp.int32(0)}),
        count=sm.State(jnp.int32(0)),
    )


def data(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)


def update(net: Net, x: jax.Array) -> tuple[jax.Array, Net]:
    keys, rng = net.rng.rows(len(x), "x")
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (WIDTH,)))(keys)
    part = len(net.weight.value)
    start = jax.lax.axis_index("y") * part
    kept = jax.lax.dynamic_slice_in_dim(jnp.where(mask, x, 0.0), start, part, 1)
    grads = kept.T @ jnp.tanh(sm.pmean(x.mean(), "x") + x[:, :4])
    grads = jax.lax.psum(grads, "x") / ROWS
    momentum, numbers = net.slots
    momentum = momentum.set(0.9 * momentum.value + grads)
    net = net.replace(
        weight=net.weight.value - net.rate * momentum.value,
        mean={"x": 0.9 * net.mean.value["x"] + 0.1 * x.mean(0)},
        rng=rng,
        seen=net.seen.value + len(x),
        largest=jnp.maximum(net.largest.value, x.max()),
        slots=(momentum, {"n": numbers["n"] + 1}),
        head=net.head * jnp.bfloat16(1.5),
        count=net.count.value + 1,
    )
    return jnp.packbits(mask, axis=1), net


@functools.cache
def step_on(mesh: Mesh) -> Any:
    # Only the mask varies by rows; what is not in a State stays equal on all shards.
    return sm.shard_map(update, mesh, in_specs=(None, P("x")), out_specs=(P("x"), P()))


def train(net: Net, mesh: Mesh, start: int, steps: int = STEPS) -> tuple[list[jax.Array], Net]:
    masks = []
    for k in range(start, start + steps):
        mask, net = jax.block_until_ready(step_on(mesh)(net, data(k)))
        masks.append(mask)
    return masks, net


def totals(net: Net) -> dict[str, Any]:
    """What must not depend on the layout. Per shard, that is what the policy keeps."""
    return {
        "weight": net.weight.value,
        "momentum": net.slots[0].value,
        "n": net.slots[1]["n"],
        "mean": net.mean.value["x"],
        "head": net.head.astype(jnp.float32),
        "key": jax.random.key_data(net.rng.value),
        "seen": net.seen.value.sum(),
        "largest": net.largest.value.max(),
        "count": net.count.value,
    }


def save_all(root: pathlib.Path) -> tuple[list[jax.Array], dict[str, Any]]:
    """Save the model in every layout as it is after the first steps.

    **Returns:** the masks and the totals of a run that goes on without an interruption.
    """
    for name, shape in LAYOUTS.items():
        mesh = mesh_of(shape)
        _, net = train(make(shape[0]), mesh, 0)
        checkpoint.save(root / name, net)
    masks, net = train(net, mesh, STEPS)
    return masks, totals(net)


def assert_same(masks: Any, net: Net, expected: tuple[Any, dict[str, Any]]) -> None:
    for mask, other in zip(masks, expected[0], strict=True):
        np.testing.assert_array_equal(mask, other)
    for name, value in totals(net).items():
        if np.issubdtype(value.dtype, np.floating):
            np.testing.assert_allclose(value, expected[1][name], rtol=2e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(value, expected[1][name], err_msg=name)


def numbered(step: int) -> dict[str, Any]:
    """Values that tell their step, and that no compression makes small."""
    x = np.random.default_rng(step).random(50_000, np.float32)
    return {"x": sm.State(jnp.asarray(x), spec=P("x")), "y": [jnp.int32(step)] * 5}


def saving(folder: str, mesh: Mesh) -> None:
    """Save one step after another until the process is killed. It tells when the first is whole."""
    checkpoints = Checkpoints(folder, keep=3)
    first = 0 if checkpoints.latest is None else checkpoints.latest + 1
    for step in itertools.count(first):
        checkpoints.save(step, sm.place(numbered(step), mesh))
        if step == first:
            checkpoints.wait()
            print("started", flush=True)


def die_in_deleting(event: str, _: Any) -> None:
    """Kill this process when the files of a first folder are deleted, and the folder is about to be."""
    if event == "os.rmdir":
        os.kill(os.getpid(), signal.SIGKILL)


# What is loaded: layouts of one process, and what both processes have saved.
SOURCES = ("1", "4x2", "both", "packed")


def layouts(folder: pathlib.Path) -> None:
    """Save and load in the layout of several processes, each its part."""
    mesh = mesh_of((4, 1))
    packed = sm.pack(make(4), mesh)
    for name, first in (("both", make(4)), ("packed", packed)):
        _, net = train(first, mesh, 0)
        checkpoint.save(folder / name, net)
    for source in SOURCES:
        like: Any = packed if source == "packed" else make()
        net = checkpoint.load(folder / source, like, mesh)
        masks, net = train(net, mesh, STEPS)
        checkpoint.save(folder / f"after {source}", net)
        whole = [multihost_utils.process_allgather(mask, tiled=True) for mask in masks]
        if jax.process_index() == 0:
            np.save(folder / f"masks {source}.npy", np.stack(whole))


if __name__ == "__main__":
    task, place, *process = sys.argv[1:]
    if process:
        index, count, port = process
        jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    if task == "die":
        sys.addaudithook(die_in_deleting)
    if task == "layouts":
        layouts(pathlib.Path(place))
    else:
        saving(place, mesh_of((jax.device_count() if process else 1, 1)))
