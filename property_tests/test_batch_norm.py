"""Running statistics are those of all rows that count, however the batches are split."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import SHAPES, make_mesh


SIZE, ROWS = 2, 8
MESHES = ("1", "2", "4", "8", "2x2", "4x2", "2x2x2")


@cache
def mapped(name: str, lanes: bool, explicit: bool, check_vma: bool) -> tuple[Any, Any]:
    """A call of the layer on `ROWS` rows of a few positions each on a mesh, all rows at once or in lanes."""
    mesh = make_mesh(name, AxisType.Explicit if explicit else AxisType.Auto)
    names = SHAPES[name][1]

    def forward(layer: Any, x: Any, where: Any) -> Any:
        return layer(x, where)

    def in_lanes(layer: Any, x: Any, where: Any) -> Any:
        return sm.vmap2(forward, in_axes=(None, 0, 0), axis_name="rows")(layer, x, where)

    specs = (None, P(names), P(names))
    fun = in_lanes if lanes else forward
    call = sm.shard_map(fun, mesh, specs, (P(names), P()), check_vma=check_vma)
    return (*names, "rows") if lanes else names, call


ways = st.builds(mapped, st.sampled_from(MESHES), st.booleans(), st.booleans(), st.booleans())


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Any]:
    """Rows of four positions with any mean and spread, and which positions count."""
    seed, mean = draw(st.integers(0, 99)), draw(st.floats(-300, 300, width=32))
    spread = draw(st.floats(0.125, 30, width=32))
    x = np.random.default_rng(seed).normal(mean, spread, (ROWS, 4, SIZE)).astype(np.float32)
    places = st.lists(st.booleans(), min_size=4, max_size=4)
    rows = draw(st.lists(places, min_size=ROWS, max_size=ROWS))
    return x, np.array(rows, bool)


@pytest.mark.slow
@given(
    way=ways,
    given=st.lists(batches(), min_size=1, max_size=5),
    momentum=st.sampled_from([None, 0.0, 0.5, 0.99]),
    start=st.none() | st.sampled_from([0.0, 1e8, np.nan, np.inf]),
)
def test_running_statistics_of_split_batches(
    way: tuple[Any, Any],
    given: list[tuple[Any, Any]],
    momentum: float | None,
    start: float | None,
) -> None:
    axis_name, call = way
    layer = sm.nn.BatchNorm(SIZE, axis_name=axis_name, momentum=momentum)
    mean, var = np.zeros(SIZE), np.ones(SIZE)
    if start is not None:
        mean, var = np.full((2, SIZE), np.float32(start), np.float64)
        layer = layer.with_statistics(mean, var, count=0)
    seen = np.zeros((0, SIZE))
    for x, where in given:
        y, layer = jax.block_until_ready(call(layer, x, where))
        mine = x[where].astype(np.float64)
        if not len(mine):
            continue
        seen = np.concatenate([seen, mine])
        size = np.abs(mine).max() / np.sqrt(mine.var(0).min() + 1e-5)
        wanted = (mine - mine.mean(0)) / np.sqrt(mine.var(0) + 1e-5)
        np.testing.assert_allclose(np.asarray(y)[where], wanted, rtol=1e-5, atol=4e-6 * (1 + size))
        if momentum is None:
            mean, var = seen.mean(0), seen.var(0)
        else:
            mean = _moved(mean, mine.mean(0), momentum)
            var = _moved(var, mine.var(0), momentum)
    running = layer.running.value
    assert running["count"] == len(seen)
    largest = np.abs(np.append(seen, mean[np.isfinite(mean)])).max(initial=0)
    np.testing.assert_allclose(running["mean"], mean, rtol=1e-5, atol=4e-6 * largest)
    # A rounding error in a mean changes the variance by its square, once more in each merge.
    np.testing.assert_allclose(running["var"], var, rtol=2e-5, atol=(4e-6 * largest) ** 2)


def _moved(old: Any, new: Any, momentum: float) -> Any:
    return momentum * old + (1 - momentum) * new if momentum else new
