"""Checkpoints: every layout loads what every other saved, and what is refused."""

import gc
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from statemesh.filters import PathContains
from tests.checkpoint.model import LAYOUTS, STEPS, assert_same, make, mesh_of, save_all, train
from tests.helpers import slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder for each layout, and the masks and the end of a run that was not interrupted."""
    root = tmp_path_factory.mktemp("layouts")
    return root, save_all(root)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["4x2", *map(slow, ["1", "2", "4", "8"])])
def test_training_goes_on_on_any_mesh(target: str, saved: Any) -> None:
    root, expected = saved
    mesh = mesh_of(LAYOUTS[target])
    for source in LAYOUTS:
        net = checkpoint.load(root / source, eqx.filter_eval_shape(make), mesh)
        assert net.weight.value.sharding == NamedSharding(mesh, P("y"))
        assert net.seen.value.shape == (LAYOUTS[target][0],)
        assert_same(*train(net, mesh, STEPS), expected)


def test_the_same_mesh_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    mesh = mesh_of((2, 1))
    net = sm.place(make(2), mesh)
    checkpoint.save(tmp_path / "a", net)
    # The mesh is that of the arrays of `like`.
    back = checkpoint.load(tmp_path / "a", net)
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(net))
    for old, new in zip(*map(jax.tree.leaves, (net, back)), strict=True):
        assert not hasattr(old, "sharding") or old.sharding == new.sharding
        assert bool(jnp.all(old == new))


def test_keys_keep_their_implementation(tmp_path: pathlib.Path) -> None:
    keys = {impl: jax.random.key(7, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
    tree = {
        impl: [key, sm.RandomState(key), jax.random.split(key, 3)] for impl, key in keys.items()
    }
    checkpoint.save(tmp_path / "a", tree)
    back = checkpoint.load(tmp_path / "a", eqx.filter_eval_shape(lambda: tree))
    for old, new in zip(*map(jax.tree.leaves, (tree, back)), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(jax.random.key_data(old), jax.random.key_data(new))


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
    like: dict[str, Any] = tree | {"epoch": 0, "loss": 0.0, "done": False, "z": 0j}
    like |= {"model": Rate(0.2, sm.State(0)), "name": "b"}
    back = checkpoint.load(tmp_path / "a", like)
    # Numbers in a Module are static, as everywhere.
    assert (back["model"].rate, int(back["model"].state.value)) == (0.2, 1)
    assert (back["epoch"], back["loss"], back["done"], back["z"]) == (3, float("inf"), True, 1j)
    assert (back["name"], back["none"], back["empty"].shape) == ("b", None, (0, 2))
    assert isinstance(back["numpy"], jax.Array)
    np.testing.assert_array_equal(back["numpy"], np.arange(3.0))


class Cell(sm.Module):
    h: Any = None
    rng: Any = None

    def init_state(self) -> "Cell":
        h = sm.ShortTermState(jnp.zeros((), jnp.bfloat16))
        return self.replace(h=h, rng=sm.RandomState(jax.random.key(0)))

    def update(self, x: jax.Array) -> tuple[jax.Array, "Cell"]:
        key, rng = self.rng.split()
        return jax.random.bits(key), self.replace(h=self.h.value + x, rng=rng)


@pytest.mark.parametrize("behavior", ["vmap", "pmap"])
def test_lanes_are_data(behavior: Literal["vmap", "pmap"], tmp_path: pathlib.Path) -> None:
    def make() -> Any:
        return sm.Map(Cell(), 4, behavior=behavior).init_all_states()

    x = jnp.arange(4, dtype=jnp.bfloat16)
    _, cells = make()(x)
    checkpoint.save(tmp_path / "a", cells)
    back = checkpoint.load(tmp_path / "a", eqx.filter_eval_shape(make), mesh_of((2, 1)))
    bits, again = back(x)
    expected_bits, expected = cells(x)
    np.testing.assert_array_equal(bits, expected_bits)
    for state, other in zip(sm.states(again).values(), sm.states(expected).values(), strict=True):
        assert state.value.dtype == other.value.dtype
        assert bool(jnp.all(state.value == other.value))


@pytest.mark.parametrize("target", [2, 4])
def test_packed_models_stay_packed_as_in_like(target: int, tmp_path: pathlib.Path) -> None:
    model = {
        "w": sm.ParamState(jnp.arange(8.0)),
        "seen": sm.State(jnp.arange(2), reduce="sum"),
        "n": sm.State(3, spec=P("y")),
    }
    specs = {sm.ParamState: P("x"), PathContains("seen"): sm.PerShard("x"), ...: P()}
    packed = sm.pack(model, mesh_of((2, 1)), state_specs=specs)
    # Of the slots only the parts of parameters are there.
    tree = packed, optax.adam(0.1).init(sm.trainable(packed))
    checkpoint.save(tmp_path / "a", tree)
    mesh = mesh_of((target, 1))
    back, slots = checkpoint.load(tmp_path / "a", tree, mesh)
    seen = [0, 1] if target == 2 else [1, 0, 0, 0]
    model["seen"] = sm.State(jnp.array(seen), reduce="sum")
    fresh = sm.pack(model, mesh, state_specs=specs)
    expected: Any = fresh, optax.adam(0.1).init(sm.trainable(fresh))
    structure: Any = jax.tree.structure
    assert structure((back, slots)) == structure(expected)
    for x, y in zip(*map(jax.tree.leaves, ((back, slots), expected)), strict=True):
        np.testing.assert_array_equal(x, y)
    places = [[x.sharding for x in model.buffers] for model in (back, fresh)]
    assert places[0] == places[1]


def test_trees_without_elements(tmp_path: pathlib.Path) -> None:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)[:0]
    for what, value in {"number": 3, "floats": jnp.zeros((0, 2)), "keys": keys}.items():
        checkpoint.save(tmp_path / what, {what: value})
        assert str(checkpoint.load(tmp_path / what, {what: value})) == str({what: value})


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", [2.5, 2.5, 2.5]), ("sum", [10, 0, 0]), ("max", [4, 4, 4]), ("min", [1, 1, 1])],
)
def test_values_of_shards_become_those_of_others(reduce: str, expected: list[float]) -> None:
    for dtype in (np.float32, jnp.bfloat16, np.int32):
        if reduce == "mean" and dtype is np.int32:
            continue
        state = sm.State(jnp.zeros(4, dtype), reduce=reduce)
        values = state.reshard(np.array([1, 2, 3, 4], dtype), 3)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values.astype(float), expected)


def test_streams_of_shards_stay_or_are_new(tmp_path: pathlib.Path) -> None:
    keys = jax.random.split(jax.random.key(1), 2)
    checkpoint.save(tmp_path / "a", sm.RandomState(keys, spec=sm.PerShard("x")))
    data = {}
    for count in (1, 2, 4):
        like = sm.RandomState(keys, spec=sm.PerShard("x"))
        back = checkpoint.load(tmp_path / "a", like, mesh_of((count, 1)))
        data[count] = np.asarray(jax.random.key_data(back.value))
        both = min(count, 2)
        np.testing.assert_array_equal(data[count][:both], jax.random.key_data(keys)[:both])
    assert len(np.unique(data[4], axis=0)) == 4


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


def test_any_text_is_a_key_and_no_two_have_one_file(tmp_path: pathlib.Path) -> None:
    keys = ["", *"\n\t\0\r\x7f\u2028\ud800%é", "a\nb", "a\\nb", "a\\b", "a%5C%5Cb", "a%5Cnb"]
    keys += ["a/b", "a%2Fb", "a%252Fb", "/../../../x", ".."]
    tree: Any = {key: jnp.int32(k) for k, key in enumerate(keys)}
    tree["key"] = {key: sm.State(np.arange(2) + k) for k, key in enumerate(keys)}
    checkpoint.save(tmp_path / "a" / "b", tree)
    back = checkpoint.load(tmp_path / "a" / "b", jax.tree.map(jnp.zeros_like, tree))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), back, tree))
    # Nothing is written beside the folder.
    assert [path.name for path in tmp_path.glob("*/*")] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_names_that_orbax_takes_are_fields_too(tmp_path: pathlib.Path) -> None:
    class Names(sm.Module):
        _METADATA: Any
        _sharding: Any
        array_metadatas: Any
        checksums: Any

    tree = Names(jnp.ones(1), jnp.ones(2), jnp.ones(3), {"json": jnp.ones(4)})
    checkpoint.save(tmp_path / "a", tree)
    assert str(checkpoint.load(tmp_path / "a", tree)) == str(tree)


def test_what_is_written_does_not_change_with_what_is_donated(tmp_path: pathlib.Path) -> None:
    mesh = mesh_of((8, 1))
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


# Orbax closes its event loop at the first file that is missing, and leaves the reads of others unfinished.
# Python reports them when it collects them, which is here and not in whichever test comes later.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
    gc.collect()
