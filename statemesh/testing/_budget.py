"""`assert_budget`: a call keeps to numbers."""

import fnmatch
import functools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import statemesh as sm

from .._jax._frames import without_own_frames
from ._types import Fun, PyTree


@functools.partial(without_own_frames, says_so=False)
def assert_budget(
    fun: Fun,
    *args: PyTree,
    collectives: int | float | Mapping[str, int | float] | None = None,
    bytes: int | float | None = None,
    peak: int | float | None = None,
    allocated: int | float | None = None,
    temporaries: int | float | None = None,
    donated: int | float | None = None,
    held: int | float | None = None,
    moved: int | float | None = None,
    **kwargs: PyTree,
) -> sm.Explanation:
    """Fail if a call exchanges, sends, holds or moves more than it may. The call is compiled and not run.

    **Arguments:**

    - `fun`, `args`, `kwargs`: the call, as for `statemesh.explain`.
    - `collectives`: the most exchanges between devices in a call, loops multiplied out, without those that
        XLA removed. A dictionary gives a number to each cause that the explanation shows (`"the policy of
        net.mean"`, `"your code"`), to all of one operation (`"psum"`), or to all causes of a pattern (`"the
        gradient of *"`), in which `*` stands for any text and `?` for one character. A collective with none
        of them fails, and so does one in a loop of unknown length unless its number is `math.inf`.
    - `bytes`: the most that a device sends in a call, by the dtypes of the program, even where XLA widens
        them. A collective in a loop of unknown length fails.
    - `peak`: the most memory that a device holds at once, by XLA's account. On a CPU it leaves temporaries
        out.
    - `allocated`: the most memory that is set aside on a device: arguments, results and temporaries, less
        what is donated.
    - `temporaries`: the most that is set aside on a device for temporaries.
    - `donated`: the least of the arguments whose memory the results have to take over.
    - `held`: the most that a device holds of the arguments.
    - `moved`: the most of the arguments that the call lays out on each device before it runs. It is 0 for
        what `place` returned.

    **Returns:** the explanation.

    **Raises:** `AssertionError` that says by how much each number is exceeded, and names the lines, states
    and arguments that make it up, the largest first; `ValueError` if there is no limit at all, and
    `TypeError` for one that is no number. What the call raises comes through.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import assert_budget
        >>> mesh = jax.make_mesh((2,), ("data",))
        >>> def step(mean, x):
        ...     return x - mean.value, mean.set(x.mean())
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=(P("data"), P()))
        >>> args = step.place(sm.BatchState(0.0, reduce="mean"), jnp.arange(8.0))
        >>> explanation = assert_budget(step, *args, collectives={"the policy of mean": 1}, bytes=4, moved=0)

        ```

        Where it fails:

        ```python
        >>> try:
        ...     assert_budget(step, *args, collectives=0)
        ... except AssertionError as error:
        ...     print(error)
        step: the call is over its budget.
        collectives: 1 where 0 are allowed.
          - psum over data, 1 time, 4 B: the policy of mean

        ```
    """
    limits: dict[str, Any] = {
        "collectives": collectives,
        "bytes": bytes,
        "peak": peak,
        "allocated": allocated,
        "temporaries": temporaries,
        "donated": donated,
        "held": held,
        "moved": moved,
    }
    _check_limits(limits)
    explanation = sm.explain(fun, *args, **kwargs)
    exchanges = [row for row in explanation.collectives if row.compiled != "removed"]
    leaves = sorted(explanation.leaves, key=lambda row: -row.bytes)
    over: list[str] = []
    if collectives is not None:
        over += _collectives(exchanges, collectives)
    endless = [row for row in exchanges if row.unknown_loop and row.bytes]
    if bytes is not None and endless and bytes != math.inf:
        head = f"bytes sent: an unknown number where {bytes} B are allowed"
        over.append(_listed(head, _lines(endless)))
    else:
        over += _over("bytes sent", explanation.bytes, bytes, _lines(exchanges))
    for what in ("peak", "allocated", "temporaries", "donated"):
        if limits[what] is not None:
            over += _memory(explanation, leaves, what, limits[what])
    over += _over("bytes held", sum(row.bytes for row in leaves), held, map(_held, leaves))
    lines = (f"{row.path}: {row.moved} B" for row in leaves if row.moved)
    over += _over("bytes moved", sum(row.moved for row in leaves), moved, lines)
    if over:
        head = f"{explanation.name}: the call is over its budget."
        raise AssertionError("\n".join([head, *over]))
    return explanation


