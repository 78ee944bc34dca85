"""Gradients of whole parameters, of which each shard keeps its own part: ZeRO's first and second stage."""

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
from statemesh.testing import assert_equivalent
from tests.helpers import jnp, make_mesh, slow


KEY = jax.random.key(0)
X = np.cos(np.arange(256, dtype=np.float32)).reshape(32, 8)
Y = np.sin(np.arange(128, dtype=np.float32)).reshape(32, 4)
OPTIMIZER = optax.adamw(1e-2, weight_decay=1e-2)
# Of a model, the slots of its optimizer, the rows, and what is wanted of them.
SPECS = (None, None, P("x"), P("x"))

structure: Any = jax.tree.structure
both_kinds = pytest.mark.parametrize(
    ("check_vma", "kind"), [(True, AxisType.Explicit), slow(False, AxisType.Auto)]
)


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype) / 2


def raw() -> dict[str, Any]:
    """Parameters in States and outside, one that no mesh splits, and a state that is none."""
    return {
        "up": eqx.nn.Linear(8, 16, key=KEY),
        "down": sm.ParamState({"w": values(16, 4), "b": values(4)}),
        "odd": values(3),
        "steps": sm.State(0),
    }


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    down = model["down"].value
    out = jnp.tanh(jax.vmap(model["up"])(x)) @ down["w"] + down["b"]
    odd = model["odd"].value if sm.is_state(model["odd"]) else model["odd"]
    loss = jnp.mean((out * odd.sum() - y) ** 2)
    return loss, {**model, "steps": model["steps"].set(model["steps"].value + 1)}


Step = Callable[..., Any]


def plain(model: Any, slots: Any, x: Any, y: Any) -> Any:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x, y)
    updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(model))
    return loss, eqx.apply_updates(model, updates), slots


def first_stage(split: Any, **options: Any) -> Step:
    """The slots are split, and the parameters are whole."""

    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        gradients = sm.value_and_grad(loss_fn, axis_name="x", split_as=split, **options)
        (loss, model), grads = gradients(model, x, y)
        updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(model, split_as=split))
        return loss, eqx.apply_updates(model, sm.gather(updates, "x")), slots

    return step


def second_stage(_: Any, **options: Any) -> Step:
    """The parameters are split too. They are gathered once in a step."""

    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        gradients = sm.value_and_grad(loss_fn, axis_name="x", split_as=model, **options)
        (loss, whole), grads = gradients(sm.gather(model, "x"), x, y)
        model = sm.scatter(whole, model)
        updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(model))
        return loss, eqx.apply_updates(model, updates), slots

    return step


