"""The memory of a compiled program, by XLA's account."""

from collections.abc import Sequence
from typing import Any

from ._hlo import CompiledText
from ._records import Memory


def memory_of(
    compiled: Any, text: CompiledText, arguments: Sequence[str], results: Sequence[str]
) -> Memory | None:
    """What a device needs for a call; `None` where XLA does not tell.

    **Arguments:**

    - `arguments`: the paths of the inputs that the program reads. Others come first, for its constants.
    - `results`: the paths of the program's outputs.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    by_argument: dict[str, int] = {}
    parameters = text.parameters()
    constants = len(parameters) - len(arguments)
    # What JAX calls an input may be the name in another program, which it took from its cache on disk.
    named = [name or "constants" for name, _ in parameters[: max(constants, 0)]]
    paths = [*named, *arguments] if constants >= 0 else [name for name, _ in parameters]
    for path, (_, size) in zip(paths, parameters, strict=True):
        by_argument[path] = by_argument.get(path, 0) + size
    made = text.results()
    sources = results if len(results) == len(made) else ["results"] * len(made)
    by_result: dict[str, int] = {}
    for path, size in zip(sources, made, strict=True):
        by_result[path] = by_result.get(path, 0) + size
    taken = int(stats.argument_size_in_bytes)
    given = int(stats.output_size_in_bytes)
    temporaries = int(stats.temp_size_in_bytes)
    donated = int(stats.alias_size_in_bytes)
    allocated = taken + given + temporaries - donated
    peak = int(getattr(stats, "peak_memory_in_bytes", 0))
    return Memory(
        arguments=taken,
        results=given,
        temporaries=temporaries,
        donated=donated,
        peak=peak or allocated,
        allocated=allocated,
        by_argument=by_argument,
        by_result=by_result,
        result_table=given - sum(made),
    )
