"""`nn.Dropout`: the mask is the same, however the rows are split."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.nn.ways import forward, key_data, ways


RATE = 0.4
X: Any = 1 + np.arange(16 * 5, dtype=np.float32).reshape(16, 5)


def dropout(**options: Any) -> Any:
    return sm.nn.Dropout(RATE, jax.random.key(3), **options)


plainly = eqx.filter_jit(forward)


WAYS = ways()


@pytest.mark.parametrize("name", WAYS)
def test_masks_do_not_depend_on_how_rows_are_split(name: str) -> None:
    axis_name, run = WAYS[name]
    plain, layer = dropout(), dropout(axis_name=axis_name)
    for _ in range(2):
        want, plain = plainly(plain, X)
        got, layer = run(layer, X)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(*map(key_data, (layer, plain)))


def test_each_row_in_a_lane() -> None:
    layer = dropout(axis_name="rows", row_axis=None)
    got, _ = sm.vmap2(forward, in_axes=(None, 0), axis_name="rows")(layer, X)
    np.testing.assert_array_equal(got, plainly(dropout(), X)[0])


def test_entries_are_dropped_at_the_rate_and_the_others_scaled_to_make_up() -> None:
    ones = np.ones((100, 200), np.float32)
    y, layer = dropout()(ones)
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(1 - RATE)}
    # Five standard deviations of the share among 20,000 draws, and among 200 draws for each row.
    share = np.mean(np.asarray(y) == 0)
    assert abs(share - RATE) < 5 * (RATE * (1 - RATE) / y.size) ** 0.5
    by_row = np.mean(np.asarray(y) == 0, axis=1)
    assert np.all(abs(by_row - RATE) < 5 * (RATE * (1 - RATE) / 200) ** 0.5)
    # Rows and calls have masks of their own.
    second, _ = layer(ones)
    assert len(np.unique(np.concatenate([y, second]), axis=0)) == 200


@pytest.mark.slow
def test_axes_dtypes_and_gradients() -> None:
    want, _ = dropout()(X)
    for axis in (1, -1):
        got, _ = dropout(row_axis=axis)(X.T)
        np.testing.assert_array_equal(np.asarray(got).T, want)
    for dtype in (jnp.bfloat16, jnp.float16):
        y, _ = dropout()(X.astype(dtype))
        assert y.dtype == dtype
        np.testing.assert_array_equal(y == 0, want == 0)
    slope = jax.grad(lambda x: dropout()(x)[0].sum())(X)
    np.testing.assert_allclose(slope, np.asarray(want) / X, rtol=1e-6)


def test_without_a_rate_and_in_inference_nothing_is_drawn() -> None:
    for layer in (
        sm.nn.Dropout(0.0, jax.random.key(0)),
        dropout(inference=True),
        eqx.nn.inference_mode(dropout()),
    ):
        y, same = layer(X)
        assert same is layer
        np.testing.assert_array_equal(y, X)
    flipped = eqx.nn.inference_mode(dropout(inference=True), value=False)
    assert (flipped(X)[0] == 0).any()
