"""`nn.BatchNorm` in any mesh and in lanes: its statistics are compared with NumPy's float64, and its outputs
with those of Flax."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, compiles, counted, make_mesh, slow
from tests.nn.ways import forward, ways


SIZE = 3


def norm(**options: Any) -> Any:
    """A layer that by default keeps the statistics of all values."""
    return sm.nn.BatchNorm(SIZE, **{"momentum": None, **options})


plainly = eqx.filter_jit(forward)


WAYS = ways()
some_ways = pytest.mark.parametrize("name", ["vmap2 in shards", slow("4x2, unchecked")])


def uneven_batches() -> list[tuple[Any, Any]]:
    """Batches of 8 or 24 rows, of which 1 to all count. Their means are far from 0 and wander."""
    numbers = np.random.default_rng(0)
    batches = []
    for i in range(5):
        rows = 24 if i % 3 else 8
        x = numbers.normal(100 + 5 * np.sin(i), 1 + i / 10, (rows, SIZE)).astype(np.float32)
        counted = numbers.permutation(rows) < numbers.integers(1, rows + 1)
        # Rows that do not count may hold anything.
        batches.append((np.where(counted[:, None], x, np.float32(np.nan)), counted))
    assert len({int(c.sum()) for _, c in batches}) > 3
    return batches


BATCHES = uneven_batches()


def assert_moments(running: Any, rows: Any) -> None:
    """The layer's statistics are those of all the rows together."""
    rows = np.asarray(rows, np.float64).reshape(-1, SIZE)
    assert running["count"] == len(rows)
    np.testing.assert_allclose(running["mean"], rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(running["var"], rows.var(0), rtol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_running_statistics_are_those_of_all_rows_ever_seen(name: str) -> None:
    axis_name, run = WAYS[name]
    layer = norm(axis_name=axis_name)
    # Of the first batch each shard has one row, or two where it has two lanes.
    batches = [(images()[:, 0], np.ones(8, bool)), *BATCHES]
    for x, where in batches:
        y, layer = jax.block_until_ready(run(layer, x, where))
        mine = np.asarray(x[where], np.float64)
        wanted = (mine - mine.mean(0)) / np.sqrt(mine.var(0) + 1e-5)
        np.testing.assert_allclose(np.asarray(y)[where], wanted, atol=1e-4)
    assert_moments(layer.running.value, np.concatenate([x[where] for x, where in batches]))


@pytest.mark.slow
@some_ways
def test_its_gradient_is_that_of_the_formula(name: str) -> None:
    """The gradient is taken outside the call, with respect to the parameters and to every row."""
    axis_name, run = WAYS[name]
    layer = norm(axis_name=axis_name)
    x, where = np.nan_to_num(BATCHES[1][0] - 100), BATCHES[1][1]
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def loss(scale: Any, shift: Any, x: Any) -> Any:
        y, _ = run(layer.replace(scale=scale, shift=shift), x, where)
        return (jnp.sin(y) * weights).sum()

    def plain(scale: Any, shift: Any, x: Any) -> Any:
        mean, variance = x[where].mean(0), x[where].var(0)
        y = (x - mean) / jnp.sqrt(variance + 1e-5) * scale + shift
        return (jnp.sin(y) * weights).sum()

    at = jnp.array([0.5, 1.0, 2.0]), jnp.array([0.0, 0.3, -0.2]), jnp.asarray(x)
    got, want = (jax.jit(jax.grad(fun, argnums=(0, 1, 2)))(*at) for fun in (loss, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("checked", [True, slow(False)])
def test_its_gradient_by_value_and_grad_inside(checked: bool) -> None:
    names = ("x", "y")

    def loss_fn(layer: Any, x: Any) -> Any:
        y, layer = layer(x)
        return jnp.sin(y).mean(), layer

    step, traces = counted(sm.value_and_grad(loss_fn, axis_name=names))
    x, mesh = images(), make_mesh("4x2", AxisType.Auto if checked else AxisType.Explicit)
    layer = norm(axis_name=names).replace(scale=jnp.array([0.5, 1.0, 2.0]))
    (plain_loss, _), plain_grads = eqx.filter_jit(sm.value_and_grad(loss_fn))(layer, x)
    specs = (None, P(names))
    call = sm.shard_map(step, mesh, specs, P(), check_vma=checked, donate="states")
    (loss, layer), grads = jax.block_until_ready(call(layer, x))
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert grads.running is None
    with compiles() as compiled:
        (_, layer), _ = jax.block_until_ready(call(layer, x))
    assert (traces.times, compiled.times) == (1, 0)
    assert_moments(layer.running.value, [x, x])


# Compared with other libraries


def images() -> Any:
    return np.random.default_rng(1).normal(5, 2, (8, 4, SIZE)).astype(np.float32)


def of_flax(momentum: float = 0.99) -> Any:
    # Its faster variance, a mean of squares minus a squared mean, is less precise.
    return nnx.BatchNorm(SIZE, momentum=momentum, use_fast_variance=False, rngs=nnx.Rngs(0))


def assert_statistics(layer: Any, mean: Any, var: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(layer.running.value["mean"], mean, rtol=rtol)
    np.testing.assert_allclose(layer.running.value["var"], var, rtol=rtol)


@pytest.mark.slow
def test_batches_leave_the_statistics_and_outputs_of_flax() -> None:
    """With the default momentum and batches of two sizes that are far from mean 0 and variance 1."""
    ours, flax = sm.nn.BatchNorm(SIZE), of_flax()
    for i in range(5):
        x = np.random.default_rng(i).normal(3 + i, 1 + i, (8 * (1 + i % 2), SIZE)).astype("float32")
        y, ours = plainly(ours, x)
        np.testing.assert_allclose(y, flax(x), atol=1e-5)
    assert_statistics(ours, flax.mean[...], flax.var[...])
    x = images()
    y, _ = eqx.nn.inference_mode(ours)(x)
    np.testing.assert_allclose(y, flax(x, use_running_average=True), atol=1e-4)


def test_statistics_go_in_from_other_libraries_and_out_to_them() -> None:
    ours, flax = norm(momentum=0.9), of_flax(0.9)
    flax(images() * 2)
    mean, var = flax.mean[...], flax.var[...]
    ours = ours.with_statistics(np.asarray(mean, np.float64), var)
    np.testing.assert_array_equal(ours.statistics, (mean, var))
    assert ours.statistics[1] is not var and ours.running.value["count"] == 0
    x = images() + 1
    y, ours = plainly(ours, x)
    np.testing.assert_allclose(y, flax(x), atol=1e-5)
    assert_statistics(ours, flax.mean[...], flax.var[...])
    # Statistics of so many values are merged with others.
    first, second = BATCHES[0][0][BATCHES[0][1]], images()
    given = norm().with_statistics(first.mean(0), first.var(0), count=len(first))
    _, merged = plainly(given, second)
    assert_moments(merged.running.value, np.concatenate([first, second.reshape(-1, SIZE)]))


# Options


@some_ways
def test_momentum_moves_them_by_the_rows_that_count(name: str) -> None:
    axis_name, run = WAYS[name]
    layer = norm(axis_name=axis_name, momentum=0.7)
    mean, var, count = np.zeros(SIZE), np.ones(SIZE), 0
    for x, where in BATCHES[:4]:
        _, layer = jax.block_until_ready(run(layer, x, where))
        rows = x[where].astype(np.float64)
        mean, var = 0.7 * mean + 0.3 * rows.mean(0), 0.7 * var + 0.3 * rows.var(0)
        count += len(rows)
    assert_statistics(layer, mean, var)
    assert layer.running.value["count"] == count


@pytest.mark.parametrize("momentum", [0.0, None])
def test_what_counts_for_nothing_leaves_no_trace(momentum: Any) -> None:
    x = images() * 1e-4
    for start in (1e8, np.nan, np.inf):
        each = np.full(SIZE, start, np.float32)
        layer = norm(momentum=momentum).with_statistics(each, each, count=0)
        _, layer = plainly(layer, x)
        assert_moments(layer.running.value, x)


def test_channels_may_be_on_any_axis() -> None:
    x = images()
    want, layer = plainly(norm(), x)
    for axis in (0, -2):
        got, moved = plainly(norm(channel_axis=axis), np.moveaxis(x, -1, axis))
        np.testing.assert_allclose(np.moveaxis(np.asarray(got), axis, -1), want, rtol=1e-6)
        assert_moments(moved.running.value, x)
    bare = norm(affine=False)
    assert sm.states(bare).keys() == {"running"}
    np.testing.assert_array_equal(plainly(bare, x)[0], want)
    # A batch of one row comes out as the shift.
    y, layer = norm().replace(shift=jnp.arange(3.0))(np.full((1, SIZE), 7.0, np.float32))
    np.testing.assert_array_equal(y, [[0, 1, 2]])
    assert_moments(layer.running.value, np.full((1, SIZE), 7.0))


def test_a_mask_has_the_leading_axes() -> None:
    x = images()
    positions = np.arange(32).reshape(8, 4) % 5 > 1
    for where in (positions, positions[:, 0]):
        spoilt = np.where(where[(...,) + (None,) * (3 - where.ndim)], x, np.float32(np.inf))
        _, layer = plainly(norm(), spoilt, where)
        assert_moments(layer.running.value, x[where])
    # A batch of which nothing counts changes nothing.
    for start in (norm(), layer):
        _, after = plainly(start, x, np.zeros(8, bool))
        for a, b in zip(*map(jax.tree.leaves, (after.running, start.running)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_inference_uses_the_running_statistics_and_leaves_the_layer_as_it_is() -> None:
    x = images()
    layer = eqx.nn.inference_mode(norm())
    y, same = layer(x)
    assert same is layer
    # The mean is 0 and the variance 1 until there are other statistics.
    np.testing.assert_allclose(y, x, rtol=1e-5)

    _, seen = eqx.nn.inference_mode(layer, value=False)(x)
    seen = eqx.nn.inference_mode(seen.replace(scale=jnp.full(3, 2.0), shift=jnp.ones(3)))
    y, same = seen(x[:1] + 1)
    assert same is seen
    flat = x.reshape(-1, SIZE)
    np.testing.assert_allclose(
        y, (x[:1] + 1 - flat.mean(0)) / flat.std(0) * 2 + 1, rtol=1e-4, atol=1e-5
    )
    call = sm.shard_map(forward, make_mesh(), (None, P("x")), (P("x"), P()))
    seen, x = call.place(seen, x + 1)
    on_mesh, same = call(seen, x)
    np.testing.assert_allclose(on_mesh[:1], y, rtol=1e-6)
    assert same.running.value["mean"] is seen.running.value["mean"]


def test_channels_may_be_split_over_the_mesh() -> None:
    mesh, x = make_mesh("4x2"), np.tile(images(), 2)
    specs = (None, P("x", None, "y"))
    layer = sm.nn.BatchNorm(2 * SIZE, axis_name="x", spec=P("y"))
    y, new = sm.shard_map(forward, mesh, specs, (specs[1], P()))(layer, x)
    assert new.running.value["mean"].sharding.spec == P("y")
    plain, whole = plainly(layer, x)
    np.testing.assert_allclose(y, plain, atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (new.running, whole.running)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_low_precision_in_and_out_and_statistics_of_float32(dtype: Any) -> None:
    # The sum of 40 values of about 3000 overflows float16, and so does the square of one value.
    x = jnp.asarray(3000 + 100 * images().reshape(-1, 1)[:40] * np.ones(SIZE), dtype)
    y, layer = plainly(norm(dtype=dtype), x)
    assert y.dtype == dtype and layer.scale.value.dtype == dtype
    running = layer.running.value
    assert {a.dtype for a in running.values()} == {jnp.dtype(jnp.float32)}
    assert_moments(running, x)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), (exact - exact.mean(0)) / exact.std(0), atol=2e-2
    )


def test_float64() -> None:
    with jax.enable_x64(True):
        x = 1e8 + images().astype(np.float64)
        y, layer = plainly(norm(), x)
        assert y.dtype == np.float64
        flat = x.reshape(-1, SIZE)
        np.testing.assert_allclose(layer.running.value["var"], flat.var(0), rtol=1e-8)
        y, narrow = plainly(norm(dtype=jnp.float32), x)
        assert y.dtype == np.float64
        assert {a.dtype for a in narrow.running.value.values()} == {np.dtype(np.float32)}


# Refused calls


def test_shards_that_write_their_own_statistics_are_an_error_that_says_what_was_named() -> None:
    spec = P(("x", "y"))
    call = sm.shard_map(forward, make_mesh("4x2"), (None, spec), (spec, P()))
    for axis_name, over in ((None, "'x', 'y'"), ("x", "'y'")):
        with pytest.raises(sm.DivergedStateError) as raised:
            call(norm(axis_name=axis_name), images())
        text = str(raised.value)
        assert "layer.running" in text and f"varies over {over} but" in text
        assert f"BatchNorm(axis_name={axis_name!r})" in text
    with pytest.raises(sm.BatchAxisError, match=r"BatchNorm\(axis_name=None\)"):
        sm.vmap2(forward, in_axes=(None, 0))(norm(), images())


X = np.ones((8, SIZE), np.float32)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: norm()(X[:0]),
        "BatchNorm: x is float32[0,3], and no rows have no mean. Give every shard at least one row: if "
        "rows do not divide evenly, pad them, and mark with `where` which of them count.",
    ),
    (
        lambda: norm()(X[0]),
        "BatchNorm: x is float32[3], a single row, which has no statistics. Give the layer all rows at "
        "once; or name the axis that they are mapped over, in the layer and in the map: axis_name='rows'.",
    ),
    (
        lambda: norm()(X, X[:4, 0] > 0),
        "BatchNorm: where is bool[4], but must be bool and have the leading axes of x, which is "
        "float32[8,3] with its channels on axis -1.",
    ),
    (
        lambda: norm().with_statistics(np.zeros(SIZE), np.ones(SIZE)),
        "BatchNorm: with momentum=None all values count the same, whenever they were seen, so "
        "with_statistics must know how many values these are of: `with_statistics(mean, var, count=...)`.",
    ),
    (
        lambda: jax.jit(forward)(norm(), X),
        "BatchNorm: `inference` is traced here, but must be True or False. jax.jit, scan and grad trace "
        "the Python numbers in a model. Give them only its arrays: `arrays, rest = "
        "equinox.partition(model, equinox.is_array)`, or use equinox.filter_jit.",
    ),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES)
def test_the_text_is_exactly(call: Callable[[], Any], text: str) -> None:
    assert_says(call, TypeError if "is traced here" in text else sm.StatemeshError, text)
