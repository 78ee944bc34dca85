"""Errors of `pmap2` with several processes."""

from collections.abc import Mapping, Sequence

from .._paths import describe
from ._classes import BatchAxisError, StructureError
from ._text import counted, error_listing


def not_shapes(given: object) -> TypeError:
    return TypeError(
        f"global_arg_shapes={given!r} is not a shape (a tuple of ints) or None for each positional argument."
    )


def global_shapes_count(name: str, entries: int, args: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name} was called with {counted(args, 'positional argument')}, but global_arg_shapes has "
        f"{counted(entries, 'entry', 'entries')}. It has one for each positional argument: its global shape, "
        "or None."
    )


def global_shape(
    name: str, bad: Sequence[tuple[str, object, tuple[int, ...], tuple[int, ...]]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} here, but global_arg_shapes has {given}, of which this process's part is "
        f"{part}"
        for path, x, given, part in bad
    ]
    mend = (
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give None "
        "for any other argument."
    )
    return error_listing(
        BatchAxisError, f"{name}: arguments do not fit global_arg_shapes", items, mend
    )


def no_own_devices(name: str, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: none of the {counted(devices, 'device')} belongs to this process. Only processes that own "
        "some of them can make the call."
    )


def processes_traced(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 over the devices of several processes cannot be traced, as by jit, grad, vmap or "
        "scan around it. It takes and gives this process's lanes, which exist only while it runs. Call it "
        "outside of them, and transform the function that it maps; or use shard_map."
    )


def processes_disagree(name: str, bad: Sequence[tuple[str, object]]) -> StructureError:
    items = [f"{path}: {describe(value)} in this process" for path, value in bad]
    return error_listing(
        StructureError,
        f"{name}: all processes must pass the same values here, but they passed different ones",
        items or ["the structure of the arguments, or where their arrays lie"],
        "Make them from the same seed or file in every process, or send one process's array or seed to "
        "all: jax.experimental.multihost_utils.broadcast_one_to_all(x). If each process has a part of "
        "the data, make one array of the parts: jax.make_array_from_process_local_data(sharding, part).",
    )


def processes_place_differently(name: str, lines: Mapping[str, Sequence[int]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{name}: all processes must lay out its arguments alike, but their meshes or specs differ",
        _by_process(lines),
        "Give every process the same mesh, with its devices in one order, and the same specs.",
    )


def programs_differ(name: str, number: int, lines: Mapping[str, Sequence[int]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{name}: all processes must run the same program, but they traced different ones. Line {number} is "
        "the first that differs",
        _by_process(lines),
        "Nothing that is traced may depend on jax.process_index(), on the time or on a seed of one process, "
        "nor on the order of a set. What differs between devices is an argument that is split, or comes of "
        "sm.axis_index inside.",
    )


def process_failed(name: str, processes: Sequence[int]) -> StructureError:
    numbers = ", ".join(map(str, processes))
    return StructureError(
        f"{name}: {counted(len(processes), 'process', 'processes')} ({numbers}) raised an error while "
        "tracing it, which this process did not. So none of them runs it. The error is in the output of "
        f"process {processes[0]}."
    )


def _by_process(lines: Mapping[str, Sequence[int]]) -> list[str]:
    return [
        f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(map(str, numbers))}: {line}"
        for line, numbers in lines.items()
    ]


def unsharded_by_one_process() -> BatchAxisError:
    return BatchAxisError(
        "unsharded: each of several processes has only its own lanes. Gather them, as with "
        "jax.experimental.multihost_utils.process_allgather, and call vmap2."
    )
