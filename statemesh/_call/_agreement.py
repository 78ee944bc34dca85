"""Step 2 with several processes: they pass the same where they have to, and trace the same program."""

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
from ._arguments import Input


SIZE = 16

_PRINTED = (str, bytes, int, float, complex, type(None), np.dtype, jax.sharding.PartitionSpec)


def is_own(x: Leaf) -> bool:
    """Whether every process has an `x` of its own: of the host, or on devices of its own."""
    if compat.is_tracer(x):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(data: bytes) -> bytes:
    """The digest of some bytes."""
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def of_array(x: Leaf) -> bytes:
    """The digest of an array. This process must hold the whole of it."""
    kind = str(x.dtype)
    if is_key(x):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(x)
    hashed = hashlib.blake2b(f"{kind}{host.shape}".encode(), digest_size=SIZE)
    hashed.update(host.view(np.uint8).data if host.ndim and host.size else host.tobytes())
    return hashed.digest()


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
            equations = tuple(_equation_lines(jaxpr, body))
            if equations not in numbers:
                numbers[equations] = f"jaxpr {len(numbers)}"
                lines.extend([f"{numbers[equations]}:", *equations])
            known[id(jaxpr)] = numbers[equations]
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
        case _ if isinstance(value, _PRINTED):
            return repr(value)
        case tuple() | list():
            return f"({', '.join(_parameter(x, body) for x in value)})"
        case Set():
            return f"{{{', '.join(sorted(_parameter(x, body) for x in value))}}}"
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


_NO_MESH = AbstractMesh((), ())

# A path, the value, and its digest.
Passed: TypeAlias = tuple[str, Any, bytes]


def array_passed(path: str, x: Leaf) -> Passed:
    return path, x, of_array(x)


def static_passed(path: str, value: Leaf) -> Passed:
    """A static leaf, compared by the words with which it and its type are printed.

    Where a set may be printed the order of the words does not count: sets of strings have another one in each
    process.
    """
    text = without_addresses(f"{type(value).__qualname__} {value!r}")
    words = re.findall(r"\w+|[^\w\s]", text)
    return path, value, digest("\n".join(sorted(words) if "{" in text else words).encode())


def structure_passed(treedef: PyTreeDef, paths: Sequence[str]) -> Passed:
    """The structure of arguments, compared by the words with which it is printed."""
    words = words_of(treedef)
    text = "\n".join([*paths, words])
    return "the structure of the arguments", treedef, digest(text.encode())


def check_alike(name: str, mesh: Mesh, passed: Sequence[Passed]) -> None:
    """Refuse values that differ from those of another process with devices of the mesh.

    **Raises:** `StructureError` in all processes, naming what differs.
    """
    counts, differing = _differing(name, mesh, [passed_digest for *_, passed_digest in passed])
    if differing:
        # Where one process passes more than another, no value stands beside its like.
        named = [passed[k][:2] for k in differing] if len(counts) == 1 else []
        items = [f"{path}: {describe(value)} in this process" for path, value in named]
        raise error_listing(
            StructureError,
            f"{name}: all processes must pass the same values here, but they passed different ones",
            items or ["the structure of the arguments, or where their arrays lie"],
            "Make them from the same seed or file in every process, or send one process's array or seed to "
            "all: jax.experimental.multihost_utils.broadcast_one_to_all(x). If each process has a part of "
            "the data, make one array of the parts: jax.make_array_from_process_local_data(sharding, part).",
        )


def check_same_arrays(name: str, mesh: AnyMesh, named: Sequence[tuple[str, Leaf]]) -> None:
    """Refuse arrays that each process has for itself, where another process has different ones.

    `named`: all arrays, each with its path. On a mesh of one process nothing is compared.
    """
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        check_alike(name, mesh, [array_passed(path, x) for path, x in named if is_own(x)])


def check_placements(name: str, mesh: Mesh, inputs: Sequence[Input]) -> None:
    """Refuse a mesh or specs that differ from those of another process with the same devices.

    **Raises:** `StructureError` in all processes, with the first that differs.
    """
    devices = [device.id for device in mesh.devices.flat]
    lines = [f"mesh: {dict(mesh.shape)} of the devices {devices}"]
    lines += [f"{leaf.path}: {leaf.placement.spec}" for leaf in inputs]
    _, differing = _first_difference(name, mesh, lines)
    if differing:
        raise error_listing(
            StructureError,
            f"{name}: all processes must lay out its arguments alike, but their meshes or specs differ",
            _listed_by_process(differing),
            "Give every process the same mesh, with its devices in one order, and the same specs.",
        )


