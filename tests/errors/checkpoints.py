"""Mistakes with checkpoints: what does not fit, is damaged or forged, or is none."""

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

import statemesh as sm
from statemesh import checkpoint
from statemesh.checkpoint import Checkpoints
from tests.helpers import jnp, make_mesh

from .table import Mistakes, each, refusal


Change = Callable[[pathlib.Path], object]

A, B = "arrays/['a']/0", "arrays/['b']/0"
METADATA, CHECKSUMS = "statemesh/metadata", "arrays/checksums.json"


def forged_tree() -> dict[str, Any]:
    tree = {name: sm.State(jnp.arange(4.0) + k) for k, name in enumerate("ab")}
    return tree | {"key": sm.RandomState(jax.random.key(3)), "n": 3, "done": True}


_whole: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def steps(*names: str) -> Iterator[pathlib.Path]:
    """A folder of steps, of which each is a copy of one that was saved as step 3."""
    if not _whole:
        _whole.append(tempfile.TemporaryDirectory())
        with Checkpoints(_whole[0].name) as checkpoints:
            checkpoints.save(3, forged_tree())
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            shutil.copytree(pathlib.Path(_whole[0].name) / "3", pathlib.Path(place) / name)
        yield pathlib.Path(place)


# How a file is changed


def crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def write(file: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(content)


def truncated(file: str) -> Change:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - 1)


