"""What each of several processes does in `test_checkpoint_processes`."""

import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

import statemesh as sm
from statemesh import checkpoint
from tests import checkpoint_steps as steps
from tests.checkpoint_steps import LAYOUTS, STEPS


def layouts(folder: pathlib.Path) -> None:
    mesh = steps.mesh_of((4, 1))
    packed = sm.pack(steps.make(4), mesh)
    for name, made in (("both", steps.make(4)), ("packed", packed)):
        _, net = steps.train(made, mesh, 0)
        checkpoint.save(folder / name, net)
    for source in [*LAYOUTS, "both", "packed"]:
        like = packed if source == "packed" else steps.make()
        net = checkpoint.load(folder / source, like, mesh)
        masks, net = steps.train(net, mesh, STEPS)
        checkpoint.save(folder / f"after {source}", net)
        whole = [multihost_utils.process_allgather(mask, tiled=True) for mask in masks]
        if jax.process_index() == 0:
            np.save(folder / f"masks {source}.npy", np.stack(whole))


def saving(folder: pathlib.Path) -> None:
    """Save one step after another, each process its part."""
    steps.saving(str(folder), steps.mesh_of((jax.device_count(), 1)))


if __name__ == "__main__":
    index, count, port, task, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(index))
    {"layouts": layouts, "saving": saving}[task](pathlib.Path(folder))
