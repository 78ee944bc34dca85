"""Step 2 with several processes: they pass the same where they have to, and trace the same program."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base._checks import is_key
from .._base._errors import StructureError, counted, error_listing
from .._base._trees import describe
from .._base._types import AnyMesh, Leaf, PyTreeDef
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import Operand
from .._jax._jaxprs import AnyJaxpr
from ._placement import Input, is_own


SIZE = 16

_PLAIN = (str, bytes, int, float, complex, type(None), np.dtype, jax.sharding.PartitionSpec)


def digest(data: bytes) -> bytes:
    """The digest of some bytes."""
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def of_array(x: Leaf) -> bytes:
    """The digest of an array. This process must hold the whole of it."""
    kind = str(x.dtype)
    if is_key(x):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(x)
    found = hashlib.blake2b(f"{kind}{host.shape}".encode(), digest_size=SIZE)
    found.update(host.view(np.uint8).data if host.ndim and host.size else host.tobytes())
    return found.digest()


def without_addresses(text: str) -> str:
    """A printed object, without where it lies in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def words_of(treedef: PyTreeDef) -> str:
    """The words with which a structure is printed, without their order: sets of strings have another one in
    each process."""
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", without_addresses(str(treedef)))))


def program_lines(program: AnyJaxpr) -> list[str]:
    """A traced program in lines that are alike in all processes that traced the same one.

    The lines hold no name of a function, no address, and no order of a set. The jaxprs that an equation runs
    come before it, equal ones once.
    """
    lines: list[str] = []
    numbers: dict[tuple[str, ...], str] = {}
    # By identity, so that a jaxpr that many equations run is read once.
    known: dict[int, str] = {}

    def body(jaxpr: AnyJaxpr) -> str:
        if id(jaxpr) not in known:
            own = tuple(_equation_lines(jaxpr, body))
            if own not in numbers:
                numbers[own] = f"jaxpr {len(numbers)}"
                lines.extend([f"{numbers[own]}:", *own])
            known[id(jaxpr)] = numbers[own]
        return known[id(jaxpr)]

    body(program)
    return lines


def _equation_lines(jaxpr: AnyJaxpr, body: Any) -> list[str]:
    opened = jaxprs.open_jaxpr(jaxpr)
    variables: dict[Operand, str] = {}

    def text(atom: Operand) -> str:
        kind = _sorted_in_braces(str(atom.aval).removeprefix("ShapedArray"))
        if isinstance(atom, compat.core.Literal):
            return f"{_parameter(atom.val, body)}:{kind}"
        name = variables.setdefault(atom, f"v{len(variables)}")
        return f"{name}:{kind}"

    def texts(atoms: Sequence[Operand]) -> str:
        return " ".join(map(text, atoms))

    constants = [_parameter(x, body) for x in getattr(jaxpr, "consts", ())]
    lines = [f"{text(v)} = {x}" for v, x in zip(opened.constvars, constants, strict=False)]
    lines.append(f"takes {texts(opened.invars)}")
    for eqn in opened.eqns:
        # A name is that of a function, or one given to a value. It changes nothing.
        parameters = [
            f"{key}={_parameter(value, body)}"
            for key, value in sorted(eqn.params.items())
            if key != "name" and value is not None
        ]
        listed = f"[{' '.join(parameters)}]" if parameters else ""
        lines.append(f"{texts(eqn.outvars)} = {eqn.primitive.name}{listed} {texts(eqn.invars)}")
    return [*lines, f"returns {texts(opened.outvars)}"]


def _parameter(value: Any, body: Any) -> str:
    """A parameter of an equation, or a constant of a program."""
    if hasattr(value, "eqns"):
        return body(value)
    if hasattr(value, "__array__"):
        if compat.is_tracer(value) or not getattr(value, "is_fully_addressable", True):
            return "array"
        if not np.ndim(value) and not is_key(value):
            return repr(np.asarray(value).item())
        return f"array {of_array(value).hex()}"
    match value:
        case PyTreeDef():
            return words_of(value)
        case type():
            return _type_text(value)
        case int() | float() | complex():
            # JAX has numbers of its own, which are printed with their dtypes.
            return repr(np.asarray(value).item())
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case tuple() | list():
            return f"({', '.join(_parameter(one, body) for one in value)})"
        case Set():
            return f"{{{', '.join(sorted(_parameter(one, body) for one in value))}}}"
        case Mapping():
            return _parameter(sorted(value.items(), key=str), body)
        case _ if callable(value):
            return _type_text(type(value))
    return _sorted_in_braces(without_addresses(repr(value)))


