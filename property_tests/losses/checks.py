"""Compares losses and their gradients with those of whole arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.arrays import EPS, Array, wide_dtype
from ..base.checks import jitted
from ..base.models import arrays_of, model_of
from . import reference
from .layers import TIMES, WIDTH, LossCase, LossValues
from .mapped import mapping, unsplit_axes
from .reference import largest, rate


# The relative tolerance of a gradient, by the dtype of its parameter.
PRECISION = {"float32": 3e-5, "complex64": 3e-5, "bfloat16": 3e-2}
ROUNDING = {"float32": EPS, "complex64": EPS, "bfloat16": 2.0**-8}


def check_loss(loss: LossCase, values: LossValues, how: str, *, jit: bool = False) -> None:
    """Compares the loss, its gradient and the new model with those of whole arrays."""
    call: Any = mapping(loss, how)
    slots = [*values.params, np.zeros(WIDTH, np.float32), np.zeros((), np.int32)]
    model, flag = model_of(loss.case, [[x] for x in slots]), np.float32(values.flag)
    before = model if jit else call.place(model, values.x, flag)[0]
    result, after = (jitted(call) if jit else call)(before, values.x, flag)
    total, rows, found, same = jax.tree.map(np.asarray, result)
    chosen = loss.chosen
    whole = [g for k, g in zip(chosen, found, strict=True) if not loss.params[k].axes]
    for once, copies in zip(same, [total, *whole], strict=True):
        np.testing.assert_array_equal(copies, np.broadcast_to(once, copies.shape))
    x = -values.x if loss.around == "cond" and values.flag < 0 else values.x
    for entry in _entries(loss):
        values = dataclasses.replace(values, x=x[entry] if loss.around == "vmap" else x)
        got = {
            k: _at(loss, loss.params[k].axes, g, entry) for k, g in zip(chosen, found, strict=True)
        }
        new = {k: g.reshape(-1, *values.params[k].shape)[0] for k, g in got.items()}
        if loss.around == "scan":
            got = {
                k: np.conj((values.params[k] - g.astype(wide_dtype(g))) / rate(loss))
                for k, g in got.items()
            }
        check_gradient(loss, values, _at(loss, (), total, entry), got)
        each, _, features = reference.forward(loss, values.widened())
        for some in rows:
            some = _at(loss, loss.rows, some, entry)
            np.testing.assert_allclose(
                some, np.broadcast_to(each, some.shape), rtol=1e-4, atol=1e-4
            )
        if loss.around == "scan":
            params = [new.get(k, old) for k, old in enumerate(values.params)]
            values = dataclasses.replace(values, params=params)
    _check_model(loss, before, after, [*values.params, features.mean(0)], exact=not jit)


def check_gradient(
    loss: LossCase, values: LossValues, total: Array, found: dict[int, Array]
) -> None:
    """Compares copies of a loss with NumPy, and of its gradients with JAX, both on whole arrays."""
    scale = largest(loss)
    want = reference.value(loss, values.widened())
    np.testing.assert_allclose(
        total, np.broadcast_to(want, total.shape), rtol=1e-4, atol=1e-5 * scale
    )
    params = [jnp.asarray(w) for w in values.params]

    def value(trained: dict[int, Any]) -> Any:
        every = [trained.get(k, w) for k, w in enumerate(params)]
        return reference.value(loss, LossValues(every, jnp.asarray(values.x), values.flag), jnp)

    plain = jax.grad(value)({k: params[k] for k in sorted(found)})
    plain = {k: np.asarray(g).astype(wide_dtype(g)) for k, g in plain.items()}
    scale = max([scale, *(float(np.max(np.abs(g))) for g in plain.values())])
    for k, g in found.items():
        error = _error(loss, k, scale)
        np.testing.assert_allclose(
            g, np.broadcast_to(plain[k], g.shape), rtol=0, atol=error, err_msg=f"s{k}"
        )


def _check_model(
    loss: LossCase, before: Any, after: Any, wanted: Sequence[Array], exact: bool
) -> None:
    old, new = arrays_of(loss.case, before), arrays_of(loss.case, after)
    times = {"scan": TIMES, "vmap": 0}.get(loss.around, 1)
    assert int(new[-1][0]) == times
    if loss.around != "vmap":
        np.testing.assert_allclose(np.asarray(new[-2][0]), wanted[-1], rtol=1e-4, atol=1e-4)
    for k in range(len(loss.params)):
        ((a,), (b,)) = old[k], new[k]
        np.testing.assert_array_equal(np.asarray(b), wanted[k])
        # A parameter that was not written is the very array that went in.
        assert not exact or loss.around not in ("plain", "vmap") or a is b, f"s{k} was copied"


def _entries(loss: LossCase) -> range:
    return range({"scan": TIMES, "vmap": 2}.get(loss.around, 1))


def _at(loss: LossCase, axes: Any, x: Array, entry: int) -> Array:
    """One entry of each copy."""
    lead = loss.around in ("scan", "vmap")
    return np.take(x, entry, axis=len(unsplit_axes(loss, tuple(axes)))) if lead else x


def _error(loss: LossCase, k: int, scale: float) -> float:
    dtype = loss.params[k].dtype
    # A gradient computed from parameters after a step has their rounding error.
    rounded = 2 * ROUNDING[dtype] / rate(loss) if loss.around == "scan" else 0.0
    return PRECISION[dtype] * scale + rounded