def traced_alike(
    name: str, mesh: Mesh, trace: Callable[[], jax.stages.Traced]
) -> jax.stages.Traced:
    """What `trace` returns, if every process with devices of the mesh has traced the same program.

    A process whose trace fails tells the others, so that none of them waits for it.

    **Raises:** `StructureError` in all processes, with the first line that differs; what `trace` raises.
    """
    try:
        traced = trace()
    except Exception:  # Whatever the user's function raises.
        _first_difference(name, mesh, [_FAILED])
        raise
    number, differing = _first_difference(name, mesh, program_lines(traced.jaxpr))
    if failed := differing.get(_FAILED):
        numbers = ", ".join(map(str, failed))
        raise StructureError(
            f"{name}: {counted(len(failed), 'process', 'processes')} ({numbers}) raised an error while "
            "tracing it, which this process did not. So none of them runs it. The error is in the output of "
            f"process {failed[0]}."
        )
    if differing:
        raise error_listing(
            StructureError,
            f"{name}: all processes must run the same program, but they traced different ones. Line "
            f"{number} is the first that differs",
            _listed_by_process(differing),
            "Nothing that is traced may depend on jax.process_index(), on the time or on a seed of one "
            "process, nor on the order of a set. What differs between devices is an argument that is split, "
            "or comes of sm.axis_index inside.",
        )
    return traced


# What a process that could not trace has in place of its program. No program has such a line.
_FAILED = "failed"
# A text that differs is shown up to this many bytes.
_SHOWN = 300


def _first_difference(
    name: str, mesh: Mesh, lines: Sequence[str]
) -> tuple[int, Mapping[str, Sequence[int]]]:
    """The number of the first line that differs, and the processes that have each form of it, if any does."""
    _, differing = _differing(name, mesh, [digest(line.encode()) for line in lines])
    if not differing:
        return 0, {}
    at = differing[0]
    return at + 1, _by_process(mesh, lines[at] if at < len(lines) else "nothing more")


def _differing(name: str, mesh: Mesh, digests: Sequence[bytes]) -> tuple[set[int], list[int]]:
    """How many digests the processes have, and the numbers of those that differ.

    All processes with devices of the mesh have to call this at the same time. They exchange a few bytes if
    everything is alike, and all digests if not.

    **Raises:** `StructureError` where something differs and another process is at a call of another name.
    """
    if not _over(mesh)[1].addressable_devices:
        return {len(digests)}, []
    whole = digest(b"".join(digests))
    rows = _gathered(mesh, whole + len(digests).to_bytes(SIZE, "little"))
    counts = {int.from_bytes(row[SIZE:], "little") for row in rows}
    if len(set(rows)) == 1:
        return counts, []
    if len(calls := _by_process(mesh, name)) > 1:
        raise error_listing(
            StructureError,
            f"{name}: all processes must make the same calls in the same order, but they are at different "
            "ones",
            _listed_by_process(calls),
            "Look for a call that only some processes make, as under `if jax.process_index() == 0`, or as "
            "often as each has data. `explain`, `place` and `save` are such calls too. Make it in every "
            "process, and print or write what it gives in one.",
        )
    common = min(counts)
    rows = _gathered(mesh, b"".join(digests[:common])) if common else []
    each = range(common)
    differing = [k for k in each if len({row[k * SIZE :][:SIZE] for row in rows}) > 1]
    return counts, differing if len(counts) == 1 else [*differing, common]


def _by_process(mesh: Mesh, text: str) -> Mapping[str, Sequence[int]]:
    """The texts that the processes have, each with their numbers."""
    rows = _gathered(mesh, text.encode()[:_SHOWN].ljust(_SHOWN))
    by_text: dict[str, list[int]] = {}
    for device, row in zip(_devices(mesh), rows, strict=True):
        processes = by_text.setdefault(row.decode(errors="ignore").rstrip(), [])
        if device.process_index not in processes:
            processes.append(device.process_index)
    return by_text


def _gathered(mesh: Mesh, row: bytes) -> list[bytes]:
    """The bytes that each device of the mesh has from its process."""
    size, parts, join = _over(mesh)
    data = np.frombuffer(row, np.uint8)[None]
    here = parts.addressable_devices_indices_map((size, len(row)))
    arrays = [jax.device_put(data, device) for device in here]
    spread = jax.make_array_from_single_device_arrays((size, len(row)), parts, arrays)
    # This has to work whatever mesh is set, and inside transformations.
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        rows = np.asarray(join(spread).addressable_data(0))
    return [row.tobytes() for row in rows]


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


def _listed_by_process(lines: Mapping[str, Sequence[int]]) -> list[str]:
    return [
        f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(map(str, numbers))}: {line}"
        for line, numbers in lines.items()
    ]