def _type_text(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sorted_in_braces(text: str) -> str:
    """A printed object, with what it shows of sets in one order."""

    def in_order(match: re.Match[str]) -> str:
        words = " ".join(sorted(re.findall(r"[^\s,()]+", match[1])))
        return f"{{{words}}}"

    return re.sub(r"\{([^{}]*,[^{}]*)\}", in_order, text)


def of_printed(value: object) -> bytes:
    """The digest of the words with which a value and its type are printed.

    Not of where objects lie in memory. And not of the order of words where a set may be printed: sets of
    strings have another one in each process.
    """
    text = without_addresses(f"{type(value).__qualname__} {value!r}")
    words = re.findall(r"\w+|[^\w\s]", text)
    return digest("\n".join(sorted(words) if "{" in text else words).encode())


Traced: TypeAlias = jax.stages.Traced

_NO_MESH = AbstractMesh((), ())

# A path, the value, and its digest.
Passed: TypeAlias = tuple[str, Any, bytes]


def array_passed(path: str, x: Leaf) -> Passed:
    return path, x, of_array(x)


def static_passed(path: str, value: Leaf) -> Passed:
    return path, value, of_printed(value)


def structure_passed(treedef: PyTreeDef, paths: Sequence[str]) -> Passed:
    """The structure of arguments, compared by the words with which it is printed."""
    words = words_of(treedef)
    text = "\n".join([*paths, words])
    return "the structure of the arguments", treedef, digest(text.encode())


def check_alike(name: str, mesh: Mesh, passed: Sequence[Passed]) -> None:
    """Refuse values that differ from those of another process with devices of the mesh.

    All of them have to call this at the same time. They exchange a few bytes if everything is alike, whatever
    its size, and a few more for each value if not.

    **Raises:** `StructureError` in all processes, naming what differs.
    """
    if not _over(mesh)[1].addressable_devices:
        return
    whole = digest(b"".join(one for _, _, one in passed))
    rows = _gathered(mesh, whole + len(passed).to_bytes(SIZE, "little"))
    if _is_one(rows):
        return
    if not _is_one([row[SIZE:] for row in rows]):
        raise _processes_disagree(name, [])
    rows = _gathered(mesh, b"".join(one for _, _, one in passed))
    bad = [
        (path, value)
        for k, (path, value, _) in enumerate(passed)
        if not _is_one([row[k * SIZE :][:SIZE] for row in rows])
    ]
    raise _processes_disagree(name, bad)


def check_same_arrays(name: str, mesh: AnyMesh, named: Sequence[tuple[str, Leaf]]) -> None:
    """Refuse arrays that each process has for itself, and another process otherwise.

    `named`: all arrays, each with its path. Nothing is compared on a mesh of one process.
    """
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        check_alike(name, mesh, [array_passed(path, x) for path, x in named if is_own(x)])


def check_placements(name: str, mesh: Mesh, inputs: Sequence[Input]) -> None:
    """Refuse a mesh or specs that differ from those of another process with the same devices.

    **Raises:** `StructureError` in all processes, with the first that differs.
    """
    devices = [device.id for device in mesh.devices.flat]
    lines = [f"mesh: {dict(mesh.shape)} of the devices {devices}"]
    lines += [f"{one.path}: {one.placement.spec}" for one in inputs]
    if (differing := _first_difference(mesh, lines, failed=False)) is not None:
        raise error_listing(
            StructureError,
            f"{name}: all processes must lay out its arguments alike, but their meshes or specs differ",
            _listed_by_process(differing.lines),
            "Give every process the same mesh, with its devices in one order, and the same specs.",
        )


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
    differing = _first_difference(mesh, program_lines(traced.jaxpr), failed=False)
    if differing is not None and differing.failed:
        numbers = ", ".join(map(str, differing.failed))
        raise StructureError(
            f"{name}: {counted(len(differing.failed), 'process', 'processes')} ({numbers}) raised an error "
            "while tracing it, which this process did not. So none of them runs it. The error is in the "
            f"output of process {differing.failed[0]}."
        )
    if differing is not None:
        raise error_listing(
            StructureError,
            f"{name}: all processes must run the same program, but they traced different ones. Line "
            f"{differing.number} is the first that differs",
            _listed_by_process(differing.lines),
            "Nothing that is traced may depend on jax.process_index(), on the time or on a seed of one "
            "process, nor on the order of a set. What differs between devices is an argument that is split, "
            "or comes of sm.axis_index inside.",
        )
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
        return _is_one(_gathered(mesh, digest("\n".join(lines[:count]).encode())))

    whole = digest("\n".join(lines).encode())
    rows = _gathered(mesh, whole + len(lines).to_bytes(8, "little") + bytes([failed]))
    if _is_one(rows) and not failed:
        return None
    if stopped := _by_process(mesh, [row[-1:].hex() for row in rows]).get("01"):
        return _Difference(0, {}, stopped)
    counts = [int.from_bytes(row[SIZE:-1], "little") for row in rows]
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


def _processes_disagree(name: str, bad: Sequence[tuple[str, object]]) -> StructureError:
    items = [f"{path}: {describe(value)} in this process" for path, value in bad]
    return error_listing(
        StructureError,
        f"{name}: all processes must pass the same values here, but they passed different ones",
        items or ["the structure of the arguments, or where their arrays lie"],
        "Make them from the same seed or file in every process, or send one process's array or seed to "
        "all: jax.experimental.multihost_utils.broadcast_one_to_all(x). If each process has a part of "
        "the data, make one array of the parts: jax.make_array_from_process_local_data(sharding, part).",
    )


def _listed_by_process(lines: Mapping[str, Sequence[int]]) -> list[str]:
    return [
        f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(map(str, numbers))}: {line}"
        for line, numbers in lines.items()
    ]
