"""The columns of the table: what is made with a function that a row calls."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._base._checks import is_inexact


Call = Callable[..., list[Array]]

LANES = "lanes"


def value(call: Call, *operands: Array) -> list[Array]:
    return call(*operands)


def jvp(call: Call, *operands: Array) -> list[Array]:
    """The tangents of the results that have one."""
    of, floats = _of_floats(call, operands)
    _, tangents = jax.jvp(of, floats, [jnp.cos(x) for x in floats])
    return list(tangents)


def vjp(call: Call, *operands: Array, zero: Array | float = 0.0) -> list[Array]:
    """The gradients of a weighted sum of all results, by each operand that has one.

    **Arguments:**

    - `zero`: is added to the sum; one that varies makes the sum vary.
    """
    of, floats = _of_floats(call, operands)
    total, pull = jax.vjp(lambda *floats: weighted(of(*floats)) + zero, *floats)
    return list(pull(jnp.ones_like(total)))


def vmap(call: Call, *operands: Array) -> list[Array]:
    """Two calls at once, with other numbers where an operand has any."""
    return jax.vmap(call, _lane_axes(operands))(*_in_lanes(operands))


def lanes(call: Call, *operands: Array) -> list[Array]:
    """The sum of two calls, by a collective over the lanes of a `vmap`."""

    def summed(*operands: Array) -> list[Array]:
        return [lax.psum(_number(x), LANES) for x in call(*operands)]

    return jax.vmap(summed, _lane_axes(operands), None, axis_name=LANES)(*_in_lanes(operands))


def lanes_by_hand(call: Call, *operands: Array) -> list[Array]:
    """The same without a collective."""
    return [_number(x).sum(axis=0, dtype=_number(x).dtype) for x in vmap(call, *operands)]


def weighted(results: Sequence[Array]) -> Array:
    """A sum in which it counts where an entry stands, as after a permutation."""
    total = jnp.zeros(())
    for x in results:
        weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        total += jnp.sum(weights * x.real + (weights * x.imag if jnp.iscomplexobj(x) else 0))
    return total


def _of_floats(call: Call, operands: Sequence[Array]) -> tuple[Call, list[Array]]:
    """The results that have a derivative, as a function of the operands that have one."""
    at = [k for k, x in enumerate(operands) if is_inexact(x)]

    def of(*floats: Array) -> list[Array]:
        filled = list(operands)
        for k, x in zip(at, floats, strict=True):
            filled[k] = x
        results = [x for x in call(*filled) if is_inexact(x)]
        if not results or not floats:
            raise NoDerivative
        return results

    return of, [operands[k] for k in at]


class NoDerivative(Exception):
    """No operand or no result has one."""


def _in_lanes(operands: Sequence[Array]) -> list[Array]:
    axes = _lane_axes(operands)
    return [
        x if axis is None else jnp.stack([x, 0.9 * x if is_inexact(x) else x])
        for x, axis in zip(operands, axes, strict=True)
    ]


def _lane_axes(operands: Sequence[Array]) -> tuple[int | None, ...]:
    """Floats have an entry for each lane; where there are none, all operands have."""
    some = any(map(is_inexact, operands))
    return tuple(0 if is_inexact(x) or not some else None for x in operands)


def _number(x: Array) -> Array:
    return x.astype(jnp.int32) if x.dtype == bool else x
