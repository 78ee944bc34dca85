"""Gradients of random losses inside mapped calls are reduced exactly once, however arrays are split."""

from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from .cases import loss_cases, loss_values
from .checks import check_loss
from .mapped import HOW


@fewer(1 / 2)  # Each example compiles a program of its own.
@given(st.data())
def test_on_meshes(data: st.DataObject) -> None:
    loss = data.draw(loss_cases(), "loss")
    how = data.draw(st.sampled_from(HOW), "how")
    jit = data.draw(st.sampled_from([False, False, True]), "inside jit")
    check_loss(loss, data.draw(loss_values(loss=loss), "values"), how, jit=jit)
