"""The files of a checkpoint: Orbax's, with a record of what they hold and a checksum of each."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from .._base._errors import StatemeshError, error_listing
from .._base._types import Leaf


try:
    import fcntl
except ImportError:  # On Windows no process knows what others do, and nothing of others is deleted.
    fcntl = None  # type: ignore[assignment]


# The checksums of version 1 have none of their own.
VERSION = 2
ARRAYS, RECORD, OLD = "arrays", "statemesh", ".old"
METADATA = f"{RECORD}/metadata"
_CHECKSUMS = "checksums.json"
_LOCK = ".lock"
_TEMPORARY: str = ocp.utils.TMP_DIR_SUFFIX
# What Orbax writes beside the folders of the arrays.
_TAKEN = ("_METADATA", "_sharding", "array_metadatas", "commit_success.txt", _CHECKSUMS)
_PIECE = 1 << 22

Record = dict[str, Any]


class CheckpointError(StatemeshError):
    """A folder that cannot be written or read as a checkpoint.

    !!! example

        ```python
        >>> import tempfile
        >>> from statemesh import checkpoint
        >>> try:
        ...     checkpoint.save(tempfile.gettempdir(), {})
        ... except checkpoint.CheckpointError as error:
        ...     print("is there already" in str(error))
        True

        ```
    """


class ArraysHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, which gives each a folder of its own; and a checksum for each file."""

    def __init__(self) -> None:
        super().__init__(use_ocdbt=False)
        self._record = 0

    async def async_save(self, directory: Any, *, args: "_Save") -> Any:
        self._record = args.record
        return await super().async_save(directory, args=args)

    def finalize(self, directory: Any) -> None:
        # One process calls this when all have written, before the folder gets its final name. Orbax's own
        # `finalize` merges files of a format that is not used here.
        folder = pathlib.Path(directory)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        checksums = {str(path.relative_to(folder)): _checksum(path) for path in files}
        sealed = {"crc32": _crc(checksums), "record": self._record, "files": checksums}
        (folder / _CHECKSUMS).write_text(json.dumps(sealed))


@ocp.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    """What the handler saves, and the checksum of the record of it."""

    record: int = 0


@ocp.args.register_with_handler(ArraysHandler, for_restore=True)
@dataclasses.dataclass
class _Restore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """What the handler restores."""


def handlers() -> dict[str, Any]:
    """The handler of each part of a checkpoint."""
    return {ARRAYS: ArraysHandler(), RECORD: ocp.JsonCheckpointHandler()}


def to_save(arrays: Mapping[str, Leaf], record: Record) -> Any:
    """What Orbax is asked to save.

    **Arguments:**

    - `arrays`: the arrays by path.
    """
    sealed = {"crc32": _crc(record), "record": record}
    parts: dict[str, Any] = {RECORD: ocp.args.JsonSave(sealed)}
    if arrays:  # Orbax refuses to save none.
        named = {folder_of(path, record): x for path, x in arrays.items()}
        parts[ARRAYS] = _Save(named, record=_crc(record))
    return ocp.args.Composite(**parts)


def folder_name(path: str) -> str:
    """A name for the folder of an array: its path, without what no file's name may have.

    Two paths never get one name.
    """
    safe = re.sub(r"[%/\\\x00-\x1f]", lambda sign: f"%{ord(sign[0]):02X}", path)
    return f"%{safe}" if safe in _TAKEN else safe


def folder_of(path: str, record: Record) -> str:
    """The folder in which the array with a path is."""
    return record["arrays"][path].get("folder", path)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Say of an error in the system or in Orbax that `what` was not saved."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as reason:
        raise CheckpointError(
            f"{what} was not saved: {reason}\nThe checkpoints that were saved before are untouched."
        ) from reason


