"""Split parameters on meshes of Explicit axes, in checkpoints, with microbatches, and in `explain`."""

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
from tests.test_fsdp import (
    OPTIMIZER,
    ROWS,
    WANTED,
    Stack,
    bytes_on,
    check,
    loss_fn,
    mixed,
    scanned_loss,
    step_of,
    tensor_parallel,
    tensor_parallel_loss,
    trained,
    values,
)


MODELS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "mixed": (mixed, loss_fn, {}),
    "tensor parallel": (tensor_parallel, tensor_parallel_loss, {}),
    "scanned": (lambda: Stack(8), scanned_loss, {"first_axis": 1}),
}
SPECS = (None, None, P("x"), P("x"))


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        ("mixed", True),
        slow("mixed", False),
        slow("tensor parallel", True),
        slow("scanned", False),
    ],
)
def test_on_a_mesh_of_explicit_axes(name: str, check_vma: bool) -> None:
    make, loss, options = MODELS[name]
    mesh = make_mesh("4x2", AxisType.Explicit)
    model = sm.fsdp(make(), mesh, "x", min_size=4, **options)
    mapped = sm.shard_map(step_of(loss), mesh, SPECS, P(), check_vma=check_vma)
    got = trained(mapped, model, 3)
    check(got, trained(jax.jit(step_of(loss)), make(), 3))
    total = sum(x.nbytes for x in jax.tree.leaves(got[3]))
    assert bytes_on(got[3], mesh.devices.flat[1]) <= total // 4


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_microbatches_each_of_which_gathers(check_vma: bool) -> None:
    def step(model: Any, slots: Any, x: Any, y: Any) -> Any:
        gradients = sm.value_and_grad(loss_fn, axis_name="x", microbatches=2)
        (loss, model), grads = gradients(model, x, y)
        updates, slots = OPTIMIZER.update(grads, slots)
        return loss, eqx.apply_updates(model, updates), slots, grads

    model = sm.fsdp(mixed(), make_mesh("4"), "x", min_size=4)
    mapped = sm.shard_map(step, make_mesh("4"), SPECS, P(), check_vma=check_vma)
    check(trained(mapped, model, 3), trained(jax.jit(step_of(loss_fn)), mixed(), 3))
    slots = OPTIMIZER.init(sm.trainable(model))
    found = mapped.explain(model, slots, ROWS, WANTED).collectives
    times = {one.operation: one.times for one in found if one.cause != "XLA's own"}
    # JAX takes the gathering out of the loop, where the parameters do not change. Each part of a gradient is
    # summed up where it lies.
    assert times == {"all_gather": 1, "reduce_scatter": 2, "psum": 1}


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [slow("2", AxisType.Auto), ("4x2", AxisType.Explicit), slow("8", AxisType.Explicit)],
)
def test_a_checkpoint_of_split_parameters_loads_on_another_mesh(
    mesh: str, kind: AxisType, tmp_path: Any
) -> None:
    """The training goes on as if nothing had happened, with the parts that the other mesh asks for."""

    def at(mesh: Any) -> tuple[Any, Any, Any]:
        model = sm.fsdp(mixed(), mesh, "x", min_size=4)
        slots = OPTIMIZER.init(sm.trainable(model))
        return model, slots, sm.shard_map(step_of(loss_fn), mesh, SPECS, P())

    model, slots, step = at(make_mesh("4"))
    _, model, slots, _ = jax.block_until_ready(step(model, slots, ROWS, WANTED))
    checkpoint.save(tmp_path / "one", (model, slots))
    there = make_mesh(mesh, kind)
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


def test_explain_tells_what_is_split() -> None:
    mesh = make_mesh("4")
    model = sm.fsdp({"w": values(8, 16), "b": values(6)}, mesh, "x", min_size=4)

    def total(model: Any) -> Any:
        whole = sm.gather(model, "x")
        return sm.pmean(whole["w"].sum() + whole["b"].sum(), "x")

    rows = {
        row.path: row
        for row in sm.shard_map(total, mesh, out_specs=P(), in_specs=(None,)).explain(model).leaves
    }
    w, b = (next(rows[path] for path in rows if f"'{name}'" in path) for name in ("w", "b"))
    assert (w.shard_shape, b.shard_shape) == ((8, 4), (6,))


def some_whole(mesh: Any) -> Any:
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
    fun = sm.shard_map(lambda model, slots: model, mesh, (None, None), P())
    return fun.explain(model, slots)


def test_explain_tells_what_stays_whole_and_why() -> None:
    found = some_whole(AbstractMesh((4, 3), ("data", "model")))
    whole = {row.path: row.whole for row in found.leaves if row.path.startswith("model")}
    assert whole == {
        "model['up']": "",
        "model['w']": "",
        "model['odd']": "no axis is divisible by data=4",
        "model['bias']": "kept whole",
        "model['few']": "no axis is divisible by data=4",
        "model['seen']": "",
    }
    text = " ".join(str(found).split())
    assert "P() (its own spec: kept" in text
    assert list(found.advice) == [
        "model['odd'], slots[0].trace['odd']: 16.8 KiB stay whole on each of 12 devices, because no axis "
        "is divisible by data=4. Pad an axis to a multiple, so that `fsdp` can split it."
    ]
