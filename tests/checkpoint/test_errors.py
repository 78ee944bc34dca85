"""What does not fit a checkpoint, is damaged, or is none: the exact texts, and how to mend it."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from tests.checkpoint.model import mesh_of


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text with which a call is refused."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("small") / "a"
    tree = {"avg": sm.State(jnp.arange(3.0)), "w": sm.State(jnp.ones((2, 3))), "n": jnp.int32(1)}
    checkpoint.save(folder, tree)
    return folder


def test_everything_that_does_not_fit_is_in_one_error(small: pathlib.Path) -> None:
    like = {"average": sm.State(jnp.zeros(3)), "w": sm.State(jnp.ones((2, 4))), "n": jnp.float32(1)}
    assert refused(sm.StructureError, lambda: checkpoint.load(small, like)) == (
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
    layers = [sm.State(jnp.full((2, 3), value)) for value in (5.0, 0.0)]
    rename = {"['w']": "['layers'][1]", "['avg']": None, "['n']": None}
    new = {"layers": layers, "x": sm.State(7)}
    back = checkpoint.load(small, new, rename=rename, missing="keep")
    assert [float(s.value.max()) for s in sm.states(back).values()] == [5.0, 1.0, 7.0]


def test_an_inserted_layer_is_named(tmp_path: pathlib.Path) -> None:
    def layers(*widths: int) -> Any:
        pairs = itertools.pairwise(widths)
        return {"layers": [{"w": sm.ParamState(jnp.ones(pair))} for pair in pairs]}

    checkpoint.save(tmp_path / "a", layers(4, 8, 2))
    text = refused(sm.StructureError, lambda: checkpoint.load(tmp_path / "a", layers(4, 8, 8, 2)))
    assert text == (
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
    packed = sm.pack(model, mesh_of((2, 1)))
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
    text = refused(
        sm.StructureError, lambda: checkpoint.load(small, like, rename={"w": "v", "['n']": "['w']"})
    )
    assert text == (
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

    text = refused(
        sm.StructureError,
        lambda: checkpoint.load(small, eqx.filter_eval_shape(make), missing="keep"),
    )
    assert text == (
        "load: missing='keep' keeps the values of `like`, which has only shapes for:\n"
        "  - ['more']\n"
        "Give the model itself as `like`."
    )


def test_a_checkpoint_is_never_written_over(small: pathlib.Path) -> None:
    assert refused(CheckpointError, lambda: checkpoint.save(small, jnp.zeros(3))) == (
        f"save: {small} is there already, and a checkpoint is never written over another. Give a new folder, "
        "or keep several steps with Checkpoints(folder)."
    )


def test_damaged_files_are_named(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(whole, folder)
    for damage in (truncated(A), flipped(B), deleted("arrays/['key']/0")):
        damage(folder)
    assert refused(CheckpointError, lambda: checkpoint.load(folder, forged_tree())) == (
        f"load: files in {folder} are not as they were saved:\n"
        "  - arrays/['a']/0, of ['a']: another size\n"
        "  - arrays/['b']/0, of ['b']: other content\n"
        "  - arrays/['key']/0, of ['key']: missing\n"
        "Load another checkpoint, or copy these files again from where they are whole."
    )


def test_a_foreign_folder_is_refused(tmp_path: pathlib.Path) -> None:
    assert refused(CheckpointError, lambda: checkpoint.load(tmp_path, jnp.zeros(3))) == (
        f"load: {tmp_path} is no checkpoint that statemesh.checkpoint saved, or it was not saved to its end. "
        "Give the folder that was given to `save`."
    )


def forged_tree() -> dict[str, Any]:
    tree = {name: sm.State(jnp.arange(4.0) + k) for k, name in enumerate("ab")}
    return tree | {"key": sm.RandomState(jax.random.key(3)), "n": 3, "done": True}


A, B = "arrays/['a']/0", "arrays/['b']/0"
METADATA, CHECKSUMS = "statemesh/metadata", "arrays/checksums.json"
Forgery = Callable[[pathlib.Path], object]


def crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def write(file: str, content: str | bytes) -> Forgery:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(content)


def truncated(file: str) -> Forgery:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - 1)


def flipped(file: str) -> Forgery:
    """One bit of a file is another."""

    def flip(folder: pathlib.Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(content)

    return flip


def swapped(a: str, b: str) -> Forgery:
    def swap(folder: pathlib.Path) -> None:
        (folder / a).rename(folder / "kept")
        (folder / b).rename(folder / a)
        (folder / "kept").rename(folder / b)

    return swap


def replaced(file: str, make: Forgery) -> Forgery:
    """Something else in the place of a file, or nothing."""

    def replace(folder: pathlib.Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return replace


def deleted(file: str) -> Forgery:
    return replaced(file, lambda path: None)


def a_folder(file: str) -> Forgery:
    return replaced(file, pathlib.Path.mkdir)


def a_loop(file: str) -> Forgery:
    """A file that cannot be opened: a symbolic link to itself."""
    return replaced(file, lambda path: path.symlink_to(path))


def without_arrays(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "arrays")


def arrays_as_a_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "arrays")
    (folder / "arrays").touch()


def record(**entries: Any) -> Forgery:
    """Entries of the record replaced, `a__dtype` for that of the array `a`, and all checksums made anew."""

    def replace(folder: pathlib.Path) -> None:
        content = json.loads((folder / METADATA).read_text())["record"]
        for path, value in entries.items():
            name, _, entry = path.partition("__")
            if entry:
                part = "numbers" if f"['{name}']" in content["numbers"] else "arrays"
                content[part][f"['{name}']"][entry] = value
            else:
                content[name] = value
        (folder / METADATA).write_text(json.dumps({"crc32": crc(content), "record": content}))
        sealed = json.loads((folder / CHECKSUMS).read_text())
        (folder / CHECKSUMS).write_text(json.dumps(sealed | {"record": crc(content)}))

    return replace


def checksums(change: Callable[[dict[str, Any]], Any], resealed: bool = True) -> Forgery:
    def replace(folder: pathlib.Path) -> None:
        sealed = json.loads((folder / CHECKSUMS).read_text())
        files = change(sealed["files"])
        seal = {"crc32": crc(files)} if resealed else {}
        (folder / CHECKSUMS).write_text(json.dumps(sealed | seal | {"files": files}))

    return replace


def other_entry(files: dict[str, Any]) -> dict[str, Any]:
    return files | {A[len("arrays/") :]: files[B[len("arrays/") :]]}


def of_another(part: str) -> Forgery:
    """A part of another checkpoint of the same shapes in the place of this one's."""

    def replace(folder: pathlib.Path) -> None:
        tree = forged_tree()
        checkpoint.save(folder / "other", tree | {"n": 4, "a": tree["b"]})
        shutil.rmtree(folder / part)
        (folder / "other" / part).rename(folder / part)

    return replace


