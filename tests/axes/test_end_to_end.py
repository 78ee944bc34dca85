"""Small arrays put end to end and taken apart again, in programs that compile quickly."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_same, make_mesh


# More than one operation takes at once, with a scalar and an empty array.
SHAPES = [(), (3,), (0,), (2, 2), *[(2,)] * 17]


def model() -> list[sm.State]:
    numbers = np.random.default_rng(0)
    return [sm.State(numbers.normal(size=shape).astype(np.float32)) for shape in SHAPES]


def test_arrays_come_back_as_they_were() -> None:
    states, mesh = model(), make_mesh("2")
    packed = sm.pack(states, mesh)
    (whole,) = packed.buffers
    np.testing.assert_array_equal(whole, np.concatenate([s.value.ravel() for s in states]))
    assert_same(packed.unpack(), states)
    assert_same(jax.jit(sm.Packed.unpack)(packed), sm.place(states, mesh))


def test_the_gradient_of_what_is_taken_apart_is_one_concatenation() -> None:
    def total(states: Any) -> jax.Array:
        return jnp.stack([(k * s.value).sum() for k, s in enumerate(states)]).sum()

    mesh = make_mesh("1")
    gradient: Any = jax.grad(sm.shard_map(total, mesh, P(), P()))
    packed = sm.pack(model(), mesh)
    (gradients,) = gradient(packed).buffers
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    assert gradients.tolist() == [k for k, size in enumerate(sizes) for _ in range(size)]
    text = str(jax.make_jaxpr(gradient)(packed))
    put_together = re.findall(r"dynamic_update_slice|concatenate|pad\[", text)
    assert put_together == ["concatenate"]


def test_no_loop_begins_at_a_constant() -> None:
    call = sm.shard_map(
        lambda states: jax.tree.map(lambda value: value + 1, states), make_mesh("2"), P(), P()
    )
    text = call.lower(sm.pack(model(), make_mesh("2"))).as_text()
    sliced = re.findall(r"dynamic(?:_update)?_slice .*", text)
    assert len(sliced) >= 3
    hidden = set(re.findall(r"(%\d+)(?::\d+)? = stablehlo.optimization_barrier", text))
    for line in sliced:
        start = line.split(",")[2 if "update" in line else 1]
        assert start.strip().split("#")[0] in hidden, line
