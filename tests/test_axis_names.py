"""Axis names wherever they are taken: one, a tuple of one, a tuple of several; never one of them twice."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import legacy
from tests.helpers import assert_says, jnp, make_mesh


KEY = jax.random.key(0)
KINDS = [AxisType.Auto, AxisType.Explicit]


def loss_fn(model: Any, x: Any) -> Any:
    return (x * model["w"].value).mean(), model


def model() -> Any:
    return {"w": sm.ParamState(jnp.arange(1.0, 5.0), spec=P("x"))}


# Inside a mapped call over "x", or outside of any: what takes the names, and something that depends on them.
INSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "axis_index": lambda names, x: sm.axis_index(names),
    "axis_size": lambda names, x: sm.axis_size(names) * jnp.ones(()),
    "psum": lambda names, x: sm.psum(x, names),
    "pmean": lambda names, x: sm.pmean(x, names),
    "pmax": lambda names, x: sm.pmax(x, names),
    "pmin": lambda names, x: sm.pmin(x, names),
    "all_gather": lambda names, x: sm.all_gather(x, names),
    "rows": lambda names, x: jax.random.uniform(sm.RandomState(KEY).rows(1, names)[0][0]),
    "gather": lambda names, x: sm.gather(model_inside(x), names)["w"].value,
    "value_and_grad": lambda names, x: sm.value_and_grad(loss_fn, axis_name=names)(
        {"w": sm.ParamState(jnp.ones(4))}, x
    )[0][0],
    "grad": lambda names, x: (
        sm.grad(loss_fn, axis_name=names)({"w": sm.ParamState(jnp.ones(4))}, x)[0]["w"].value
    ),
    "BatchNorm": lambda names, x: sm.nn.BatchNorm(4, axis_name=names)(x)[0],
    "Average": lambda names, x: sm.nn.Average(jnp.zeros(4), axis_name=names)(x[0])[0],
    "Dropout": lambda names, x: sm.nn.Dropout(0.5, KEY, axis_name=names)(x)[0],
    "KVCache": lambda names, x: sm.nn.KVCache(4, 1, 2, axis_name=names).axis_name and x,
}

CALLED: dict[str, str] = {"rows": "RandomState.rows", "grad": "value_and_grad"}


def model_inside(x: Any) -> Any:
    return {"w": sm.ParamState(x, spec=P("x"))}


def mapped(fun: Callable[[Any], Any], mesh: Any, spec: Any) -> Any:
    x = np.cos(np.arange(32.0, dtype=np.float32)).reshape(8, 4)
    each = lambda x: jnp.asarray(fun(x))[None]
    return sm.shard_map(each, mesh, (spec,), spec, check_vma=False)(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INSIDE)
def test_a_tuple_of_one_name_is_the_name(name: str, kind: AxisType) -> None:
    mesh = make_mesh("8", kind)
    run: Callable[[Any], Any] = lambda names: mapped(lambda x: INSIDE[name](names, x), mesh, P("x"))
    one, tupled = run("x"), run(("x",))
    np.testing.assert_array_equal(one, tupled)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in INSIDE if name not in ("gather", "KVCache")])
def test_two_axes_are_one_of_both_sizes(name: str, kind: AxisType) -> None:
    """Named major to minor, as in the spec that splits the rows."""
    one = mapped(lambda x: INSIDE[name]("x", x), make_mesh("8", kind), P("x"))
    names = ("x", "y")
    two = mapped(lambda x: INSIDE[name](names, x), make_mesh("4x2", kind), P(names))
    np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("name", INSIDE)
def test_no_name_twice(name: str, place: str) -> None:
    what = CALLED.get(name, name)
    text = f"{what}: axis_name names 'x' more than once, in ('x', 'y', 'x'). Name each axis once."

    def run() -> None:
        fun: Callable[[Any], Any] = lambda x: INSIDE[name](("x", "y", "x"), x)
        if place == "inside":
            mapped(fun, make_mesh("4x2"), P(("x", "y")))
        else:
            fun(jnp.ones((2, 4)))

    assert_says(run, sm.StatemeshError, text)


@pytest.mark.parametrize(
    ("make", "what", "argument"),
    [
        (lambda names: sm.fsdp(model(), make_mesh("4"), names), "fsdp", "axis_name"),
        (
            lambda names: sm.shard_map(jnp.sin, make_mesh("4"), P(), P(), axis_names=names),
            "shard_map",
            "axis_names",
        ),
        (
            lambda names: legacy.shard_map(jnp.sin, make_mesh("4x2"), P(), P(), auto=names),
            "shard_map",
            "auto",
        ),
        (lambda names: sm.vmap2(jnp.sin, spmd_axis_name=names), "vmap2", "spmd_axis_name"),
    ],
)
def test_no_name_twice_where_a_call_is_made(
    make: Callable[[Any], Any], what: str, argument: str
) -> None:
    text = f"{what}: {argument} names 'x' more than once, in ('x', 'x'). Name each axis once."
    assert_says(lambda: make(("x", "x")), sm.StatemeshError, text)


@pytest.mark.parametrize("names", [None, ()])
@pytest.mark.parametrize("what", ["fsdp", "gather"])
def test_split_parameters_need_a_name(what: str, names: Any) -> None:
    text = (
        f"{what}: axis_name is {names!r} of type {type(names).__name__}, but must be a string, or a tuple of "
        "several, as in axis_name=('data', 'model')."
    )
    calls: dict[str, Callable[[], Any]] = {
        "fsdp": lambda: sm.fsdp(model(), make_mesh("4"), names),
        "gather": lambda: sm.gather(model(), names),
    }
    assert_says(calls[what], TypeError, text)
