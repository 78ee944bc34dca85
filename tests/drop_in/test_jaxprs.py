"""Under an outer trace a mapped call leaves the jaxpr that `jax.shard_map` leaves."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.drop_in.cases import CASES, Map, jnp
from tests.helpers import make_mesh
from tests.scripts.drop_in.stand_in import by_older_names


def pulled_back(fun: Map) -> Map:
    def call(*args: Any) -> Any:
        out, pull = jax.vjp(fun, *args)
        return pull(jax.tree.map(jnp.ones_like, out))

    return call


def lanes(fun: Map) -> Map:
    def call(*args: Any) -> Any:
        return jax.vmap(fun)(*(jnp.stack([x, x]) for x in args))

    return call


def nothing(fun: Map) -> Map:
    return fun


def with_a_count(shard_map: Map, make: Callable[[Any], Any]) -> Map:
    """A map with one more argument and result: a count, which is made a state or stays an array."""

    def mapped(fun: Map, **options: Any) -> Map:
        def step(count: Any, *args: Any) -> Any:
            return fun(*args), jax.tree.map(lambda value: value + 1, count)

        def call(count: Any, *args: Any) -> Any:
            specs = {"out_specs": (options["out_specs"], P())}
            if "in_specs" in options:
                given = options["in_specs"]
                each = given if isinstance(given, tuple) else [given] * len(args)
                specs["in_specs"] = (P(), *each)
            result, count = shard_map(step, **{**options, **specs})(make(count), *args)
            return result, *jax.tree.leaves(count)

        return call

    return mapped


COUNTING = with_a_count(sm.shard_map, sm.State), with_a_count(jax.shard_map, nothing)
# Two maps that leave one jaxpr, the transformation around them, and what both get before their arguments.
PAIRS: list[tuple[Map, Map, Map, tuple[Any, ...]]] = [
    *((sm.shard_map, jax.shard_map, around, ()) for around in (nothing, pulled_back, lanes)),
    (by_older_names, jax.shard_map, nothing, ()),
    # A state adds an input and an output.
    *((*COUNTING, around, (jnp.float32(0),)) for around in (nothing, pulled_back)),
]


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


@pytest.mark.parametrize("name", CASES)
def test_the_jaxpr_is_that_of_jax(name: str) -> None:
    jaxprs: list[tuple[str, str]] = []

    def comparing(fun: Any = None, *args: Any, **options: Any) -> Any:
        """A `jax.shard_map` that notes two jaxprs of each of its calls, for each of the pairs."""
        if fun is None:
            return functools.partial(comparing, *args, **options)
        made = [[make(fun, *args, **options) for make in pair[:2]] for pair in PAIRS]
        run = jax.shard_map(fun, *args, **options)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            for maps, (*_, around, before) in zip(made, PAIRS, strict=True):
                mine, theirs = (recorded(each, around, (*before, *args), kwargs) for each in maps)
                jaxprs.append((mine, theirs))
            return run(*args, **kwargs)

        return call

    CASES[name](comparing)
    for mine, theirs in jaxprs:
        assert mine == theirs
    assert jaxprs


def test_what_a_model_gives_back_untouched_is_no_output() -> None:
    def step(model: Any, x: Any) -> Any:
        return x * model["w"], {**model, "count": model["count"].set(model["count"].value + 1)}

    mapped = sm.shard_map(step, make_mesh(), (P(), P("x")), (P("x"), P()))
    model = {"w": jnp.ones(3), "count": sm.State(0.0), "idle": sm.State(jnp.ones(2))}
    eqn: Any
    (eqn,) = jax.make_jaxpr(mapped)(model, jnp.ones((8, 3))).eqns
    assert [v.aval.shape for v in eqn.outvars] == [(8, 3), ()]
