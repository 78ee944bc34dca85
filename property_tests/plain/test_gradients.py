"""Gradients around mapped calls of random smooth programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .cases import cases, values
from .gradients import check_gradient


@pytest.mark.slow
@given(st.data())
def test_sharded_gradients_are_unsharded_gradients(data: st.DataObject) -> None:
    case = data.draw(cases(portable=True, smooth=True), "case")
    jit = data.draw(st.booleans(), "inside jit")
    # Where no mesh is set, JAX cannot type a constant gradient by Explicit axes.
    homes = ["host"] if case.mesh.explicit else ["host", "placed"]
    home = data.draw(st.sampled_from(homes), "home")
    check_gradient(case, data.draw(values(case=case, calls=1), "values"), home=home, jit=jit)
