"""Programs that are right, and cancel, jump at thresholds, or learn from rounding. None is accused."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .checked import check


pytestmark = pytest.mark.slow

jnp: Any = jax.numpy
lax: Any = jax.lax
FOUR: list[Any] = [{"x": 4}]


def rows(dtype: str) -> Any:
    return jnp.asarray(np.sin(1.7 * np.arange(16 * 4)).reshape(16, 4), dtype)


def delicate(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x")
    mean = lax.pmean(x.mean(0), "x")
    squares = lax.psum(jnp.square(x).sum(0), "x")
    unit = total / jnp.sqrt(jnp.square(total).sum())
    turned = jnp.sin(x) / jnp.sqrt(lax.psum(jnp.square(jnp.sin(x)).sum(0), "x"))
    return {
        "length_of_unit": 1 - jnp.square(unit).sum(),
        "angle_of_equal": jnp.arccos(jnp.clip((unit * unit).sum(), -1, 1)),
        "cosine_of_equal": lax.psum((turned * turned).sum(0), "x"),
        "sum_of_centered": lax.psum((x - mean).sum(0), "x"),
        "its_direction": jnp.sign(lax.psum((x - mean).sum(0), "x")),
        "spread_by_moments": jnp.sqrt(jnp.abs(squares / 16 - jnp.square(mean))),
        "spread_of_nothing": squares / 16 - lax.pmean(jnp.square(x).mean(0), "x"),
        "floor": jnp.floor(total),
        "rounded": jnp.round(4 * total).astype(jnp.int32),
        "is_above": total > lax.psum(x.sum(), "x") / 4,
        "at_its_mean": (mean - total / 16) >= 0,
        "largest": jnp.argmax(total),
        "order": jnp.argsort(jnp.concatenate([total, mean * 16])),
        "chosen": jnp.where(mean >= total / 16, total, -total),
        "log": jax.nn.logsumexp(total * 50),
        "ratio": total / (total + 1e-3),
        "power": jnp.exp(total) ** 2,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_delicate_results_are_not_accused(dtype: str) -> None:
    check(delicate, rows(dtype), meshes=FOUR)


def by_rows(x: Any) -> Any:
    mean = lax.pmean(x.mean(0), "x")
    return {"above": x > mean, "kept": jnp.where(x >= mean, x, 0), "sign": jnp.sign(x - mean)}


def test_ties_and_thresholds_at_a_mean_are_not_accused() -> None:
    """Every second number is the mean of all, but for rounding."""
    x = np.full((16, 2), 0.1, np.float32)
    x[::2] += np.tile([[0.3], [-0.3]], (4, 1)).astype(np.float32)
    checked = check(by_rows, x, meshes=FOUR, out_specs=P("x"))
    assert sum(checked.unjudged.values()) <= 3 * 16


def test_their_gradients_are_not_accused() -> None:
    def steep(x: Any) -> Any:
        total = lax.psum(x.sum(0), "x")
        unit = total / jnp.sqrt(jnp.square(total).sum())
        return {"unit": 1 - jnp.square(unit).sum(), "soft": jax.nn.softmax(total * 20)}

    check(steep, rows("float32"), meshes=FOUR, gradients=True)


# A bias before a norm: its gradient is rounding and nothing else


class Net(sm.Module):
    w: sm.ParamState
    bias: sm.ParamState


class Slots(sm.Module):
    first: Any
    second: Any
    count: Any


def loss_fn(net: Net, x: Any, y: Any) -> Any:
    z = x @ net.w.value + net.bias.value
    z = z - lax.pmean(z.mean(0), "x")
    z = z / jnp.sqrt(lax.pmean(jnp.square(z).mean(0), "x") + 1e-5)
    return jnp.square(z.sum(1) - y).mean(), net


def adam(net: Net, slots: Slots, x: Any, y: Any) -> Any:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="x")(net, x, y)
    count = slots.count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, slots.first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, slots.second, grads)
    one, two = 1 - 0.9**count, 1 - 0.999**count

    def step(m: Any, v: Any) -> Any:
        return 0.01 * (m / one) / (jnp.sqrt(v / two) + 1e-8)

    updates = jax.tree.map(step, first, second)
    slots = slots.replace(first=first, second=second, count=count)
    return loss, jax.tree.map(lambda p, u: p - u, net, updates), slots


def test_adam_on_a_bias_before_a_norm_is_not_accused() -> None:
    x = rows("float32")
    net = Net(sm.ParamState(x[:4, :3]), sm.ParamState(jnp.ones(3)))
    nothing = jax.tree.map(jnp.zeros_like, net)
    slots = Slots(nothing, nothing, jnp.float32(0))
    specs = (None, None, P("x"), P("x"))
    checked = check(
        adam, net, slots, x, x[:, 0], in_specs=specs, steps=None, gradients=None, meshes=FOUR
    )
    assert {at for at, _ in checked.fed_back} == {"args[0]", "args[1]"}
    assert any("bias" in path for path in checked.unjudged)
    assert not any("[1].w" in path for path in checked.unjudged)
