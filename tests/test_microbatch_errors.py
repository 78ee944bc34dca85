"""Every mistake with microbatches that is refused, with its exact text."""

# ruff: noqa: E501

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh, mistakes_in


X = jnp.arange(12.0).reshape(6, 2)
CASES: list[Any] = []
mistake = mistakes_in(CASES)


def net() -> dict[str, Any]:
    return {"w": sm.ParamState(1.0), "seen": sm.State(0.0), "table": jnp.zeros(2)}


def fit(net: Any, x: Any, rate: Any = None, *, key: Any = None) -> Any:
    return jnp.mean((x * net["w"].value - 1) ** 2), net


def run(fun: Any, *args: Any, **options: Any) -> Any:
    return sm.value_and_grad(fun, microbatches=2, **options)(net(), *args)


@mistake(
    sm.StatemeshError,
    "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is 0.",
)
def no_microbatches() -> Any:
    return sm.value_and_grad(fit, microbatches=0)


@mistake(
    sm.StatemeshError,
    "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is 2.0.",
)
def microbatches_that_are_no_int() -> Any:
    # Past the annotations, which the suites check at run time.
    return inspect.unwrap(sm.value_and_grad)(fit, microbatches=2.0)


@mistake(
    sm.StructureError,
    """\
value_and_grad: microbatches=4 does not divide the leading axis of arguments of fit:
  - x['a']: float32[6,2], 6 = 1 x 4 + 2
  - rate: int32[9], 9 = 2 x 4 + 1
Inside a mapped call these are the rows of one shard. Choose a number that divides them; or pad the rows and leave them out of the loss by a mask.""",
)
def uneven_rows() -> Any:
    step = sm.value_and_grad(fit, microbatches=4)
    return step(net(), {"a": X, "b": X[:4]}, jnp.arange(9))


@mistake(
    sm.StructureError,
    """\
value_and_grad: microbatches=2 splits the leading axis of every array in the positional arguments of fit after the model, but these have none:
  - rate.value: key<fry>[]
Pass what all microbatches share as a keyword argument: `rate=...`.""",
)
def arguments_without_rows() -> Any:
    return run(fit, X, sm.RandomState(jax.random.key(0)))


@mistake(
    sm.StructureError,
    """\
value_and_grad: microbatches=2 splits the leading axis of every array in the positional arguments of fit after the model, but these have none:
  - rate: 0.5
Pass what all microbatches share as a keyword argument: `rate=...`.""",
)
def a_number() -> Any:
    return run(fit, X, 0.5)


@mistake(
    sm.StatemeshError,
    "value_and_grad: the microbatches of fit stand inside those of another value_and_grad. Split the rows once: leave `microbatches` out inside, and give the outer one the product of both.",
)
def microbatches_inside_microbatches() -> Any:
    return run(lambda net, x: run(fit, x)[0], X)


@mistake(
    sm.DivergedStateError,
    """\
value_and_grad: the microbatches of write wrote different values, but the model keeps one:
  - net['seen']: State(float32[])
  - net['table']: float32[2]
Mend it in one of these ways:
  - declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function
  - put an array that is written into a State, which can say how writes are merged
  - return the microbatches' own values as auxiliary ones, with `has_aux=True`""",
)
def writes_without_a_policy() -> Any:
    def write(net: Any, x: Any) -> Any:
        new = {"seen": net["seen"].set(x.sum()), "table": x.sum(0)}
        return fit(net, x)[0], {**net, **new}

    return run(write, X)


def own(old: Any, new: Any, axis_names: Any) -> Any:
    return new


@mistake(
    sm.DivergedStateError,
    """\
value_and_grad: policies that merge what the microbatches of write wrote gave values that still differ between these:
  - net['seen']: merged by own
A policy must return one value for all instances, as with jax.lax.psum(value, axis_names).""",
)
def a_policy_that_merges_nothing() -> Any:
    def write(net: Any, x: Any) -> Any:
        return fit(net, x)[0], {**net, "seen": net["seen"].set(x.sum())}

    model = {**net(), "seen": sm.State(0.0, reduce=own)}
    return sm.value_and_grad(write, microbatches=2)(model, X)


@mistake(
    sm.StatemeshError,
    "value_and_grad: the loss that shared returns is the same in every microbatch: reduce='sum' would count it once for each. Compute it from the rows, or write reduce='mean', which leaves such a loss as it is.",
)
def a_loss_that_microbatches_share() -> Any:
    def shared(net: Any, x: Any) -> Any:
        return net["w"].value ** 2, net

    return run(shared, X, reduce="sum")


@mistake(
    sm.StatemeshError,
    "RandomState.rows: inside the microbatches of value_and_grad, a RandomState must come with the model or as a keyword argument. One that the function makes or closes over does not know which rows a microbatch has.",
)
def rows_of_a_state_made_inside() -> Any:
    def draw(net: Any, x: Any) -> Any:
        keys, _ = sm.RandomState(jax.random.key(0)).rows(len(x))
        return fit(net, x)[0] + jax.random.uniform(keys[0]), net

    return run(draw, X)


@mistake(
    sm.StatemeshError,
    "RandomState.rows: inside the microbatches of value_and_grad, rows cannot be drawn after a key was set, because only the first microbatch knows that key. Set the key before value_and_grad.",
)
def rows_after_a_key_was_set() -> Any:
    def draw(net: Any, x: Any, *, rng: Any) -> Any:
        rng.set(jax.random.fold_in(rng.key, 1)).rows(len(x))
        return fit(net, x)

    step = sm.value_and_grad(draw, microbatches=2)
    return step(net(), X, rng=sm.RandomState(jax.random.key(0)))


@pytest.mark.parametrize(("run", "kind", "text"), CASES)
def test_mistakes(run: Callable[[], Any], kind: type[Exception], text: str) -> None:
    assert_says(run, kind, text)


def test_the_paths_are_those_on_a_mesh_too() -> None:
    def write(net: Any, x: Any) -> Any:
        return fit(net, x)[0], {**net, "seen": net["seen"].set(x.sum())}

    def step(net: Any, x: Any) -> Any:
        return sm.value_and_grad(write, axis_name="x", microbatches=3)(net, x)

    with pytest.raises(sm.DivergedStateError, match=r"net\['seen'\]: State\(float32\[\]\)"):
        sm.shard_map(step, make_mesh("2"), (None, P("x")), P())(net(), X)
