"""What a checkpoint gives back beside the mistakes, and what stays as it is on disk when one is made."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from tests.helpers import jnp, make_mesh

from .checkpoints import CHECKSUMS, METADATA, A, forged_tree, layers, record, small, steps


def test_values_are_renamed_kept_and_left_out(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", small())
    new = {
        "layers": [sm.State(jnp.ones((2, 3)) * 5), sm.State(jnp.zeros((2, 3)))],
        "x": sm.State(7),
    }
    rename = {"['w']": "['layers'][1]", "['avg']": None, "['n']": None}
    back = checkpoint.load(tmp_path / "a", new, rename=rename, missing="keep")
    assert [float(s.value.max()) for s in sm.states(back).values()] == [5.0, 1.0, 7.0]


def test_a_path_is_renamed_with_all_below_it(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", layers(4, 8, 2))
    rename = {"['layers'][1]": "['layers'][2]"}
    back = checkpoint.load(tmp_path / "a", layers(4, 8, 8, 2), rename=rename, missing="keep")
    assert [state.value.shape for state in sm.states(back).values()] == [(4, 8), (8, 8), (8, 2)]
    checkpoint.save(tmp_path / "b", {"net": {"a": jnp.int32(1), "b": [jnp.int32(2)]}, "net2": 0})
    like: Any = {"body": {"a": jnp.int32(0), "b": [jnp.int32(0)]}, "net2": 1}
    back = checkpoint.load(tmp_path / "b", like, rename={"['net']": "['body']"})
    assert (int(back["body"]["a"]), int(back["body"]["b"][0]), back["net2"]) == (1, 2, 0)


def test_a_packed_model_keeps_what_was_not_saved(tmp_path: pathlib.Path) -> None:
    model = {"a": sm.State(jnp.arange(4.0)), "b": sm.State(jnp.float32(7))}
    checkpoint.save(tmp_path / "a", {"a": sm.State(jnp.ones(4))})
    packed = sm.pack(model, make_mesh("2"))
    back = checkpoint.load(tmp_path / "a", packed, missing="keep").unpack()
    np.testing.assert_array_equal(back["a"].value, np.ones(4))
    assert float(back["b"].value) == 7
    # And back: what is saved packed loads into the model itself.
    checkpoint.save(tmp_path / "b", packed)
    assert float(checkpoint.load(tmp_path / "b", model)["b"].value) == 7


def test_a_checkpoint_of_version_1_loads() -> None:
    with steps("3") as folder:
        record(version=1)(folder / "3")
        files = json.loads((folder / "3" / CHECKSUMS).read_text())["files"]
        (folder / "3" / CHECKSUMS).write_text(json.dumps(files))
        back = checkpoint.load(folder / "3", forged_tree())
        assert (back["n"], back["done"]) == (3, True)
        np.testing.assert_array_equal(back["a"].value, np.arange(4.0))
        (folder / "3" / CHECKSUMS).write_text("{}")
        with pytest.raises(CheckpointError, match="no checksum"):
            checkpoint.load(folder / "3", forged_tree())


def test_a_renamed_step_loads_by_its_folder() -> None:
    with steps("4", "03", "x3", "٣") as folder:
        assert Checkpoints(folder).latest == 4
        checkpoint.load(folder / "4", forged_tree())


def test_whole_numbers_of_any_kind_are_steps(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=np.int64(2)) as checkpoints:
        for step in (0, np.int64(1), np.uint8(2), jnp.int32(3)):
            checkpoints.save(step, int(step))
        assert [checkpoints.load(0, step) for step in (2, np.int32(3))] == [2, 3]
    assert Checkpoints(tmp_path).latest == 3


@pytest.mark.parametrize(
    "path", ["", "3", "3/statemesh", f"3/{METADATA}", f"3/{CHECKSUMS}", f"3/{A}"]
)
def test_what_may_not_be_read_is_named(path: str) -> None:
    with steps("3") as folder:
        for at in (folder, *folder.rglob("*")):
            at.chmod(0o755)
        checkpoints = Checkpoints(folder)
        checkpoints.load(forged_tree())
        (folder / path).chmod(0)
        # Root may read everything, so it becomes somebody else.
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(CheckpointError) as error:
                checkpoints.load(forged_tree())
        finally:
            os.seteuid(user)
        (folder / path).chmod(0o755)
    assert str(folder) in str(error.value)
    assert pathlib.Path(path).name in str(error.value)


def test_a_look_writes_nothing() -> None:
    with steps("3") as folder:
        with Checkpoints(folder / "none", keep=1) as checkpoints:
            assert checkpoints.latest is None
        for name in ("4.orbax-checkpoint-tmp", ".old/1", "2", "notes"):
            (folder / name).mkdir(parents=True)
        before = sorted(folder.rglob("*"))
        with Checkpoints(folder, keep=1) as checkpoints:
            assert checkpoints.latest == 3
            checkpoints.load(forged_tree())
            checkpoints.wait()
        assert sorted(folder.rglob("*")) == before


def test_nothing_is_deleted_behind_a_link(tmp_path: pathlib.Path) -> None:
    precious, folder = tmp_path / "precious" / "7" / "file", tmp_path / "a"
    precious.parent.mkdir(parents=True)
    precious.touch()
    (folder / ".old").mkdir(parents=True)
    (folder / ".old" / "77").symlink_to(precious.parent)
    (folder / ".old" / "notes").touch()
    (folder / "9.orbax-checkpoint-tmp").symlink_to(precious.parent)
    with Checkpoints(folder, keep=1) as checkpoints:
        for step in range(3):
            checkpoints.save(step, 0)
    assert sorted(path.name for path in (folder / ".old").iterdir()) == ["77", "notes"]
    for path in (folder / ".old").iterdir():
        path.unlink()
    (folder / ".old").rmdir()
    (folder / ".old").symlink_to(precious.parent.parent)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 2
        with pytest.raises(CheckpointError, match=r"\.old is a symbolic link"):
            checkpoints.save(3, 0)
    assert precious.exists()
