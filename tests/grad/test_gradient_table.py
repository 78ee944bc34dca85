"""JAX's gradients inside mapped calls, cell by cell, and the gradient that statemesh gives in the same place.

The eight rows are split over the shards. NumPy computes the right gradients in float64.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, slow


ROWS = 8
X = np.sin(np.arange(16.0)).reshape(ROWS, 2)
T = np.cos(3 * np.arange(8.0))
W = np.array([0.7, -1.3])
B = np.linspace(-0.5, 0.5, ROWS)


def narrow(x: Any) -> Any:
    return np.asarray(x, np.float32)


# JAX alone: `w` is the same on all shards, and the rows are split.


def loss(w: Any, x: Any, t: Any) -> Any:
    return jnp.mean((x @ w - t) ** 2)


def local_slopes(n: int) -> Any:
    """The gradient of each shard's own loss, of shape `(n, 2)`."""
    residuals, rows = (X @ W - T).reshape(n, -1, 1), X.reshape(n, -1, 2)
    return 2 * (residuals * rows).mean(axis=1)


BODIES: dict[str, Callable[..., Any]] = {
    "grad(loss)": lambda *args: jax.grad(loss)(*args),
    "psum(grad(loss))": lambda *args: jax.lax.psum(jax.grad(loss)(*args), "x"),
    "grad(psum(loss))": lambda *args: jax.grad(lambda *a: jax.lax.psum(loss(*a), "x"))(*args),
    "pcast, grad(loss)": lambda w, x, t: jax.grad(loss)(jax.lax.pcast(w, "x", to="varying"), x, t),
}


Cell = Callable[[Any], Any]
summed: Cell = lambda slopes: np.broadcast_to(slopes.sum(0), slopes.shape)
local: Cell = lambda slopes: slopes
n_times_summed: Cell = lambda slopes: len(slopes) * summed(slopes)
n_times_local: Cell = lambda slopes: len(slopes) * slopes

TABLE: dict[str, dict[str, Cell]] = {
    "grad(loss)": {"check": summed, "no check": local, "vmap": local},
    "psum(grad(loss))": {"check": n_times_summed, "no check": summed, "vmap": summed},
    "grad(psum(loss))": {"check": summed, "no check": n_times_local, "vmap": n_times_local},
    "pcast, grad(loss)": {"check": local, "no check": local},
}


def of_jax(mode: str, n: int, bodies: dict[str, Any], agree: bool = False) -> Any:
    """What these bodies give on each shard, or on all, if the spec is to say that they agree."""
    given = narrow(W), narrow(X), narrow(T)

    def shard(*args: Any) -> Any:
        results = {name: body(*args) for name, body in bodies.items()}
        return results if agree else jax.tree.map(lambda x: x[None], results)

    if mode == "vmap":
        lanes = jax.vmap(shard, in_axes=(None, 0, 0), axis_name="x")
        found = jax.jit(lanes)(given[0], given[1].reshape(n, -1, 2), given[2].reshape(n, -1))
        return jax.tree.map(lambda x: x[:, 0], found)
    specs, out, check = (P(), P("x"), P("x")), P() if agree else P("x"), mode == "check"
    mapped = jax.shard_map(
        shard, mesh=make_mesh(str(n)), in_specs=specs, out_specs=out, check_vma=check
    )
    return jax.jit(mapped)(*given)


@pytest.mark.parametrize("mode", ["check", "no check", "vmap"])
def test_jax(mode: str) -> None:
    bodies = {name: body for name, body in BODIES.items() if mode in TABLE[name]}
    for name, gradient in of_jax(mode, 4, bodies).items():
        wanted = TABLE[name][mode](local_slopes(4))
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_jax_where_the_spec_says_that_all_shards_agree() -> None:
    def kept(body: str, mode: str) -> Any:
        return of_jax(mode, 4, {body: BODIES[body]}, agree=True)[body]

    # Unchecked, it keeps the first shard's gradient; checked, it lets pass one that was summed too often.
    slopes = local_slopes(4)
    first, too_often = kept("grad(psum(loss))", "no check"), kept("psum(grad(loss))", "check")
    np.testing.assert_allclose(first, n_times_local(slopes)[0], rtol=1e-5)
    np.testing.assert_allclose(too_often, n_times_summed(slopes)[0], rtol=1e-5)
    with pytest.raises(ValueError, match="out_specs which require replication"):
        kept("pcast, grad(loss)", "check")


