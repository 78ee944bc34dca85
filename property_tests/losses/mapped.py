"""Losses as functions of one shard, their gradients with statemesh, and the mapped calls of these."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.models import (
    SlotNumber,
    arrays_of,
    is_unit,
    mesh_of,
    partition_spec,
    positions_of,
    units_of,
    with_units,
)
from ..programs import Axes, Leaf, Spec
from ..trees import grow, structure
from .layers import TIMES, Layer, LossCase, dense, penalty_of, real, row_losses
from .reference import rate


def loss_fn(loss: LossCase, model: Any, x: Any, flag: Any) -> Any:
    """The loss of one shard, as a user would write it."""
    arrays = arrays_of(loss.case, model)
    params = [arrays[k][0] for k in range(len(loss.trained))]
    penalty: Any = 0.0
    for layer in loss.layers:
        w = None if layer.param is None else params[layer.param]
        if layer.op == "penalty" and layer.param is not None:
            penalty = penalty + _penalty(loss.params[layer.param], w)
        elif layer.op != "idle":
            x = _controlled(loss, layer, x, w, flag)
    rows = row_losses(x, jnp)
    total = getattr(jnp, loss.local)(rows) + penalty
    if loss.inner_axes:
        total = _REDUCE[loss.inner_reduce](total, loss.inner_axes)
    if loss.around != "vmap":
        model = _written(loss, model, x)
    return ((total, rows) if loss.aux else total), model


def _written(loss: LossCase, model: Any, x: Any) -> Any:
    mean = x.mean(axis=0)
    if loss.around == "scan":
        # The carry of the scan must keep its type.
        for name in loss.mesh.axis_names:
            mean = jax.lax.pmean(mean, name)
    units, (*_, running, counter) = units_of(model), positions_of(loss.case)
    count = units[counter].set(units[counter].value + 1)
    return with_units(model, {counter: count, running: units[running].set(mean)})


def _controlled(loss: LossCase, layer: Layer, x: Any, w: Any, flag: Any) -> Any:
    if w is None:
        return _through(loss, layer, x, None)

    def one(x: Any, w: Any) -> Any:
        return _through(loss, layer, x, w)

    match layer.control:
        case "scan":
            return _scanned(lambda x, _: one(x, w), x, jnp.arange(TIMES))
        case "layers":
            return _scanned(one, x, w)
        case "cond":
            return jax.lax.cond(flag > 0, one, lambda x, w: 0.5 * one(x, w), x, w)
        case "remat":
            return jax.checkpoint(one)(x, w)
        case "jit":
            return jax.jit(one)(x, w)
    return one(x, w)


def _scanned(one: Callable[..., Any], x: Any, each: Any) -> Any:
    """A scan whose carry has from the start the type that it has in the end."""
    over = _varying(x) | _varying(one(x, each[0]))

    def body(x: Any, each: Any) -> Any:
        return _vary(one(x, each), over), None

    return jax.lax.scan(body, _vary(x, over), each)[0]


def _varying(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Any, over: frozenset[str]) -> Any:
    missing = tuple(over - _varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _through(loss: LossCase, layer: Layer, x: Any, w: Any) -> Any:
    if layer.param is None:
        match layer.op:
            case "center":
                mean = x.mean(axis=0)
                return x - (jax.lax.pmean(mean, loss.rows) if loss.rows else mean)
            case "softplus":
                return jax.nn.softplus(x)
            case op:
                return getattr(jnp, op)(x)
    leaf = loss.params[layer.param]
    match layer.op:
        case "rows":
            return x + real(w if w.shape[0] == len(x) else _own(w, loss.rows, 0, len(x)))
        case "block":
            return x + real(w)
        case "dense":
            return _dense(layer, leaf, x, w)
    (axes,) = leaf.spec[-1:]
    part = any(layer.parts)
    w = real(w if part or not axes else jax.lax.all_gather(w, axes, tiled=True))
    if part:
        x = _own(x, axes, 1, len(w))
    x = x * w if layer.op == "scale" else x + w
    return jax.lax.all_gather(x, axes, axis=1, tiled=True) if part else x


def _dense(layer: Layer, leaf: Leaf, x: Any, w: Any) -> Any:
    (inner, outer), (by_inner, by_outer) = leaf.spec[-2:], layer.parts
    if inner and not by_inner:
        w = jax.lax.all_gather(w, inner, axis=0, tiled=True)
    if outer and not by_outer:
        w = jax.lax.all_gather(w, outer, axis=1, tiled=True)
    if by_inner:
        x = _own(x, inner, 1, len(w))
    x = dense(x, real(w))
    x = jnp.tanh(jax.lax.psum(x, inner) if by_inner else x)
    return jax.lax.all_gather(x, outer, axis=1, tiled=True) if by_outer else x


def _penalty(leaf: Leaf, w: Any) -> Any:
    axes = tuple(name for names in leaf.spec for name in names)
    part = penalty_of(real(w))
    return jax.lax.psum(part, axes) if axes else part


def _own(x: Any, axes: Axes, axis: int, size: int) -> Any:
    """This shard's part of a whole array."""
    index: Any = 0
    for name in axes:
        index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


