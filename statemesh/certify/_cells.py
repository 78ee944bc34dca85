"""The cells of a row: the ways to shard what it calls, and what each should give."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .._base._checks import is_inexact
from . import _columns as columns
from ._rows import COLLECTIVES, SHARDS, Row


AXIS = "x"
MAPS = ("shard_map", "unchecked", "statemesh")
PARTITIONED = ("Explicit", "Auto")
MODES = (*MAPS, *PARTITIONED)

COLUMNS: dict[str, Callable[..., list[Array]]] = {
    "value": columns.value,
    "jvp": columns.jvp,
    "vjp": columns.vjp,
    "vmap": columns.vmap,
    "lanes": columns.lanes,
}
# Of a mapped call: a gradient that is taken around it, and what its type says of the result.
AROUND, TYPE = "vjp around", "type"
OF_COLLECTIVES = ("value", "jvp", "vmap")

# What a cell gives: arrays, on as many devices as there are shards.
Results = list[Any]
# For each operand the shard whose draw it is.
Draws = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to shard one column of a row.

    **Attributes:**

    - `mode`, `column`: where it stands in the table.
    - `split`: how the operands are sharded, in words.
    - `fun`, `operands`: what is compiled, and the sharded operands.
    - `reference`: the column of what each shard should give on one device.
    - `shards`: for each shard, which shard's draw each operand has.
    - `joined`: the results that the cell should give, of those of all shards.
    - `result`: which of the results has a type to be judged.
    """

    mode: str
    column: str
    split: str
    fun: Callable[..., Results]
    operands: Sequence[Array]
    reference: str
    shards: tuple[Draws, ...]
    joined: Callable[[Sequence[Results]], Results]
    result: int = 0


def mesh_of(mode: str) -> Mesh:
    kind = AxisType.Auto if mode == "Auto" else AxisType.Explicit
    return jax.make_mesh((SHARDS,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:SHARDS])


def context(mode: str) -> AbstractContextManager[Any]:
    return jax.set_mesh(mesh_of(mode))


def placed(mode: str, x: Array, spec: P) -> Array:
    return jax.device_put(x, NamedSharding(mesh_of(mode), spec))


def mapped(
    mode: str, fun: Callable[..., Any], in_specs: tuple[P, ...], out_specs: Any
) -> Callable[..., Any]:
    mesh = mesh_of(mode)
    if mode == "statemesh":
        return sm.shard_map(fun, mesh, in_specs, out_specs)
    checked = mode == "shard_map"
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked)


def cells(row: Row, modes: Sequence[str]) -> Iterator[Cell]:
    drawn = [row.drawn(shard) for shard in range(SHARDS)]
    for mode in modes:
        if mode in MAPS:
            for varying in _varying(row):
                yield from _of_map(row, mode, varying, drawn)
        elif row.name not in COLLECTIVES:
            yield from _partitioned(row, mode, drawn[0])


def _varying(row: Row) -> list[tuple[int, ...]]:
    """The operands that differ between shards: none, each of the first two, and all of more."""
    count = len(row.operands)
    every = tuple(range(count))
    if _is_compound(row):
        return [(), every]
    return [(), *[(k,) for k in every[:2]], *([every] if count > 2 else [])]


def _is_compound(row: Row) -> bool:
    """Whether a function is made of others that have rows, and takes long to compile."""
    return row.name.startswith("jax.scipy.stats.")


