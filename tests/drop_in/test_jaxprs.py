"""Under an outer trace a mapped call leaves the jaxpr that `jax.shard_map` leaves."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .drop_in_cases import CASES
from .helpers import make_mesh


jnp: Any = jax.numpy
Map = Callable[..., Any]


def recorded(mapped: Map, around: Map, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The jaxpr of a call inside a transformation, or the class of the exception that JAX raises."""
    arrays, others = eqx.partition((args, kwargs), eqx.is_array)

    def call(*leaves: Any) -> Any:
        args, kwargs = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), others)
        return mapped(*args, **kwargs)

    try:
        return str(jax.make_jaxpr(around(call))(*jax.tree.leaves(arrays)))
    except (ValueError, NotImplementedError) as error:
        assert around in (pulled_back, lanes)
        return (ValueError if isinstance(error, sm.StatemeshError) else type(error)).__name__


def pulled_back(fun: Map) -> Map:
    def call(*args: Any) -> Any:
        out, pull = jax.vjp(fun, *args)
        return pull(jax.tree.map(jnp.ones_like, out))

    return call


def lanes(fun: Map) -> Map:
    def call(*args: Any) -> Any:
        return jax.vmap(fun)(*(jnp.stack([x, x]) for x in args))

    return call


AROUND: dict[str, Map] = {
    "nothing": lambda fun: fun,
    "jit": jax.jit,
    "vjp": pulled_back,
    "vmap": lanes,
}


def comparing(
    mine: Map, theirs: Map, arounds: list[Map], found: list[tuple[str, str]], *before: Any
) -> Map:
    """A `jax.shard_map` that notes two jaxprs for each call and transformation: those of the two maps.

    Both maps get the arguments `before` and then those of the call.
    """

    def mapping(fun: Any = None, *args: Any, **options: Any) -> Any:
        if fun is None:
            return functools.partial(mapping, *args, **options)
        pairs = [[made(fun, *args, **options) for made in (mine, theirs)] for _ in arounds]
        run = jax.shard_map(fun, *args, **options)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            for around, pair in zip(arounds, pairs, strict=True):
                one, other = (recorded(mapped, around, (*before, *args), kwargs) for mapped in pair)
                found.append((one, other))
            return run(*args, **kwargs)

        return call

    return mapping


@pytest.mark.parametrize("name", CASES)
def test_the_jaxpr_is_that_of_jax(name: str) -> None:
    found: list[tuple[str, str]] = []
    CASES[name](comparing(sm.shard_map, jax.shard_map, [*AROUND.values()], found))
    for mine, theirs in found:
        assert mine == theirs
    assert found


def test_what_a_model_gives_back_untouched_is_no_output() -> None:
    def step(model: Any, x: Any) -> Any:
        return x * model["w"], {**model, "count": model["count"].set(model["count"].value + 1)}

    specs = (P(), P("x")), (P("x"), P())
    mapped = sm.shard_map(step, make_mesh(), *specs)
    model = {"w": jnp.ones(3), "count": sm.State(0.0), "idle": sm.State(jnp.ones(2))}
    eqn: Any
    (eqn,) = jax.make_jaxpr(mapped)(model, jnp.ones((8, 3))).eqns
    assert [v.aval.shape for v in eqn.outvars] == [(8, 3), ()]


def with_a_state(fun: Map, **options: Any) -> Map:
    """A map with a state that counts by one; its value is an argument and a result."""

    def step(count: sm.State, *args: Any) -> Any:
        return fun(*args), count.set(count.value + 1)

    def call(count: Any, *args: Any) -> Any:
        mapped = sm.shard_map(step, **with_one_more(options, len(args)))
        result, state = mapped(sm.State(count), *args)
        return result, state.value

    return call


def with_an_array(fun: Map, **options: Any) -> Map:
    """The same map by hand."""

    def step(count: Any, *args: Any) -> Any:
        return fun(*args), count + 1

    def call(count: Any, *args: Any) -> Any:
        return jax.shard_map(step, **with_one_more(options, len(args)))(count, *args)

    return call


def with_one_more(options: dict[str, Any], count: int) -> dict[str, Any]:
    """The options for a map with an additional first argument and an additional last result."""
    options = {**options, "out_specs": (options["out_specs"], P())}
    if "in_specs" in options:
        given = options["in_specs"]
        options["in_specs"] = (P(), *(given if isinstance(given, tuple) else [given] * count))
    return options


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_state_adds_an_input_and_an_output(name: str) -> None:
    found: list[tuple[str, str]] = []
    arounds = [AROUND["nothing"], AROUND["vjp"]]
    CASES[name](comparing(with_a_state, with_an_array, arounds, found, jnp.float32(0)))
    for mine, theirs in found:
        assert mine == theirs
    assert found