_REDUCE: dict[str, Callable[..., Any]] = {"mean": jax.lax.pmean, "sum": jax.lax.psum}


def gradient(loss: LossCase, typed: bool, model: Any, x: Any, flag: Any) -> Any:
    """On one shard: the loss, auxiliary values, gradients (or parameters after some steps), and the model.

    All arrays have an axis of size one for each mesh axis over which their copies should be equal. Arrays
    that are the same everywhere are returned once more, without these axes.
    """
    both = sm.value_and_grad(functools.partial(loss_fn, loss), **_options(loss))

    def once(model: Any, x: Any) -> Any:
        (value, new), grads = both(model, x, flag)
        _assert_alike(loss, model, grads)
        if loss.around == "scan":
            new = eqx.apply_updates(new, jax.tree.map(lambda g: -rate(loss) * jnp.conj(g), grads))
        found = _trained_arrays(loss, new if loss.around == "scan" else grads)
        for k, g in found.items():
            # JAX's types, where they are checked, say that the gradient is the same on all shards.
            assert not typed or _varying(g) == loss.params[k].axes
        total, rows = value if loss.aux else (value, ())
        return (total, rows, found), new

    arrays, static = eqx.partition(model, eqx.is_array)

    def on_arrays(arrays: Any, x: Any) -> Any:
        result, new = once(eqx.combine(arrays, static), x)
        return result, eqx.filter(new, eqx.is_array)

    match loss.around:
        case "plain":
            result, model = once(model, x)
            return _copies(loss, *result), model
        case "vmap":
            return _copies(loss, *jax.vmap(lambda x: once(model, x)[0])(x)), model
        case "jit":
            result, arrays = jax.jit(on_arrays)(arrays, x)
        case "remat":
            result, arrays = jax.checkpoint(on_arrays)(arrays, x)
        case "cond":
            result, arrays = jax.lax.cond(
                flag > 0, on_arrays, lambda arrays, x: on_arrays(arrays, -x), arrays, x
            )
        case _:

            def step(arrays: Any, _: Any) -> Any:
                result, arrays = on_arrays(arrays, x)
                return arrays, result

            arrays, (total, rows, found) = jax.lax.scan(step, arrays, None, TIMES)
            result = total, rows, found
    return _copies(loss, *result), eqx.combine(arrays, static)


def _options(loss: LossCase) -> dict[str, Any]:
    names: Any = loss.axis_names or None
    if len(loss.axis_names) == 1 and not loss.as_tuple:
        (names,) = loss.axis_names
    own = {"wrt": _wrt(loss), "axis_name": names, "has_aux": loss.aux}
    return own | {"reduce": loss.reduce}


def _wrt(loss: LossCase) -> Any:
    """The filter of the trained parameters: none for all of them, tags if they have any, else paths."""
    if all(loss.trained):
        return None
    chosen = loss.chosen
    if all(loss.case.slots[k].declared for k in chosen):
        return [f"s{k}" for k in chosen]
    tree = jax.tree_util.tree_flatten_with_path(grow(loss.case.tree, SlotNumber))[0]
    paths = [path for path, unit in tree if isinstance(unit, SlotNumber) and unit.slot in chosen]
    return lambda path, unit: path in paths


