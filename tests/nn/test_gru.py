"""`nn.GRUCell`: Equinox's cell with its hidden value, compared with Equinox in a Python loop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh, slow


ROWS, STEPS, INPUT, HIDDEN = 8, 4, 3, 5
KEY = jax.random.key(0)
X: Any = np.sin(np.arange(STEPS * ROWS * INPUT, dtype=np.float32)).reshape(STEPS, ROWS, INPUT)


def make(**options: Any) -> Any:
    return sm.nn.GRUCell(INPUT, HIDDEN, key=KEY, **options)


def cell(**options: Any) -> Any:
    return make(**options).init_state(ROWS)


def by_equinox() -> Any:
    """The hidden values, of shape (steps, rows, hidden)."""
    plain: Any = eqx.filter_jit(eqx.nn.GRUCell(INPUT, HIDDEN, key=KEY))
    hidden = np.zeros((ROWS, HIDDEN), np.float32)
    steps = []
    for x in X:
        hidden = np.stack([plain(row, h) for row, h in zip(x, hidden, strict=True)])
        steps.append(hidden)
    return np.stack(steps)


WANTED = by_equinox()


def forward(cell: Any, x: Any) -> Any:
    return cell(x)


def scanned(cell: Any, xs: Any) -> Any:
    def body(cell: Any, x: Any) -> Any:
        y, cell = cell(x)
        return cell, y

    cell, ys = jax.lax.scan(body, cell, xs)
    return ys, cell


@pytest.mark.parametrize("name", ["4", slow("4x2")])
def test_steps_on_a_mesh(name: str) -> None:
    spec = P(("x", "y")) if name == "4x2" else P("x")
    mesh = make_mesh(name, AxisType.Explicit if name == "4" else AxisType.Auto)
    call = sm.shard_map(forward, mesh, (None, spec), (spec, P()), check_vma=name == "4")
    here = cell(spec=spec)
    for x, want in zip(X, WANTED, strict=True):
        y, here = jax.block_until_ready(call(here, x))
        np.testing.assert_allclose(y, want, atol=1e-6)
        np.testing.assert_array_equal(here.hidden.value, y)
    assert here.hidden.value.addressable_shards[0].data.shape == (ROWS // mesh.size, HIDDEN)


@pytest.mark.parametrize("mapped", [sm.vmap2, slow(sm.pmap2)])
def test_each_row_in_a_lane_of_its_own(mapped: Any) -> None:
    over = {0: sm.HiddenState}
    # The weights are arrays outside States, so out_axes applies to them.
    call = mapped(forward, in_axes=(None, 0), out_axes=(0, None), state_in_axes=over)
    here = cell()
    for x, want in zip(X[:2], WANTED, strict=False):
        y, here = jax.block_until_ready(call(here, x))
        np.testing.assert_allclose(y, want, atol=1e-6)
    made, states = sm.vmap2_new_states(make(), {}, axis_size=ROWS)
    assert made.hidden.value.shape == (ROWS, HIDDEN) and list(states) == [0]


@pytest.mark.slow
def test_reset_dtypes_and_bias() -> None:
    y, after = cell()(X[0])
    again, _ = after.reset()(X[0])
    np.testing.assert_array_equal(again, y)
    assert not after.reset().hidden.value.any()
    assert make().reset().hidden is None
    # The hidden value has the dtype of the weights.
    for dtype, of_x in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)):
        y, after = eqx.filter_jit(forward)(cell(dtype=dtype), X[0].astype(of_x))
        assert y.dtype == after.hidden.value.dtype == dtype
    y, _ = cell(use_bias=False)(np.zeros((ROWS, INPUT), np.float32))
    assert not y.any()


@pytest.mark.slow
def test_its_weights_are_parameters_and_get_a_gradient_through_time() -> None:
    def loss_fn(cell: Any, xs: Any) -> Any:
        ys, cell = scanned(cell, xs)
        return (ys**2).mean(), cell

    def plain(cell: Any) -> Any:
        hidden, ys = jnp.zeros((ROWS, HIDDEN)), []
        for x in X:
            hidden = jax.vmap(cell)(x, hidden)
            ys.append(hidden)
        return (jnp.stack(ys) ** 2).mean()

    want = eqx.filter_jit(eqx.filter_grad(plain))(eqx.nn.GRUCell(INPUT, HIDDEN, key=KEY))
    step = sm.grad(loss_fn, axis_name="x")
    call = sm.shard_map(step, make_mesh(), (None, P(None, "x")), (P(), P()))
    grads, _ = call(cell(spec=P("x")), X)
    assert grads.hidden is None
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    ys, _ = jax.jit(scanned)(cell(), X)
    np.testing.assert_allclose(ys, WANTED, atol=1e-6)


def test_without_a_hidden_value_it_says_how_to_make_one() -> None:
    text = (
        "GRUCell has no hidden value yet. Make it with `init_state(batch_size)`, or those of a whole model "
        "with `model.init_all_states(batch_size=...)`."
    )
    assert_says(lambda: make()(X[0]), sm.StatemeshError, text)
