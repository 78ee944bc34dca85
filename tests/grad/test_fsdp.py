"""`fsdp`, `gather`, `scatter`, `global_norm`: training is that of one device, in a part of its memory."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import checkpoint
from tests.helpers import jnp, make_mesh, slow


KEY = jax.random.key(0)
ROWS = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)
WANTED = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)
OPTIMIZER = optax.adam(1e-2)
# Of a model, the slots of its optimizer, the rows, and what is wanted of them.
SPECS = (None, None, P("x"), P("x"))


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype) / 2


def mixed() -> dict[str, Any]:
    """Arrays outside States, parameters, and a state that is none."""
    return {
        "up": eqx.nn.Linear(8, 16, key=KEY),
        "down": sm.ParamState({"w": values(16, 4), "b": values(4)}),
        "steps": sm.State(0),
    }


def applied(layer: Any, x: Any) -> Any:
    if isinstance(layer, sm.ParamState):
        return x @ layer.value["w"] + layer.value["b"]
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


both_kinds = pytest.mark.parametrize(
    ("check_vma", "kind"), [(True, AxisType.Explicit), slow(False, AxisType.Auto)]
)


@pytest.mark.slow
@both_kinds
def test_training_is_that_of_one_device_in_a_quarter_of_its_memory(
    check_vma: bool, kind: AxisType
) -> None:
    mesh, step = make_mesh("4", kind), step_of(loss_fn)
    model = sm.fsdp(mixed(), mesh, "x", min_size=4)
    mapped = sm.shard_map(step, mesh, SPECS, P(), check_vma=check_vma)
    got, wanted = trained(mapped, model), trained(jax.jit(step), mixed())
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


@pytest.mark.slow
@both_kinds
def test_with_tensor_parallelism_on_another_axis(check_vma: bool, kind: AxisType) -> None:
    mesh, step = make_mesh("4x2", kind), step_of(tensor_parallel_loss)
    model = sm.fsdp(tensor_parallel(), mesh, "x", min_size=4)
    specs = {name: model[name].spec for name in model}
    assert specs == {"up": P("x", "y"), "bias": P("y"), "down": P("y", "x"), "last": P("x")}
    mapped = sm.shard_map(step, mesh, SPECS, P(), check_vma=check_vma)
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


@pytest.mark.slow
@both_kinds
def test_layer_by_layer_in_a_scan_with_remat(check_vma: bool, kind: AxisType) -> None:
    mesh, step = make_mesh("4", kind), step_of(scanned_loss)
    stack: Any = sm.fsdp(Stack(8), mesh, "x", min_size=4, first_axis=1)
    assert (stack.w.spec, stack.linear.bias.spec) == (P(None, "x", None), P(None, "x"))
    mapped = sm.shard_map(step, mesh, SPECS, P(), check_vma=check_vma)
    check(trained(mapped, stack), trained(jax.jit(step), Stack(8)))
    slots = OPTIMIZER.init(sm.trainable(stack))
    compiled = mapped.lower(stack, slots, ROWS, WANTED).compile().as_text()
    # Once on the way there, and again on the way back: `jax.checkpoint` kept nothing.
    assert calls(compiled, "all-gather") == 2
    assert calls(compiled, "reduce-scatter") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "check_vma"), [("float32", False), ("bfloat16", True)])
def test_bits_are_those_of_separate_gathers(dtype: str, check_vma: bool) -> None:
    """Small arrays go together, and each large one by itself. The whole array decides what is large."""
    rows = 2**17 // jnp.dtype(dtype).itemsize // 8
    specs = {"a": P("x", None), "b": P(None, "x", None), "c": P("x", None), "d": P(None, "x")}
    shapes = {"a": (8, 4), "b": (2, 8, 2), "c": (rows, 8), "d": (2 * rows, 4)}
    given = {name: values(*shape, dtype=dtype) for name, shape in shapes.items()}
    weights = {name: values(4, *shape, dtype=dtype) for name, shape in shapes.items()}
    model = {name: sm.ParamState(given[name], spec=specs[name]) for name in given}

    def joined(model: Any, weights: Any) -> Any:
        def loss(model: Any) -> Any:
            whole = sm.gather(model, "x")
            total = sum((whole[name].value * weights[name][0]).sum() for name in whole)
            return (total, {name: state.value[None] for name, state in whole.items()}), model

        grads = sm.grad(loss, axis_name="x", reduce="sum", has_aux=True)
        return grads(model)[0]

    out = P(), P("x")
    mapped = sm.shard_map(joined, make_mesh("4"), (None, P("x")), out, check_vma=check_vma)
    grads, whole = mapped(model, weights)
    for name, x in given.items():
        np.testing.assert_array_equal(whole[name], np.broadcast_to(x, (4, *x.shape)))
        exact = np.asarray(weights[name], np.float64).sum(0)
        bound = 2.0**-8 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.float64(grads[name].value), exact, bound, 1e-7)
        assert grads[name].value.dtype == x.dtype
    # XLA may sum narrow floats in float32 by itself, so that only the program tells.
    program = str(jax.make_jaxpr(mapped)(model, weights))
    assert re.findall(r"(\w+)\[[^\n=]*= reduce_scatter\b", program) == 3 * ["f32"]
    assert len(re.findall(r"= all_gather\b", program)) == 3


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
    shapes = eqx.filter_eval_shape(mixed)
    abstract = jax.sharding.AbstractMesh((4,), ("x",))
    assert sm.fsdp(shapes, abstract, "x", min_size=4)["up"].weight.spec == P("x", None)


def test_without_an_axis_the_same_program_runs_on_whole_parameters() -> None:
    mesh, step = make_mesh("4"), step_of(loss_fn)
    model = sm.fsdp(mixed(), mesh, None, min_size=4)
    mapped = sm.shard_map(step, mesh, SPECS, P())
    check(trained(mapped, model, 1), trained(jax.jit(step), mixed(), 1))
    explained = mapped.explain(model, OPTIMIZER.init(sm.trainable(model)), ROWS, WANTED)
    assert {collective.operation for collective in explained.collectives} == {"psum"}


def test_outside_any_mapped_call_values_are_whole() -> None:
    raw = mixed()
    model = sm.fsdp(raw, make_mesh("4"), "x", min_size=4)
    whole = sm.gather(model, "x")
    assert whole["up"].weight is raw["up"].weight and whole["down"].spec is None
    assert sm.gather(raw, "x")["up"].weight is raw["up"].weight
    back = sm.scatter(whole, model)
    assert back["up"].weight is model["up"].weight and back["down"] is model["down"]


# In checkpoints, with microbatches, and in `explain`


@pytest.mark.slow
def test_a_checkpoint_of_split_parameters_loads_on_another_mesh(tmp_path: Any) -> None:
    """The training goes on as if nothing had happened, with the parts that the other mesh asks for."""

    def at(mesh: Any) -> tuple[Any, Any, Any]:
        model = sm.fsdp(mixed(), mesh, "x", min_size=4)
        slots = OPTIMIZER.init(sm.trainable(model))
        return model, slots, sm.shard_map(step_of(loss_fn), mesh, SPECS, P())

    model, slots, step = at(make_mesh("4"))
    _, model, slots, _ = jax.block_until_ready(step(model, slots, ROWS, WANTED))
    checkpoint.save(tmp_path / "one", (model, slots))
    there = make_mesh("4x2", AxisType.Explicit)
    *like, step_there = at(there)
    loaded = checkpoint.load(tmp_path / "one", tuple(like), there)
    for got, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves((model, slots)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for state in (loaded[0]["up"].weight, loaded[1][0].mu["up"].weight):
        assert state.spec == P("x", None)
        assert state.value.addressable_shards[0].data.shape == (16 // there.shape["x"], 8)
    wanted = jax.block_until_ready(step(model, slots, ROWS, WANTED))
    check(jax.block_until_ready(step_there(*loaded, ROWS, WANTED)), wanted)
    # A model that was never split loads it too.
    plain, _ = checkpoint.load(tmp_path / "one", (mixed(), OPTIMIZER.init(sm.trainable(mixed()))))
    assert isinstance(plain["up"].weight, jax.Array)
    np.testing.assert_array_equal(plain["up"].weight, model["up"].weight.value)


def test_explain_tells_what_stays_whole_and_why() -> None:
    mesh = AbstractMesh((4, 3), ("data", "model"))
    given = {
        "up": sm.ParamState(jnp.ones((32, 66)), spec=P(None, "model")),
        "w": jnp.ones((32, 64)),
        "odd": sm.ParamState(jnp.ones((33, 65))),
        "bias": sm.ParamState(jnp.ones(64)),
        "few": sm.ParamState(jnp.ones(3)),
        "seen": sm.State(jnp.ones(4)),
    }
    model = sm.fsdp(given, mesh, "data")
    slots = optax.sgd(0.1, momentum=0.9).init(sm.trainable(model))
    report = sm.shard_map(lambda model, slots: model, mesh, (None, None), P()).explain(model, slots)
    whole = {row.path: row.whole for row in report.leaves if row.path.startswith("model")}
    assert whole == {
        "model['up']": "",
        "model['w']": "",
        "model['odd']": "no axis is divisible by data=4",
        "model['bias']": "kept whole",
        "model['few']": "no axis is divisible by data=4",
        "model['seen']": "",
    }
    text = " ".join(str(report).split())
    assert "P() (its own spec: kept" in text
    assert list(report.advice) == [
        "model['odd'], slots[0].trace['odd']: 16.8 KiB stay whole on each of 12 devices, because no axis "
        "is divisible by data=4. Pad an axis to a multiple, so that `fsdp` can split it."
    ]


@both_kinds
def test_a_cast_model_trains_its_master_weights(check_vma: bool, kind: AxisType) -> None:
    """Also those that `fsdp` left whole; each keeps its bits until the optimizer moves it."""
    mesh = make_mesh("4", kind)
    fine = np.float32(1) + np.float32(2**-20)
    whole_arrays = {"odd": sm.ParamState(jnp.full(3, fine)), "plain": jnp.full((), fine)}
    model = sm.fsdp({**mixed(), **whole_arrays}, mesh, "x", min_size=4)

    def loss(model: Any, x: Any, y: Any) -> Any:
        narrow: Callable[[Any], Any] = lambda x: (
            x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
        )
        whole = sm.gather(jax.tree.map(narrow, model), "x")
        out = applied(whole["down"], jnp.tanh(applied(whole["up"], narrow(x))))
        plain = whole["plain"].value if sm.is_state(whole["plain"]) else whole["plain"]
        out = out * whole["odd"].value.sum() * plain
        whole = {**whole, "steps": whole["steps"].set(whole["steps"].value + 1)}
        return jnp.mean((out.astype(jnp.float32) - y) ** 2), sm.scatter(whole, model)

    step = sm.value_and_grad(loss, axis_name="x")
    mapped = sm.shard_map(step, mesh, (None, P("x"), P("x")), P(), check_vma=check_vma)
    (_, new), grads = mapped(model, ROWS, WANTED)
    assert new["steps"].value == 1
    for before, after in zip(
        jax.tree.leaves(sm.trainable(model)), jax.tree.leaves(sm.trainable(new)), strict=True
    ):
        np.testing.assert_array_equal(before, after)
        assert after.dtype == np.float32
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(grads))


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ sm.gather(w, "x").value), None


def all_at_once(model: Any, x: Any) -> Any:
    whole = sm.gather(model, "x").value
    for k in range(4):
        x = jnp.tanh(x @ whole[k])
    return x.mean(), model


@pytest.mark.parametrize(
    ("loss", "gathers", "scatters"),
    [
        (all_at_once, 1, 4),
        (lambda model, x: (sm.scan(layer, x, model)[0].mean(), model), 16, 16),
        (lambda model, x: (sm.scan(jax.checkpoint(layer), x, model)[0].mean(), model), 32, 16),
    ],
)
def test_how_often_microbatches_gather(loss: Any, gathers: int, scatters: int) -> None:
    """The table on the page."""
    mesh = make_mesh("4", AxisType.Explicit)
    model = sm.fsdp(sm.ParamState(values(4, 8, 8)), mesh, "x", min_size=4, first_axis=1)
    step = sm.value_and_grad(loss, axis_name="x", microbatches=4)
    mapped = sm.shard_map(step, mesh, (None, P("x")), P())
    times = {"all_gather": 0, "reduce_scatter": 0, "psum": 0}
    for collective in mapped.explain(model, values(32, 8)).collectives:
        times[collective.operation] += collective.times
        assert collective.operation != "psum" or collective.cause == "the loss"
    assert times == {"all_gather": gathers, "reduce_scatter": scatters, "psum": 1}


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False])
def test_the_norm_is_that_of_all_parts_and_of_what_is_whole_once(checked: bool) -> None:
    grads = {
        "over both": sm.ParamState(values(8, 4), spec=P("y", "x")),
        "over one": sm.ParamState({"w": values(2, 16), "b": values(8)}, spec=P(None, "x")),
        "over both together": sm.ParamState(values(8), spec=P(("x", "y"))),
        "whole": sm.ParamState(values(3)),
        "narrow": values(300, dtype=jnp.bfloat16),
        "none": None,
        "integers": sm.State(np.arange(4)),
    }
    grads["over one"] = grads["over one"].replace(spec={"w": P(None, "x"), "b": P("x")})
    floats = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.floating)]
    wanted = np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in floats))
    mesh = make_mesh("4x2")
    call = sm.shard_map(sm.global_norm, mesh, None, P(), check_vma=checked)
    for norm in (call(grads), call(sm.pack(grads, mesh)), sm.global_norm(grads)):
        assert norm.dtype == np.float32
        np.testing.assert_allclose(norm, wanted, rtol=1e-6)


def test_clipping_by_the_norm_is_that_of_one_device() -> None:
    def clipped(model: Any, x: Any, y: Any) -> Any:
        grads, model = sm.grad(loss_fn, axis_name="x")(model, x, y)
        norm = sm.global_norm(grads)
        return norm, jax.tree.map(lambda g: g / norm, grads)

    model = sm.fsdp(mixed(), make_mesh("4"), "x", min_size=0)
    on_four = sm.shard_map(clipped, make_mesh("4"), SPECS[1:], P())(model, ROWS, WANTED)
    alone = clipped(model, ROWS, WANTED)
    for a, b in zip(jax.tree.leaves(on_four), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    updates = [x for x in jax.tree.leaves(on_four[1]) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert np.sqrt(sum(float(np.square(x).sum()) for x in updates)) == pytest.approx(1)


def test_each_lane_has_a_norm_of_its_own() -> None:
    rows = jnp.asarray(ROWS)
    for lanes in (sm.vmap2, sm.pmap2):
        norms = lanes(sm.global_norm, in_axes=0, out_axes=0, axis_name="lanes")({"w": rows})
        np.testing.assert_allclose(norms, np.linalg.norm(ROWS, axis=1), rtol=1e-6)
