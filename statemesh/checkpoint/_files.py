"""The files of a checkpoint: Orbax's, with a record of what they hold and a checksum of each."""

import dataclasses
import json
import os
import pathlib
import shutil
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from .._base._types import Leaf
from . import _errors as errors


VERSION = 1
ARRAYS, RECORD, OLD = "arrays", "statemesh", ".old"
_CHECKSUMS = "checksums.json"
_PIECE = 1 << 22

Record = dict[str, Any]


class ArraysHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, which gives each a folder of its own; and a checksum for each file."""

    def __init__(self) -> None:
        super().__init__(use_ocdbt=False)

    def finalize(self, directory: Any) -> None:
        # One process calls this when all have written, before the folder gets its final name. Orbax's own
        # `finalize` merges files of a format that is not used here.
        folder = pathlib.Path(directory)
        found = {file: _checksum(folder / file) for file in _files(folder)}
        (folder / _CHECKSUMS).write_text(json.dumps(found))


@ocp.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    """What the handler saves."""


@ocp.args.register_with_handler(ArraysHandler, for_restore=True)
@dataclasses.dataclass
class _Restore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """What the handler restores."""


def handlers() -> dict[str, Any]:
    """The handler of each part of a checkpoint."""
    return {ARRAYS: ArraysHandler(), RECORD: ocp.JsonCheckpointHandler()}


def to_save(arrays: Mapping[str, Leaf], record: Record) -> Any:
    """What Orbax is asked to save."""
    text = json.dumps(record, sort_keys=True)
    sealed = {"crc32": zlib.crc32(text.encode()), "record": record}
    parts: dict[str, Any] = {RECORD: ocp.args.JsonSave(sealed)}
    if arrays:  # Orbax refuses to save none.
        parts[ARRAYS] = _Save(dict(arrays))
    return ocp.args.Composite(**parts)


def read_record(folder: pathlib.Path) -> Record:
    """What a checkpoint holds.

    **Raises:** `CheckpointError` for a folder that is no whole checkpoint, was altered, or is of a newer
    version.
    """
    file = folder / RECORD / "metadata"
    if not file.is_file():
        raise errors.no_checkpoint(folder, steps_in(folder))
    try:
        sealed = json.loads(file.read_text())
        record: Record = sealed["record"]
        text = json.dumps(record, sort_keys=True)
        whole = sealed["crc32"] == zlib.crc32(text.encode())
        version = record["version"]
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise errors.altered(folder, [(f"{RECORD}/metadata", "", "other content")])
    if version > VERSION:
        raise errors.newer_version(folder, version, VERSION)
    return record


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of which a folder has a checkpoint."""
    if not folder.is_dir():
        return []
    return sorted(int(sub.name) for sub in folder.iterdir() if sub.name.isdecimal())


def delete_old(folder: pathlib.Path) -> threading.Thread:
    """Start to delete the old steps that Orbax has moved to the folder `OLD`. One process deletes them."""
    old = list((folder / OLD).glob("*")) if jax.process_index() == 0 else []
    thread = threading.Thread(
        target=lambda: [shutil.rmtree(step, ignore_errors=True) for step in old]
    )
    thread.start()
    return thread


def is_empty(array: Mapping[str, Any]) -> bool:
    """Whether an array in a record has no elements. There are no files for it."""
    return 0 in array["shape"]


def check_files(folder: pathlib.Path, record: Record) -> None:
    """Refuse a checkpoint of which a file is not as it was saved. Each process reads a part of them."""
    if all(map(is_empty, record["arrays"].values())):
        return
    arrays = folder / ARRAYS
    try:
        saved = json.loads((arrays / _CHECKSUMS).read_text())
        files = sorted(saved)
    except (OSError, ValueError, TypeError):
        raise errors.altered(
            folder, [(f"{ARRAYS}/{_CHECKSUMS}", "", "missing or not readable")]
        ) from None
    states = np.zeros(len(files), np.uint8)
    for k in range(jax.process_index(), len(files), jax.process_count()):
        states[k] = _state_of(arrays / files[k], saved[files[k]])
    if jax.process_count() > 1:
        states = np.max(np.asarray(multihost_utils.process_allgather(states)), axis=0)
    words = ("", "missing", "another size", "other content")
    bad = [
        (f"{ARRAYS}/{file}", _leaf_of(file), words[state])
        for file, state in zip(files, states, strict=True)
        if state
    ]
    if bad:
        raise errors.altered(folder, bad)


def read_arrays(folder: pathlib.Path, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by name, each laid out by its sharding, or as NumPy's where that is `None`."""
    wanted = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for name, sharding in shardings.items()
    }
    if not wanted:
        return {}
    reader = ocp.Checkpointer(ArraysHandler())
    asked = _Restore(item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True)
    found: dict[str, Any] = reader.restore(folder / ARRAYS, args=asked)
    return found


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
        if name != _CHECKSUMS
    )


def _checksum(file: pathlib.Path) -> list[int]:
    """The size and the CRC-32 of a file."""
    size = crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _state_of(file: pathlib.Path, saved: list[int]) -> int:
    if not file.is_file():
        return 1
    if file.stat().st_size != saved[0]:
        return 2
    return 0 if _checksum(file) == saved else 3


def _leaf_of(file: str) -> str:
    leaf = os.path.dirname(file)
    return "" if leaf in (".", "array_metadatas") else leaf
