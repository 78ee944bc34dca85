"""`value_and_grad` of parameters that are split, one for each shard, or the same on all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh
from tests.grad.test_grad import SHARDS, Net, X, check, make_net, plain, still_loss


pytestmark = pytest.mark.usefixtures("each_kind")


def split_loss(model: Any, x: Any, joined: Callable[[Any], Any]) -> Any:
    """The loss of hidden units that may be split over several shards."""
    hidden = jnp.tanh(model["gain"].value * x @ model["up"].value + model["bias"].value)
    y = joined(hidden @ model["down"].value) + model["last"].value
    return jnp.mean((y - 1) ** 2), model


def split_model() -> dict[str, sm.ParamState]:
    return {
        "gain": sm.ParamState(jnp.array([0.5, 1.0, 2.0])),
        "up": sm.ParamState(np.cos(np.arange(12.0)).reshape(3, 4), spec=P(None, "y")),
        "bias": sm.ParamState(np.linspace(-1, 1, 4), spec=P("y")),
        "down": sm.ParamState(np.sin(np.arange(4.0)), spec=P("y")),
        "last": sm.ParamState(0.5),
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_units_split_over_one_axis_and_rows_over_the_other(check_vma: bool) -> None:
    def by_both(model: Any, x: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            return split_loss(model, x, lambda y: jax.lax.psum(y, "y"))

        mean = sm.value_and_grad(loss, axis_name="x")(model, x)
        total = sm.value_and_grad(loss, axis_name="x", reduce="sum")(model, x)
        return mean, total

    mapped = sm.shard_map(by_both, make_mesh("4x2"), (P(), P("x")), P(), check_vma=check_vma)
    mean, ((loss, _), grads) = mapped(split_model(), X)
    wanted = plain(split_loss)(split_model(), X, lambda y: y)
    check(mean, wanted)
    check((loss / 4, jax.tree.map(lambda g: g / 4, grads)), (wanted[0][0], wanted[1]))
    assert grads["up"].value.sharding.spec == P(None, "y")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gather", [sm.all_gather, jax.lax.all_gather], ids=["sm", "lax"])
def test_parameters_gathered_from_all_shards(gather: Any, check_vma: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2), w

    def within(w: Any, x: Any) -> Any:
        return loss(gather(w, "x", tiled=True), x)[0], w

    def parts(w: Any, x: Any) -> Any:
        inside, _ = sm.grad(within, axis_name="x")(w, x)
        # Gathered before, a parameter is one value on all shards, and has the whole gradient.
        whole, _ = sm.grad(loss, axis_name="x")(gather(w, "x", tiled=True), x)
        return inside, jax.lax.dynamic_slice_in_dim(whole, sm.axis_index("x") * w.size, w.size)

    w = np.linspace(-1, 1, 16, dtype=np.float32)
    x = np.cos(np.arange(128, dtype=np.float32)).reshape(8, 16)
    specs = (P("x"), P("x"))
    found = sm.shard_map(parts, make_mesh("4"), specs, P("x"), check_vma=check_vma)(w, x)
    wanted = jax.grad(lambda w: loss(w, x)[0])(w)
    for gradient in found:
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_a_cast_parameter_belongs_to_its_shard() -> None:
    def own(w: Any, x: Any) -> Any:
        return sm.grad(lambda w, x: ((w * x).sum(), w))(jax.lax.pcast(w, "x", to="varying"), x)[0]

    x = np.arange(4.0, dtype=np.float32)
    got = sm.shard_map(own, make_mesh("4"), (P(), P("x")), P("x"))(jnp.ones(1), x)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_rows_split_over_several_axes(check_vma: bool) -> None:
    step = sm.value_and_grad(still_loss, axis_name=("x", "z"))
    specs = (P(), P(("z", "x")))
    got = sm.shard_map(step, make_mesh("2x2x2"), specs, P(), check_vma=check_vma)(make_net(), X)
    check(got, plain(still_loss)(make_net(), X))


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_parameter_per_shard(check_vma: bool) -> None:
    own = np.linspace(-1, 1, SHARDS, dtype=np.float32)
    model = {"w": sm.ParamState(0.3), "own": sm.ParamState(own, spec=sm.PerShard("x"))}

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean((x * model["w"].value - model["own"].value) ** 2), model

    step = sm.value_and_grad(loss, axis_name="x")
    specs = (P(), P("x"))
    (value, _), grads = sm.shard_map(step, make_mesh("4"), specs, P(), check_vma=check_vma)(
        model, X
    )
    apart = X.astype(np.float64).reshape(SHARDS, -1) * 0.3 - own[:, None]
    np.testing.assert_allclose(value, np.mean(apart**2), rtol=1e-5)
    np.testing.assert_allclose(grads["own"].value, -2 * apart.sum(1) / X.size, rtol=1e-5)
    assert grads["own"].spec == sm.PerShard("x")


def test_aux_comes_back_by_its_own_spec() -> None:
    def loss(net: Net, x: Any) -> Any:
        y = net.apply(x)
        return (jnp.mean(y**2), {"rows": y, "kind": "text", "w": net.w}), net

    def both(net: Net, x: Any) -> Any:
        value_and_grads = sm.value_and_grad(loss, axis_name="x", has_aux=True)(net, x)
        return value_and_grads, sm.grad(loss, axis_name="x", has_aux=True)(net, x)

    net, aux = make_net(), {"rows": P("x"), "kind": None, "w": P()}
    out_specs = ((((P(), aux), P()), P()), ((P(), aux), P()))
    got = sm.shard_map(both, make_mesh("4"), (P(), P("x")), out_specs)(net, X)
    ((loss_wanted, aux_wanted), new), grads = plain(loss, has_aux=True)(net, X)
    check(got, ((((loss_wanted, aux_wanted), new), grads), ((grads, aux_wanted), new)))
