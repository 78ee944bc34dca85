"""Runs the cells of some rows, and judges what they give."""

import dataclasses
import faulthandler
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import jaxpr_as_fun

import statemesh as sm

from .._base._checks import is_inexact, is_key
from .._jax._jaxprs import equations
from ._cells import TYPE, Cell, Results, cells, context, reference, reference_of_collective
from ._columns import NoDerivative
from ._rows import COLLECTIVES, SHARDS, Row
from ._untyped import untyped


# A cell is only wrong if its program confirms it.
Outcome = Literal["right", "refused", "raw", "wrong", "unconfirmed", "none"]

# So many programs are compiled as one, which is faster than each on its own.
_TOGETHER = 60
# Compiling and running them takes some seconds; after this time JAX waits for ever.
_SECONDS = 180
# Each program runs once.
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# By how much operands are moved, to see by how much the results move.
_MOVED = 1e-10
_EPS = {"f64": 2**-52, "c128": 2**-52, "f32": 2**-23, "c64": 2**-23, "f16": 2**-10, "bf16": 2**-7}
# An error that says what to write. One that advises to turn a check off does not.
_ADVICE = ("pcast", "pvary", "out_sharding", "reshard", "auto_axes", "explicit_axes")


@dataclasses.dataclass(frozen=True)
class Judged:
    """What came of a cell.

    **Attributes:**

    - `outcome`: `"none"` where a function has no such column on one device.
    - `says`: the error, or by how much a result is off.
    - `result`: which of the results has this type.
    """

    mode: str
    column: str
    split: str
    outcome: Outcome
    says: str = ""
    result: int = 0


