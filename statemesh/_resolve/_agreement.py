"""Step 2 with several processes: check that they pass the same where they have to, and trace the same."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base import _digests as digests
from .._base import errors
from .._base._types import Leaf, PyTreeDef
from ._inputs import Input


Traced: TypeAlias = jax.stages.Traced

_NO_MESH = AbstractMesh((), ())

# A path, the value, and its digest.
Passed: TypeAlias = tuple[str, Any, bytes]


def array_passed(path: str, x: Leaf) -> Passed:
    return path, x, digests.of_array(x)


def static_passed(path: str, value: Leaf) -> Passed:
    return path, value, digests.of_printed(value)


def structure_passed(treedef: PyTreeDef, paths: Sequence[str]) -> Passed:
    """The structure of arguments, compared by the words with which it is printed."""
    words = digests.words_of(treedef)
    text = "\n".join([*paths, words])
    return "the structure of the arguments", treedef, digests.digest(text.encode())


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


def check_placements(name: str, mesh: Mesh, inputs: Sequence[Input]) -> None:
    """Refuse a mesh or specs that differ from those of another process with the same devices.

    **Raises:** `StructureError` in all processes, with the first that differs.
    """
    devices = [device.id for device in mesh.devices.flat]
    lines = [f"mesh: {dict(mesh.shape)} of the devices {devices}"]
    lines += [f"{one.path}: {one.placement.spec}" for one in inputs]
    if (differing := _first_difference(mesh, lines, failed=False)) is not None:
        raise errors.processes_place_differently(name, differing.lines)


def traced_alike(name: str, mesh: Mesh, trace: Callable[[], Traced]) -> Traced:
    """What `trace` returns, if every process with devices of the mesh has traced the same program.

    A process whose trace fails tells the others, so that none of them waits for it.

    **Raises:** `StructureError` in all processes, with the first line that differs; what `trace` raises.
    """
    try:
        traced = trace()
    except Exception:  # Whatever the user's function raises.
        _first_difference(mesh, [], failed=True)
        raise
    differing = _first_difference(mesh, digests.program_lines(traced.jaxpr), failed=False)
    if differing is not None and differing.failed:
        raise errors.process_failed(name, differing.failed)
    if differing is not None:
        raise errors.programs_differ(name, differing.number, differing.lines)
    return traced


@dataclasses.dataclass(frozen=True)
class _Difference:
    """Where texts of several processes begin to differ.

    **Attributes:**

    - `number`: of the first line that differs.
    - `lines`: this line, and the processes that have it.
    - `failed`: the processes that have no text because they raise an error.
    """

    number: int
    lines: Mapping[str, Sequence[int]]
    failed: Sequence[int]


# The first line that differs is shown up to this many bytes.
_LINE = 300


def _first_difference(mesh: Mesh, lines: Sequence[str], failed: bool) -> _Difference | None:
    """Where these lines differ from those of other processes; `None` where all have the same.

    All of them have to call this at the same time. They exchange a few bytes if everything is alike, and else
    a few for each halving of the lines.
    """
    if not _over(mesh)[1].addressable_devices:
        return None

    def alike(count: int) -> bool:
        return _is_one(_gathered(mesh, digests.digest("\n".join(lines[:count]).encode())))

    whole = digests.digest("\n".join(lines).encode())
    rows = _gathered(mesh, whole + len(lines).to_bytes(8, "little") + bytes([failed]))
    if _is_one(rows) and not failed:
        return None
    if stopped := _by_process(mesh, [row[-1:].hex() for row in rows]).get("01"):
        return _Difference(0, {}, stopped)
    counts = [int.from_bytes(row[digests.SIZE : -1], "little") for row in rows]
    same, differ = 0, min(counts)
    if alike(differ):
        same = differ
    while differ - same > 1:
        middle = (same + differ) // 2
        same, differ = (middle, differ) if alike(middle) else (same, middle)
    line = lines[same] if same < len(lines) else "nothing more"
    shown = _gathered(mesh, line.encode()[:_LINE].ljust(_LINE))
    texts = [row.decode(errors="ignore").rstrip() for row in shown]
    return _Difference(same + 1, _by_process(mesh, texts), [])


def _by_process(mesh: Mesh, texts: Sequence[str]) -> dict[str, list[int]]:
    """The processes that sent each text."""
    found: dict[str, list[int]] = {}
    for device, text in zip(_devices(mesh), texts, strict=True):
        processes = found.setdefault(text, [])
        if device.process_index not in processes:
            processes.append(device.process_index)
    return found


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


def _devices(mesh: Mesh) -> list[jax.Device]:
    """The devices in an order that is the same in every process, whatever that of the mesh is."""
    return sorted(mesh.devices.flat, key=lambda device: device.id)


@functools.lru_cache(maxsize=16)
def _over(mesh: Mesh) -> tuple[int, NamedSharding, Callable[..., Any]]:
    flat = Mesh(np.array(_devices(mesh)), ("devices",))
    parts, whole = (NamedSharding(flat, PartitionSpec(*axes)) for axes in (("devices",), ()))
    return flat.size, parts, jax.jit(_same, out_shardings=whole)


def _same(x: jax.Array) -> jax.Array:
    return x