def flipped(file: str) -> Change:
    def flip(folder: pathlib.Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(content)

    return flip


def swapped(first: str, second: str) -> Change:
    def swap(folder: pathlib.Path) -> None:
        (folder / first).rename(folder / "kept")
        (folder / second).rename(folder / first)
        (folder / "kept").rename(folder / second)

    return swap


def deleted(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def replaced(file: str, make: Callable[[pathlib.Path], object]) -> Change:
    def replace(folder: pathlib.Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return replace


def a_folder(file: str) -> Change:
    return replaced(file, pathlib.Path.mkdir)


def a_loop(file: str) -> Change:
    """A file that cannot be opened: a symbolic link to itself."""
    return replaced(file, lambda path: path.symlink_to(path))


def arrays_as_a_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "arrays")
    (folder / "arrays").touch()


def record(**entries: Any) -> Change:
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


def checksums(change: Callable[[dict[str, Any]], Any], resealed: bool = True) -> Change:
    def replace(folder: pathlib.Path) -> None:
        sealed = json.loads((folder / CHECKSUMS).read_text())
        files = change(sealed["files"])
        seal = {"crc32": crc(files)} if resealed else {}
        (folder / CHECKSUMS).write_text(json.dumps(sealed | seal | {"files": files}))

    return replace


def of_another(part: str) -> Change:
    """A part of another checkpoint of the same shapes in the place of this one's."""

    def replace(folder: pathlib.Path) -> None:
        tree = forged_tree()
        checkpoint.save(folder / "other", tree | {"n": 4, "a": tree["b"]})
        shutil.rmtree(folder / part)
        (folder / "other" / part).rename(folder / part)

    return replace


def other_entry(files: dict[str, Any]) -> dict[str, Any]:
    return files | {A[len("arrays/") :]: files[B[len("arrays/") :]]}


def without_a(files: dict[str, Any]) -> dict[str, Any]:
    return {path: sums for path, sums in files.items() if "['a']" not in path}


NO_CONTENT = ("", "{}", "[]", '"a"', '{"a": 1}')
BAD_ENTRIES: dict[str, Any] = {
    "version": "1",
    "arrays": [1],
    "numbers": None,
    "a__shape": 4,
    "b__shape": [-1],
    "a__dtype": "float99",
    "b__dtype": 3,
    "key__impl": 3,
    "key__shape": ["x"],
    "a__folder": 3,
    "n__type": "list",
    "n__value": "x",
    "done__value": "maybe",
}
FORGERIES: dict[str, Change] = {
    "array truncated": (truncated(A)),
    "bit of an array": (flipped(A)),
    "array deleted": (deleted(A)),
    "array that is a folder": (a_folder(A)),
    "array that is a loop": (a_loop(A)),
    "several arrays damaged": (
        lambda folder: [
            truncated(A)(folder),
            flipped(B)(folder),
            deleted("arrays/['key']/0")(folder),
        ]
    ),
    "two arrays swapped": (swapped(A, B)),
    "two folders of arrays swapped": (swapped("arrays/['a']", "arrays/['b']")),
    "folder of an array renamed": (
        lambda folder: (folder / "arrays/['a']").rename(folder / "arrays/['c']")
    ),
    "shape in an array": (write("arrays/['a']/.zarray", "{}")),
    "Orbax's metadata deleted": (deleted("arrays/_METADATA")),
    "Orbax's metadata emptied": (write("arrays/_METADATA", "{}")),
    "all arrays deleted": (lambda folder: shutil.rmtree(folder / "arrays")),
    "arrays that are a file": (arrays_as_a_file),
    "checksums emptied": (checksums(lambda files: {})),
    "checksum deleted": (checksums(without_a)),
    "checksum of another file": (checksums(other_entry)),
    "list of checksums altered": (checksums(other_entry, resealed=False)),
    "checksums of texts": (checksums(lambda files: {file: ["1", "2"] for file in files})),
    "checksums of numbers": (checksums(lambda files: dict.fromkeys(files, 1))),
    "arrays of another checkpoint": (of_another("arrays")),
    "record of another checkpoint": (of_another("statemesh")),
    "record truncated": (truncated(METADATA)),
    "bit of the record": (flipped(METADATA)),
    "record that is a folder": (a_folder(METADATA)),
    "record that is a loop": (a_loop(METADATA)),
    "record deleted": (deleted(METADATA)),
    "record that is no text": (write(METADATA, b"\xff\xfe")),
    "record that is deep": (write(METADATA, "[" * 100_000)),
    "another shape": record(a__shape=[5], b__shape=[5]),
    "another dtype": record(a__dtype="int32", b__dtype="int32"),
    "another kind of key": (record(key__impl="rbg")),
    "folder that is not there": (record(a__folder="../..")),
    "newer version": (record(version=3)),
    **{f"checksums {content!r}": write(CHECKSUMS, content) for content in NO_CONTENT},
    **{f"record {content!r}": write(METADATA, content) for content in NO_CONTENT},
    **{f"{name} {value!r}": record(**{name: value}) for name, value in BAD_ENTRIES.items()},
}
# These are also loaded as the latest step of their folder.
BY_STEP = ("array truncated", "record deleted", "checksums emptied", "newer version")
LIKE: dict[str, dict[str, Any]] = {
    "another shape": {name: sm.State(jnp.zeros(5)) for name in "ab"},
    "another dtype": {name: sm.State(jnp.zeros(4, jnp.int32)) for name in "ab"},
}


def forgeries() -> str:
    """What is said of forgeries, however they are loaded, each time with all of which it is said."""
    said: dict[str, list[str]] = {}
    for name, change in FORGERIES.items():
        with steps("3") as folder:
            change(folder / "3")
            like = forged_tree() | LIKE.get(name, {})
            text = refusal(functools.partial(checkpoint.load, folder / "3", like))
            if name in BY_STEP:
                assert refusal(functools.partial(Checkpoints(folder).load, like)) == text
        said.setdefault(text.partition("\n  - ")[2].partition("\nLoad ")[0] or text, []).append(
            name
        )
    return "\n".join(f"{', '.join(names)}:\n  - {text}" for text, names in said.items())


def damaged() -> Any:
    with steps("3") as folder:
        truncated(A)(folder / "3")
        deleted(B)(folder / "3")
        return checkpoint.load(folder / "3", forged_tree())


# What does not fit


def saved(tree: Any, load: Callable[[pathlib.Path], Any]) -> Any:
    """What is done with a checkpoint of a tree."""
    with tempfile.TemporaryDirectory() as place:
        checkpoint.save(folder := pathlib.Path(place) / "a", tree)
        return load(folder)


def small(**changes: Any) -> dict[str, Any]:
    tree = {"avg": sm.State(jnp.arange(3.0)), "w": sm.State(jnp.ones((2, 3))), "n": jnp.int32(1)}
    return tree | changes


def several_differences(folder: pathlib.Path) -> Any:
    like = {"average": sm.State(jnp.zeros(3)), "w": sm.State(jnp.ones((2, 4))), "n": jnp.float32(1)}
    return checkpoint.load(folder, like)


def layers(*widths: int) -> Any:
    return {"layers": [{"w": sm.ParamState(jnp.ones(pair))} for pair in itertools.pairwise(widths)]}


def merge(old: Any, new: Any, names: Any) -> Any:
    return new


def per_shard() -> dict[str, Any]:
    policies: dict[str, Any] = {"a": None, "b": merge, "c": "mean"}
    spec = sm.PerShard("x")
    return {k: sm.State(jnp.zeros(2), spec=spec, reduce=how) for k, how in policies.items()}


def load_a_step(names: tuple[str, ...], *step: int) -> Any:
    with steps(*names) as folder:
        (folder / "9").touch()
        return Checkpoints(folder).load(forged_tree(), *step)


class Alike:
    """Keys that have one repr."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Alike()"

    def __lt__(self, other: "Alike") -> bool:
        return self.number < other.number


ALIKE = {Alike(1): jnp.zeros(3), Alike(2): {"x": 1}, Alike(3): jnp.ones((), int)}


def in_a_folder(make: Callable[[pathlib.Path], Any]) -> Any:
    """A mistake after which nothing is left in the folder."""
    with tempfile.TemporaryDirectory() as place:
        try:
            return make(pathlib.Path(place))
        finally:
            assert not os.listdir(place)


def link_in_the_place_of_old_steps() -> Any:
    with tempfile.TemporaryDirectory() as place:
        os.symlink(place, os.path.join(place, ".old"))
        with Checkpoints(place) as checkpoints:
            return checkpoints.save(3, 0)


STEPS = (1.0, "../../x")

MISTAKES: Mistakes = {
    "damaged checkpoint": damaged,
    "loading what differs in several ways": lambda: saved(small(), several_differences),
    "loading into an inserted layer": lambda: saved(
        layers(4, 8, 2), lambda folder: checkpoint.load(folder, layers(4, 8, 8, 2))
    ),
    "renaming what was not saved": lambda: saved(
        small(),
        lambda folder: checkpoint.load(folder, small(), rename={"w": "v", "['n']": "['w']"}),
    ),
    "loading a key of another implementation": lambda: saved(
        sm.RandomState(jax.random.key(0)),
        lambda folder: checkpoint.load(folder, sm.RandomState(jax.random.key(0, impl="rbg"))),
    ),
    "values of other shards without a policy": lambda: saved(
        per_shard(), lambda folder: checkpoint.load(folder, per_shard(), make_mesh("4"))
    ),
    "keeping shapes": lambda: saved(
        small(),
        lambda folder: checkpoint.load(
            folder, eqx.filter_eval_shape(lambda: small(more=jnp.zeros(2))), missing="keep"
        ),
    ),
    "saving over a checkpoint": lambda: saved(
        small(), lambda folder: checkpoint.save(folder, jnp.zeros(3))
    ),
    "loading a foreign folder": lambda: in_a_folder(
        lambda folder: checkpoint.load(folder, jnp.zeros(3))
    ),
    "renamed step": lambda: load_a_step(("4", "03", "x3", "٣")),
    "missing step": lambda: load_a_step(("4", "03"), 9),
    "saving under no step": each(
        lambda step: in_a_folder(lambda folder: Checkpoints(folder / "a" / "b").save(step, 0)),
        *STEPS,
    ),
    "loading no step": each(
        lambda step: in_a_folder(lambda folder: Checkpoints(folder / "a").load(0, step)), *STEPS
    ),
    "mesh in the place of a step": lambda: in_a_folder(
        lambda folder: Checkpoints(folder / "a").load(0, make_mesh())
    ),
    "keeping no steps": each(
        lambda keep: in_a_folder(lambda folder: Checkpoints(folder / "a", keep)), 0, True
    ),
    "two values of one path": [
        lambda: in_a_folder(lambda folder: checkpoint.save(folder / "a", ALIKE)),
        lambda: in_a_folder(lambda folder: Checkpoints(folder / "a").save(0, ALIKE)),
        lambda: saved({"x": 1}, lambda folder: checkpoint.load(folder, ALIKE)),
    ],
    "link in the place of old steps": link_in_the_place_of_old_steps,
}