def _check_limits(limits: Mapping[str, Any]) -> None:
    if all(limit is None for limit in limits.values()):
        raise ValueError(
            "assert_budget: there is no limit, so nothing would be checked. Give at least one of "
            f"{', '.join(limits)}. What the call takes now is in `explain(fun, *args)`."
        )
    for name, limit in limits.items():
        several = ", or a dictionary with a number for each cause" if name == "collectives" else ""
        numbers_of = limit.values() if several and isinstance(limit, Mapping) else [limit]
        for number in numbers_of if limit is not None else ():
            if isinstance(number, bool) or not isinstance(number, numbers.Real):
                raise TypeError(
                    f"assert_budget: {name} is {limit!r}, but must be a number{several}."
                )
            if float(number) < 0:
                raise ValueError(
                    f"assert_budget: {name} is {limit!r}, but no call takes less than 0."
                )


def _collectives(
    exchanges: Sequence[Any], allowed: int | float | Mapping[str, int | float]
) -> list[str]:
    limits = allowed if isinstance(allowed, Mapping) else {"": allowed}
    groups: dict[str | None, list[Any]] = {}
    for row in exchanges:
        key = _key(row, list(limits)) if limits is allowed else ""
        groups.setdefault(key, []).append(row)
    over = []
    for key, rows in groups.items():
        room = 0 if key is None else limits[key]
        endless = [row for row in rows if row.unknown_loop and room != math.inf]
        times = sum(row.times for row in rows)
        if not endless and times <= room:
            continue
        if key is None:
            number = ", in unknown number" if endless else f": {times}"
            head = f"collectives that the budget does not name{number}"
        else:
            number = "an unknown number" if endless else f"{times}"
            are = "is" if room == 1 else "are"
            head = f"collectives{f' ({key})' if key else ''}: {number} where {room} {are} allowed"
        over.append(_listed(head, _lines(endless or rows)))
    return over


def _key(row: Any, keys: Sequence[str]) -> str | None:
    """The entry of a dictionary that gives a collective its number."""
    exact = [key for key in (row.cause, row.operation) if key in keys]
    # Paths have brackets, which in a pattern would stand for one of several characters.
    alike = [key for key in keys if fnmatch.fnmatchcase(row.cause, key.replace("[", "[[]"))]
    return next(iter([*exact, *alike]), None)


def _lines(exchanges: Sequence[Any]) -> Iterator[str]:
    """One line for each collective, the largest first."""
    for row in sorted(exchanges, key=lambda row: -row.bytes):
        axes = f" over {', '.join(map(str, row.axes))}" if row.axes else ""
        turns = " in each turn of a loop of unknown length" if row.unknown_loop else ""
        times = f"{row.times} time{'s' * (row.times != 1)}{turns}"
        line = row.line and f", {row.line}"
        yield f"{row.operation}{axes}, {times}, {row.bytes} B: {row.cause}{line}"


def _memory(
    explanation: sm.Explanation, leaves: Sequence[Any], what: str, limit: int | float
) -> list[str]:
    memory = explanation.memory
    if memory is None:
        raise ValueError(
            f"{explanation.name}: `{what}` is known only of a compiled call, and this one has no devices. "
            "Leave it out, or give a mesh with devices."
        )
    size = getattr(memory, what)
    if what == "donated":
        head = f"donated: {size} B where at least {limit} B are asked for"
        return [_listed(head, map(_held, leaves))] if size < limit else []
    parts = ("arguments", "results", "temporaries")
    lines = [f"{part}: {getattr(memory, part)} B" for part in parts]
    donated = f"donated, and held once: {memory.donated} B"
    lines.append(donated if memory.donated else "nothing is donated")
    rows = {row.path: row for row in leaves}
    for path, held in _largest(memory.by_argument):
        lines.append(_held(rows[path], held) if path in rows else f"{path}: {held} B")
    results = (pair for pair in _largest(memory.by_result) if pair[0] not in rows)
    lines += [f"{path}: {held} B, a result" for path, held in results]
    return _over(what, size, limit, lines)


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def _held(row: Any, held: int | None = None) -> str:
    return f"{row.path}: {row.bytes if held is None else held} B, as {row.enters} ({row.placed_by})"


def _over(what: str, size: int, limit: int | float | None, lines: Iterable[str]) -> list[str]:
    """What is said of a size that is over its limit, if there is one."""
    if limit is None or size <= limit:
        return []
    return [_listed(f"{what}: {size} B where {limit} B are allowed", lines)]


# More lines are counted and not shown.
_SHOWN = 12


def _listed(head: str, lines: Iterable[str]) -> str:
    items = [f"  - {line}" for line in lines]
    more = [f"  - and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "\n".join([f"{head}.", *items[:_SHOWN], *more])
