"""Checkpoints: every layout loads what every other saved, and what is refused."""

import json
import pathlib
import subprocess
import sys
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from statemesh.filters import PathContains
from tests import checkpoint_steps as steps
from tests.checkpoint_steps import LAYOUTS, STEPS
from tests.helpers import slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder for each layout, and the masks and the end of a run that was not interrupted."""
    root = tmp_path_factory.mktemp("layouts")
    for name, shape in LAYOUTS.items():
        mesh = steps.mesh_of(shape)
        _, net = steps.train(steps.make(shape[0]), mesh, 0)
        checkpoint.save(root / name, net)
    masks, net = steps.train(net, mesh, STEPS)
    return root, masks, steps.totals(net)


def assert_same(masks: Any, found: Any, expected: Any) -> None:
    for mask, other in zip(masks, expected[0], strict=True):
        np.testing.assert_array_equal(mask, other)
    for name, value in steps.totals(found).items():
        if np.issubdtype(value.dtype, np.floating):
            np.testing.assert_allclose(value, expected[1][name], rtol=2e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(value, expected[1][name], err_msg=name)


@pytest.mark.parametrize("target", ["1", "4x2", *map(slow, ["2", "4", "8"])])
def test_training_goes_on_on_any_mesh(target: str, saved: Any) -> None:
    root, *expected = saved
    mesh = steps.mesh_of(LAYOUTS[target])
    for source in LAYOUTS:
        net = checkpoint.load(root / source, eqx.filter_eval_shape(steps.make), mesh)
        assert net.weight.value.sharding == NamedSharding(mesh, P("y"))
        assert net.seen.value.shape == (LAYOUTS[target][0],)
        assert_same(*steps.train(net, mesh, STEPS), expected)


def test_the_same_mesh_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    mesh = steps.mesh_of((2, 1))
    net = sm.place(steps.make(2), mesh)
    checkpoint.save(tmp_path / "a", net)
    # The mesh is that of the arrays of `like`.
    back = checkpoint.load(tmp_path / "a", net)
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(net))
    for old, new in zip(*map(jax.tree.leaves, (net, back)), strict=True):
        assert not hasattr(old, "sharding") or old.sharding == new.sharding
        assert bool(jnp.all(old == new))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_keep_their_implementation(impl: str, tmp_path: pathlib.Path) -> None:
    key = jax.random.key(7, impl=impl)
    tree = {"key": key, "rng": sm.RandomState(key), "lanes": jax.random.split(key, 3)}
    checkpoint.save(tmp_path / "a", tree)
    back = checkpoint.load(tmp_path / "a", eqx.filter_eval_shape(lambda: tree))
    for old, new in zip(*map(jax.tree.leaves, (tree, back)), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(jax.random.key_data(old), jax.random.key_data(new))


def test_a_key_of_another_implementation_is_refused(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", {"rng": sm.RandomState(jax.random.key(0))})
    like = {"rng": sm.RandomState(jax.random.key(0, impl="rbg"))}
    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(tmp_path / "a", like)
    assert str(error.value) == (
        f"load: what {tmp_path / 'a'} holds is not what `like` has:\n"
        "  - ['rng']: saved as key<fry>[], but `like` has key<rbg>[]"
    )


def test_numbers_and_static_leaves(tmp_path: pathlib.Path) -> None:
    class Rate(sm.Module):
        rate: float
        state: sm.State

    tree = {
        "epoch": 3,
        "loss": float("inf"),
        "done": True,
        "z": 1j,
        "model": Rate(0.1, sm.State(1)),
        "none": None,
        "name": "a",
        "empty": jnp.zeros((0, 2)),
        "numpy": np.arange(3.0),
    }
    checkpoint.save(tmp_path / "a", tree)
    like = tree | {"epoch": 0, "loss": 0.0, "done": False, "z": 0j}
    like |= {"model": Rate(0.2, sm.State(0)), "name": "b"}
    back = checkpoint.load(tmp_path / "a", like)
    # Numbers in a Module are static, as everywhere.
    assert (back["model"].rate, int(back["model"].state.value)) == (0.2, 1)
    assert (back["epoch"], back["loss"], back["done"], back["z"]) == (3, float("inf"), True, 1j)
    assert (back["name"], back["none"], back["empty"].shape) == ("b", None, (0, 2))
    assert isinstance(back["numpy"], jax.Array)
    np.testing.assert_array_equal(back["numpy"], np.arange(3.0))


def test_lanes_are_data(tmp_path: pathlib.Path) -> None:
    lanes = sm.State(jnp.arange(6.0), tag="lanes")
    checkpoint.save(tmp_path / "a", lanes)
    back = checkpoint.load(tmp_path / "a", lanes, steps.mesh_of((4, 1)))
    np.testing.assert_array_equal(back.value, np.arange(6.0))


def test_packed_models(tmp_path: pathlib.Path) -> None:
    mesh = steps.mesh_of((2, 1))
    packed = sm.pack({"a": sm.State(jnp.arange(4.0), spec=P("x")), "n": sm.State(3)}, mesh)
    checkpoint.save(tmp_path / "a", packed)
    for like in (packed, jax.tree.map(jnp.zeros_like, packed), packed.unpack()):
        back = checkpoint.load(tmp_path / "a", like)
        assert type(back) is type(like)
        np.testing.assert_array_equal(sm.states(back)["['a']"].value, np.arange(4.0))


@pytest.mark.parametrize("target", [2, 4])
def test_packed_models_stay_packed_as_in_like(target: int, tmp_path: pathlib.Path) -> None:
    model = {
        "w": sm.ParamState(jnp.arange(8.0)),
        "seen": sm.State(jnp.arange(2), reduce="sum"),
        "n": sm.State(3, spec=P("y")),
    }
    specs = {sm.ParamState: P("x"), PathContains("seen"): sm.PerShard("x"), ...: P()}
    packed = sm.pack(model, steps.mesh_of((2, 1)), state_specs=specs)
    # Of the slots only the parts of parameters are there.
    tree = packed, optax.adam(0.1).init(sm.trainable(packed))
    checkpoint.save(tmp_path / "a", tree)
    mesh = steps.mesh_of((target, 1))
    back, slots = checkpoint.load(tmp_path / "a", tree, mesh)
    seen = [0, 1] if target == 2 else [1, 0, 0, 0]
    model["seen"] = sm.State(jnp.array(seen), reduce="sum")
    fresh = sm.pack(model, mesh, state_specs=specs)
    expected: Any = fresh, optax.adam(0.1).init(sm.trainable(fresh))
    structure: Any = jax.tree.structure
    assert structure((back, slots)) == structure(expected)
    for x, y in zip(*map(jax.tree.leaves, ((back, slots), expected)), strict=True):
        np.testing.assert_array_equal(x, y)
    places = [[x.sharding for x in one.buffers] for one in (back, fresh)]
    assert places[0] == places[1]


@pytest.mark.parametrize("tree", [{"epoch": 3}, {"empty": jnp.zeros((0, 2))}])
def test_a_tree_without_elements(tree: Any, tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a", tree)
    back = checkpoint.load(tmp_path / "a", tree)
    assert str(back) == str(tree)
    with Checkpoints(tmp_path / "b") as checkpoints:
        checkpoints.save(0, tree)
        assert str(checkpoints.load(tree)) == str(tree)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", [2.5, 2.5, 2.5]), ("sum", [10, 0, 0]), ("max", [4, 4, 4]), ("min", [1, 1, 1])],
)
def test_values_of_shards_become_those_of_others(reduce: str, expected: list[float]) -> None:
    for dtype in (np.float32, jnp.bfloat16, np.int32):
        if reduce == "mean" and dtype is np.int32:
            continue
        state = sm.State(jnp.zeros(4, dtype), reduce=reduce)
        found = state.reshard(np.array([1, 2, 3, 4], dtype), 3)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(float), expected)


def test_streams_of_shards_stay_or_are_new(tmp_path: pathlib.Path) -> None:
    keys = jax.random.split(jax.random.key(1), 2)
    checkpoint.save(tmp_path / "a", sm.RandomState(keys, spec=sm.PerShard("x")))
    data = {}
    for count in (1, 2, 4):
        like = sm.RandomState(keys, spec=sm.PerShard("x"))
        back = checkpoint.load(tmp_path / "a", like, steps.mesh_of((count, 1)))
        data[count] = np.asarray(jax.random.key_data(back.value))
        both = min(count, 2)
        np.testing.assert_array_equal(data[count][:both], jax.random.key_data(keys)[:both])
    assert len(np.unique(data[4], axis=0)) == 4


def test_values_of_shards_without_a_policy_are_refused(tmp_path: pathlib.Path) -> None:
    def merge(old: Any, new: Any, names: Any) -> Any:
        return new

    tree = {
        name: sm.State(jnp.zeros(2), spec=sm.PerShard("x"), reduce=how)
        for name, how in (("a", None), ("b", merge), ("c", "mean"))
    }
    checkpoint.save(tmp_path / "a", tree)
    checkpoint.load(tmp_path / "a", tree, steps.mesh_of((2, 1)))
    with pytest.raises(sm.StructureError) as error:
        checkpoint.load(tmp_path / "a", tree, steps.mesh_of((4, 1)))
    assert str(error.value) == (
        "load: these states have values of single shards, and no way to get those of another number of "
        "shards:\n"
        "  - ['a']: State with values of 2 shards, for 4, reduce=None\n"
        "  - ['b']: State with values of 2 shards, for 4, reduce=merge\n"
        "Declare reduce='mean', 'sum', 'max' or 'min' in `like`, override `reshard` in a kind of your own, "
        "or load on a mesh of the same size."
    )


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


def test_steps(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(CheckpointError, match=r"holds no step. Nothing was saved there yet."):
            checkpoints.load(jnp.int32(0))
        for step in (1, 5, 7):
            checkpoints.save(step, jnp.int32(step))
        assert int(checkpoints.load(jnp.int32(0))) == 7
        assert int(checkpoints.load(jnp.int32(0), 5)) == 5
        with pytest.raises(CheckpointError, match=r"holds no step 1. There are: 5, 7."):
            checkpoints.load(jnp.int32(0), 1)
        with pytest.raises(CheckpointError, match=r"step 7 in .* is not later than step 7"):
            checkpoints.save(7, jnp.int32(0))
    with pytest.raises(CheckpointError, match=r"holds the steps 5, 7, and is no checkpoint itself"):
        checkpoint.load(tmp_path, jnp.int32(0))
    assert Checkpoints(tmp_path).latest == 7


def test_what_is_written_does_not_change_with_what_is_donated(tmp_path: pathlib.Path) -> None:
    mesh = steps.mesh_of((8, 1))
    double = sm.shard_map(
        lambda state: (None, state.set(state.value + 1)),
        mesh,
        in_specs=(None,),
        out_specs=(None, P()),
        donate="states",
    )
    state = sm.place(sm.State(jnp.zeros((8, 20_000)), spec=P("x")), mesh)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state)
            _, state = jax.block_until_ready(double(state))
        for step in range(4):
            assert set(np.unique(checkpoints.load(state, step).value)) == {float(step)}


def test_the_package_does_not_import_orbax() -> None:
    code = "import sys, statemesh; assert 'orbax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
