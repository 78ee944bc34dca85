"""Gradients inside losses, and losses that each shard has for itself, in every kind of map."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import statemesh as sm

from ..base.settings import fewer
from .nested import NestedCase, check_nested, nested_cases


@pytest.mark.slow
# Each example compiles two programs of its own.
@fewer(2 / 5)
@given(nested_cases(), st.sampled_from([0.0, 1.0]))
# Over the axis of the loss, what shards exchange inside is refused, whether types tell of it or not.
@example(NestedCase("unchecked", exchange="through"), 0.0)
@example(NestedCase("checked", exchange="through", explicit=True), 0.0)
def test_nested(case: NestedCase, seed: float) -> None:
    check_nested(case, seed)


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_a_derivative_around_a_map_that_reduces_a_gradient(transform: Any) -> None:
    def curve(w: Any, x: Any) -> Any:
        return jnp.mean(x * w**3), w

    def lane(w: Any, x: Any) -> Any:
        return sm.grad(curve, axis_name="x")(w, x)[0]

    x = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    lanes = transform(lane, in_axes=(None, 0), out_axes=None, axis_name="x")
    found, _ = sm.grad(lambda w: (lanes(w, x), w))(jnp.float32(2))
    np.testing.assert_allclose(found, 6 * 2 * x.mean(), rtol=1e-6)
