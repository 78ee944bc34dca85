"""`value_and_grad(..., blocks=b)`: the same bits on any number of devices."""

import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.nn import BatchNorm, Dropout
from tests.helpers import slow


# Numbers of many sizes, so that the order of a sum shows in its bits.
NUMBERS = np.random.default_rng(0)
X = (NUMBERS.normal(size=(64, 6)) * 10.0 ** NUMBERS.integers(-3, 3, (64, 6))).astype(np.float32)
Y = NUMBERS.normal(size=64).astype(np.float32)
OPTIMIZER = optax.adam(1e-2)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

Step = Callable[..., Any]


class Net(sm.Module):
    """A layer whose sums differ in each way that a state can be merged."""

    up: sm.ParamState
    down: jax.Array
    norm: BatchNorm
    drop: Dropout
    total: sm.State
    largest: sm.State
    merged: sm.State
    calls: sm.State
    halved: sm.State


def root_mean_square(old: Any, new: Any, axis_names: Any) -> Any:
    return jnp.sqrt(jax.lax.pmean(new**2, axis_names))


def net(axis_names: Any) -> Net:
    numbers = np.random.default_rng(1)
    return Net(
        sm.ParamState(jnp.asarray(numbers.normal(size=(6, 8)), jnp.float32)),
        jnp.asarray(numbers.normal(size=8), jnp.bfloat16),
        BatchNorm(8),
        Dropout(0.2, key=jax.random.key(0), axis_name=axis_names),
        sm.State(jnp.zeros(8), reduce="sum"),
        sm.State(jnp.zeros(8), reduce="max"),
        sm.State(jnp.ones(8), reduce=root_mean_square),
        sm.State(0),
        sm.State(jnp.zeros((6, 8)), reduce="mean"),
    )


def loss_fn(model: Net, x: Any, y: Any) -> Any:
    h, norm = model.norm(jnp.tanh(x @ model.up.value))
    h, drop = model.drop(h)
    loss = jnp.mean((h @ model.down.astype(jnp.float32) - y) ** 2)
    new = model.replace(
        norm=norm,
        drop=drop,
        total=model.total.set(model.total.value + h.sum(0)),
        largest=model.largest.set(jnp.maximum(model.largest.value, h.max(0))),
        merged=model.merged.set(h.mean(0)),
        calls=model.calls.set(model.calls.value + 1),
        # It comes of parameters alone, and all blocks write the same.
        halved=model.halved.set(model.up.value / 2),
    )
    return loss, new


def training_step(axis_names: Any, **options: Any) -> Step:
    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        both = sm.value_and_grad(loss_fn, axis_name=axis_names, **options)
        (loss, model), grads = both(model, x, y)
        updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(model))
        return loss, eqx.apply_updates(model, updates), slots

    return step


def trained(sizes: dict[str, int], kind: AxisType, calls: int = 3, **options: Any) -> list[bytes]:
    """The bits of all losses, and of the model and slots after the last call."""
    names = tuple(sizes)
    axis_names = names or None
    check_vma = options.pop("check_vma", True)
    model = net(axis_names)
    slots = OPTIMIZER.init(sm.trainable(model))
    step = training_step(axis_names, **options)
    if names:
        mesh = mesh_of(kind, **sizes)
        specs = (None, P(), P(names), P(names)), (P(), P(), P())
        step = sm.shard_map(step, mesh, *specs, check_vma=check_vma)
    else:
        step = eqx.filter_jit(step)
    losses = []
    for _ in range(calls):
        loss, model, slots = step(model, slots, X, Y)
        losses.append(loss)
    return bits((losses, model, slots))


def mesh_of(kind: AxisType = EXPLICIT, **sizes: int) -> Mesh:
    shape = tuple(sizes.values())
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, tuple(sizes), (kind,) * len(shape), devices=devices)


def bits(tree: Any) -> list[bytes]:
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    numbers = [jax.random.key_data(x) if hit else x for x, hit in zip(arrays, keys, strict=True)]
    return [np.asarray(x).tobytes() for x in numbers]


@pytest.fixture(scope="module")
def on_one_device() -> list[bytes]:
    return trained({}, AUTO, blocks=8)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"x": 8}, EXPLICIT),
        ({"x": 2, "y": 2}, AUTO),
        slow({"x": 1}, EXPLICIT),
        slow({"x": 2}, EXPLICIT),
        slow({"x": 4}, AUTO),
        slow({"x": 2, "y": 4}, EXPLICIT),
    ],
)
def test_a_training_run_has_the_same_bits_on_every_mesh(
    sizes: dict[str, int], kind: AxisType, on_one_device: list[bytes]
) -> None:
    assert trained(sizes, kind, blocks=8) == on_one_device


