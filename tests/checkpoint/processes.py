"""What each of several processes does in `test_processes`."""

import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

import statemesh as sm
from statemesh import checkpoint
from tests.checkpoint import model
from tests.checkpoint.model import STEPS


# What is loaded: layouts of one process, and what both processes have saved.
SOURCES = ("1", "4x2", "both", "packed")


def layouts(folder: pathlib.Path) -> None:
    mesh = model.mesh_of((4, 1))
    packed = sm.pack(model.make(4), mesh)
    for name, first in (("both", model.make(4)), ("packed", packed)):
        _, net = model.train(first, mesh, 0)
        checkpoint.save(folder / name, net)
    for source in SOURCES:
        like = packed if source == "packed" else model.make()
        net = checkpoint.load(folder / source, like, mesh)
        masks, net = model.train(net, mesh, STEPS)
        checkpoint.save(folder / f"after {source}", net)
        whole = [multihost_utils.process_allgather(mask, tiled=True) for mask in masks]
        if jax.process_index() == 0:
            np.save(folder / f"masks {source}.npy", np.stack(whole))


def saving(folder: pathlib.Path) -> None:
    """Save one step after another, each process its part."""
    model.saving(str(folder), model.mesh_of((jax.device_count(), 1)))


if __name__ == "__main__":
    index, count, port, task, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(index))
    {"layouts": layouts, "saving": saving}[task](pathlib.Path(folder))