NO_RECORD = ["", "{}", "[]", "null", "3", '"a"', '{"a": 1}']
# What is done to a checkpoint, by what the error says of it.
FORGERIES: dict[str, list[Forgery]] = {
    f"{A}, of ['a']: another size": [truncated(A)],
    f"{A}, of ['a']: other content": [
        flipped(A),
        swapped(A, B),
        swapped("arrays/['a']", "arrays/['b']"),
        checksums(other_entry),
    ],
    f"{A}, of ['a']: missing": [
        deleted(A),
        a_folder(A),
        lambda folder: (folder / "arrays/['a']").rename(folder / "arrays/['c']"),
    ],
    f"{A}, of ['a']: ": [a_loop(A)],
    "arrays/['a']/.zarray, of ['a']: another size": [write("arrays/['a']/.zarray", "{}")],
    "arrays/_METADATA: missing": [deleted("arrays/_METADATA")],
    "arrays/_METADATA: another size": [write("arrays/_METADATA", "{}")],
    f"{CHECKSUMS}: missing or not readable": [
        without_arrays,
        arrays_as_a_file,
        checksums(lambda files: {file: ["1", "2"] for file in files}),
        checksums(lambda files: dict.fromkeys(files, 1)),
        *(write(CHECKSUMS, content) for content in NO_RECORD),
    ],
    f"{CHECKSUMS}, of ['a']: no checksum": [
        checksums(lambda _: {}),
        checksums(lambda files: {k: v for k, v in files.items() if "['a']" not in k}),
        record(a__folder="../.."),
    ],
    f"{CHECKSUMS}: other content": [checksums(other_entry, resealed=False)],
    f"{CHECKSUMS}: of another checkpoint than {METADATA}": [
        of_another("arrays"),
        of_another("statemesh"),
    ],
    f"{METADATA}: other content": [
        truncated(METADATA),
        flipped(METADATA),
        write(METADATA, b"\xff\xfe"),
        write(METADATA, "[" * 100_000),
        *(write(METADATA, content) for content in NO_RECORD),
        record(version="1"),
        record(arrays=[1]),
        record(numbers=None),
        record(a__shape=4),
        record(b__shape=[-1]),
        record(a__dtype="float99"),
        record(b__dtype=3),
        record(key__impl=3),
        record(key__shape=["x"]),
        record(a__folder=3),
        record(n__type="list"),
        record(n__value="x"),
        record(done__value="maybe"),
    ],
    f"{METADATA} cannot be read: ": [a_folder(METADATA), a_loop(METADATA)],
    "is no checkpoint": [deleted(METADATA)],
    " has version 3 of the format, and this statemesh reads versions up to 2. Install a newer "
    "statemesh.": [record(version=3)],
    f"arrays/['key'], of ['key']: {METADATA} says key<fry>[], which it is not": [
        record(key__impl="rbg")
    ],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("whole")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, forged_tree())
    return folder / "3"


