"""What a check that passed has not tested, and what it is asked to leave out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing._emulate._sources import drawn_arguments
from statemesh.testing._equivalent._feedback import find
from statemesh.testing._equivalent._untested import UntestedWarning, left_out, untested

from .helpers import make_mesh


jnp: Any = jax.numpy
X = np.ones(3, np.float32)
MESHES: Any = [{"x": 1}, {"x": 2}]


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    rng: sm.RandomState
    seen: sm.State


def net() -> Net:
    return Net(
        sm.ParamState(jnp.ones(3)),
        sm.BatchState(jnp.zeros(3), reduce="mean", tag="statistics"),
        sm.RandomState(jax.random.key(0)),
        sm.State(0, name="seen"),
    )


def right(net: Net, x: Any) -> Any:
    key, rng = net.rng.split()
    y = x + jax.random.normal(key, x.shape)
    return y, net.replace(mean=y, rng=rng, seen=net.seen.value + 1)


def drawn(fun: Callable[..., Any], *args: Any) -> frozenset[int]:
    return drawn_arguments(jax.make_jaxpr(fun)(*args))


def warned(fun: Callable[..., Any], *args: Any, **more: Any) -> list[str]:
    result = fun(*args)
    feedback = find(args, {}, result)
    next_args, _ = feedback.apply(args, {}, result)
    calls: Any = [((args, {}), result), ((next_args, {}), fun(*next_args))]
    more = {"sizes": MESHES, "drawn": drawn(fun, *args), **more}
    return untested(calls, feedback, **more)


# What needs no warning


def test_ordinary_functions() -> None:
    assert warned(right, net(), X) == []
    assert warned(right, net(), X, steps=3) == []
    # Inference reads everything and returns nothing of it.
    assert warned(lambda net, x: (x - net.mean.value) * net.w.value, net(), X) == []
    assert warned(lambda x: x + 1, X) == []
    assert warned(lambda x: x + 1, X, steps=1) == []


def test_parameters_are_read_only() -> None:
    model = (sm.ParamState(X), sm.LongTermState(X))
    assert warned(lambda model, x: (x, model), model, X) == []


def test_random_state_that_is_not_drawn_from() -> None:
    assert warned(lambda rng, x: (x, rng), sm.RandomState(jax.random.key(0)), X) == []
    assert warned(lambda rng, x: x, sm.RandomState(jax.random.key(0)), X) == []


def test_bare_key_that_the_caller_makes_anew() -> None:
    assert warned(lambda key, x: x + jax.random.normal(key), jax.random.key(0), X) == []


def test_state_that_some_call_changes() -> None:
    def second(seen: Any) -> Any:
        return seen.set(jnp.maximum(seen.value, 1))

    assert warned(second, sm.State(1.0)) != []
    assert warned(second, sm.State(0.0)) == []


def test_some_meshes_of_one_device() -> None:
    assert warned(right, net(), X, sizes=[{"x": 1}, {"x": 1, "y": 2}]) == []


# What needs one


def test_state_that_no_call_changes() -> None:
    def forgetful(net: Net, x: Any) -> Any:
        y, new = right(net, x)
        return y, new.replace(seen=net.seen, mean=net.mean)

    assert warned(forgetful, net(), X) == [
        "args[0].mean: no call changed this BatchState, so that writing it is not tested. If the function "
        "writes it, return the new one; if it only reads it, name it in leave_out, or make it a "
        "LongTermState.",
        "args[0].seen: no call changed this State, so that writing it is not tested. If the function writes "
        "it, return the new one; if it only reads it, name it in leave_out, or make it a LongTermState.",
    ]


def test_equal_values_in_a_new_state_are_no_change() -> None:
    for value in (1.0, np.nan, True):
        assert (
            len(warned(lambda s: s.set(jnp.asarray(s.value + 0, s.value.dtype)), sm.State(value)))
            == 1
        )


def test_random_state_that_comes_back_as_it_went_in() -> None:
    assert warned(
        lambda net, x: (right(net, x)[0], right(net, x)[1].replace(rng=net.rng)), net(), X
    ) == [
        "args[0].rng: random numbers are drawn from it, and it comes back as it went in, so that every call "
        "draws the same. Return what the draw returns: `key, rng = rng.split()`."
    ]
    assert len(warned(lambda d: (jax.random.normal(d["k"]), d), {"k": jax.random.key(0)})) == 1


def test_random_state_that_does_not_come_back() -> None:
    assert warned(lambda net, x: right(net, x)[0], net(), X) == [
        "args[0].rng: random numbers are drawn from this RandomState, and the next call does not get the new "
        "one, so that every call draws the same. Return what the draw returns: `key, rng = rng.split()`."
    ]


def test_meshes_of_one_device() -> None:
    assert warned(right, net(), X, sizes=[{"x": 1}, {"x": 1, "y": 1}]) == [
        "Every mesh has one device, so nothing is compared between shards. Give a mesh of several, such as "
        'meshes=[{"data": 4}].'
    ]


def test_steps_without_anything_to_feed_back() -> None:
    assert warned(lambda x: x + 1, X, steps=3) == [
        "steps=3, but nothing that a call returns fits its arguments, so that every call gets the same. Name "
        'what the next call gets, as in fed_back={"args[0]": "[1]"}, or give steps=1.'
    ]


def test_the_warning_is_a_user_warning() -> None:
    assert issubclass(UntestedWarning, UserWarning)


# From what is drawn


def test_keys_that_are_drawn_from() -> None:
    one, two, n = jax.random.key(0), jax.random.key(1), jnp.ones(3)
    normal = jax.random.normal
    assert drawn(lambda a, b, x: x + normal(b), one, two, n) == {1}
    assert drawn(lambda a, b, x: (jax.random.split(a), x), one, two, n) == frozenset()
    assert drawn(lambda a, b: normal(jax.random.fold_in(a, normal(b).astype(int))), one, two) == {
        0,
        1,
    }
    nested = jax.jit(lambda a, b, x: jax.vmap(lambda y: y + normal(a))(x))
    assert drawn(nested, one, two, n) == {0}
    zero: Any = lambda key: 0.0
    branch = lambda a, b, x: jax.lax.cond(x[0] > 0, normal, zero, b)
    assert drawn(branch, one, two, n) == {1}


def test_keys_on_a_mesh() -> None:
    def fun(one: Any, two: Any, x: Any) -> Any:
        keys, two = two.rows(len(x), "x")
        return x + jax.vmap(jax.random.normal)(keys), one, two

    mapped = sm.shard_map(fun, make_mesh("2"), (None, None, P("x")), (P("x"), P(), P()))
    one, two = sm.RandomState(jax.random.key(0)), sm.RandomState(jax.random.key(1))
    assert drawn(mapped, one, two, np.ones(4)) == {1}


def test_keys_in_loops() -> None:
    one, two = jax.random.key(0), jax.random.key(1)

    def scanned(a: Any, b: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            a, b, c = carry
            return (a, a, b), jax.random.normal(c)

        return jax.lax.scan(body, (a, b, b), length=3)

    assert drawn(scanned, one, two) == {0, 1}
    assert drawn(lambda a, b: scanned(b, b), one, two) == {1}
    more: Any = lambda s: s + jax.random.normal(one)
    assert drawn(lambda a, b: jax.lax.while_loop(lambda s: s < 1, more, 0.0), one, two) == set()
    more = lambda s: (s[0] + jax.random.normal(s[1]), s[1])
    assert drawn(lambda a: jax.lax.while_loop(lambda s: s[0] < 1, more, (0.0, a)), one) == {0}


# What is left out


RESULT = (X, net())


@pytest.mark.parametrize(
    ("leave_out", "numbers"),
    [
        (None, set()),
        (False, set()),
        ((), set()),
        (sm.filters.Nothing(), set()),
        (sm.BatchState, {2}),
        ("statistics", {2}),
        (..., {1, 2, 3, 4}),
        ("[1].mean", {2}),
        ("step(...)[1].mean", {2}),
        ("[1]", {1, 2, 3, 4}),
        ("[0]", {0}),
        (["[0]", sm.BatchState, "[1].rng.value"], {0, 2, 3}),
        (lambda path, state: state.name == "seen", {4}),
        (sm.filters.Where(lambda result: result[1].mean), {2}),
        (sm.filters.Where(lambda model: model.mean), {2}),
        (sm.filters.PathContains("rng"), {3}),
    ],
)
def test_left_out(leave_out: Any, numbers: set[int]) -> None:
    assert left_out("step", RESULT, leave_out) == numbers


def test_whole_result_is_left_out() -> None:
    assert left_out("step", X, "") == {0}
    assert left_out("step", {"a": X, "b": X}, '["b"]') == {1}
    assert left_out("step", X, ...) == frozenset()


@pytest.mark.parametrize("leave_out", ["[2]", "[1].men", "statistic", sm.HiddenState])
def test_names_of_nothing(leave_out: Any) -> None:
    with pytest.raises(sm.StructureError) as raised:
        left_out("step", RESULT, leave_out)
    assert str(raised.value) == (
        f"leave_out: {leave_out!r} names nothing in the result. The states are step(...)[1].w, "
        "step(...)[1].mean, step(...)[1].rng, step(...)[1].seen."
    )
    with pytest.raises(sm.StructureError, match="There are no states in it"):
        left_out("step", X, leave_out)


def test_what_is_no_filter() -> None:
    with pytest.raises(TypeError):
        left_out("step", RESULT, 3)
