"""What the partitioner makes of right programs is not accused, however arguments and values lie on a mesh."""

from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from statemesh.testing import assert_equivalent

from .base.settings import fewer
from .test_blocks import LAYERS, W, X


jnp: Any = jax.numpy

OF_ROWS = (P(), P("data"), P("model"), P(("data", "model")), P(None, "model"), P("data", "model"))
OF_WEIGHTS = (P(), P("model"), P(None, "model"), P(None, None, "model"), P("model", None, None))
# With Explicit axes the program says how a product of split axes lies; these need not.
EXPLICIT = ("dense", "tanh", "gate", "gelu", "over a root", "softmax", "chosen")


@pytest.mark.slow
@fewer(1 / 5)
@given(st.data())
def test_right_programs_pass(data: Any) -> None:
    kind = data.draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    sizes = data.draw(st.sampled_from([(4, 2), (2, 2), (8, 1)]))
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(kind, kind))
    is_explicit = kind == AxisType.Explicit
    names = data.draw(
        st.lists(st.sampled_from(EXPLICIT if is_explicit else list(LAYERS)), min_size=1, max_size=3)
    )
    of_rows = st.sampled_from(OF_ROWS[:4] if is_explicit else OF_ROWS)
    first, between = data.draw(of_rows), data.draw(of_rows)
    of_weights = P() if is_explicit else data.draw(st.sampled_from(OF_WEIGHTS))

    def step(w: Any, x: Any) -> Any:
        h = x
        for number, name in enumerate(names):
            h = LAYERS[name](h, w[number % 2])
        if not is_explicit:
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, between))
        return {"h": h, "mean": h.mean()}

    w = jax.device_put(W, NamedSharding(mesh, of_weights))
    x = jax.device_put(X, NamedSharding(mesh, first))
    checked = assert_equivalent(jax.jit(step), (w, x))
    assert len(checked.differentiated) == 2
