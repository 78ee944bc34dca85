"""What does not fit a checkpoint, is damaged, or is none: the exact texts, and how to mend it."""

import itertools
import json
import pathlib
import zlib
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError
from tests import checkpoint_steps as steps


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("small") / "a"
    tree = {"avg": sm.State(jnp.arange(3.0)), "w": sm.State(jnp.ones((2, 3))), "n": jnp.int32(1)}
    checkpoint.save(folder, tree)
    return folder


def test_everything_that_does_not_fit_is_in_one_error(small: pathlib.Path) -> None:
    like = {"average": sm.State(jnp.zeros(3)), "w": sm.State(jnp.ones((2, 4))), "n": jnp.float32(1)}
    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(small, like)
    assert str(error.value) == (
        f"load: what {small} holds is not what `like` has:\n"
        "  - missing: ['average']: float32[3] is in `like`, and was not saved\n"
        "  - left over: ['avg']: float32[3] was saved, and is not in `like`\n"
        "  - ['n']: saved as int32[], but `like` has float32[]\n"
        "  - ['w']: saved as float32[2,3], but `like` has float32[2,4]\n"
        "Probably renamed: rename={\"['avg']\": \"['average']\"}.\n"
        "missing='keep' keeps what `like` has for values that were not saved.\n"
        "rename={'path': None} leaves a saved value out."
    )


def test_values_are_renamed_kept_and_left_out(small: pathlib.Path) -> None:
    new = {
        "layers": [sm.State(jnp.ones((2, 3)) * 5), sm.State(jnp.zeros((2, 3)))],
        "x": sm.State(7),
    }
    rename = {"['w']": "['layers'][1]", "['avg']": None, "['n']": None}
    back = checkpoint.load(small, new, rename=rename, missing="keep")
    found = [float(s.value.max()) for s in sm.states(back).values()]
    assert found == [5.0, 1.0, 7.0]


def test_an_inserted_layer_is_named(tmp_path: pathlib.Path) -> None:
    def layers(*widths: int) -> Any:
        pairs = itertools.pairwise(widths)
        return {"layers": [{"w": sm.ParamState(jnp.ones(pair))} for pair in pairs]}

    checkpoint.save(tmp_path / "a", layers(4, 8, 2))
    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(tmp_path / "a", layers(4, 8, 8, 2))
    assert str(error.value) == (
        f"load: what {tmp_path / 'a'} holds is not what `like` has:\n"
        "  - missing: ['layers'][2]['w']: float32[8,2] is in `like`, and was not saved\n"
        "  - ['layers'][1]['w']: saved as float32[8,2], but `like` has float32[8,8]\n"
        "Probably renamed: rename={\"['layers'][1]['w']\": \"['layers'][2]['w']\"}.\n"
        "missing='keep' keeps what `like` has for values that were not saved."
    )
    rename = {"['layers'][1]": "['layers'][2]"}
    back = checkpoint.load(tmp_path / "a", layers(4, 8, 8, 2), rename=rename, missing="keep")
    assert [state.value.shape for state in sm.states(back).values()] == [(4, 8), (8, 8), (8, 2)]


def test_a_packed_model_keeps_what_was_not_saved(tmp_path: pathlib.Path) -> None:
    model = {"a": sm.State(jnp.arange(4.0)), "b": sm.State(jnp.float32(7))}
    checkpoint.save(tmp_path / "a", {"a": sm.State(jnp.ones(4))})
    packed = sm.pack(model, steps.mesh_of((2, 1)))
    back = checkpoint.load(tmp_path / "a", packed, missing="keep").unpack()
    np.testing.assert_array_equal(back["a"].value, np.ones(4))
    assert float(back["b"].value) == 7


def test_a_path_is_renamed_with_all_below_it(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", {"net": {"a": jnp.int32(1), "b": [jnp.int32(2)]}, "net2": 0})
    like = {"body": {"a": jnp.int32(0), "b": [jnp.int32(0)]}, "net2": 1}
    back = checkpoint.load(tmp_path / "a", like, rename={"['net']": "['body']"})
    assert (int(back["body"]["a"]), int(back["body"]["b"][0]), back["net2"]) == (1, 2, 0)


def test_mistakes_in_rename(small: pathlib.Path) -> None:
    like = {"avg": sm.State(jnp.zeros(3)), "w": sm.State(jnp.ones((2, 3))), "n": jnp.int32(1)}
    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(small, like, rename={"w": "v", "['n']": "['w']"})
    assert str(error.value) == (
        f"load: what {small} holds is not what `like` has:\n"
        "  - rename: ['n'] and ['w'] would both be ['w']\n"
        "  - rename: 'w' was not saved\n"
        "  - missing: ['n']: int32[] is in `like`, and was not saved\n"
        "missing='keep' keeps what `like` has for values that were not saved."
    )


def test_shapes_cannot_be_kept(small: pathlib.Path) -> None:
    def make() -> Any:
        tree = {"avg": sm.State(jnp.zeros(3)), "w": sm.State(jnp.ones((2, 3)))}
        return tree | {"n": jnp.int32(1), "more": jnp.zeros(2)}

    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(small, eqx.filter_eval_shape(make), missing="keep")
    assert str(error.value) == (
        "load: missing='keep' keeps the values of `like`, which has only shapes for:\n"
        "  - ['more']\n"
        "Give the model itself as `like`."
    )


def test_a_checkpoint_is_never_written_over(small: pathlib.Path) -> None:
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(small, jnp.zeros(3))
    assert str(error.value) == (
        f"save: {small} is there already, and a checkpoint is never written over another. Give a new folder, "
        "or keep several steps with Checkpoints(folder)."
    )


def test_damaged_files_are_named(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    tree = {name: jnp.arange(100.0) for name in "abcd"}
    checkpoint.save(folder, tree)
    first, second, third, _ = (folder / "arrays" / f"['{name}']" / "0" for name in "abcd")
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    third.unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(folder, tree)
    assert str(error.value) == (
        f"load: files in {folder} are not as they were saved:\n"
        "  - arrays/['a']/0, of ['a']: another size\n"
        "  - arrays/['b']/0, of ['b']: other content\n"
        "  - arrays/['c']/0, of ['c']: missing\n"
        "Load another checkpoint, or copy these files again from where they are whole."
    )


@pytest.mark.parametrize("file", ["arrays/checksums.json", "statemesh/metadata"])
def test_a_damaged_record_is_named(file: str, tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", jnp.zeros(3))
    path = tmp_path / "a" / file
    path.write_text(path.read_text()[:-2])
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(tmp_path / "a", jnp.zeros(3))


def test_a_newer_version_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    checkpoint.save(folder, jnp.zeros(3))
    path = folder / "statemesh" / "metadata"
    record = json.loads(path.read_text())["record"] | {"version": 2}
    crc = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc, "record": record}))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(folder, jnp.zeros(3))
    assert str(error.value) == (
        f"load: {folder} has version 2 of the format, and this statemesh reads versions up to 1. Install a "
        "newer statemesh."
    )


def test_a_foreign_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, jnp.zeros(3))
    assert str(error.value) == (
        f"load: {tmp_path} is no checkpoint that statemesh.checkpoint saved, or it was not saved to its end. "
        "Give the folder that was given to `save`."
    )
