"""`lower` refuses the gradients that the call refuses, and traces the function once."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, jnp, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")

X = np.ones((4, 2), np.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w.value) ** 2), w


def summed_twice(w: Any, x: Any) -> Any:
    return jax.lax.psum(sm.grad(loss, axis_name="x")(w, x)[0], "x")


def gathered_before(w: Any, x: Any) -> Any:
    whole = w.set(sm.all_gather(x[0, :1], "x", tiled=True)[:2])
    return jax.lax.pmean(jax.jit(sm.grad(loss, axis_name="x"))(whole, x)[0], "x")


def mapped(fun: Any, donate: Any) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), donate=donate)


@pytest.mark.parametrize("donate", ["none", "states"])
@pytest.mark.parametrize("fun", [summed_twice, gathered_before])
def test_lower_refuses_what_the_call_refuses(fun: Any, donate: Any) -> None:
    w = sm.ParamState(jnp.ones(2))
    with pytest.raises(sm.StatemeshError) as of_call:
        mapped(fun, donate)(w, X)
    with pytest.raises(sm.StatemeshError) as of_lower:
        mapped(fun, donate).lower(w, X)
    assert str(of_lower.value) == str(of_call.value)


@pytest.mark.parametrize("donate", ["none", "states"])
def test_the_function_is_traced_once(donate: Any) -> None:
    fun, count = counted(lambda w, x: sm.grad(loss, axis_name="x")(w, x)[0])
    lowered = mapped(fun, donate).lower(sm.ParamState(jnp.ones(2)), X)
    assert count.times == 1
    assert lowered.out_info.value.shape == (2,)