def assert_named(folder: pathlib.Path, like: Any, expected: str) -> None:
    loads: list[Any] = [Checkpoints(folder.parent).load, functools.partial(checkpoint.load, folder)]
    for load in loads:
        with pytest.raises(CheckpointError) as error:
            load(like)
        assert str(folder) in str(error.value)
        assert expected in str(error.value)


@pytest.mark.parametrize("expected", FORGERIES)
def test_forgeries_are_named(expected: str, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for k, forge in enumerate(FORGERIES[expected]):
        folder = tmp_path / f"{k}" / "3"
        shutil.copytree(whole, folder)
        forge(folder)
        assert_named(folder, forged_tree(), expected)


@pytest.mark.parametrize("form", ["float32[5]", "int32[4]"])
def test_a_forged_shape_or_dtype_is_named(
    form: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    dtype, size = form.removesuffix("]").split("[")
    forms: dict[str, Any] = {f"{name}__shape": [int(size)] for name in "ab"}
    forms |= {f"{name}__dtype": dtype for name in "ab"}
    shutil.copytree(whole, tmp_path / "3")
    record(**forms)(tmp_path / "3")
    zeros = sm.State(jnp.zeros(int(size), dtype))
    expected = f"arrays/['a'], of ['a']: {METADATA} says {form}, which it is not"
    assert_named(tmp_path / "3", forged_tree() | {"a": zeros, "b": zeros}, expected)


def test_a_checkpoint_of_version_1_loads(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(whole, folder)
    record(version=1)(folder)
    files = json.loads((folder / CHECKSUMS).read_text())["files"]
    (folder / CHECKSUMS).write_text(json.dumps(files))
    back = checkpoint.load(folder, forged_tree())
    assert (back["n"], back["done"]) == (3, True)
    np.testing.assert_array_equal(back["a"].value, np.arange(4.0))
    (folder / CHECKSUMS).write_text("{}")
    with pytest.raises(CheckpointError, match="no checksum"):
        checkpoint.load(folder, forged_tree())


def test_a_renamed_step_is_named(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name in ("4", "03", "x3", "٣"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "9").touch()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest == 4
    assert refused(CheckpointError, lambda: checkpoints.load(forged_tree())) == (
        f"Checkpoints.load: {tmp_path / '4'} was saved as step 3, and has been renamed. Give it its name "
        "again, or write statemesh.checkpoint.load(folder, like), which takes a folder of any name."
    )
    checkpoint.load(tmp_path / "4", forged_tree())
    with pytest.raises(CheckpointError, match=r"holds no step 9\. There are: 4\."):
        checkpoints.load(forged_tree(), 9)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything, so it becomes somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "path", ["", "3", "3/statemesh", f"3/{METADATA}", f"3/{CHECKSUMS}", f"3/{A}"]
)
def test_what_may_not_be_read_is_named(path: str, whole: pathlib.Path) -> None:
    # The folders of pytest are for their owner alone.
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        shutil.copytree(whole, root / "3")
        for at in (root, *root.rglob("*")):
            at.chmod(0o755)
        checkpoints = Checkpoints(root)
        checkpoints.load(forged_tree())
        (root / path).chmod(0)
        with nobody(), pytest.raises(CheckpointError) as error:
            checkpoints.load(forged_tree())
        (root / path).chmod(0o755)
    assert str(root) in str(error.value)
    assert pathlib.Path(path).name in str(error.value)


@pytest.mark.parametrize("step", [1.0, -1, True, None, "../../x", np.float32(1)])
def test_a_step_is_a_whole_number(step: Any, tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "b")
    calls: dict[str, Any] = {"save": lambda: checkpoints.save(step, 0)}
    if step is not None:
        calls["load"] = lambda: checkpoints.load(0, step)
    for name, call in calls.items():
        assert refused(CheckpointError, call) == (
            f"Checkpoints.{name}: step is {step!r} of type {type(step).__name__}, but must be a whole number "
            "that is not negative."
        )
    assert not list(tmp_path.iterdir())


def test_whole_numbers_of_any_kind_are_steps(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=np.int64(2)) as checkpoints:
        for step in (0, np.int64(1), np.uint8(2), jnp.int32(3)):
            checkpoints.save(step, int(step))
        assert [checkpoints.load(0, step) for step in (2, np.int32(3))] == [2, 3]
    assert Checkpoints(tmp_path).latest == 3


@pytest.mark.parametrize("keep", [0, -1, True, "zz", 1.5])
def test_keep_is_at_least_1(keep: Any, tmp_path: pathlib.Path) -> None:
    assert refused(CheckpointError, lambda: Checkpoints(tmp_path / "a", keep)) == (
        f"Checkpoints: keep is {keep!r}, but must be a whole number of at least 1. Leave it out to keep all "
        "steps."
    )


class Alike:
    """Keys that have one repr."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Alike()"

    def __lt__(self, other: "Alike") -> bool:
        return self.number < other.number


def test_two_values_with_one_path_are_refused(tmp_path: pathlib.Path) -> None:
    tree = {Alike(1): jnp.zeros(3), Alike(2): {"x": 1}, Alike(3): jnp.ones((), int)}
    checkpoint.save(tmp_path / "a", {"x": 1})
    calls: dict[str, Any] = {
        "save": lambda: checkpoint.save(tmp_path / "b", tree),
        "Checkpoints.save": lambda: Checkpoints(tmp_path / "b").save(0, tree),
        "load": lambda: checkpoint.load(tmp_path / "a", tree),
    }
    for name, call in calls.items():
        assert refused(sm.StructureError, call) == (
            f"{name}: values are saved by their paths, and these paths have several:\n"
            "  - [Alike()]: float32[3] and int32[]\n"
            "Give the keys different reprs, or the fields different names."
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_look_writes_nothing(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path / "none", keep=1) as checkpoints:
        assert checkpoints.latest is None
    assert not list(tmp_path.iterdir())
    shutil.copytree(whole, tmp_path / "3")
    for name in ("4.orbax-checkpoint-tmp", ".old/1", "2", "notes"):
        (tmp_path / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest == 3
        checkpoints.load(forged_tree())
        checkpoints.wait()
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_deleted_behind_a_link(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious" / "7" / "file"
    precious.parent.mkdir(parents=True)
    precious.touch()
    folder = tmp_path / "a"
    (folder / ".old").mkdir(parents=True)
    (folder / ".old" / "77").symlink_to(precious.parent)
    (folder / ".old" / "notes").touch()
    (folder / "9.orbax-checkpoint-tmp").symlink_to(precious.parent)
    with Checkpoints(folder, keep=1) as checkpoints:
        for step in range(3):
            checkpoints.save(step, 0)
    assert sorted(path.name for path in (folder / ".old").iterdir()) == ["77", "notes"]
    shutil.rmtree(folder / ".old")
    (folder / ".old").symlink_to(precious.parent.parent)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 2
        text = refused(CheckpointError, lambda: checkpoints.save(3, 0))
    assert text == (
        f"Checkpoints.save: {folder / '.old'} is a symbolic link. Old steps are moved there to be deleted, "
        "and nothing is deleted behind a link. Remove the link."
    )
    assert precious.exists()


def test_what_vanishes_while_it_is_read(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = ocp.Checkpointer.restore
    vanishing: list[Callable[[pathlib.Path], object]] = []

    def restore_less(reader: Any, arrays: Any, **options: Any) -> Any:
        if vanishing:
            vanishing.pop()(pathlib.Path(arrays).parent)
        return restore(reader, arrays, **options)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore_less)
    shutil.copytree(whole, tmp_path / "3")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, forged_tree() | {"n": 4})
        # Another process drops the newest step.
        vanishing.append(lambda folder: folder.rename(tmp_path / "dropped"))
        assert checkpoints.load(forged_tree())["n"] == 3
        vanishing.append(deleted(A))
        with pytest.raises(CheckpointError, match=r"arrays cannot be read: "):
            checkpoints.load(forged_tree())
