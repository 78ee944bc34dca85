"""With random models, meshes and programs `shard_map` gives what the loop over coordinates gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.checks import HOMES
from .cases import cases, values
from .checks import check_program
from .gradients import check_gradient


@given(st.data())
def test_sharded_is_the_reference(data: st.DataObject) -> None:
    case = data.draw(cases(), "case")
    home = data.draw(st.sampled_from(HOMES), "home")
    check_program(case, data.draw(values(case=case), "values"), home=home)


@pytest.mark.slow
@given(st.data())
def test_in_other_ways(data: st.DataObject) -> None:
    """Inside `jax.jit`, emulated on one device, and with the model's arrays packed."""
    case = data.draw(cases(), "case")
    how = data.draw(st.sampled_from(["jit", "emulated", "packed"]), "how")
    # `jax.jit` itself refuses an array that is committed to another device.
    home = data.draw(st.sampled_from(HOMES).filter("another".__ne__), "home")
    check_program(case, data.draw(values(case=case, calls=2), "values"), how=how, home=home)


@pytest.mark.slow
@given(st.data())
def test_sharded_is_unsharded(data: st.DataObject) -> None:
    case = data.draw(cases(portable=True), "case")
    run = data.draw(values(case=case, calls=2), "values")
    check_program(case, run)
    check_program(case, run, how="unsharded")


@pytest.mark.slow
@given(st.data())
def test_sharded_gradients_are_unsharded_gradients(data: st.DataObject) -> None:
    case = data.draw(cases(portable=True, smooth=True), "case")
    jit = data.draw(st.booleans(), "inside jit")
    # Where no mesh is set, JAX cannot type a constant gradient by Explicit axes.
    homes = ["host"] if case.mesh.explicit else ["host", "placed"]
    home = data.draw(st.sampled_from(homes), "home")
    check_gradient(case, data.draw(values(case=case, calls=1), "values"), home=home, jit=jit)
