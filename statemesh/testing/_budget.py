"""`assert_budget`: a call keeps to numbers."""

import fnmatch
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import statemesh as sm

from . import _budget_errors as errors
from ._types import Fun, PyTree


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
    found = sm.explain(fun, *args, **kwargs)
    over: list[str] = []
    if collectives is not None:
        over += _collectives(found, collectives)
    endless = [one for one in _real(found) if one.unknown_loop and one.bytes]
    if bytes is not None and endless and bytes != math.inf:
        over.append(errors.bytes_unknown(bytes, _lines(endless)))
    elif bytes is not None and found.bytes > bytes:
        over.append(errors.bytes_over("bytes sent", found.bytes, bytes, _lines(found.collectives)))
    for what in ("peak", "allocated", "temporaries", "donated"):
        if limits[what] is not None:
            over += _memory(found, what, limits[what])
    rows = sorted(found.leaves, key=lambda row: -row.bytes)
    total = sum(row.bytes for row in rows)
    if held is not None and total > held:
        lines = [errors.held_line(row.path, row.bytes, row.enters, row.placed_by) for row in rows]
        over.append(errors.bytes_over("bytes held", total, held, lines))
    total = sum(row.moved for row in rows)
    if moved is not None and total > moved:
        lines = [errors.moved_line(row.path, row.moved) for row in rows if row.moved]
        over.append(errors.bytes_over("bytes moved", total, moved, lines))
    if over:
        raise errors.over_budget(found.name, over)
    return found


def _check_limits(limits: Mapping[str, Any]) -> None:
    if all(limit is None for limit in limits.values()):
        raise errors.no_limit(list(limits))
    for name, limit in limits.items():
        several = name == "collectives" and isinstance(limit, Mapping)
        for one in limit.values() if several else [limit] if limit is not None else []:
            if isinstance(one, bool) or not isinstance(one, numbers.Real):
                raise errors.no_number(name, limit)
            if float(one) < 0:
                raise errors.below_zero(name, limit)


def _real(found: sm.Explanation) -> list[Any]:
    return [one for one in found.collectives if one.compiled != "removed"]


def _collectives(
    found: sm.Explanation, allowed: int | float | Mapping[str, int | float]
) -> list[str]:
    real = _real(found)
    if isinstance(allowed, Mapping):
        groups: dict[str | None, list[Any]] = {}
        most = allowed
        for one in real:
            groups.setdefault(_key(one, list(allowed)), []).append(one)
    else:
        groups = {"": real} if real else {}
        most = {"": allowed}
    over = []
    for key, ones in groups.items():
        times = sum(one.times for one in ones)
        room = 0 if key is None else most[key]
        if any(one.unknown_loop for one in ones) and room != math.inf:
            endless = [one for one in ones if one.unknown_loop]
            over.append(errors.collectives_unknown(key, room, _lines(endless)))
        elif times > room:
            over.append(errors.collectives_over(key, times, room, _lines(ones)))
    return over


def _key(one: Any, keys: Sequence[str]) -> str | None:
    """The entry of a dictionary that gives a collective its number."""
    exact = [key for key in (one.cause, one.operation) if key in keys]
    # Paths have brackets, which in a pattern would stand for one of several characters.
    alike = [key for key in keys if fnmatch.fnmatchcase(one.cause, key.replace("[", "[[]"))]
    return next(iter([*exact, *alike]), None)


def _lines(collectives: Any) -> list[str]:
    """One line for each collective, the largest first."""
    ordered = sorted(collectives, key=lambda one: -one.bytes)
    return [
        errors.collective_line(
            one.operation,
            one.axes,
            one.times,
            one.unknown_loop,
            one.bytes,
            one.cause,
            one.line,
        )
        for one in ordered
        if one.compiled != "removed"
    ]


def _memory(found: sm.Explanation, what: str, most: int | float) -> list[str]:
    memory = found.memory
    if memory is None:
        raise errors.memory_unknown(found.name, what)
    size = getattr(memory, what)
    if size >= most if what == "donated" else size <= most:
        return []
    if what == "donated":
        lines = [
            errors.held_line(row.path, row.bytes, row.enters, row.placed_by)
            for row in sorted(found.leaves, key=lambda row: -row.bytes)
        ]
        return [errors.donated_under(size, most, lines)]
    parts = {
        "arguments": memory.arguments,
        "results": memory.results,
        "temporaries": memory.temporaries,
    }
    lines = [errors.memory_line(part, own) for part, own in parts.items()]
    lines.append(
        errors.memory_line("donated, and held once", memory.donated)
        if memory.donated
        else errors.nothing_donated()
    )
    rows = {row.path: row for row in found.leaves}
    for path, own in sorted(memory.by_argument.items(), key=lambda pair: -pair[1]):
        row = rows.get(path)
        lines.append(
            errors.memory_line(path, own)
            if row is None
            else errors.held_line(path, own, row.enters, row.placed_by)
        )
    made = sorted(memory.by_result.items(), key=lambda pair: -pair[1])
    lines += [errors.result_line(path, own) for path, own in made if path not in rows]
    return [errors.bytes_over(what, size, most, lines)]
