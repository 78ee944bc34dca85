"""Runs programs whose states change positions with statemesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.models import added_range, mesh_of
from ..programs import Axes
from ..trees import KINDS, at, grow, walk
from .cases import LANES, Moves, Sources, Write


Step = Callable[[Any, Any, Any], Any]


def mapped_of(moves: Moves, how: str, traces: list[Any]) -> sm.StatefulMapping:
    """The program, not yet called. Each trace of it makes `traces` longer."""
    fun = functools.partial(_body, moves, how in LANES, traces)
    if how in LANES:
        return getattr(sm, how)(  # type: ignore[no-any-return]
            fun,
            axis_name="x",
            in_axes=(None, 0, None),
            out_axes=(0, None),
            axis_size=moves.mesh.sizes[0],
        )
    rows = PartitionSpec(moves.split)
    model = rows if moves.split_arrays else PartitionSpec()
    mapped: sm.StatefulMapping = sm.shard_map(
        fun,
        mesh_of(moves.mesh),
        (model, rows, PartitionSpec()),
        (rows, model),
        check_vma=moves.check,
    )
    return mapped


def model_of(moves: Moves, states: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """The model with these arrays at its positions."""
    reduce: Any = added_range if moves.policy == "range" else moves.policy
    kind = KINDS[moves.kind]
    parts = [*(kind(x, reduce=reduce) for x in states), *arrays]
    return grow(moves.tree, parts.__getitem__)


def parts_of(moves: Moves, model: Any) -> list[Any]:
    """What a model has at its positions."""
    paths = {number: path for path, number in walk(grow(moves.tree, int))}
    return [at(model, paths[k]) for k in moves.still]


def _body(moves: Moves, lanes: bool, traces: list[Any], model: Any, x: Any, on: Any) -> Any:
    traces.append(None)
    if moves.moved == "before":
        model = _moved(moves, model, moves.sources)
    model = _wrapped(moves, lanes, moves.wraps, moves.inner[0])(model, x, on)
    if moves.moved == "after":
        model = _moved(moves, model, moves.sources)
    return 2 * x, model


def _moved(moves: Moves, model: Any, way: Sources) -> Any:
    parts = parts_of(moves, model)
    return grow(moves.tree, [parts[k] for k in way].__getitem__)


def _wrapped(moves: Moves, lanes: bool, wraps: tuple[str, ...], way: Sources) -> Step:
    if not wraps:
        return functools.partial(_step, moves, way)
    inner = _wrapped(moves, lanes, wraps[1:], way)
    match wraps[0]:
        case "jit":
            compiled: Step = jax.jit(inner)
            return compiled
        case "checkpoint":
            recomputed: Step = jax.checkpoint(inner)
            return recomputed
        case "cond":
            other = _wrapped(moves, lanes, wraps[1:], moves.inner[1])
            return lambda model, x, on: jax.lax.cond(on, inner, other, model, x, on)
        case "scan":
            return functools.partial(_scanned, moves, lanes, inner)
        case wrap:
            assert wrap == "gradient"
            return functools.partial(_in_a_gradient, inner)


def _scanned(moves: Moves, lanes: bool, inner: Step, model: Any, x: Any, on: Any) -> Any:
    # The carry must have the same type from the first row on.
    typed = moves.check and not lanes
    typed = typed and any(write.adds in ("own", "gathered") for write in moves.states)
    axes = moves.split if typed else ()

    def body(model: Any, row: Any) -> Any:
        return _varied(inner(model, row[None], on), axes), None

    return jax.lax.scan(body, _varied(model, axes), x)[0]


def _varied(model: Any, axes: Axes) -> Any:
    """The model with every state typed as varying over these axes."""

    def leaf(x: Any) -> Any:
        left = set(axes) - set(jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, tuple(sorted(left)), to="varying") if left else x

    return jax.tree.map(
        lambda part: jax.tree.map(leaf, part) if sm.is_state(part) else part,
        model,
        is_leaf=sm.is_state,
    )


def _in_a_gradient(inner: Step, model: Any, x: Any, on: Any) -> Any:
    loss = lambda model, x, on: (jnp.zeros(()), inner(model, x, on))
    return sm.value_and_grad(loss, wrt=...)(model, x, on)[0][1]


def _step(moves: Moves, way: Sources, model: Any, x: Any, on: Any) -> Any:
    parts = parts_of(moves, model)
    old = [parts[k] for k in way]
    values = [_value(part) for part in parts]
    new = [
        _new(moves, write, values, values[source], x)
        for write, source in zip(moves.writes, way, strict=True)
    ]
    match moves.style:
        case "map states":
            filled = grow(moves.tree, new.__getitem__)
            return jax.tree.map(
                _set, grow(moves.tree, old.__getitem__), filled, is_leaf=sm.is_state
            )
        case "map leaves":
            leaves = iter(jax.tree.leaves(grow(moves.tree, new.__getitem__)))
            return jax.tree.map(lambda _: next(leaves), grow(moves.tree, old.__getitem__))
        case "replace":
            write: Any = lambda part, value: part.replace(value=value)
        case _:
            write = _set
    written = [
        part if write_.adds is None else write(part, value) if sm.is_state(part) else value
        for write_, part, value in zip(moves.writes, old, new, strict=True)
    ]
    return grow(moves.tree, written.__getitem__)


def _value(part: Any) -> Any:
    return part.value if sm.is_state(part) else part


def _set(part: Any, value: Any) -> Any:
    return part.set(value) if sm.is_state(part) else value


def _new(moves: Moves, write: Write, values: Sequence[Any], old: Any, x: Any) -> Any:
    if write.adds is None:
        return old
    value = old if write.keeps else jnp.zeros_like(old)
    if write.reads is not None:
        value = value + values[write.reads]
    match write.adds:
        case "own":
            value = value + x.sum()
        case "whole":
            value = value + jax.lax.psum(x.sum(), moves.split)
        case "gathered":
            value = value + jax.lax.all_gather(x, moves.split, tiled=True).sum()
    return value + write.bias
