"""Training steps that give their states up: under `jit` with shardings, by hand, and with each library.

All compute the same loss, gradients and steps of Adam. They differ in what holds the arrays, and in whether
`shard_map` or the partitioner of `jit` splits the program.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.scripts.benchmarks.peers._case import Case, Made
from tests.scripts.benchmarks.peers._models import OPTIMIZER, Arrays, Training, training


def start(case: Case) -> tuple[Training, Arrays, Arrays, tuple[Any, ...]]:
    """The model, with parameters and statistics on every device and the batch split."""
    model = training(case.kind)
    params, stats = whole(case, (model.params, model.statistics))
    return model, params, stats, tuple(jax.device_put(model.batch, case.split))


def fed_back(call: Any, carry: tuple[Any, ...], batch: Any, param: Callable[[Any], Any]) -> Made:
    """A call that takes a batch after what it returns after the loss."""

    def step() -> Any:
        nonlocal carry
        loss, *carry = call(*carry, *batch)
        return loss

    lower = (lambda: call.lower(*carry, *batch)) if hasattr(call, "lower") else None
    return Made(step, lambda: param(carry), lower)


def whole(case: Case, tree: Any) -> Any:
    """The arrays of a tree on every device."""
    return jax.device_put(tree, NamedSharding(case.mesh, P()))


def of_all_rows(x: Any) -> Any:
    """The mean over all devices where the program has the rows of all of them."""
    return x


def _step(model: Training, params: Arrays, slots: Any, stats: Arrays, x: Any, y: Any) -> Any:
    of_batch = lambda p: model.loss(p, stats, x, y, of_all_rows)
    (loss, stats), grads = jax.value_and_grad(of_batch, has_aux=True)(params)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, optax.apply_updates(params, updates), slots, stats


def first(carry: Any) -> Any:
    return jax.tree.leaves(carry)[0]


def by_shardings(case: Case) -> Made:
    """The partitioner splits the program of one device: the arrays say how they lie."""
    model, params, stats, batch = start(case)
    call = jax.jit(functools.partial(_step, model), donate_argnums=(0, 1, 2))
    return fed_back(call, (params, whole(case, OPTIMIZER.init(params)), stats), batch, first)


def by_hand(case: Case) -> Made:
    model, params, stats, batch = start(case)

    def step(params: Arrays, slots: Any, stats: Arrays, x: Any, y: Any) -> Any:
        own = jax.lax.pcast(params, "x", to="varying")
        of_batch = lambda p: model.loss(p, stats, x, y, lambda x: jax.lax.pmean(x, "x"))
        (loss, stats), grads = jax.value_and_grad(of_batch, has_aux=True)(own)
        loss, grads = jax.lax.pmean((loss, grads), "x")
        updates, slots = OPTIMIZER.update(grads, slots)
        return loss, optax.apply_updates(params, updates), slots, stats

    split = case.split.spec
    mapped = jax.shard_map(
        step, mesh=case.mesh, in_specs=(P(), P(), P(), split, split), out_specs=P()
    )
    call = jax.jit(mapped, donate_argnums=(0, 1, 2))
    return fed_back(call, (params, whole(case, OPTIMIZER.init(params)), stats), batch, first)


class Net(sm.Module):
    params: dict[str, sm.ParamState]
    statistics: dict[str, sm.State]


def with_statemesh(case: Case, blocks: int | None = None) -> Made:
    model, params, stats, batch = start(case)

    def loss_fn(net: Net, x: Any, y: Any) -> Any:
        params, stats = jax.tree.map(
            lambda state: state.value, (net.params, net.statistics), is_leaf=sm.is_state
        )
        loss, new = model.loss(params, stats, x, y, lambda x: sm.pmean(x, "x"))
        return loss, net.replace(
            statistics={name: net.statistics[name].set(value) for name, value in new.items()}
        )

    def step(net: Net, slots: Any, x: Any, y: Any) -> Any:
        (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="x", blocks=blocks)(net, x, y)
        updates, slots = OPTIMIZER.update(grads, slots)
        return loss, eqx.apply_updates(net, updates), slots

    net = Net(
        {name: sm.ParamState(value) for name, value in params.items()},
        {name: sm.State(value) for name, value in stats.items()},
    )
    split = case.split.spec
    call = sm.shard_map(
        step, case.mesh, (None, None, split, split), (P(), P(), P()), donate="states"
    )
    slots = OPTIMIZER.init(sm.trainable(net))
    net, slots, *_ = call.place(net, slots, *batch)
    return fed_back(call, (net, slots), batch, first)


class Filtered(eqx.Module):
    params: Arrays
    statistics: Arrays


def with_equinox(case: Case) -> Made:
    model, params, stats, batch = start(case)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Any, net: Filtered, slots: Any) -> Any:
        loss, params, slots, stats = _step(model, net.params, slots, net.statistics, *batch)
        return loss, Filtered(params, stats), slots

    slots = whole(case, OPTIMIZER.init(params))
    call = lambda *carry: step(batch, *carry)
    return fed_back(call, (Filtered(params, stats), slots), (), first)
