"""Layers with states, and models of several, in microbatches: what all rows at once would give."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.grad.test_microbatches import WAYS, X
from tests.helpers import make_mesh, slow


Loss = Callable[[Any, Any], Any]


def run(way: str, loss: Loss, count: int | None = 4) -> Callable[[Any, Any], Any]:
    """The loss, the new model and the gradients, with the rows split in two."""
    step = WAYS[way](
        lambda net, x, _: sm.value_and_grad(loss, axis_name="x", microbatches=count)(net, x)
    )
    return lambda net, x: jax.block_until_ready(step(net, x, x[:, 0]))


def assert_as_at_once(got: Any, loss: Loss, net: Any, x: Any) -> None:
    wanted = sm.value_and_grad(loss)(net, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if eqx.is_array(a) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, 2e-5, 2e-6)


class Layers(sm.Module):
    w: sm.ParamState
    norm: sm.nn.BatchNorm
    dropout: sm.nn.Dropout
    average: sm.nn.Average


@pytest.mark.slow
def test_layers_with_statistics() -> None:
    def loss(net: Layers, x: Any) -> Any:
        _, norm = net.norm(x)
        y, dropout = net.dropout(x)
        loss = ((y @ net.w.value) ** 2).mean()
        _, average = net.average(loss, weight=len(x))
        return loss, net.replace(norm=norm, dropout=dropout, average=average)

    net = Layers(
        sm.ParamState(jnp.array([1.0, 2.0, 3.0])),
        sm.nn.BatchNorm(3, axis_name="x", momentum=None),
        sm.nn.Dropout(0.5, jax.random.key(1), axis_name="x"),
        sm.nn.Average(0.0, axis_name="x"),
    )
    assert_as_at_once(run("mesh", loss)(net, X), loss, net, X)


# The means of consecutive rows lie apart.
ROWS = (X + np.arange(32, dtype=np.float32)[:, None] / 4 + 10).astype(np.float32)


class Normed(sm.Module):
    w: sm.ParamState
    norm: sm.nn.BatchNorm


def normed_by_hand(w: Any, scale: Any, x: Any, count: int) -> Any:
    """The loss of a `Normed` of plain arrays: microbatch `i` holds every `count`-th row from row `i` on."""
    losses = []
    for i in range(count):
        rows = x[i::count]
        apart = rows - rows.mean(0)
        y = apart / jnp.sqrt((apart**2).mean(0) + 1e-5) * scale
        losses.append((jnp.tanh(y @ w) * (1 + y[:, 0])).mean())
    return jnp.stack(losses).mean()


@pytest.mark.parametrize(
    ("mesh", "checked", "kind", "momentum"),
    [
        ("4x2", True, AxisType.Explicit, 0.5),
        slow("8", False, AxisType.Auto, None),
    ],
)
def test_statistics_of_a_microbatch_are_the_same_on_every_mesh(
    mesh: str, checked: bool, kind: AxisType, momentum: float | None
) -> None:
    names = make_mesh(mesh).axis_names

    def loss(net: Normed, x: Any) -> Any:
        y, norm = net.norm(x)
        return (jnp.tanh(y @ net.w.value) * (1 + y[:, 0])).mean(), net.replace(norm=norm)

    step = sm.value_and_grad(loss, axis_name=names, microbatches=4)
    with jax.enable_x64(True):
        mapped = sm.shard_map(step, make_mesh(mesh, kind), (None, P(names)), P(), check_vma=checked)
        norm = sm.nn.BatchNorm(3, axis_name=names, momentum=momentum, dtype=np.float64)
        net = Normed(sm.ParamState(np.array([0.3, -0.6, 0.9])), norm)
        x = ROWS.astype(np.float64)
        (value, new), grads = jax.block_until_ready(mapped(net, x))
        by_hand = jax.jit(jax.value_and_grad(normed_by_hand, (0, 1)), static_argnums=3)
        wanted, (by_w, by_scale) = by_hand(net.w.value, np.ones(3), x, 4)
        np.testing.assert_allclose(value, wanted, 1e-12)
        np.testing.assert_allclose(grads.w.value, by_w, 1e-11)
        np.testing.assert_allclose(grads.norm.scale.value, by_scale, 1e-11)
        mean, var = new.norm.statistics
        kept = momentum or 0
        np.testing.assert_allclose(mean, (1 - kept) * x.mean(0), 1e-12)
        np.testing.assert_allclose(var, kept + (1 - kept) * x.var(0), 1e-12)


def test_statistics_of_layers_that_a_scan_stacks() -> None:
    """As many layers as channels, so that one may not be taken for the other."""

    def loss(net: Any, x: Any) -> Any:
        def apply(x: Any, layer: Any) -> Any:
            norm, average, factor = layer
            y, norm = norm(x * factor.value)
            _, average = average(x.mean(0) * factor.value, weight=len(x))
            return x, ((norm, average, factor), y.mean())

        _, (net, means) = sm.scan(apply, x, net)
        return means.sum(), net

    def stacked(layer: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x] * 3) if isinstance(x, jax.Array) else x, layer)

    norm = sm.nn.BatchNorm(3, momentum=0.75)
    average = sm.nn.Average(jnp.zeros(3))
    net = stacked(norm), stacked(average), sm.ParamState(jnp.array([1.0, 2.0, 4.0]))
    (_, (new, average, _)), _ = sm.value_and_grad(loss, microbatches=4)(net, ROWS)
    for k, factor in enumerate((1, 2, 4)):
        rows = ROWS.astype(np.float64) * factor
        np.testing.assert_allclose(new.statistics[0][k], 0.25 * rows.mean(0), 1e-5)
        np.testing.assert_allclose(new.statistics[1][k], 0.75 + 0.25 * rows.var(0), 1e-5)
        np.testing.assert_allclose(average.running.value["mean"][k], rows.mean(0), 1e-5)
    np.testing.assert_array_equal(new.running.value["count"], [32, 32, 32])


@pytest.mark.parametrize(("way", "debias"), [("mesh", False), slow("unchecked", True)])
def test_what_each_microbatch_writes_alike_is_written_once(way: str, debias: bool) -> None:
    def loss(net: Any, x: Any) -> Any:
        averaged, ema = net["ema"](net["w"])
        sums, most = net["sums"].value, net["most"].value
        written = {
            "steps": net["steps"].value + 1,
            "sums": {
                "rows": sums["rows"] + len(x),
                "each": [sums["each"][0] + x.sum(0)],
                "calls": sums["calls"] + 1,
            },
            "most": (jnp.maximum(most[0], x.max(0)), most[1] * 2),
        }
        states = {name: net[name].set(value) for name, value in written.items()}
        loss = ((x @ net["w"].value) ** 2 + x @ averaged.value).mean()
        return loss, {**net, "ema": ema, **states}

    w = sm.ParamState(jnp.array([1.0, 2.0, 4.0]))
    net = {
        "w": w,
        "ema": sm.nn.EMA(w.set(jnp.zeros(3)), decay=0.75, debias=debias),
        "steps": sm.State(0),
        "sums": sm.State({"rows": 0, "each": [jnp.ones(3)], "calls": 5}, reduce="sum"),
        "most": sm.State((jnp.zeros(3), 1.0), reduce="max"),
    }
    (value, new), grads = run(way, loss)(net, X)
    (wanted, _), wanted_grads = sm.value_and_grad(loss)(net, X)
    np.testing.assert_allclose(value, wanted, 1e-5)
    np.testing.assert_allclose(grads["w"].value, wanted_grads["w"].value, 1e-4)
    # The correction takes out the zeros from which the averages start.
    np.testing.assert_allclose(new["ema"].averages.value, w.value * (1 if debias else 0.25), 1e-6)
    sums, most = new["sums"].value, new["most"].value
    np.testing.assert_allclose(sums["each"][0], 1 + X.astype(np.float64).sum(0), 1e-5)
    np.testing.assert_array_equal(most[0], np.maximum(X.max(0), 0))
    # A number of rows is the same in every microbatch, and counts once: sum the rows to count them.
    assert (int(new["steps"].value), int(sums["calls"]), float(most[1])) == (1, 6, 2.0)
    packed, _ = run(way, loss)(sm.pack(net, make_mesh("2", AxisType.Explicit)), X)
    assert isinstance(packed[1], sm.Packed)
    for a, b in zip(jax.tree.leaves(packed[1].unpack()), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)


def test_averages_of_the_lanes_own_weights_are_not_merged() -> None:
    def step(w: Any, ema: Any) -> Any:
        return ema(w)

    w = sm.ParamState(jnp.ones((2, 3)))
    mapped = sm.vmap2(step, in_axes=None, axis_name="x", state_in_axes={0: sm.ParamState})
    with pytest.raises(sm.BatchAxisError, match=r"ema\.averages"):
        mapped(w, sm.nn.EMA(sm.ParamState(jnp.ones(3))))


@pytest.mark.slow
def test_layers_with_states_that_are_scanned_and_rematerialised() -> None:
    @jax.checkpoint
    def apply(x: Any, layer: Any) -> Any:
        x = jnp.tanh(x @ layer["w"].value)
        return x, {**layer, "seen": layer["seen"].set(layer["seen"].value + x.sum(0))}

    def loss(stack: Any, x: Any) -> Any:
        x, stack = sm.scan(apply, x, stack)
        return (x**2).mean(), stack

    stack = {
        "w": sm.ParamState(jnp.sin(jnp.arange(36.0)).reshape(4, 3, 3)),
        "seen": sm.State(jnp.zeros((4, 3)), reduce="sum"),
    }
    assert_as_at_once(run("mesh", loss)(stack, X), loss, stack, X)