def test_without_blocks_the_bits_differ() -> None:
    def fit(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2), w

    def gradient(blocks: int | None) -> list[list[bytes]]:
        step = sm.value_and_grad(fit, axis_name="x", blocks=blocks)
        meshes = [mesh_of(x=size) for size in (1, 8)]
        specs = (P(), P("x"), P("x")), ((P(), P()), P())
        return [bits(sm.shard_map(step, mesh, *specs)(jnp.ones(6), X, Y)) for mesh in meshes]

    one, eight = gradient(None)
    assert one != eight
    one, eight = gradient(8)
    assert one == eight


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"check_vma": False}, {"microbatches": 2}])
def test_nothing_else_changes_the_bits(options: Any, on_one_device: list[bytes]) -> None:
    assert trained({"x": 4}, AUTO, blocks=8, **options) == on_one_device


def test_blocks_give_the_mean_that_all_rows_give() -> None:
    def fit(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2), w

    w, x = jnp.ones(6), X / 1e3
    (loss, _), grad = sm.value_and_grad(fit, blocks=8)(w, x, Y)
    (want, _), wanted = sm.value_and_grad(fit)(w, x, Y)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-6)


def test_sums_stay_sums() -> None:
    def fit(w: Any, x: Any, y: Any) -> Any:
        return jnp.sum((x @ w - y) ** 2), w

    w, x = jnp.ones(6), X / 1e3
    whole = sm.value_and_grad(fit, reduce="sum", blocks=4)
    parts = sm.value_and_grad(fit, reduce="sum", blocks=4, axis_name="x")
    mesh = mesh_of(x=4)
    mapped = sm.shard_map(parts, mesh, (P(), P("x"), P("x")), ((P(), P()), P()))
    assert bits(mapped(w, x, Y)) == bits(jax.jit(whole)(w, x, Y))
    np.testing.assert_allclose(mapped(w, x, Y)[0][0], fit(w, x, Y)[0], rtol=1e-6)


def test_auxiliary_values_come_one_for_each_block() -> None:
    def fit(w: Any, x: Any) -> Any:
        return (jnp.mean(x @ w), x[:, 0].sum()), w

    step = sm.value_and_grad(fit, axis_name="x", has_aux=True, blocks=8)
    mapped = sm.shard_map(step, mesh_of(x=2), (P(), P("x")), (((P(), P("x")), P()), P()))
    ((_, aux), _), _ = mapped(jnp.ones(6), X)
    np.testing.assert_allclose(aux, X[:, 0].reshape(8, 8).sum(1), rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"x": 8}, slow({"x": 2, "y": 2})])
def test_parts_of_gradients_have_the_same_bits(sizes: dict[str, int]) -> None:
    """Each shard keeps its part, of small parameters and of one that goes alone."""
    model = {
        "wide": sm.ParamState(jnp.asarray(NUMBERS.normal(size=(6, 8192)), jnp.float32)),
        "down": sm.ParamState(jnp.asarray(NUMBERS.normal(size=8192), jnp.float32)),
    }

    def fit(model: Any, x: Any, y: Any) -> Any:
        out = jnp.tanh(x @ model["wide"].value) @ model["down"].value
        return jnp.mean((out - y) ** 2), model

    names = tuple(sizes)
    mesh = mesh_of(**sizes)
    split = sm.fsdp(model, mesh, names, min_size=0)

    def step(split: Any, x: Any, y: Any) -> Any:
        whole = sm.gather(split, names)
        both = sm.value_and_grad(fit, axis_name=names, blocks=8, split_as=split)
        (loss, _), grads = both(whole, x, y)
        return loss, grads

    mapped = sm.shard_map(step, mesh, (None, P(names), P(names)), (P(), None))
    loss, grads = mapped(split, X, Y)
    (want, _), wanted = jax.jit(sm.value_and_grad(fit, blocks=8))(model, X, Y)
    assert not grads["wide"].value.sharding.is_fully_replicated
    assert bits((loss, grads)) == bits((want, wanted))


def test_a_block_is_compiled_alike_on_every_mesh() -> None:
    """The operations of a block, in all its loops of their own, are those of the only block of a shard."""

    def fit(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2), w

    def fused(sizes: dict[str, int]) -> list[str]:
        step = sm.value_and_grad(fit, axis_name="x", blocks=8)
        mapped = sm.shard_map(step, mesh_of(**sizes), (P(), P("x"), P("x")), ((P(), P()), P()))
        text = mapped.lower(jnp.ones(6), X, Y).compile().as_text()
        assert text is not None
        return loops_with("tanh", text)

    alone = fused({"x": 8})
    assert alone
    assert fused({"x": 1}) == fused({"x": 2}) == alone


def test_small_blocks_are_compiled_as_on_a_shard_of_their_own() -> None:
    """XLA compiles a loop over little data as one function, which rounds otherwise than its parts alone."""

    def fit(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2), w

    def compiled(**options: int) -> str:
        step = sm.value_and_grad(fit, axis_name="x", **options)
        mapped = sm.shard_map(step, mesh_of(x=2), (P(), P("x")), ((P(), P()), P()))
        return mapped.lower(jnp.ones(6), X[:16]).compile().as_text()

    assert "small_call" in compiled(microbatches=4)
    assert "small_call" not in compiled(blocks=8)


