"""`fsdp`, `gather` and `scatter`: training is that of one device, in a part of its memory."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh


KEY = jax.random.key(0)
ROWS = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)
WANTED = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)
OPTIMIZER = optax.adam(1e-2)


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype) / 2


def only_states() -> dict[str, Any]:
    return {
        "up": sm.ParamState(values(8, 16)),
        "down": sm.ParamState({"w": values(16, 4), "b": values(4)}),
        "steps": sm.State(0),
    }


def only_arrays() -> dict[str, Any]:
    up, down = eqx.nn.Linear(8, 16, key=KEY), eqx.nn.Linear(16, 4, key=KEY)
    return {"up": up, "down": down, "steps": sm.State(0)}


def mixed() -> dict[str, Any]:
    return {**only_states(), "up": eqx.nn.Linear(8, 16, key=KEY)}


def applied(layer: Any, x: Any) -> Any:
    if isinstance(layer, sm.ParamState):
        layer = layer.value
        return x @ layer["w"] + layer["b"] if isinstance(layer, dict) else x @ layer
    return jax.vmap(layer)(x)


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    whole = sm.gather(model, "x")
    out = applied(whole["down"], jnp.tanh(applied(whole["up"], x)))
    whole = {**whole, "steps": whole["steps"].set(whole["steps"].value + 1)}
    return jnp.mean((out - y) ** 2), sm.scatter(whole, model)


def step_of(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x, y)
        updates, slots = OPTIMIZER.update(grads, slots)
        return loss, eqx.apply_updates(model, updates), slots, grads

    return step


def trained(step: Callable[..., Any], model: Any, steps: int = 3) -> Any:
    slots = OPTIMIZER.init(sm.trainable(model))
    for _ in range(steps):
        loss, model, slots, grads = jax.block_until_ready(step(model, slots, ROWS, WANTED))
    return loss, model, slots, grads


def check(got: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def bytes_on(tree: Any, device: jax.Device) -> int:
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def calls(compiled: str, operation: str) -> int:
    return len(re.findall(rf" {operation}(?:-start)?\(", compiled))


@pytest.mark.parametrize(
    ("make", "check_vma", "kind"),
    [
        (only_states, True, AxisType.Auto),
        (mixed, True, AxisType.Explicit),
        (only_arrays, False, AxisType.Explicit),
    ],
)
def test_training_is_that_of_one_device_in_a_quarter_of_its_memory(
    make: Callable[[], Any], check_vma: bool, kind: AxisType
) -> None:
    mesh, step = make_mesh("4", kind), step_of(loss_fn)
    model = sm.fsdp(make(), mesh, "x", min_size=4)
    specs = (None, None, P("x"), P("x"))
    mapped = sm.shard_map(step, mesh, specs, P(), check_vma=check_vma)
    got, wanted = trained(mapped, model), trained(jax.jit(step), make())
    check(got, wanted)
    _, after, slots, grads = got
    structure: Any = jax.tree.structure
    assert structure(after) == structure(model)
    # Every array of parameters has an axis that 4 divides. Numbers of steps stay whole.
    for tree, whole in ((after, 4), (slots, 4), (grads, 0)):
        total = sum(x.nbytes for x in jax.tree.leaves(tree)) - whole
        assert bytes_on(tree, mesh.devices.flat[1]) == total // 4 + whole
    compiled = mapped.lower(model, slots, ROWS, WANTED).compile().as_text()
    assert calls(compiled, "all-gather") == calls(compiled, "reduce-scatter") == 1
    # Of the loss.
    assert calls(compiled, "all-reduce") == 1


def tensor_parallel() -> dict[str, Any]:
    return {
        "up": sm.ParamState(values(8, 16), spec=P(None, "y")),
        "bias": sm.ParamState(values(16), spec=P("y")),
        "down": sm.ParamState(values(16, 4), spec=P("y")),
        "last": values(4),
    }


def tensor_parallel_loss(model: Any, x: Any, y: Any) -> Any:
    whole = sm.gather(model, "x")
    hidden = jnp.tanh(x @ whole["up"].value + whole["bias"].value)
    out = sm.psum(hidden @ whole["down"].value, "y") + whole["last"]
    return jnp.mean((out - y) ** 2), model


@pytest.mark.parametrize("check_vma", [True, False])
def test_with_tensor_parallelism_on_another_axis(check_vma: bool) -> None:
    kind = AxisType.Explicit if check_vma else AxisType.Auto
    mesh, step = make_mesh("4x2", kind), step_of(tensor_parallel_loss)
    model = sm.fsdp(tensor_parallel(), mesh, "x", min_size=4)
    specs = {name: model[name].spec for name in model}
    assert specs == {
        "up": P("x", "y"),
        "bias": P("y"),
        "down": P("y", "x"),
        "last": P("x"),
    }
    mapped = sm.shard_map(step, mesh, (None, None, P("x"), P("x")), P(), check_vma=check_vma)
    got = trained(mapped, model)
    check(got, trained(jax.jit(step), tensor_parallel()))
    assert got[1]["up"].value.addressable_shards[0].data.shape == (2, 8)


class Stack(sm.Module):
    """Layers of States and of plain arrays, stacked along the first axis."""

    w: sm.ParamState
    linear: eqx.nn.Linear

    def __init__(self, count: int) -> None:
        self.w = sm.ParamState(values(count, 8, 8))
        self.linear = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(
            jax.random.split(KEY, count)
        )


def scanned_loss(stack: Stack, x: Any, y: Any) -> Any:
    @jax.checkpoint
    def apply(x: Any, layer: Stack) -> Any:
        layer = sm.gather(layer, "x")
        return jnp.tanh(jax.vmap(layer.linear)(x) @ layer.w.value), None

    out, _ = sm.scan(apply, x, stack)
    return jnp.mean((out[:, :4] - y) ** 2), stack


@pytest.mark.parametrize("check_vma", [True, False])
def test_layer_by_layer_in_a_scan_with_remat(check_vma: bool) -> None:
    kind = AxisType.Auto if check_vma else AxisType.Explicit
    mesh, step = make_mesh("4", kind), step_of(scanned_loss)
    stack = sm.fsdp(Stack(8), mesh, "x", min_size=4, first_axis=1)
    assert (stack.w.spec, stack.linear.bias.spec) == (P(None, "x", None), P(None, "x"))
    mapped = sm.shard_map(step, mesh, (None, None, P("x"), P("x")), P(), check_vma=check_vma)
    check(trained(mapped, stack), trained(jax.jit(step), Stack(8)))
    slots = OPTIMIZER.init(sm.trainable(stack))
    compiled = mapped.lower(stack, slots, ROWS, WANTED).compile().as_text()
    # Once on the way there, and again on the way back: `jax.checkpoint` kept nothing.
    assert calls(compiled, "all-gather") == 2
    assert calls(compiled, "reduce-scatter") == 1


@pytest.mark.parametrize(
    ("by_hand", "dtype", "check_vma"),
    [
        (False, "float32", False),
        (False, "bfloat16", True),
        (True, "bfloat16", False),
        (True, "float32", True),
    ],
)
def test_bits_are_those_of_separate_gathers(by_hand: bool, dtype: str, check_vma: bool) -> None:
    mesh = make_mesh("4")
    given = {"a": values(8, 4, dtype=dtype), "b": values(2, 8, 2, dtype=dtype)}
    weights = {"a": values(4, 8, 4, dtype=dtype), "b": values(4, 2, 8, 2, dtype=dtype)}
    specs = {"a": P("x", None), "b": P(None, "x", None)}
    model = {name: sm.ParamState(given[name], spec=specs[name]) for name in given}

    def joined(model: Any, weights: Any) -> Any:
        def loss(parts: Any) -> Any:
            whole = sm.gather({k: model[k].set(x) for k, x in parts.items()}, "x")
            return sum((whole[k].value * weights[k][0]).sum() for k in whole), whole

        parts = {name: state.value for name, state in model.items()}

        def both(parts: Any) -> Any:
            total, whole = loss(parts)
            return (total, whole), parts

        if by_hand:
            grads, whole = jax.grad(loss, has_aux=True)(parts)
        else:
            gradients = sm.grad(both, axis_name="x", reduce="sum", has_aux=True)
            (grads, whole), _ = gradients(parts)
        return grads, {name: state.value[None] for name, state in whole.items()}

    out = specs, P("x")
    mapped = sm.shard_map(joined, mesh, (None, P("x")), out, check_vma=check_vma)
    grads, whole = mapped(model, weights)
    for name, x in given.items():
        np.testing.assert_array_equal(whole[name], np.broadcast_to(x, (4, *x.shape)))
        exact = np.asarray(weights[name], np.float64).sum(0)
        bound = 2.0**-8 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.asarray(grads[name], np.float64), exact, bound, 1e-7)
        assert grads[name].dtype == x.dtype
    if by_hand and check_vma:
        return
    # XLA may sum narrow floats in float32 by itself, so that only the program tells.
    program = str(jax.make_jaxpr(mapped)(model, weights))
    assert re.findall(r"(\w+)\[[^\n=]*= reduce_scatter\b", program) == ["f32"]


def test_which_axis_is_split() -> None:
    mesh = make_mesh("4x2")
    shapes = {"largest": (8, 16, 4), "first": (8, 8), "none": (6, 10), "small": (4,), "scalar": ()}
    given = {name: sm.ParamState(jnp.ones(shape)) for name, shape in shapes.items()}
    model = sm.fsdp(given, mesh, "x", min_size=8)
    assert {name: state.spec for name, state in model.items()} == {
        "largest": P(None, "x", None),
        "first": P("x", None),
        "none": P(None, None),
        "small": P(None),
        "scalar": P(),
    }
    # What is decided stays, and what is not a parameter is not touched.
    again = sm.fsdp(model, mesh, "y", min_size=0)
    assert {name: again[name].spec for name in ("none", "small")} == {
        "none": P(None, None),
        "small": P(None),
    }
    others = {"w": jnp.ones(8), "n": jnp.arange(8), "h": sm.HiddenState(jnp.ones(8)), "f": jnp.tanh}
    split = sm.fsdp(others, mesh, "x", min_size=8)
    assert isinstance(split["w"], sm.ParamState)
    assert all(split[name] is others[name] for name in ("n", "h", "f"))
    own = sm.ParamState(jnp.ones((4, 8)), spec=sm.PerShard("x"))
    assert sm.fsdp([own], mesh, "x", min_size=0)[0].spec == sm.PerShard("x")
    placed = sm.place(split, mesh)
    assert placed["w"].value.addressable_shards[0].data.shape == (2,)
    # Shapes are enough.
    shapes = eqx.filter_eval_shape(only_arrays)
    abstract = jax.sharding.AbstractMesh((4,), ("x",))
    assert sm.fsdp(shapes, abstract, "x", min_size=4)["up"].weight.spec == P("x", None)


def test_outside_any_mapped_call_values_are_whole() -> None:
    raw = mixed()
    model = sm.fsdp(raw, make_mesh("4"), "x", min_size=4)
    whole = sm.gather(model, "x")
    assert whole["up"].weight is raw["up"].weight and whole["down"].spec is None
    assert sm.gather(raw, "x")["up"].weight is raw["up"].weight
    back = sm.scatter(whole, model)
    assert back["up"].weight is model["up"].weight and back["down"] is model["down"]
