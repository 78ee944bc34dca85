"""Every mistake with microbatches that is refused, with its exact text."""

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


def uneven_rows() -> Any:
    step = sm.value_and_grad(fit, microbatches=4)
    return step(net(), {"a": X, "b": X[:4]}, jnp.arange(9))


def writes_without_a_policy() -> Any:
    def write(net: Any, x: Any) -> Any:
        new = {"seen": net["seen"].set(x.sum()), "table": x.sum(0)}
        return fit(net, x)[0], {**net, **new}

    return run(write, X)


def own(old: Any, new: Any, axis_names: Any) -> Any:
    return new


def a_policy_that_merges_nothing() -> Any:
    def write(net: Any, x: Any) -> Any:
        return fit(net, x)[0], {**net, "seen": net["seen"].set(x.sum())}

    model = {**net(), "seen": sm.State(0.0, reduce=own)}
    return sm.value_and_grad(write, microbatches=2)(model, X)


def a_loss_that_microbatches_share() -> Any:
    def shared(net: Any, x: Any) -> Any:
        return net["w"].value ** 2, net

    return run(shared, X, reduce="sum")


def rows_of_a_state_made_inside() -> Any:
    def draw(net: Any, x: Any) -> Any:
        keys, _ = sm.RandomState(jax.random.key(0)).rows(len(x))
        return fit(net, x)[0] + jax.random.uniform(keys[0]), net

    return run(draw, X)


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


MISTAKES: Mistakes = {
    "no microbatches": lambda: sm.value_and_grad(fit, microbatches=0),
    "microbatches that are no int": lambda: inspect.unwrap(sm.value_and_grad)(
        fit, microbatches=2.0
    ),
    "uneven rows": uneven_rows,
    "arguments without rows": lambda: run(fit, X, sm.RandomState(jax.random.key(0))),
    "a number": lambda: run(fit, X, 0.5),
    "microbatches inside microbatches": lambda: run(lambda net, x: run(fit, x)[0], X),
    "writes without a policy": writes_without_a_policy,
    "a policy that merges nothing": a_policy_that_merges_nothing,
    "a loss that microbatches share": a_loss_that_microbatches_share,
    "rows of a state made inside": rows_of_a_state_made_inside,
    "rows after a key was set": rows_after_a_key_was_set,
}
