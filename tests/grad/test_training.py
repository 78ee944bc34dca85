"""Ten training steps give the same parameters and slots on every mesh as without one.

One program trains with two optimizers. The reference is a loop of JAX and Optax alone.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.grad.test_grad import X, make_net, still_loss
from tests.helpers import make_mesh, slow


structure: Any = jax.tree.structure


STEPS, ROWS = 10, 16
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.05),
}
SHAPES = {"up": (3, 8), "bias": (8,), "down": (8, 2), "last": (2,)}
SPECS = {"up": P(None, "y"), "bias": P("y"), "down": P("y", None), "last": P()}


def weights() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {k: jnp.asarray(0.5 * draw.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def batch(step: int) -> tuple[Any, Any]:
    x = np.random.default_rng(1 + step).normal(size=(ROWS, 3)).astype(np.float32)
    return x, np.stack([np.sin(2 * x[:, 0]), x[:, 1] * x[:, 2]], axis=1)


def fit(w: Any, x: Any, y: Any, axis: str | None) -> Any:
    """The loss of a network whose hidden units may be split over `axis`."""
    out = jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]
    out = jax.lax.psum(out, axis) if axis else out
    return jnp.mean((out + w["last"] - y) ** 2)


def trained(step: Any, model: Any) -> Any:
    """The losses of each optimizer, its model and its slots."""
    models = {k: jax.tree.map(jnp.copy, model) for k in OPTIMIZERS}
    runs = {k: (models[k], o.init(sm.trainable(models[k]))) for k, o in OPTIMIZERS.items()}
    losses = []
    for k in range(STEPS):
        # On JAX 0.10 simulated devices block each other unless each step is awaited.
        loss, runs = jax.block_until_ready(step(runs, *batch(k)))
        losses.append(loss)
    return losses, runs


@functools.cache
def by_hand() -> Any:
    @jax.jit
    def step(runs: Any, x: Any, y: Any) -> Any:
        losses, after = {}, {}
        for k, (w, slots) in runs.items():
            losses[k], grads = jax.value_and_grad(fit)(w, x, y, None)
            updates, slots = OPTIMIZERS[k].update(grads, slots, w)
            after[k] = optax.apply_updates(w, updates), slots
        return losses, after

    return trained(step, weights())


def make_step(axis: str | None) -> Any:
    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        loss = fit({k: model[k].value for k in SHAPES}, x, y, axis)
        return loss, {**model, "steps": model["steps"].set(model["steps"].value + 1)}

    def step(runs: Any, x: Any, y: Any) -> Any:
        losses, after = {}, {}
        for k, (model, slots) in runs.items():
            (losses[k], model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x, y)
            updates, slots = OPTIMIZERS[k].update(grads, slots, sm.trainable(model))
            after[k] = eqx.apply_updates(model, updates), slots
        return losses, after

    return step


def make_model(split: bool) -> dict[str, sm.State]:
    states = {k: sm.ParamState(w, spec=SPECS[k] if split else None) for k, w in weights().items()}
    return {**states, "steps": sm.State(0)}


@pytest.mark.parametrize(
    ("name", "kind", "check_vma"),
    [
        ("8", AxisType.Explicit, True),
        ("4x2", AxisType.Auto, False),
        slow("4x2", AxisType.Explicit, True),
    ],
)
def test_parameters_and_slots_are_the_same(name: str, kind: AxisType, check_vma: bool) -> None:
    split, specs = name == "4x2", (P(), P("x"), P("x"))
    step = make_step("y" if split else None)
    call = sm.shard_map(step, make_mesh(name, kind), specs, P(), check_vma=check_vma)
    losses, runs = trained(call, make_model(split))
    assert all(int(model["steps"].value) == STEPS for model, _ in runs.values())
    weights_and_slots = {k: (sm.trainable(model), slots) for k, (model, slots) in runs.items()}
    pairs = [(losses, by_hand()[0]), (weights_and_slots, by_hand()[1])]
    for got, wanted in pairs:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # Parts of the parameters and slots stay where they are.
    model, (moments, *_) = runs["adam"]
    for tree in (model, moments.mu, moments.nu):
        for k, shape in SHAPES.items():
            part = NamedSharding(make_mesh("4x2"), SPECS[k]).shard_shape(shape) if split else shape
            assert {shard.data.shape for shard in tree[k].value.addressable_shards} == {part}


def test_training_gets_somewhere() -> None:
    losses, runs = by_hand()
    for optimizer, (w, _) in runs.items():
        assert losses[-1][optimizer] < 0.8 * losses[0][optimizer]
        for k, before in weights().items():
            assert not np.allclose(w[k], before, rtol=1e-2)


def test_other_gradients_and_slots_of_other_parts_are_hinted_at() -> None:
    """What a program still has of its time with one device."""
    model = {"w": sm.ParamState(1.0), "mean": sm.BatchState(0.0), "steps": sm.State(0)}
    loss = lambda model, x: ((model["w"].value * x).sum(), model)
    optimizer = optax.adam(0.1)

    def step(model: Any, slots: Any, x: Any) -> Any:
        (_, model), grads = sm.value_and_grad(loss, axis_name="x")(model, x)
        return optimizer.update(grads, slots, model)

    mesh, rows = make_mesh("2"), np.arange(4.0, dtype=np.float32)
    slots = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    with pytest.raises(ValueError, match=r"Hint: gradients have None .*sm.trainable\(model\)"):
        sm.shard_map(step, mesh, (None, None, P("x")), P())(model, slots, rows)
    for grad in (jax.value_and_grad(loss, has_aux=True), eqx.filter_value_and_grad(loss)):
        with pytest.raises(TypeError, match=r"Hint: sm.value_and_grad takes a function of a model"):
            sm.shard_map(grad, mesh, (None, P("x")), P())(model, rows)
    # Of bare arrays JAX's own words are enough.
    with pytest.raises(TypeError, match="grad requires") as raised:
        sm.shard_map(jax.grad(lambda w: w), mesh, P(), P())(1)
    assert "Hint" not in str(raised.value)


# The differentiated part of a model, in the form that an optimizer takes


def test_it_is_the_model_with_none_elsewhere() -> None:
    net = make_net()
    part: Any = sm.trainable(net)
    assert part.w.value is net.w.value and part.bias is net.bias
    assert part.mean is part.steps is part.rng is part.table is part.act is part.rate is None
    # Of a state with integers the floats; NumPy's arrays are arrays.
    assert part.unused.value["a"] is net.unused.value["a"] and part.unused.value["n"] is None
    part = sm.trainable({"x": np.ones(2), "n": np.arange(2)})
    assert part["n"] is None and part["x"].tolist() == [1, 1]


def test_it_has_the_structure_of_the_gradients() -> None:
    for wrt in (None, sm.ParamState, sm.filters.PathContains("bias")):
        _, grads = sm.value_and_grad(still_loss, wrt=wrt)(make_net(), X)
        part = sm.trainable(make_net(), wrt)
        assert structure(part) == structure(grads)
        pairs = zip(jax.tree.leaves(part), jax.tree.leaves(grads), strict=True)
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_nothing_to_train() -> None:
    with pytest.raises(sm.StructureError, match=r"- model\['mean'\]: BatchState"):
        sm.trainable({"mean": sm.BatchState(0.0)})
    with pytest.raises(sm.StructureError, match=r"no floating .*\n  - model\['n'\]: State"):
        sm.trainable({"n": sm.State(0), "w": sm.ParamState(1.0)}, sm.State)


@pytest.mark.parametrize("number", [0.5, np.float32(0.5)], ids=["Python", "NumPy"])
def test_a_number_is_differentiated_in_a_mapped_call_if_it_is_outside(number: Any) -> None:
    def step(model: Any, x: Any) -> Any:
        return sm.grad(lambda m, x: (jnp.mean(x) * m["w"] * m["rate"], m), axis_name="x")(model, x)

    model, x = {"w": jnp.asarray(2.0), "rate": number}, np.ones(4, np.float32)
    mapped = sm.shard_map(step, make_mesh("4"), (P(), P("x")), P())
    inside, outside = mapped(model, x)[0], step(model, x)[0]
    assert structure(inside) == structure(outside)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_optimizer_that_calls_the_loss_itself(kind: AxisType) -> None:
    optimizer = optax.lbfgs()
    x, y = batch(0)
    start = jnp.ones(3)

    def squares(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y[:, 0]) ** 2)

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return squares(model["w"].value, x, y), model

    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x, y)

        def at(parameters: Any) -> Any:
            return sm.pmean(squares(parameters["w"].value, x, y), "x")

        parameters = sm.trainable(model)
        options = {"value": loss, "grad": grads, "value_fn": at}
        updates, slots = optimizer.update(grads, slots, parameters, **options)
        return loss, eqx.apply_updates(model, updates), slots

    rows = P("x")
    sharded = sm.shard_map(step, make_mesh("4", kind), (None, None, rows, rows), (P(), P(), P()))
    model = {"w": sm.ParamState(start)}
    slots = optimizer.init(sm.trainable(model))
    # Two of its slots are one State object at first, of which each call would make two.
    with pytest.raises(sm.StructureError, match=r"`slots = jax\.tree\.map\(lambda x: x, slots\)`"):
        sharded(model, slots, x, y)
    slots = jax.tree.map(lambda x: x, slots)

    w, plain_slots = start, optimizer.init(start)
    for _ in range(4):
        loss, model, slots = jax.block_until_ready(sharded(model, slots, x, y))
        want, grads = jax.value_and_grad(squares)(w, x, y)
        value_fn = functools.partial(squares, x=x, y=y)
        options = {"value": want, "grad": grads, "value_fn": value_fn}
        updates, plain_slots = optimizer.update(grads, plain_slots, w, **options)
        w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(model["w"].value, w, rtol=1e-4, atol=1e-5)
