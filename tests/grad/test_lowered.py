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


@pytest.mark.parametrize("donate", ["none", "states"])
def test_lower_refuses_what_the_call_refuses_and_traces_once(donate: Any) -> None:
    def mapped(fun: Any) -> Any:
        return sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), donate=donate)

    w = sm.ParamState(jnp.ones(2))
    for fun in (summed_twice, gathered_before):
        texts = []
        for call in (mapped(fun), mapped(fun).lower):
            with pytest.raises(sm.StatemeshError) as caught:
                call(w, X)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
    fun, count = counted(lambda w, x: sm.grad(loss, axis_name="x")(w, x)[0])
    lowered = mapped(fun).lower(w, X)
    assert count.times == 1
    assert lowered.out_info.value.shape == (2,)