def trained(step: Step, model: Any, slots: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        loss, model, slots = jax.block_until_ready(step(model, slots, X, Y))
    return loss, model, slots


def check(got: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def bytes_on(tree: Any, device: jax.Device) -> int:
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def temporaries(compiled: Any) -> int:
    held: int = compiled.memory_analysis().temp_size_in_bytes
    return held


def calls(compiled: str, operation: str) -> int:
    return len(re.findall(rf" {operation}(?:-start)?\(", compiled))


@both_kinds
@pytest.mark.parametrize("stage", [first_stage, slow(second_stage)])
@pytest.mark.parametrize("microbatches", [slow(None), 4])
def test_training_is_that_of_one_device_with_a_quarter_of_the_slots(
    stage: Callable[..., Step], microbatches: int | None, check_vma: bool, kind: AxisType
) -> None:
    mesh = make_mesh("4", kind)
    split = sm.fsdp(raw(), mesh, "x", min_size=4)
    slots = OPTIMIZER.init(sm.trainable(split))
    model = raw() if stage is first_stage else split
    mapped = sm.shard_map(
        stage(split, microbatches=microbatches), mesh, SPECS, P(), check_vma=check_vma
    )
    got = trained(mapped, model, slots)
    check(got, trained(jax.jit(plain), raw(), OPTIMIZER.init(sm.trainable(raw()))))
    assert structure(got[1:]) == structure((model, slots))
    # The odd parameter is on every device, and so is the number of steps.
    whole = 2 * 12 + 4
    total = sum(x.nbytes for x in jax.tree.leaves(got[2])) - whole
    assert bytes_on(got[2], mesh.devices.flat[1]) == total // 4 + whole
    compiled = mapped.lower(model, slots, X, Y).compile().as_text()
    # Small arrays go together: one gather, one scatter, one sum of the loss and the odd gradient.
    for operation in ("all-gather", "reduce-scatter", "all-reduce"):
        assert calls(compiled, operation) == 1, operation


@pytest.mark.slow
@pytest.mark.parametrize("stage", [slow(first_stage), second_stage])
def test_the_check_says_that_meshes_agree(stage: Callable[..., Step]) -> None:
    mesh = make_mesh("4")
    split = sm.fsdp(raw(), mesh, "x", min_size=4)
    model = raw() if stage is first_stage else split
    mapped = sm.shard_map(stage(split, microbatches=2), mesh, SPECS, P())
    args = model, OPTIMIZER.init(sm.trainable(split)), X, Y
    assert_equivalent(mapped, args, meshes=[{"x": 4}, {"x": 2}], steps=2)


LARGE = 512


def wide_loss(model: Any, x: Any) -> Any:
    for w in model:
        x = jnp.tanh(x @ (w.value if sm.is_state(w) else w))
    return jnp.mean(x**2), model


def by_hand(microbatches: int) -> Step:
    """The same gradients with JAX alone: gathered once, added up, and scattered once."""

    def step(parts: Any, x: Any) -> Any:
        whole = [jax.lax.all_gather(part, "x", tiled=True) for part in parts]

        def add(total: Any, rows: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda whole: wide_loss(whole, rows)[0])(whole)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        rows = x.reshape(-1, microbatches, LARGE).swapaxes(0, 1)
        start = jax.lax.pcast(jnp.zeros(()), "x", to="varying"), [0 * w for w in whole]
        (loss, grads), _ = jax.lax.scan(add, start, rows)
        count = microbatches * jax.lax.axis_size("x")
        scattered = [jax.lax.psum_scatter(g, "x", tiled=True) / count for g in grads]
        return jax.lax.psum(loss, "x") / count, scattered

    return step


@pytest.mark.parametrize("microbatches", [2, slow(8)])
def test_each_large_gradient_is_scattered_once_in_the_memory_of_a_program_by_hand(
    microbatches: int,
) -> None:
    mesh = make_mesh("4", AxisType.Explicit)
    arrays = [values(LARGE, LARGE) for _ in range(3)]
    model = sm.place(sm.fsdp(arrays, mesh, "x"), mesh)
    x = sm.place(values(64, LARGE), mesh, P("x"))

    def step(model: Any, x: Any) -> Any:
        gradients = sm.value_and_grad(
            wide_loss, axis_name="x", microbatches=microbatches, split_as=model
        )
        (loss, _), grads = gradients(sm.gather(model, "x"), x)
        return loss, grads

    ours = sm.shard_map(step, mesh, (None, P("x")), P())
    parts = [w.value for w in model]
    hand = jax.jit(
        jax.shard_map(
            by_hand(microbatches), mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P(), P("x"))
        )
    )
    loss, grads = ours(model, x)
    check((loss, grads), hand(parts, x))
    programs = [
        mapped.lower(*args).compile() for mapped, args in ((ours, (model, x)), (hand, (parts, x)))
    ]
    for compiled in programs:
        text = compiled.as_text()
        assert calls(text, "all-gather") == calls(text, "reduce-scatter") == 3
        assert calls(text, "all-reduce") == 1
    held, least = (temporaries(program) for program in programs)
    assert held <= 1.02 * least
    rows = ours.explain(model, x).collectives
    scatters = [row for row in rows if row.operation == "reduce_scatter"]
    assert [(row.times, row.cause) for row in scatters] == [
        (1, f"the gradient of model[{k}]") for k in range(3)
    ]


@both_kinds
@pytest.mark.parametrize("reduce", ["mean", slow("sum")])
def test_over_several_axes_with_auxiliary_results(
    reduce: Any, check_vma: bool, kind: AxisType
) -> None:
    """One parameter is split over both axes together, one over each; a third axis splits one already."""
    mesh = make_mesh("2x2x2", kind)
    model = {
        "both": sm.ParamState(values(8, 4)),
        "each": values(8, 4),
        "tensor": sm.ParamState(values(8, 4), spec=P(None, "z")),
    }
    split = {
        "both": sm.ParamState(values(8, 4), spec=P(("x", "y"))),
        "each": sm.ParamState(values(8, 4), spec=P("x", "y")),
        "tensor": sm.fsdp(model["tensor"], mesh, ("x", "y"), min_size=4),
    }
    assert split["tensor"].spec == P(("x", "y"), "z")

    def loss_fn(model: Any, x: Any) -> Any:
        both, each, tensor = (w.value if sm.is_state(w) else w for w in model.values())
        out = x @ both + jnp.tanh(x @ each)
        total = sm.psum((jnp.tanh(x @ tensor) ** 2).sum(), "z")
        return (jnp.mean(out**2) + total / len(x), x.sum(1)), model

    def gradient(model: Any, x: Any) -> Any:
        gradients = sm.value_and_grad(
            loss_fn, axis_name=("x", "y"), reduce=reduce, has_aux=True, split_as=split
        )
        ((loss, aux), _), grads = gradients(model, x)
        return loss, aux, grads

    out_specs = P(), P(("x", "y")), P()
    mapped = sm.shard_map(gradient, mesh, (None, P(("x", "y"))), out_specs, check_vma=check_vma)
    loss, aux, grads = mapped(model, X)
    wanted_loss, wanted_aux, wanted = gradient(model, X)
    shards = 4 if reduce == "sum" else 1
    check(aux, wanted_aux)
    check((loss, grads), jax.tree.map(lambda x: shards * x, (wanted_loss, wanted)))
    assert {name: grad.spec for name, grad in grads.items()} == {
        name: state.spec for name, state in split.items()
    }


@pytest.mark.parametrize(("check_vma", "microbatches"), [(True, None), slow(False, 2)])
def test_narrow_gradients_are_summed_wide(check_vma: bool, microbatches: int | None) -> None:
    mesh = make_mesh("4")
    model = {"w": sm.ParamState(values(8, 4, dtype=jnp.bfloat16))}
    split = sm.fsdp(model, mesh, "x", min_size=4)

    def loss_fn(model: Any, x: Any) -> Any:
        return (x.astype(jnp.bfloat16) @ model["w"].value).sum().astype(np.float32), model

    def gradient(model: Any, x: Any) -> Any:
        options: Any = {"reduce": "sum", "microbatches": microbatches, "split_as": split}
        return sm.grad(loss_fn, axis_name="x", **options)(model, x)[0]

    mapped = sm.shard_map(gradient, mesh, (None, P("x")), P(), check_vma=check_vma)
    got = mapped(model, X)["w"]
    assert got.value.dtype == jnp.bfloat16 and got.spec == P("x", None)
    exact = np.repeat(X.astype(jnp.bfloat16).astype(np.float64).sum(0)[:, None], 4, 1)
    np.testing.assert_allclose(np.float64(got.value), exact, 2.0**-6, 2.0**-6)
    program = str(jax.make_jaxpr(mapped)(model, X))
    assert re.findall(r"(\w+)\[[^\n=]*= reduce_scatter\b", program) == ["f32"]


def test_a_loss_that_is_the_same_everywhere_counts_once() -> None:
    mesh, model = make_mesh("4"), sm.ParamState(values(8, 4))
    split = sm.fsdp(model, mesh, "x", min_size=4)

    def loss_fn(model: Any, x: Any) -> Any:
        return sm.pmean((x @ model.value).mean(), "x") + (model.value**2).sum(), model

    def gradient(model: Any, x: Any) -> Any:
        return sm.grad(loss_fn, axis_name="x", split_as=split)(model, x)[0]

    for check_vma in (True, False):
        mapped = sm.shard_map(gradient, mesh, (None, P("x")), P(), check_vma=check_vma)
        check(mapped(model, X), gradient(model, X))


def test_shapes_are_enough_and_outside_any_call_values_are_whole() -> None:
    mesh, model = make_mesh("4"), raw()
    split = sm.fsdp(model, mesh, "x", min_size=4)
    shapes = eqx.filter_eval_shape(lambda: split)
    wanted = sm.trainable(split)
    for like in (split, shapes):
        got = sm.trainable(model, split_as=like)
        assert structure(got) == structure(wanted)
        check(got, wanted)
    only = sm.trainable(model, sm.ParamState, split_as=split)
    assert only["odd"] is None and only["down"].spec == wanted["down"].spec
