"""A packed model behaves like the model itself, in random programs."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm
from statemesh.testing import meshes, modules, states
from tests.helpers import assert_same

from .base.settings import fewer
from .random_programs import Program, programs


pytestmark = pytest.mark.slow


jnp: Any = jax.numpy
few = fewer(1 / 4)


@fewer(2 / 5)  # Each example compiles programs of its own.
@given(st.data())
def test_it_comes_back_bit_for_bit(data: st.DataObject) -> None:
    mesh = data.draw(meshes(), "mesh")
    model = data.draw(modules(states=states(mesh=mesh)), "model")
    packed = sm.pack(model, mesh)
    assert_same(packed.unpack(), model)
    assert {*packed.states, *packed.rest} >= {*sm.states(model, ...)}
    for path, state in sm.states(model, ...).items():
        if path in packed.states:
            assert_same(packed.states[path], state)


@few
@given(programs())
def test_programs_give_the_same(program: Program) -> None:
    check(program)


@few
@given(programs(portable=False))
def test_programs_of_shards_give_the_same(program: Program) -> None:
    check(program)


def check(program: Program) -> None:
    """Two calls in a row agree. Floats may be rounded differently where the compiler fuses differently."""
    model, *inputs = program.args
    plain, packed = model, sm.pack(model, program.mesh)
    mapped: Any = program.mapped
    for _ in range(2):
        out, plain = mapped(plain, *inputs)
        found, packed = mapped(packed, *inputs)
        new = packed.unpack() if isinstance(packed, sm.Packed) else packed
        structure: Any = jax.tree.structure
        assert structure((found, new)) == structure((out, plain))
        pairs = zip(jax.tree.leaves((found, new)), jax.tree.leaves((out, plain)), strict=True)
        for x, y in pairs:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                size = float(np.abs(np.asarray(y, np.float64)).max(initial=1.0))
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * size)
            else:
                assert_same(x, y)
