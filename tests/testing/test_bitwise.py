"""`assert_equivalent(..., bitwise=True)`: equal bits, or the first line that differs in one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent


X = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
WAYS: dict[str, Any] = {"meshes": [{"x": 2}, {"x": 4}], "in_specs": (None, P("x"))}


def centred(mean: sm.State, x: Any) -> Any:
    total = jax.lax.psum(x.sum(0), "x")
    return x - total / 32, mean.set(0.9 * mean.value + total / 320)


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w.value - 1) ** 2), w


def trained(w: Any, x: Any) -> Any:
    (loss, w), grads = sm.value_and_grad(loss_fn, axis_name="x", blocks=8)(w, x)
    return loss, w.set(w.value - 0.1 * grads.value)


def test_the_first_line_that_differs_in_a_bit_is_named() -> None:
    line = centred.__code__.co_firstlineno + 1
    with pytest.raises(AssertionError) as error:
        assert_equivalent(
            centred, (sm.State(jnp.zeros(5)), X), out_specs=(P("x"), P()), bitwise=True, **WAYS
        )
    text = str(error.value).splitlines()
    words = f"test_bitwise.py:{line}: `centred` does not give the same bits on every mesh"
    assert text[0].endswith(words)
    assert text[2] == "In call 1 on mesh x=2, compared with the function on one device:"
    assert text[3].startswith("  - centred(...)[0]: ")
    assert 'total = jax.lax.psum(x.sum(0), "x")' in str(error.value)


def test_within_rounding_it_agrees_without_bits() -> None:
    ways = WAYS | {"out_specs": (P("x"), P())}
    checked = assert_equivalent(centred, (sm.State(jnp.zeros(5)), X), **ways)
    assert not any("bit for bit" in text for text in checked.agreed)


def test_blocks_agree_bit_for_bit() -> None:
    w = sm.ParamState(jnp.ones(5))
    checked = assert_equivalent(trained, (w, X), out_specs=(P(), P()), bitwise=True, **WAYS)
    assert [text for text in checked.agreed if "bit for bit" in text] == [
        "bit for bit on mesh x=2",
        "bit for bit on mesh x=4",
    ]
