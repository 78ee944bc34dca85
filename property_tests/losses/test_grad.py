"""Gradients of random losses inside mapped calls are reduced exactly once, however arrays are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from .calls import HOW
from .cases import loss_cases, loss_values
from .checks import check_loss


# Each example compiles a program of its own.
few = fewer(3 / 5)


def check(data: st.DataObject, over: str) -> None:
    loss = data.draw(loss_cases(over=over), "loss")
    how = data.draw(st.sampled_from(HOW[over]), "how")
    jit = data.draw(st.sampled_from([False, False, True]), "inside jit")
    check_loss(loss, data.draw(loss_values(loss=loss), "values"), how, jit=jit)


@few
@given(st.data())
def test_on_meshes(data: st.DataObject) -> None:
    check(data, "mesh")


@pytest.mark.slow
@few
@given(st.data())
def test_in_lanes(data: st.DataObject) -> None:
    check(data, "lanes")


@pytest.mark.slow
@few
@given(st.data())
def test_in_lanes_on_meshes(data: st.DataObject) -> None:
    check(data, "both")