def _trained_arrays(loss: LossCase, model: Any) -> dict[int, Any]:
    units, at = units_of(model), positions_of(loss.case)
    return {k: jax.tree.leaves(units[at[k]])[0] for k in loss.chosen}


def _copies(loss: LossCase, total: Any, rows: Any, found: dict[int, Any]) -> Any:
    def spread(x: Any, over: Axes) -> Any:
        return x.reshape((1,) * len(unsplit_axes(loss, over)) + x.shape)

    whole = [g for k, g in found.items() if not loss.params[k].axes]
    return (
        spread(total, ()),
        [spread(rows, loss.rows)] if loss.aux else [],
        [spread(g, tuple(loss.params[k].axes)) for k, g in found.items()],
        [total, *whole],
    )


def unsplit_axes(loss: LossCase, axes: Axes) -> Axes:
    """The mesh axes over which an array split over `axes` is the same."""
    return tuple(name for name in loss.mesh.axis_names if name not in axes)


def _assert_alike(loss: LossCase, model: Any, grads: Any) -> None:
    """Gradients have the model's structure, with `None` for everything that is not trained."""
    outline: Any = functools.partial(jax.tree.structure, is_leaf=is_unit)
    assert outline(model) == outline(grads)
    trained = {positions_of(loss.case)[k] for k in loss.chosen}
    for i, (before, after) in enumerate(zip(units_of(model), units_of(grads), strict=True)):
        if i not in trained:
            assert after is None
            continue
        assert structure(before) == structure(after)
        (x,), (g,) = jax.tree.leaves(before), jax.tree.leaves(after)
        assert (x.shape, x.dtype) == (g.shape, g.dtype)


# Mapped calls


HOW = ("checked", "unchecked")


def results(loss: LossCase) -> Any:
    """The specs of the loss, the rows' losses, the gradients, and what is the same everywhere.

    All but the last have an axis for each mesh axis over which their copies should be equal.
    """
    lead: Spec = ((),) if loss.around in ("scan", "vmap") else ()
    trained = [loss.params[k] for k in loss.chosen]

    def copied(spec: Spec, axes: Axes) -> PartitionSpec:
        return partition_spec((*((name,) for name in unsplit_axes(loss, axes)), *lead, *spec))

    return (
        copied((), ()),
        [copied((loss.rows,), loss.rows)] if loss.aux else [],
        [copied(leaf.spec, tuple(leaf.axes)) for leaf in trained],
        [partition_spec(lead)] * (1 + sum(not leaf.axes for leaf in trained)),
    )


@functools.cache
def mapping(loss: LossCase, how: str) -> sm.StatefulMapping:
    """The gradient of a loss: the same mapping for every example with it, so that it compiles once."""
    slots = loss.case.slots
    each = [partition_spec(slot.leaves[0].spec) for slot in slots]
    declared = {
        f"s{k}": spec
        for k, spec in enumerate(each)
        if slots[k].declared and slots[k].kind == "ParamState"
    }
    arrays = _of_arrays(loss, each)
    (x,) = loss.case.inputs
    mapped: sm.StatefulMapping = sm.shard_map(
        functools.partial(gradient, loss, how == "checked"),
        mesh_of(loss.mesh),
        (arrays, partition_spec(x.spec), PartitionSpec()),
        (results(loss), arrays),
        state_in_specs=declared or None,
        check_vma=how == "checked",
    )
    return mapped


def _of_arrays(loss: LossCase, each: Sequence[Any]) -> Any:
    """A tree of the model's structure with these entries for arrays outside States, and `None` elsewhere."""
    kinds = [slot.kind for slot in loss.case.slots]
    positions = enumerate(positions_of(loss.case))
    arrays = {at: each[k] for k, at in positions if kinds[k] == "array"}
    tree = grow(loss.case.tree, SlotNumber)
    return with_units(tree, dict.fromkeys(range(len(units_of(tree)))) | arrays)