@dataclasses.dataclass(frozen=True)
class _Right:
    """What is right of one shard, or of all.

    **Attributes:**

    - `moved`: by how much the results move where the operands do a little.
    - `eps`: the roundoff of the narrowest floats in the program.
    """

    results: Results
    moved: Results
    eps: float


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced function, and the operands of each of its runs."""

    closed: Any
    runs: Sequence[Sequence[Array]]


def run(
    rows: Mapping[str, Row], modes: Sequence[str]
) -> tuple[dict[str, list[Judged]], frozenset[str]]:
    """By the name of a row what came of its cells; and the primitives that were traced."""
    made = {name: list(cells(row, modes)) for name, row in rows.items()}
    done: _Done = {}
    known, reached = _references(rows, made, done)
    found: dict[str, list[Judged]] = {name: [] for name in rows}
    for mode in modes:
        waiting = [
            (name, cell) for name, each in made.items() for cell in each if cell.mode == mode
        ]
        with context(mode):
            # Of what raises on one device nothing is compared.
            traced = [
                _traced(cell.fun, [cell.operands])
                if all(known[key] for key in _keys(name, cell))
                else NoDerivative()
                for name, cell in waiting
            ]
            outcomes = _compiled(traced, done)
        reached.update(*[_primitives(x) for x in traced if isinstance(x, _Program)])
        for (name, cell), outcome in zip(waiting, outcomes, strict=True):
            (made_by_it,) = outcome if isinstance(outcome, list) else (outcome,)
            found[name].append(_judged(name, cell, made_by_it, known, found[name]))
    return found, frozenset(reached)


# By the text of a program what it gave. Errors are not among them: a program of other types may raise none.
_Done = dict[str, list[Results]]
# The key of a reference: the row, the column and the operands.
_Key = tuple[str, str, tuple[Any, ...]]


def _keys(name: str, cell: Cell) -> list[_Key]:
    if name in COLLECTIVES:
        return [(name, cell.reference, cell.shards)]
    return [(name, cell.reference, draws) for draws in cell.shards]


def _references(
    rows: Mapping[str, Row], made: Mapping[str, Sequence[Cell]], done: _Done
) -> tuple[dict[_Key, _Right | None], set[str]]:
    """What is right; and the primitives that run.

    It is `None` where a function raises on one device, or gives other numbers each time.
    """
    draws_of: dict[tuple[str, str], dict[tuple[Any, ...], None]] = {}
    for name, each in made.items():
        for cell in each:
            for _, column, each_drawn in _keys(name, cell):
                draws_of.setdefault((name, column), {})[each_drawn] = None
    # A program for each column of a row. Each draw runs it three times.
    traced: list[_Program | Exception] = []
    most = max(map(len, draws_of.values()), default=0)
    for (name, column), draws in draws_of.items():
        of = reference_of_collective if name in COLLECTIVES else reference
        fun = lambda *operands, of=of, row=rows[name], column=column: of(row, column, operands)
        runs = []
        for each_drawn in draws:
            operands = _drawn(rows[name], each_drawn)
            runs += [operands, operands, [*map(_slightly_moved, operands)]]
        # Programs that are compiled as one run as often.
        traced.append(_traced(fun, runs + runs[:1] * (3 * most - len(runs))))
    right: dict[_Key, _Right | None] = {}
    reached: set[str] = set()
    for program, outcome, ((name, column), draws) in zip(
        traced, _compiled(traced, done), draws_of.items(), strict=True
    ):
        right.update(((name, column, each_drawn), None) for each_drawn in draws)
        if isinstance(program, Exception):
            continue
        reached.update(_primitives(program))
        if isinstance(outcome, Exception):
            continue
        eps = _roundoff(program.closed)
        for k, each_drawn in enumerate(draws):
            exact, again, moved = outcome[3 * k : 3 * k + 3]
            # `rng_uniform` gives other numbers at every call.
            if not any(np.any(_difference(a, b)) for a, b in zip(exact, again, strict=True)):
                differ = [_difference(a, b) for a, b in zip(exact, moved, strict=True)]
                right[name, column, each_drawn] = _Right(exact, differ, eps)
    return right, reached


def _drawn(row: Row, draws: tuple[Any, ...]) -> list[Array]:
    """The operands of one shard; of a collective those of all shards, stacked."""
    if row.name in COLLECTIVES:
        each = [[row.drawn(draw)[k] for k, draw in enumerate(one)] for one in draws]
        return [jnp.stack(xs) for xs in zip(*each, strict=True)]
    return [row.drawn(draw)[k] for k, draw in enumerate(draws)]


def _primitives(program: _Program) -> set[str]:
    return {eqn.primitive.name for eqn in equations(program.closed.jaxpr)}


def _slightly_moved(x: Array) -> Array:
    if not is_inexact(x):
        return x
    return x * (1 + _MOVED * jnp.cos(jnp.arange(x.size))).reshape(x.shape).astype(x.dtype)


def _roundoff(closed: Any) -> float:
    dtypes = set(re.findall(r"\b(f64|c128|f32|c64|f16|bf16|f8\w*)\[", str(closed)))
    return max((_EPS.get(dtype, 0.125) for dtype in dtypes), default=_EPS["f64"])


def _traced(fun: Callable[..., Results], runs: Sequence[Sequence[Array]]) -> _Program | Exception:
    try:
        return _Program(jax.jit(fun).trace(*runs[0]).jaxpr, runs)
    except Exception as error:  # Whatever it is, it is what came of the cell.
        return error


def _compiled(
    traced: Sequence[_Program | Exception], done: _Done
) -> list[list[Results] | Exception]:
    """What each run of a program gives, or the error that it raises. Many are compiled as one program.

    **Arguments:**

    - `done`: what programs have given before. Many cells differ by their types only.
    """
    outcomes: list[Any] = list(traced)
    texts = {k: _text(program) for k, program in enumerate(traced) if isinstance(program, _Program)}

    def run_together(at: Sequence[int]) -> None:
        # JAX waits for ever where the verifier of a module complains in another thread. It ends the process.
        faulthandler.dump_traceback_later(_SECONDS, exit=True)

        def together(inputs: list[list[Array]]) -> list[list[Array]]:
            pairs = zip(at, inputs, strict=True)
            return [list(jaxpr_as_fun(outcomes[k].closed)(*operands)) for k, operands in pairs]

        compiled = jax.jit(together, compiler_options=_FAST)
        try:
            runs = zip(*[outcomes[k].runs for k in at], strict=True)
            made = [jax.block_until_ready(compiled(list(map(list, inputs)))) for inputs in runs]
        except Exception as error:  # One of them cannot be compiled, or run.
            if len(at) == 1:
                outcomes[at[0]] = error
                return
            run_together(at[: len(at) // 2])
            run_together(at[len(at) // 2 :])
            return
        for k, results in zip(at, zip(*made, strict=True), strict=True):
            outcomes[k] = list(results)

    left = dict(texts)
    while first := {text: k for k, text in reversed(left.items()) if text not in done}:
        programs = sorted(first.values())
        for start in range(0, len(programs), _TOGETHER):
            run_together(programs[start : start + _TOGETHER])
        done.update(
            (text, outcomes[k])
            for text, k in first.items()
            if not isinstance(outcomes[k], Exception)
        )
        left = {k: text for k, text in left.items() if k not in programs}
    faulthandler.cancel_dump_traceback_later()
    return [done.get(texts[k], x) if k in texts else x for k, x in enumerate(outcomes)]


def _text(program: _Program) -> str:
    """Equal for programs that compile alike, and run on the same operands."""
    operands = [x for run in program.runs for x in run]
    numbers = [jax.random.key_data(x) if is_key(x) else x for x in operands]
    return f"{untyped(program.closed)} {[(x.sharding, np.asarray(x).tobytes()) for x in numbers]}"


def _judged(
    name: str,
    cell: Cell,
    outcome: Results | Exception,
    known: Mapping[_Key, _Right | None],
    before: Sequence[Judged],
) -> Judged:
    at = cell.mode, cell.column, cell.split
    each = [known[key] for key in _keys(name, cell)]
    if any(x is None for x in each):
        return Judged(*at, "none")
    right = [x for x in each if x is not None]
    if name in COLLECTIVES:
        right = _of_shards(right[0])
    eps = max(x.eps for x in right)
    if cell.column == TYPE:
        # Where the function cannot be called at all, its type says nothing.
        values = [
            x for x in before if (x.mode, x.column, x.split) == (cell.mode, "value", cell.split)
        ]
        if values and values[0].outcome in ("raw", "refused"):
            return dataclasses.replace(values[0], column=TYPE)
        k = cell.result
        differs = any(_off(right[0].results[k], x.results[k], x.moved[k], eps) for x in right[1:])
        if isinstance(outcome, Exception):
            return Judged(*at, "right") if differs else Judged(*at, *_failure(outcome))
        if differs:
            return Judged(*at, "wrong", "shards differ, and one copy is promised", cell.result)
    if isinstance(outcome, Exception):
        if isinstance(outcome, NoDerivative):
            return Judged(*at, "none")
        return Judged(*at, *_failure(outcome))
    expected, moved = cell.joined([x.results for x in right]), cell.joined([x.moved for x in right])
    for x, want, movement in zip(outcome, expected, moved, strict=True):
        for part in x.addressable_shards:
            if says := _off(part.data, want[part.index], np.asarray(movement)[part.index], eps):
                return Judged(*at, "wrong", f"{says} on {part.device}")
    return Judged(*at, "right")


def _of_shards(stacked: _Right) -> list[_Right]:
    return [
        dataclasses.replace(
            stacked,
            results=[x[k] for x in stacked.results],
            moved=[x[k] for x in stacked.moved],
        )
        for k in range(SHARDS)
    ]


def _failure(error: Exception) -> tuple[Outcome, str]:
    kind, text = type(error).__name__, str(error)
    is_clear = (
        isinstance(error, sm.StatemeshError)
        or kind == "ShardingTypeError"
        or any(word in text for word in _ADVICE)
    )
    first = next(iter(text.strip().splitlines()), "")
    return ("refused" if is_clear else "raw"), f"{kind}: {first}"[:300]


def _difference(x: Any, y: Any) -> Any:
    x, y = _numbers(x), _numbers(y)
    with np.errstate(invalid="ignore"):
        return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))


def _numbers(x: Any) -> Any:
    """As double precision, for which narrow floats and integers have room."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _off(made: Any, want: Any, moved: Any, eps: float) -> str:
    """By how much a result is off beyond rounding; nothing if it is not."""
    made_shape, want_shape = np.shape(made), np.shape(want)
    if made_shape != want_shape:
        return f"shape {made_shape} for {want_shape}"
    made, want = _numbers(made), _numbers(want)
    differs = _difference(made, want)
    with np.errstate(invalid="ignore"):
        scale = np.max(np.abs(want), where=np.isfinite(want), initial=0)
        # What moves at all when the operands do may be rounded; integers and truths that do not are exact.
        allowed = min(1e4 * eps, 0.1) * scale + 1e-2 * np.nan_to_num(moved)
        # Operands are about one: the square of their roundoff, as of a residual, is what rounding left. Of
        # the narrowest floats, in which it is no small number, nothing is.
        allowed = np.maximum(allowed, 1e3 * eps**2 if eps < 2**-8 else 0)
        off = ~(differs <= allowed)
    if not np.any(off):
        return ""
    at = tuple(map(int, np.unravel_index(int(np.argmax(off)), off.shape)))
    return f"{made[at]:.6g} for {want[at]:.6g} at {list(at)}"
