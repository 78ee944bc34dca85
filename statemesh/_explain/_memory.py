"""The memory of a compiled program, by XLA's account."""

import re
from collections.abc import Sequence
from typing import Any

from ._hlo import CompiledText
from ._records import Memory


def memory_of(
    compiled: Any, text: CompiledText, arguments: Sequence[str], results: Sequence[str]
) -> Memory | None:
    """What a device needs for a call; `None` where XLA does not tell.

    **Arguments:**

    - `arguments`, `results`: the paths of the program's inputs and outputs.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    by_argument: dict[str, int] = {}
    for name, size in text.parameters():
        path = _path(name, arguments)
        by_argument[path] = by_argument.get(path, 0) + size
    made = text.results()
    paths = results if len(results) == len(made) else ["results"] * len(made)
    by_result: dict[str, int] = {}
    for path, size in zip(paths, made, strict=True):
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


def _path(name: str, arguments: Sequence[str]) -> str:
    """The path of an argument by the name that JAX gave it in the program."""
    numbered = re.fullmatch(r"flat_args\[(\d+)\]", name)
    if numbered and int(numbered[1]) < len(arguments):
        return arguments[int(numbered[1])]
    return name or "constants"
