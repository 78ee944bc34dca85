"""`assert_equivalent` judges what is exact: maxima of rounded numbers, saturated functions, short powers."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from statemesh.testing import assert_equivalent


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)
CAUSAL = np.tril(np.ones((8, 8), np.float32))

mask: Any = lambda x: (x[..., 0] > 0).astype(x.dtype)
kept: Any = lambda x, keep: jnp.where(keep, x.max(-1), 0)


# With noise in what is exact, these thresholds would jump.
PATTERNS: dict[str, Callable[[Any], Any]] = {
    "saturated_tanh": lambda x: kept(x, jnp.tanh(1e6 * x[..., 0]) >= 1),
    "saturated_sigmoid": lambda x: kept(x, jax.nn.sigmoid(1e6 * x[..., 0]) == 1),
    "votes_of_signs": lambda x: kept(x, jnp.tanh(1e6 * x[..., :3]).sum(-1) >= 1),
    "hard_softmax": lambda x: kept(x, jax.nn.softmax(1e6 * x).cumsum(1).max(-1) <= 2),
    "inverse_of_a_power": lambda x: kept(x, (2 * mask(x) + 2) ** -2 == 0.0625),
}


def losses(x: Any) -> Any:
    mistake = 1 + 0.2 * (lax.axis_size("x") - 1)
    return {name: mistake * lax.pmean(of(x).mean(), "x") for name, of in PATTERNS.items()}


@pytest.mark.slow
def test_mistakes_behind_exact_numbers_are_found() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_equivalent(
            losses, (X,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P(), gradients=False
        )
    assert f"  and {len(PATTERNS) - 4} more." in str(raised.value)


@pytest.mark.slow
def test_a_maximum_is_one_of_the_numbers_that_it_is_taken_of() -> None:
    """In its derivative too, where XLA computes these numbers again.

    The quick suite leaves it out, since JAX 0.10 drops the barrier that the noise needs for it.
    """

    def scaled(x: Any) -> Any:
        scores = jnp.where(CAUSAL > 0, x @ x.swapaxes(1, 2) * 0.5, -1e4)
        shifted = jnp.exp(scores - scores.max(-1)[..., None])
        # By a mean that rounds differently on each mesh.
        return shifted.sum(-1) * lax.pmean(jnp.tanh(x).mean(), "x")

    checked = assert_equivalent(scaled, (X,), meshes=[{"x": 4}], in_specs=P("x"), out_specs=P("x"))
    assert checked.unjudged == {}