def folder_path(call: str, folder: object) -> pathlib.Path:
    """The absolute path of a folder that was given to `call`."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"{call}: folder is {folder!r} of type {type(folder).__name__}, but must be a path, as a string "
            "or a pathlib.Path."
        )
    return pathlib.Path(folder).absolute()


def read_record(folder: pathlib.Path) -> Record:
    """What a checkpoint holds.

    **Raises:** `CheckpointError` for a folder that is no whole checkpoint, cannot be read, was altered, or is
    of a newer version.
    """
    try:
        sealed = json.loads((folder / METADATA).read_text())
        record: Record = sealed["record"]
        whole = sealed["crc32"] == _crc(record) and isinstance(record["version"], int)
    except (FileNotFoundError, NotADirectoryError):
        if steps := steps_in(folder):
            raise CheckpointError(
                f"load: {folder} holds the steps {', '.join(map(str, steps))}, and is no checkpoint itself. "
                "Write Checkpoints(folder).load(like), or give the folder of a step."
            ) from None
        raise CheckpointError(
            f"load: {folder} is no checkpoint that statemesh.checkpoint saved, or it was not saved to its "
            "end. Give the folder that was given to `save`."
        ) from None
    except OSError as reason:
        raise CheckpointError(f"load: {folder / METADATA} cannot be read: {reason}") from reason
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _altered(folder, [(METADATA, "", "other content")]) from None
    if whole and record["version"] > VERSION:
        raise CheckpointError(
            f"load: {folder} has version {record['version']} of the format, and this statemesh reads "
            f"versions up to {VERSION}. Install a newer statemesh."
        )
    if not (whole and _is_well_formed(record)):
        raise _altered(folder, [(METADATA, "", "other content")])
    return record


def _is_well_formed(record: Record) -> bool:
    """Whether a record says of each array and number what it has to."""
    try:
        for array in record["arrays"].values():
            key = array["dtype"].startswith("key<")
            sizes = all(type(size) is int and size >= 0 for size in array["shape"])
            texts = [array["impl"]] if key else [jnp.dtype(array["dtype"]).name]
            if not sizes or {type(text) for text in [*texts, array.get("folder", "")]} != {str}:
                return False
        for number in record["numbers"].values():
            number_of(number)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def number_of(saved: Mapping[str, str]) -> bool | int | float | complex:
    """The Python number that a record describes."""
    kinds: dict[str, Any] = {"int": int, "float": float, "complex": complex}
    if saved["type"] == "bool":
        return {"True": True, "False": False}[saved["value"]]
    return kinds[saved["type"]](saved["value"])


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of which a folder has a checkpoint.

    **Raises:** `CheckpointError` for a folder that cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as reason:
        raise CheckpointError(f"Checkpoints: {folder} cannot be read: {reason}") from reason
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def open_lock(folder: pathlib.Path) -> int:
    """Open the file whose lock all have that save in a folder."""
    if (folder / OLD).is_symlink():
        raise CheckpointError(
            f"Checkpoints.save: {folder / OLD} is a symbolic link. Old steps are moved there to be deleted, "
            "and nothing is deleted behind a link. Remove the link."
        )
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def delete_temporaries(folder: pathlib.Path, lock: int) -> None:
    """Delete what killed processes have left half-written, unless others are saving in the folder.

    The system takes the lock from a process that ends, however it ends. So one that can have the lock alone
    knows that all that is half-written is dead.

    **Arguments:**

    - `lock`: the open file of the lock. Afterwards it has the lock together with others.
    """
    if fcntl is None:
        return
    # Where a file system knows no locks, nothing is deleted.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in _real_folders(folder, rf"[0-9]+{re.escape(_TEMPORARY)}.*"):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)


def is_half_written(folder: pathlib.Path, step: int) -> bool:
    return os.path.lexists(folder / f"{step}{_TEMPORARY}")


def delete_old(folder: pathlib.Path) -> threading.Thread:
    """Start to delete the old steps that Orbax has moved to the folder `OLD`. One process deletes them."""
    old = _real_folders(folder / OLD, "[0-9]+") if jax.process_index() == 0 else []
    thread = threading.Thread(
        target=lambda: [shutil.rmtree(step, ignore_errors=True) for step in old]
    )
    thread.start()
    return thread


def _real_folders(folder: pathlib.Path, pattern: str) -> list[str]:
    """The folders in a folder by the pattern of their names. What a symbolic link points to is not ours."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [
            entry.path
            for entry in entries
            if re.fullmatch(pattern, entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def is_empty(array: Mapping[str, Any]) -> bool:
    """Whether an array in a record has no elements. There are no files for it."""
    return 0 in array["shape"]


def check_files(folder: pathlib.Path, record: Record) -> None:
    """Refuse a checkpoint of which a file is not as it was saved. Each process reads a part of them."""
    saved = _checksums(folder, record)
    files = sorted(saved)
    states = np.zeros(len(files), np.uint8)
    for k in range(jax.process_index(), len(files), jax.process_count()):
        states[k] = _state_of(folder / ARRAYS / files[k], saved[files[k]])
    if jax.process_count() > 1:
        states = np.max(np.asarray(multihost_utils.process_allgather(states)), axis=0)
    words = ("", "missing", "another size", "other content", "not readable")
    leaves = {folder_of(path, record): path for path in record["arrays"]}
    bad = [
        (f"{ARRAYS}/{file}", leaves.get(os.path.dirname(file), ""), words[state])
        for file, state in zip(files, states, strict=True)
        if state
    ]
    if bad:
        raise _altered(folder, bad)


def _checksums(folder: pathlib.Path, record: Record) -> dict[str, Sequence[int]]:
    """The checksums of all files of the arrays."""
    described = record["arrays"].items()
    wanted = {folder_of(path, record): path for path, x in described if not is_empty(x)}
    if not wanted:
        return {}
    name = f"{ARRAYS}/{_CHECKSUMS}"
    checksums: dict[str, Sequence[int]] = {}
    what = ""
    try:
        sealed = json.loads((folder / name).read_text())
        checksums = sealed if record["version"] == 1 else sealed["files"]
        if any(
            type(number) is not int for size, crc in checksums.values() for number in (size, crc)
        ):
            what = "missing or not readable"
        elif record["version"] > 1 and sealed["crc32"] != _crc(checksums):
            what = "other content"
        elif record["version"] > 1 and sealed["record"] != _crc(record):
            what = f"of another checkpoint than {METADATA}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        what = "missing or not readable"
    if what:
        raise _altered(folder, [(name, "", what)])
    known = {os.path.dirname(file) for file in checksums}
    if bare := [path for at, path in wanted.items() if at not in known]:
        raise _altered(folder, [(name, path, "no checksum") for path in bare])
    return checksums


def read_arrays(
    folder: pathlib.Path, record: Record, shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """The arrays by path, each laid out by its sharding, or as NumPy's where that is `None`.

    **Raises:** `CheckpointError` where Orbax cannot read them, or they are not what the record says.
    """
    wanted = {
        folder_of(path, record): ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for path, sharding in shardings.items()
    }
    if not wanted:
        return {}
    reader = ocp.Checkpointer(ArraysHandler())
    asked = _Restore(item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True)
    try:
        read = reader.restore(folder / ARRAYS, args=asked)
    # Where a file vanishes while it is read, Orbax raises an error that has no class of its own.
    except Exception as reason:
        raise CheckpointError(f"load: {folder / ARRAYS} cannot be read: {reason}") from reason
    arrays, bad = {}, []
    for path in shardings:
        array, at = record["arrays"][path], folder_of(path, record)
        x = read[at]
        if "impl" in array:
            # What is no data of such keys is refused below.
            with contextlib.suppress(TypeError, ValueError):
                x = jax.random.wrap_key_data(jnp.asarray(x), impl=array["impl"])
        arrays[path] = x
        if [str(x.dtype), *x.shape] != [array["dtype"], *array["shape"]]:
            saved = f"{array['dtype']}{array['shape']}".replace(" ", "")
            bad.append((f"{ARRAYS}/{at}", path, f"{METADATA} says {saved}, which it is not"))
    if bad:
        raise _altered(folder, bad)
    return arrays


def _crc(content: Any) -> int:
    """The CRC-32 of what is written as JSON."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _checksum(file: pathlib.Path) -> list[int]:
    """The size and the CRC-32 of a file."""
    size = crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _state_of(file: pathlib.Path, saved: Sequence[int]) -> int:
    try:
        if not file.is_file():
            return 1
        if file.stat().st_size != saved[0]:
            return 2
        return 0 if _checksum(file) == list(saved) else 3
    except OSError:
        return 4


def _altered(folder: object, bad: Sequence[tuple[str, str, str]]) -> CheckpointError:
    return error_listing(
        CheckpointError,
        f"load: files in {folder} are not as they were saved",
        [f"{file}{f', of {leaf}' if leaf else ''}: {what}" for file, leaf, what in bad],
        "Load another checkpoint, or copy these files again from where they are whole.",
    )
