"""Runs programs over shards with statemesh, their body in `jax.numpy`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import statemesh as sm

from .. import programs
from ..base.models import (
    arrays_of,
    declared_specs,
    mesh_of,
    partition_spec,
    positions_of,
    slot_value,
    units_of,
    with_units,
)
from ..programs import FLOAT, Case, Control, Exchange, Gather
from ..trees import Setting


def in_specs(case: Case) -> Any:
    return (None, None, *(partition_spec(leaf.spec) for leaf in case.inputs))


def out_specs(case: Case) -> Any:
    return tuple(partition_spec(output.spec) for output in case.outputs), PartitionSpec()


@functools.cache
def mapping(case: Case) -> sm.StatefulMapping:
    """The program under `shard_map`: the same for every example with this case, so that it compiles once."""
    mapping: sm.StatefulMapping = sm.shard_map(
        functools.partial(run_body, case),
        mesh_of(case.mesh),
        in_specs(case),
        out_specs(case),
        state_in_specs=declared_specs(case),
    )
    return mapping


def run_body(
    case: Case, model: Any, setting: Setting, *inputs: Any, dtype: str = FLOAT
) -> tuple[tuple[Any, ...], Any]:
    """The program of one shard, whose floats are of this dtype."""
    if case.passed == "map":
        model = jax.tree.map(lambda leaf: leaf, model)
    old, whole = arrays_of(case, model), (1,) * case.rank
    rng = model[1] if case.noisy else None
    values: list[Any] = []
    for step in case.steps:
        match step:
            case programs.Input(index):
                value = _lifted(inputs[index], case.rank)
            case programs.Read(slot, leaf):
                value = _lifted(old[slot][leaf], case.rank)
            case programs.Gain():
                value = jnp.full(whole, setting.gain, dtype)
            case programs.Index(axes):
                value = jnp.full(whole, sm.axis_index(axes), jnp.int32)
            case programs.Unary("float", arg):
                value = values[arg].astype(dtype)
            case programs.Unary(op, arg):
                value = _UNARY[op](values[arg])
            case programs.Binary(op, left, right):
                value = _BINARY[op](values[left], values[right])
            case programs.Fold(op, arg, axis):
                value = getattr(jnp, op)(values[arg], axis=axis, keepdims=True)
            case programs.Collect(op, arg, axes):
                value = getattr(jax.lax, f"p{op}")(values[arg], axes)
            case programs.Dot(left, right, axis):
                value = _dot(values[left], values[right], axis)
            case programs.Rows(arg, axis, axes):
                count = values[arg].shape[axis]
                first = sm.axis_index(axes) * count if axes else 0
                value = _along(axis, first + jnp.arange(count, dtype=jnp.int32), case.rank)
            case programs.Noise(None):
                assert rng is not None
                key, rng = rng.split()
                every = case.mesh.axis_names
                mine = jnp.where(sm.axis_index(every) == 0, jax.random.uniform(key, (), dtype), 0)
                value = jax.lax.psum(mine, every).reshape(whole)
            case programs.Noise(int() as arg, axis, axes):
                assert rng is not None
                keys, rng = rng.rows(values[arg].shape[axis], axes or None)
                drawn = jax.vmap(lambda key: jax.random.uniform(key, (), dtype))(keys)
                value = _along(axis, drawn, case.rank)
            case Gather():
                value = _gathered(step, values[step.arg])
            case Exchange():
                value = _exchanged(step, values[step.arg])
            case Control():
                value = _controlled(step, values)
        values.append(value)
    model = _written(case, model, old, values)
    outputs = tuple(values[output.step] for output in case.outputs)
    return outputs, [model[0], rng] if case.noisy else model


def _lifted(value: Any, rank: int) -> Any:
    return value if value.ndim else value.reshape((1,) * rank)


def _along(axis: int, x: Any, rank: int) -> Any:
    """A vector as an array whose other axes are of size one."""
    return x.reshape(tuple(-1 if k == axis else 1 for k in range(rank)))


def _dot(left: Any, right: Any, axis: int) -> Any:
    left, right = jnp.broadcast_arrays(jnp.tanh(left), jnp.tanh(right))
    letters = "ab"[: left.ndim]
    kept = letters.replace(letters[axis], "")
    return jnp.expand_dims(jnp.einsum(f"{letters},{letters}->{kept}", left, right), axis)


def _gathered(step: Gather, x: Any) -> Any:
    if step.row is not None:
        whole = jax.lax.all_gather(x, step.axes, axis=step.axis, tiled=True, to="invarying")
        return jax.lax.slice_in_dim(whole, step.row, step.row + 1, axis=step.axis)
    whole = jax.lax.all_gather(x, step.axes, axis=step.axis, tiled=True)
    size = x.shape[step.axis]
    following = jnp.roll(whole, -1, step.axis)
    first = sm.axis_index(step.axes) * size
    return jax.lax.dynamic_slice_in_dim(following, first, size, step.axis)


def _exchanged(step: Exchange, x: Any) -> Any:
    name, size = step.axis_name, jax.lax.axis_size(step.axis_name)
    parts = jnp.stack([x * (k + 1) for k in range(size)])
    match step.op:
        case "ppermute":
            return jax.lax.ppermute(x, name, [(k, (k + 1) % size) for k in range(size)])
        case "psum_scatter":
            return jax.lax.psum_scatter(parts, name)
        case "all_to_all":
            return jax.lax.all_to_all(parts, name, 0, 0)[-1]
        case op:
            return getattr(sm, op)(x, name)[-1]


def _controlled(step: Control, values: Sequence[Any]) -> Any:
    arg = values[step.arg]
    is_float = jnp.issubdtype(arg.dtype, jnp.floating)

    def body(c: Any, k: Any = None) -> Any:
        c = c if step.other is None else c + values[step.other]
        c = c if k is None else c + k.astype(c.dtype)
        if step.axis is not None:
            mine = (jnp.mean if is_float else jnp.max)(c, axis=step.axis, keepdims=True)
            c = c + (sm.pmean if is_float else sm.pmax)(mine, step.axes) if step.axes else c + mine
        return jnp.tanh(c) if is_float else _UNARY["wrap"](c)

    on: Any = None if step.on is None else values[step.on].reshape(())
    times: Any = step.times if on is None else on % 3
    match step.kind:
        case "cond":
            return jax.lax.cond(on > 0, body, jnp.negative, arg)
        case "fori_loop":
            return jax.lax.fori_loop(0, times, lambda _, c: body(c), arg)
        case "while_loop":
            going: Callable[[Any], Any] = lambda carry: carry[0] < times
            return jax.lax.while_loop(going, lambda s: (s[0] + 1, body(s[1])), (0, arg))[1]
        case "scan":
            return jax.lax.scan(lambda c, k: (body(c, k), None), arg, jnp.arange(times))[0]
        case kind:
            return getattr(jax, kind)(body)(arg)


def _written(case: Case, model: Any, old: list[list[Any]], values: list[Any]) -> Any:
    new: dict[int, list[Any]] = {}
    for write in case.writes:
        before, value = old[write.slot][write.leaf], values[write.step]
        value = jnp.broadcast_to(value, before.shape) if before.ndim else value.reshape(())
        new.setdefault(write.slot, list(old[write.slot]))[write.leaf] = value
    units, positions = units_of(model), positions_of(case)
    leaving = [units[position] for position in positions]
    for k, arrays in new.items():
        value = slot_value(arrays)
        leaving[k] = leaving[k].set(value) if sm.is_state(leaving[k]) else value
    sources = dict(case.moves)
    changed = {positions[k]: leaving[sources.get(k, k)] for k in case.changed()}
    return _passed(case.passed, with_units(model, changed))


def _passed(how: str, model: Any) -> Any:
    """The model, passed through a transformation that does nothing."""
    if how == "gradient":
        loss = lambda pair: (pair[0], pair)
        ((_, (_, model)), _) = sm.value_and_grad(loss)((jnp.float32(1), model))
        return model
    arrays, rest = eqx.partition(model, eqx.is_array)
    same: Callable[[Any], Any] = lambda arrays: arrays
    match how:
        case "map":
            return jax.tree.map(lambda leaf: leaf, model)
        case "jit" | "checkpoint":
            arrays = getattr(jax, how)(same)(arrays)
        case "cond":
            arrays = jax.lax.cond(jnp.bool_(True), same, same, arrays)
        case "scan":
            arrays = jax.lax.scan(lambda arrays, _: (arrays, None), arrays, None, length=2)[0]
        case _:
            return model
    return eqx.combine(arrays, rest)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    # What it was: a reshape that reads the axes in another order, and a transpose.
    "turned": lambda x: jax.lax.reshape(x, x.shape[::-1], dimensions=range(x.ndim)[::-1]).T,
    "half": lambda x: x * 0.5,
    "wrap": lambda x: x % 101 - 50,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    # Whole numbers up to 50 as they are, as exponents of two: JAX's types lose that these vary.
    "untyped": lambda x: (
        jnp.frexp(jax.lax.bitcast_convert_type((x + 127) << 23, jnp.float32))[1] - 1
    ),
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "gate": lambda a, b: jnp.tanh(a) * jnp.tanh(b),
}