def test_the_cells_of_jax_are_different_numbers() -> None:
    cells = (summed, local, n_times_summed, n_times_local)
    for a, b in itertools.combinations([cell(local_slopes(4)) for cell in cells], 2):
        assert not np.allclose(a, b, rtol=1e-2)


# statemesh: `w` is the same on all shards. `b` has an entry for each row and is split like the rows.


def residuals(model: Any, x: Any, t: Any) -> Any:
    return x @ model["w"].value + model["b"].value - t


def total(model: Any, x: Any, t: Any) -> Any:
    return jnp.sum(residuals(model, x, t) ** 2)


STYLES: dict[str, tuple[Callable[..., Any], str]] = {
    "each shard's own": (lambda *args: jnp.mean(residuals(*args) ** 2), "mean"),
    "each shard's part": (lambda *args: total(*args) / ROWS, "sum"),
    "made one by pmean": (
        lambda *args: jax.lax.pmean(jnp.mean(residuals(*args) ** 2), "x"),
        "mean",
    ),
    "made one by psum": (lambda *args: jax.lax.psum(total(*args), "x") / ROWS, "mean"),
}
ALONE = ["each shard's own", "each shard's part"]


def by_style(model: Any, x: Any, t: Any, styles: Any = STYLES) -> dict[str, Any]:
    """The loss and the gradients of each style."""
    results = {}
    for style in styles:
        fun, reduce = STYLES[style]
        step = sm.value_and_grad(
            lambda model, x, t, fun=fun: (fun(model, x, t), model), axis_name="x", reduce=reduce
        )
        (value, _), grads = step(model, x, t)
        results[style] = value, grads
    return results


def model_of(*shape: int) -> dict[str, Any]:
    b = sm.ParamState(narrow(B).reshape(*shape, -1), tag="rows", spec=P("x"))
    return {"w": sm.ParamState(narrow(W)), "b": b}


def on_mesh(n: int, check: bool) -> sm.StatefulMapping:
    mesh = make_mesh(str(n), AxisType.Explicit if n in (2, 8) else AxisType.Auto)
    mapped: sm.StatefulMapping = sm.shard_map(
        by_style, mesh, (P(), P("x"), P("x")), P(), check_vma=check
    )
    return mapped


def of_statemesh(mode: str, n: int) -> dict[str, Any]:
    if mode in ("check", "no check"):
        on_all: dict[str, Any] = on_mesh(n, mode == "check")(model_of(), narrow(X), narrow(T))
        return on_all
    mapped = getattr(sm, mode)(
        by_style, in_axes=(None, 0, 0), out_axes=None, axis_name="x", state_in_axes={0: "rows"}
    )
    by_lane: dict[str, Any] = mapped(
        model_of(n), narrow(X).reshape(n, -1, 2), narrow(T).reshape(n, -1)
    )
    return by_lane


def assert_right(value: Any, grads: Any) -> None:
    apart = X @ W + B - T
    np.testing.assert_allclose(value, np.mean(apart**2), rtol=1e-5)
    np.testing.assert_allclose(grads["w"].value, 2 / ROWS * apart @ X, rtol=1e-5, atol=1e-6)
    flat = np.reshape(grads["b"].value, ROWS)
    np.testing.assert_allclose(flat, 2 / ROWS * apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "n"),
    [("check", 8), ("no check", 4), ("vmap2", 8), ("pmap2", 2), slow("check", 2), slow("pmap2", 8)],
)
def test_statemesh(mode: str, n: int) -> None:
    for result in of_statemesh(mode, n).values():
        assert_right(*result)


def test_statemesh_on_one_device() -> None:
    """Outside any mapped call, and on a mesh of one device."""
    for result in by_style(model_of(), narrow(X), narrow(T), ALONE).values():
        assert_right(*result)
    for check in (True, False):
        found = on_mesh(8, check).unsharded(model_of(), narrow(X), narrow(T))
        for style in STYLES:
            assert_right(*found[style])
