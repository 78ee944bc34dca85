"""A step that another process drops while it is read."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from statemesh.checkpoint import CheckpointError, Checkpoints


def test_what_vanishes_while_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = ocp.Checkpointer.restore
    vanishing: list[Callable[[pathlib.Path], object]] = []

    def restore_less(reader: Any, arrays: Any, **options: Any) -> Any:
        if vanishing:
            vanishing.pop()(pathlib.Path(arrays).parent)
        return restore(reader, arrays, **options)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore_less)
    like = {"a": jnp.arange(4.0), "n": 0}
    with Checkpoints(tmp_path / "steps") as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, like | {"n": step})
        vanishing.append(lambda folder: folder.rename(tmp_path / "dropped"))
        assert checkpoints.load(like)["n"] == 3
        vanishing.append(lambda folder: shutil.rmtree(folder / "arrays" / "['a']"))
        with pytest.raises(CheckpointError, match=r"arrays cannot be read: "):
            checkpoints.load(like)