def _of_map(
    row: Row, mode: str, varying: tuple[int, ...], drawn: list[list[Array]]
) -> Iterator[Cell]:
    call, count, checked = row.fun, len(row.operands), mode != "unchecked"
    split = " and ".join(row.operands[k] for k in varying) or "none"
    in_specs = tuple(P(AXIS) if k in varying else P() for k in range(count))
    operands = [
        placed(
            mode,
            jnp.stack([each[k] for each in drawn]) if k in varying else drawn[0][k],
            in_specs[k],
        )
        for k in range(count)
    ]
    shards = tuple(
        tuple(shard if k in varying else 0 for k in range(count)) for shard in range(SHARDS)
    )

    def own(operands: Sequence[Array]) -> list[Array]:
        return [x[0] if k in varying else x for k, x in enumerate(operands)]

    def cell(
        column: str,
        one: Callable[..., list[Array]],
        out_specs: Any,
        joined: Callable[[Sequence[Results]], Results],
        reference: str,
    ) -> Cell:
        fun = mapped(mode, one, in_specs, out_specs)
        return Cell(mode, column, split, fun, operands, reference, shards, joined)

    floats = [k for k in range(count) if is_inexact(drawn[0][k])]

    def summed(each: Sequence[Results]) -> Results:
        pairs = zip(floats, zip(*each, strict=True), strict=True)
        return [np.stack(xs) if k in varying else np.sum(xs, axis=0) for k, xs in pairs]

    # Where nothing differs between shards only the type is of interest.
    of_all = varying or not row.operands
    for name, column in COLUMNS.items() if of_all else ():
        if row.name in COLLECTIVES and name not in OF_COLLECTIVES:
            continue
        if name == "vjp" and checked:

            def gradients(*operands: Array) -> list[Array]:
                # So that the sum is each shard's own, whatever the function makes of its operands.
                zero = 0.0 * lax.axis_index(AXIS)
                by_operand = zip(floats, columns.vjp(call, *own(operands), zero=zero), strict=True)
                return [x[None] if k in varying else x for k, x in by_operand]

            specs = [in_specs[k] for k in floats]
            yield cell(name, gradients, specs, summed, name)
            continue

        def each_own(*operands: Array, column: Callable[..., list[Array]] = column) -> list[Array]:
            return [x[None] for x in column(call, *own(operands))]

        yield cell(name, each_own, P(AXIS), _stacked, name)

    for number in range(_results(row, drawn[0]) if checked else 0):

        def result(*operands: Array, number: int = number) -> list[Array]:
            return [call(*own(operands))[number]]

        def first(each: Sequence[Results], number: int = number) -> Results:
            return [each[0][number]]

        yield dataclasses.replace(cell(TYPE, result, P(), first, "value"), result=number)

    def total(*operands: Array) -> Array:
        results = [x for x in call(*own(operands)) if is_inexact(x)]
        if not results:
            raise columns.NoDerivative
        return lax.psum(columns.weighted(results), AXIS)

    whole = mapped(mode, total, in_specs, P())

    def around(*operands: Array) -> list[Array]:
        def of(*floats_: Array) -> Array:
            filled = dict(zip(floats, floats_, strict=True))
            return whole(*[filled.get(k, x) for k, x in enumerate(operands)])

        _, pull = jax.vjp(of, *[operands[k] for k in floats])
        return list(pull(jnp.ones(())))

    if floats and of_all:
        yield Cell(mode, AROUND, split, around, operands, "vjp", shards, summed)


def _results(row: Row, operands: Sequence[Array]) -> int:
    """How many results a function has; none where it does not run outside of a map."""
    try:
        return len(jax.eval_shape(row.fun, *operands))
    except Exception:  # Whatever JAX or the function raises.
        return int(row.name in COLLECTIVES)


def _stacked(each: Sequence[Results]) -> Results:
    return [np.stack(xs) for xs in zip(*each, strict=True)]


def _first(each: Sequence[Results]) -> Results:
    return list(each[0])


def _partitioned(row: Row, mode: str, operands: list[Array]) -> Iterator[Cell]:
    splits = [
        (k, axis)
        for k, x in enumerate(operands[:2])
        for axis in range(min(x.ndim, 2))
        if x.shape[axis] % SHARDS == 0
    ]
    for k, axis in splits[:1] if _is_compound(row) else splits:
        spec = P(*[AXIS if at == axis else None for at in range(operands[k].ndim)])
        sharded = [placed(mode, x, spec if at == k else P()) for at, x in enumerate(operands)]
        for name, column in COLUMNS.items():
            if name == "lanes":
                continue

            def fun(*operands: Array, column: Callable[..., list[Array]] = column) -> list[Array]:
                return column(row.fun, *operands)

            split = f"{row.operands[k]} on axis {axis}"
            yield Cell(mode, name, split, fun, sharded, name, ((0,) * len(operands),), _first)


def reference(row: Row, column: str, operands: Sequence[Array]) -> Results:
    """What a shard's function should give, on one device."""
    fun = columns.lanes_by_hand if column == "lanes" else COLUMNS[column]
    return fun(row.fun, *operands)


def reference_of_collective(row: Row, column: str, operands: Sequence[Array]) -> Results:
    """What all shards should give, stacked: the lanes of a `vmap` on one device give it.

    **Arguments:**

    - `operands`: those of all shards, stacked.
    """

    def one(*operands: Array) -> list[Array]:
        return COLUMNS[column](row.fun, *operands)

    if column != "vjp":
        made: Results = jax.vmap(one, axis_name=AXIS)(*operands)
        return made

    def total(*operands: Array) -> Array:
        results: list[Array] = row.fun(*operands)
        return columns.weighted([x for x in results if is_inexact(x)])

    def losses(*operands: Array) -> list[Array]:
        return [jnp.sum(jax.vmap(total, axis_name=AXIS)(*operands))]

    return columns.vjp(losses, *operands)