def layer(h: Any, w: Any) -> Any:
    """It takes roots and quotients of what is shared by rows or columns, some more than once."""
    h = h @ w
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    h = jax.nn.softmax(h @ h.T / jnp.sqrt(6.0)) @ h
    return h / jnp.abs(w).sum() + jax.nn.softmax(h)


def in_a_row(w: Any, x: Any) -> Any:
    return layer(layer(x, w[0]), w[1])


def recomputed(w: Any, x: Any) -> Any:
    again = jax.checkpoint(layer, prevent_cse=False)
    return again(again(x, w[0]), w[1])


def scanned(w: Any, x: Any) -> Any:
    again = jax.checkpoint(layer)
    return jax.lax.scan(lambda h, w: (again(h, w), None), x, w)[0]


def without_derivative(w: Any, x: Any) -> Any:
    return x @ w[0] * jax.lax.stop_gradient(layer(x, w[1]))


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, layer, lambda h, w: layer(-h, w), x, w[0])


def repeated(w: Any, x: Any) -> Any:
    last = jax.lax.while_loop(
        lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, layer(carry[1], w[0])), (0, x)
    )
    return x @ w[1] * jax.lax.stop_gradient(last[1])


@pytest.mark.parametrize(
    "model",
    [recomputed, scanned, *map(slow, (in_a_row, without_derivative, branched, repeated))],
    ids=lambda model: model.__name__,
)
def test_one_device_rounds_like_several(model: Step) -> None:
    """XLA merges what is written twice for several devices before it simplifies, and for one it does not."""

    def fit(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(model(w, x)) ** 2), w

    def gradient(size: int) -> list[bytes]:
        step = sm.value_and_grad(fit, axis_name="x", blocks=8)
        w = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6, 6)), jnp.float32)
        return bits(sm.shard_map(step, mesh_of(x=size), (P(), P("x")), ((P(), P()), P()))(w, X))

    assert gradient(1) == gradient(2) == gradient(8)


def loops_with(operation: str, text: str) -> list[str]:
    """The fused computations of a compiled program that have an operation, without the names of values."""
    computations = re.findall(r"^%fused_computation.*?^}", text, re.M | re.S)
    plain = [re.sub(r", metadata=\{[^}]*\}|%?[\w.-]*\.\d+|%[\w.-]+", "", c) for c in computations]
    return sorted(c for c in plain if f" {operation}(" in c)


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_has_the_same_bits(
    tmp_path: Any, on_one_device: list[bytes]
) -> None:
    """Two calls on 8 devices, a checkpoint, and the third call on 2."""
    from statemesh import checkpoint

    losses: list[Any] = []
    model = net("x")
    state = {"model": model, "slots": OPTIMIZER.init(sm.trainable(model))}
    for size, calls in ((8, 2), (2, 1)):
        mesh = mesh_of(x=size)
        step = sm.shard_map(
            training_step("x", blocks=8), mesh, (None, P(), P("x"), P("x")), (P(), P(), P())
        )
        if losses:
            state = checkpoint.load(tmp_path / "step", state, mesh)
        for _ in range(calls):
            loss, model, slots = step(state["model"], state["slots"], X, Y)
            state = {"model": model, "slots": slots}
            losses.append(loss)
        if size == 8:
            checkpoint.save(tmp_path / "step", state)
    assert bits((losses, state["model"], state["slots"])) == on_one_device


# What cannot have the same bits is refused


def mean_over_shards(w: Any, x: Any) -> Any:
    return jnp.mean((x - jax.lax.pmean(x.mean(0), "x")) @ w), w


def test_an_exchange_inside_a_block_names_its_line() -> None:
    step = sm.value_and_grad(mean_over_shards, axis_name="x", blocks=8)
    mapped = sm.shard_map(step, mesh_of(x=2), (P(), P("x")), ((P(), P()), P()))
    line = mean_over_shards.__code__.co_firstlineno + 1
    with pytest.raises(sm.StatemeshError, match=rf"test_blocks.py:{line}: psum\S* over 'x'"):
        mapped(jnp.ones(6), X)


def test_a_key_of_a_shard_is_refused() -> None:
    def noisy(model: Any, x: Any) -> Any:
        key, rng = model["rng"].split()
        loss = model["w"].value * jnp.mean(x + jax.random.normal(key))
        return loss, {**model, "rng": rng}

    model = {"w": sm.ParamState(1.0), "rng": sm.RandomState(jax.random.key(0))}
    with pytest.raises(sm.StatemeshError, match="Draw a key for each row"):
        sm.value_and_grad(noisy, blocks=2)(model, X)
