"""Errors of `pmap2` with several processes."""

from collections.abc import Sequence
from typing import Any

from .._paths import describe
from ._classes import BatchAxisError, StructureError
from ._text import bullets, counted


def global_shape(
    name: str, bad: Sequence[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} here, global_arg_shapes says {given}, of which this process's part is {part}"
        for path, x, given, part in bad
    ]
    return BatchAxisError(
        f"{name}: arguments do not fit global_arg_shapes:\n{bullets(items)}\n"
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give None "
        "for any other argument."
    )


def not_shapes(given: Any) -> TypeError:
    return TypeError(
        f"global_arg_shapes={given!r} is not a shape (a tuple of ints) or None for each positional argument."
    )


def global_shapes_count(name: str, entries: int, args: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name} was called with {counted(args, 'positional argument')}, but global_arg_shapes has {entries} "
        f"{'entry' if entries == 1 else 'entries'}. It has one for each positional argument: its shape, or "
        "None where nothing is said."
    )


def no_own_devices(name: str, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: none of the {counted(devices, 'device')} is this process's. Only processes that have "
        "devices among them can make the call."
    )


def processes_traced(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 over the devices of several processes is being traced, as by jit, grad, vmap or scan "
        "around it. It takes and gives this process's lanes, which are there only while it runs. Call it by "
        "itself, and transform the function that it maps; or use shard_map."
    )


def processes_disagree(name: str, bad: Sequence[tuple[str, Any]]) -> StructureError:
    items = [f"{path}: {describe(value)} in this one" for path, value in bad]
    what = bullets(items or ["the structure of the arguments, or where their arrays lie"])
    return StructureError(
        f"{name}: the processes passed different values where all of them have to pass the same:\n{what}\n"
        "Make them from the same seed or file in every process, or send one process's array or seed to all: "
        "jax.experimental.multihost_utils.broadcast_one_to_all(x). Where each process has a part of the "
        "data, make one array of the parts: jax.make_array_from_process_local_data(sharding, part)."
    )


def processes_alone() -> BatchAxisError:
    return BatchAxisError(
        "unsharded: each of several processes has only its own lanes. Gather them, as with "
        "jax.experimental.multihost_utils.process_allgather, and call vmap2."
    )
