"""Gradients of random smooth programs, taken outside the mapped call."""

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
    # JAX cannot make a gradient that depends on no argument (a zero, a constant) typed by Explicit axes
    # where no mesh is set.
    homes = ["host"] if case.mesh.explicit else ["host", "placed"]
    home = data.draw(st.sampled_from(homes), "home")
    check_gradient(case, data.draw(values(case=case, calls=1), "values"), home=home, jit=jit)
