"""`nn.Average` of metrics and `nn.EMA` of weights, compared with NumPy and Optax."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh, slow
from tests.nn.ways import ways


# Average

ROWS, STEPS = 24, 3


def metrics(x: Any, counted: Any) -> tuple[Any, Any]:
    """The means over the rows that count, and the number of these rows."""
    rows = counted.sum()
    masked = jnp.where(counted[:, None], x, 0)
    share = jnp.maximum(rows, 1)
    return {"loss": masked.sum() / share, "each": [masked.sum(0) / share]}, rows


def average(**options: Any) -> Any:
    return sm.nn.Average({"loss": 0.0, "each": [jnp.zeros(3)]}, **options)


def add(layer: Any, x: Any, counted: Any) -> Any:
    return layer(*metrics(x, counted))


WAYS = ways(add, by_row=False)


@pytest.mark.parametrize("name", WAYS)
def test_the_average_is_that_of_all_rows_that_count(name: str) -> None:
    axis_name, run = WAYS[name]
    numbers = np.random.default_rng(0)
    layer, kept = average(axis_name=axis_name), []
    for step in range(STEPS):
        x = numbers.normal(step, 1, (ROWS, 3)).astype(np.float32)
        # With eight shards of three rows, some shards have no row that counts.
        counted = numbers.permutation(ROWS) < 5 * step + 1
        kept += list(x[counted].astype(np.float64))
        mean, layer = jax.block_until_ready(run(layer, x, counted))
        np.testing.assert_allclose(mean["each"][0], np.mean(kept, 0), rtol=1e-5)
        np.testing.assert_allclose(mean["loss"], np.mean(np.sum(kept, 1)), rtol=1e-5)
    assert layer.running.value["weight"] == len(kept)


def test_the_mean_so_far_is_read_without_adding_to_it() -> None:
    average = sm.nn.Average({"loss": 0.0})
    assert average.mean["loss"] == 0
    mean, average = average({"loss": 3.0}, weight=2)
    assert average.mean["loss"] == mean["loss"] == 3


def test_weights() -> None:
    # Without, all values count the same.
    layer = sm.nn.Average(0.0)
    for i in range(4):
        mean, layer = layer(i**2)
        np.testing.assert_allclose(mean, np.mean(np.arange(i + 1.0) ** 2), rtol=1e-6)
    empty = layer.reset()
    assert empty.running.value["weight"] == 0
    mean, _ = empty(7.0)
    assert mean == 7
    # A weight of nothing leaves out whatever the value is.
    mean, layer = sm.nn.Average(0.0)(np.nan, weight=0)
    assert mean == 0
    mean, layer = layer(2.0, weight=0.25)
    mean, layer = layer(np.inf, weight=0)
    assert mean == 2

    def body(layer: Any, x: Any) -> Any:
        mean, layer = layer(x, weight=x)
        return layer, mean

    values = np.arange(1, 5, dtype=np.float32)
    layer, means = jax.jit(lambda layer: jax.lax.scan(body, layer, values))(sm.nn.Average(0.0))
    np.testing.assert_allclose(means, np.cumsum(values**2) / np.cumsum(values), rtol=1e-6)
    assert layer.running.value["weight"] == 10


def test_without_the_name_of_the_axis_shards_that_differ_are_refused() -> None:
    call = sm.shard_map(add, make_mesh(), (None, P("x"), P("x")), (P(), P()))
    with pytest.raises(sm.DivergedStateError, match=r"running"):
        call(average(), np.ones((ROWS, 3), np.float32), np.ones(ROWS, bool))


# EMA


class Net(sm.Module):
    w: sm.ParamState
    bias: jax.Array
    seen: sm.BatchState
    steps: jax.Array
    act: Callable[..., Any] = jax.nn.relu


def net(t: float = 0.0, **options: Any) -> Net:
    w = {"a": np.float32(1 + t) * np.arange(8, dtype=np.float32), "b": t * np.ones((8, 2))}
    return Net(
        sm.ParamState(jax.tree.map(lambda x: jnp.asarray(x, np.float32), w), **options),
        jnp.sin(jnp.arange(3.0) + t),
        sm.BatchState(float(t)),
        jnp.asarray(int(t)),
    )


@pytest.mark.parametrize("debias", [False, True])
def test_averages_of_weights_are_those_of_optax(debias: bool) -> None:
    ema: Any = sm.nn.EMA(net(), decay=0.9, debias=debias)
    of_optax = optax.ema(0.9, debias=debias)
    slots = of_optax.init(sm.trainable(net()))
    if not debias:
        slots = slots._replace(ema=sm.trainable(net()))
    run = eqx.filter_jit(lambda ema, model: ema(model))
    for t in range(1, 4):
        averaged, ema = run(ema, net(t))
        want, slots = of_optax.update(sm.trainable(net(t)), slots)
        got = sm.trainable(averaged)
        assert isinstance(averaged, Net)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_with_debias_the_first_model_does_not_count() -> None:
    model: Any = lambda x: {"w": sm.ParamState(np.float32(x)), "plain": np.full(2, x, np.float32)}
    for start in (1e8, np.nan, np.inf):
        ema = sm.nn.EMA(model(start), decay=0.75, debias=True)
        for k, want in enumerate([3.0, (0.75 * 3 + 5) / 1.75]):
            averaged, ema = ema(model(3 + 2 * k))
            np.testing.assert_allclose(averaged["w"].value, want, rtol=1e-6)
            np.testing.assert_allclose(averaged["plain"], [want, want], rtol=1e-6)
    # The correction is exact for a decay close to 1.
    averaged, _ = sm.nn.EMA(net(), decay=1 - 1e-7, debias=True)(net(2))
    np.testing.assert_allclose(averaged.w.value["a"], net(2).w.value["a"], rtol=1e-6)


def test_dtypes() -> None:
    model: Any = lambda x: {
        "narrow": sm.ParamState(jnp.full(2, x, jnp.bfloat16)),
        "complex": jnp.full(2, x * 1j, np.complex64),
        "number": float(x),
    }
    ema = sm.nn.EMA(model(1), decay=0.999)
    for _ in range(4):
        averaged, ema = ema(model(2))
    # In bfloat16 a step of a thousandth would be lost.
    wanted = 2 - 0.999**4
    assert averaged["narrow"].value.dtype == jnp.bfloat16
    np.testing.assert_allclose(ema.averages["narrow"].value, wanted, rtol=1e-6)
    np.testing.assert_allclose(averaged["complex"], wanted * 1j, rtol=1e-6)
    np.testing.assert_allclose(averaged["number"], wanted, rtol=1e-6)
    # Means of integers and narrow floats are float32.
    layer = sm.nn.Average({"hits": jax.ShapeDtypeStruct((2,), np.int32), "low": jnp.bfloat16(0)})
    for k in (1, 2):
        mean, layer = layer({"hits": k * np.array([1, 2]), "low": jnp.bfloat16(k / 2)})
    assert mean["hits"].dtype == mean["low"].dtype == np.float32
    assert (mean["hits"].tolist(), float(mean["low"])) == ([1.5, 3], 0.75)


def test_an_average_with_what_is_infinite_or_far_away_is_that_of_the_formula() -> None:
    values = np.array([np.inf, 3e38, -3e38, -np.inf, np.nan, 1], np.float32)
    old, new = map(np.ravel, np.meshgrid(values, values))
    averaged, _ = sm.nn.EMA(old, decay=0.5)(new)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(averaged, 0.5 * old + 0.5 * new)
    mean, layer = sm.nn.Average(np.zeros(36, np.float32))(old)
    mean, _ = layer(new)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(mean, 0.5 * old + 0.5 * new)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_averages_lie_where_the_parameters_lie(check_vma: bool) -> None:
    spec = {"a": P("x"), "b": P("y", None)}
    mesh = make_mesh("4x2", AxisType.Explicit if check_vma else AxisType.Auto)
    # The model comes back too, next to its average.
    fun = lambda ema, model: (*ema(model), model)
    call = sm.shard_map(fun, mesh, P(), P(), check_vma=check_vma)
    ema = plain = sm.nn.EMA(net(spec=spec), decay=0.75)
    for t in (1, 2):
        averaged, ema, same = jax.block_until_ready(call(ema, net(t, spec=spec)))
        want, plain = plain(net(t, spec=spec))
        np.testing.assert_array_equal(same.w.value["a"], net(t).w.value["a"])
        pairs = zip(jax.tree.leaves((averaged, ema)), jax.tree.leaves((want, plain)), strict=True)
        for a, b in pairs:
            if eqx.is_array(b):
                np.testing.assert_allclose(a, b, rtol=1e-6)
    for value in (ema.averages.w.value, averaged.w.value):
        assert value["a"].sharding.spec == P("x") and value["b"].sharding.spec[0] == "y"


def test_what_is_averaged_and_what_is_of_the_latest_model() -> None:
    model = net(3)
    averaged, ema = sm.nn.EMA(net(), decay=0.5)(model)
    assert averaged.seen is model.seen and averaged.steps is model.steps
    assert averaged.act is model.act
    np.testing.assert_allclose(averaged.w.value["b"], 1.5)
    only, _ = sm.nn.EMA(net(), decay=0.5, wrt=sm.BatchState)(model)
    assert only.w is model.w and only.bias is model.bias
    assert only.seen.value == 1.5
    # Averages are not trained, and share no buffer with the model.
    assert jax.tree.leaves(sm.trainable({"ema": ema, "model": model})["ema"]) == []
    call = sm.shard_map(lambda ema, model: ema(model), make_mesh(), P(), P(), donate="states")
    call(*call.place(sm.nn.EMA(model), model))
    with pytest.raises(sm.StructureError, match=r"model\['steps'\]: State\(int32\[\]\)"):
        sm.nn.EMA({"steps": sm.State(0)})


@pytest.mark.parametrize("debias", [False, True])
def test_the_averaged_copy_without_an_update(debias: bool) -> None:
    first = {"w": sm.ParamState(jnp.array(1.0, jnp.bfloat16)), "n": 3}
    ema = sm.nn.EMA(first, decay=0.75, debias=debias)
    latest = {"w": sm.ParamState(jnp.array(5.0, jnp.bfloat16)), "n": 4}
    # Before anything counts, the average is empty or the model that the layer was made with.
    start = ema.averaged(latest)
    assert start["w"].value == (5 if debias else 1) and start["n"] == 4
    wanted, ema = ema(latest)
    mean = ema.averaged({"w": sm.ParamState(jnp.array(-1.0, jnp.bfloat16)), "n": 5})
    assert mean["w"].value == wanted["w"].value and mean["w"].value.dtype == jnp.bfloat16
    assert mean["n"] == 5
    with pytest.raises(sm.StructureError, match="EMA"):
        ema.averaged({"w": sm.ParamState(jnp.zeros(2))})


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: average()({"loss": np.zeros(2), "each": [np.zeros((3, 1))]}),
        sm.StructureError,
        "Average: values must hold arrays of the shapes that the layer was made with:\n"
        "  - values['each'][0]: was float32[3], is float64[3,1]\n"
        "  - values['loss']: was float32[], is float64[2]",
    ),
    (
        lambda: sm.nn.Average(0.0)(1.0, weight=np.ones(2)),
        sm.StatemeshError,
        "Average: weight.shape=(2,), but it must be that of a number, ().",
    ),
    (
        lambda: sm.nn.EMA(net())(net().replace(bias=jnp.ones(2), w=net().w.replace(value=1.0))),
        sm.StructureError,
        "EMA: model must hold arrays of the shapes that the layer was made with:\n"
        "  - model.w['a']: was float32[8], is nothing\n"
        "  - model.w['b']: was float32[8,2], is nothing\n"
        "  - model.bias: was float32[3], is float32[2]\n"
        "  - model.w: was nothing, is float32[]",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_the_text_is_exactly(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    assert_says(call, error, text)
