"""Compares gradients around a mapped call with those of the unsharded call and with the reference's slope."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.arrays import Array, Global, Values, widen
from ..base.checks import assert_near, at_home, input_shardings
from ..base.models import arrays_of, model_of
from ..programs import Case
from ..trees import Setting
from . import reference
from .checks import Stream
from .mapped import mapping


def loss_of(case: Case, call: Callable[..., Any], gain: float) -> Callable[..., Any]:
    """A loss to which every entry of the outputs and of the new states adds with its own weight."""

    def loss(slots: list[list[Any]], inputs: list[Any]) -> Any:
        outputs, model = call(model_of(case, slots), Setting(gain), *inputs)
        total = jnp.zeros(())
        for x in [*outputs, *(x for arrays in arrays_of(case, model) for x in arrays)]:
            total += jnp.sum(x * weights(x))
        return total

    return loss


def weights(x: Any) -> Array:
    return np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)


def check_gradient(case: Case, values: Values, *, home: str = "host", jit: bool = False) -> None:
    """Checks the gradients of a smooth portable program with respect to all states and inputs."""
    mapped = mapping(case)
    for gain, inputs in values.calls:
        slots = [[jnp.asarray(x) for x in arrays] for arrays in values.slots]
        gradient = jax.grad(loss_of(case, mapped, gain), argnums=(0, 1))
        gradient = jax.jit(gradient) if jit else gradient
        got = gradient(
            slots, [jnp.asarray(x) for x in at_home(home, inputs, input_shardings(case))]
        )
        plain = jax.grad(loss_of(case, mapped.unsharded, gain), argnums=(0, 1))
        assert_near(got, plain(slots, [jnp.asarray(x) for x in inputs]))
        assert_slope(case, gain, values.slots, inputs, got)


def assert_slope(
    case: Case, gain: float, slots: Sequence[Sequence[Array]], inputs: Sequence[Array], got: Any
) -> None:
    """Compares the gradient in one direction with the difference quotient of the reference's loss."""
    start, treedef = jax.tree.flatten((slots, list(inputs)))
    direction = [np.sin(1.0 + np.arange(x.size)).reshape(x.shape) for x in start]
    step = 1e-6

    def loss(sign: int) -> float:
        pairs = zip(start, direction, strict=True)
        moved = [widen(x) + sign * step * d for x, d in pairs]
        slots, inputs = jax.tree.unflatten(treedef, moved)
        world = [[Global(x) for x in leaves] for leaves in slots]
        outputs, after = reference.run(case, gain, world, inputs, Stream(0))
        return sum(
            float(np.sum(x.value * weights(x.value)))
            for x in [*outputs, *(x for leaves in after for x in leaves)]
        )

    slopes = [np.asarray(g, np.float64) for g in jax.tree.leaves(got)]
    along = sum(float(np.sum(g * d)) for g, d in zip(slopes, direction, strict=True))
    size = 1.0 + sum(float(np.sum(np.abs(g * d))) for g, d in zip(slopes, direction, strict=True))
    wanted = (loss(1) - loss(-1)) / (2 * step)
    np.testing.assert_allclose(along, wanted, rtol=0, atol=1e-4 * size)
