"""Step 2 with several processes: check that they pass the same where they have to."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base import _digests as digests
from .._base import errors
from .._base._types import Leaf, PyTreeDef


_NO_MESH = AbstractMesh((), ())

# A path, the value, and its digest.
Passed = tuple[str, Any, bytes]


def array_passed(path: str, x: Leaf) -> Passed:
    return path, x, digests.of_array(x)


def static_passed(path: str, value: Leaf) -> Passed:
    return path, value, digests.of_printed(value)


def structure_passed(treedef: PyTreeDef, paths: Sequence[str]) -> Passed:
    """The structure of arguments, compared by the words with which it is printed."""
    printed = digests.of_printed(treedef) + "\n".join(paths).encode()
    return "the structure of the arguments", treedef, digests.digest(printed)


def check_alike(name: str, mesh: Mesh, passed: Sequence[Passed]) -> None:
    """Refuse values that differ from those of another process with devices of the mesh.

    All of them have to call this at the same time. They exchange a few bytes if everything is alike, whatever
    its size, and a few more for each value if not.

    **Raises:** `StructureError` in all processes, naming what differs.
    """
    if not _over(mesh)[1].addressable_devices:
        return
    whole = digests.digest(b"".join(one for _, _, one in passed))
    rows = _gathered(mesh, whole + len(passed).to_bytes(digests.SIZE, "little"))
    if _is_one(rows):
        return
    if not _is_one([row[digests.SIZE :] for row in rows]):
        raise errors.processes_disagree(name, [])
    rows = _gathered(mesh, b"".join(one for _, _, one in passed))
    bad = [
        (path, value)
        for k, (path, value, _) in enumerate(passed)
        if not _is_one([row[k * digests.SIZE :][: digests.SIZE] for row in rows])
    ]
    raise errors.processes_disagree(name, bad)


def _is_one(rows: Sequence[bytes]) -> bool:
    return len(set(rows)) == 1


def _gathered(mesh: Mesh, row: bytes) -> list[bytes]:
    """The bytes that each device of the mesh has from its process."""
    size, parts, join = _over(mesh)
    data = np.frombuffer(row, np.uint8)[None]
    here = parts.addressable_devices_indices_map((size, len(row)))
    own = [jax.device_put(data, device) for device in here]
    given = jax.make_array_from_single_device_arrays((size, len(row)), parts, own)
    # This has to work whatever mesh is set, and inside transformations.
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        found = np.asarray(join(given).addressable_data(0))
    return [one.tobytes() for one in found]


@functools.lru_cache(maxsize=16)
def _over(mesh: Mesh) -> tuple[int, NamedSharding, Callable[..., Any]]:
    flat = Mesh(mesh.devices.reshape(-1), ("devices",))
    parts, whole = (NamedSharding(flat, PartitionSpec(*axes)) for axes in (("devices",), ()))
    return flat.size, parts, jax.jit(_same, out_shardings=whole)


def _same(x: jax.Array) -> jax.Array:
    return x
