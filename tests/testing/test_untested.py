"""What a check that passed has not tested, and what it is asked to leave out."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import UntestedWarning, assert_equivalent
from tests.helpers import jnp


X = np.ones(4, np.float32)
KEY = jax.random.key(0)
normal = jax.random.normal


def check(fun: Callable[..., Any], *args: Any, **more: Any) -> list[str]:
    """What of a check that passes is not tested. States and keys come first, and rows last."""
    options: dict[str, Any] = {
        # Nothing runs on devices, so that a check costs little.
        "meshes": [AbstractMesh((2,), ("x",))],
        "in_specs": (*[P()] * (len(args) - 1), P("x")),
        "out_specs": (P("x"), P()) if len(args) > 1 else P("x"),
        "gradients": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntestedWarning)
        return list(assert_equivalent(fun, args, **options | more).untested)


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    rng: sm.RandomState
    seen: sm.State


def net() -> Net:
    return Net(
        sm.ParamState(jnp.ones(())),
        sm.BatchState(0.0, reduce="mean", tag="statistics"),
        sm.RandomState(KEY),
        sm.State(0, name="seen"),
    )


def right(net: Net, x: Any) -> Any:
    keys, rng = net.rng.rows(len(x), "x")
    y = x + jax.vmap(normal)(keys)
    return y, net.replace(mean=y.mean(), rng=rng, seen=net.seen.value + 1)


def test_what_needs_no_warning() -> None:
    def read(model: Any, x: Any) -> Any:
        return x * model["w"].value + model["mean"].value, model["w"]

    def written(state: Any, x: Any) -> Any:
        return x, state.set(jnp.maximum(state.value, 1))

    assert check(right, net(), X) == []
    # Without states, there is nothing to feed back.
    assert check(lambda x: x + 1, X) == check(lambda x: x + 1, X, steps=1) == []
    model = {"w": sm.ParamState(1.0), "long": sm.LongTermState(1.0), "mean": sm.BatchState(0.0)}
    assert check(read, {**model, "rng": sm.RandomState(KEY), "key": KEY}, X) == []
    # The first call changes it.
    assert check(written, sm.State(0.0), X) == []


def test_a_key_that_stays_beside_a_count_that_goes_on_needs_none() -> None:
    def noisy(rngs: Any, x: Any) -> Any:
        rows = jax.random.normal(rngs.noise(), (4,))
        return x + rows.reshape(-1, *x.shape)[sm.axis_index("x")], rngs

    def deaf(rngs: Any, x: Any) -> Any:
        key = rngs.noise.key.get_value()
        return x + jax.random.normal(key, ()), rngs

    assert check(noisy, nnx.Rngs(noise=0), X) == []

    def of_two(keys: Any, x: Any) -> Any:
        """Another key that goes on is no count, and neither is a sum."""
        y = x + jax.random.normal(keys["same"], ()) + jax.random.normal(keys["new"], ())
        return y, {**keys, "new": jax.random.split(keys["new"])[0], "sum": keys["sum"] + 1.5}

    assert check(deaf, nnx.Rngs(noise=0), X) == [draws_the_same("args[0].noise.key")]
    two = {"new": jax.random.key(1), "same": KEY, "sum": jnp.float32(0)}
    assert check(of_two, two, X) == [draws_the_same("args[0]['same']")]


def test_a_key_into_which_a_state_that_goes_on_is_folded_needs_none() -> None:
    def noisy(states: Any, x: Any, folded: bool = True) -> Any:
        key, calls = states
        new = jax.random.fold_in(key, calls.value) if folded else key
        return x + jax.random.normal(new, ()), (key, calls.set(calls.value + 1))

    def alike(states: Any, x: Any) -> Any:
        """The count goes on, and nothing is made of it."""
        return noisy(states, x, folded=False)

    states = KEY, sm.State(0)
    assert check(noisy, states, X) == []
    assert check(alike, states, X) == [draws_the_same("args[0][0]")]


# What needs one


def never_changed(path: str, kind: str = "State") -> str:
    return (
        f"{path}: no call changed this {kind}, so that writing it is not tested. If the function writes it, "
        "return the new one; if it only reads it, name it in leave_out, or make it a LongTermState."
    )


def draws_the_same(path: str) -> str:
    return (
        f"{path}: random numbers are drawn from it, and it comes back as it went in, so that every call "
        "draws the same. Return what the draw returns: `key, rng = rng.split()`."
    )


def test_what_no_call_changes_is_named() -> None:
    def forgetful(net: Net, x: Any) -> Any:
        y, new = right(net, x)
        return y, new.replace(seen=net.seen, mean=net.mean.value + 0, rng=net.rng)

    assert check(forgetful, net(), X) == [
        never_changed("args[0].mean", "BatchState"),
        draws_the_same("args[0].rng"),
        never_changed("args[0].seen"),
    ]
    assert check(lambda net, x: (right(net, x)[0], None), net(), X) == [
        "args[0].rng: random numbers are drawn from this RandomState, and the next call does not get the new "
        "one, so that every call draws the same. Return what the draw returns: `key, rng = rng.split()`."
    ]


def test_where_nothing_is_compared_or_fed_back() -> None:
    text = (
        "Every mesh has one device, so nothing is compared between shards. Give a mesh of several, such as "
        'meshes=[{"data": 4}].'
    )
    assert check(lambda x: x + 1, X, meshes=[{"x": 1}, {"x": 1, "y": 1}]) == [text]
    assert check(lambda x: x + 1, X, meshes=[{"x": 1}, {"x": 1, "y": 2}]) == []
    assert check(lambda x: x + 1, X, steps=3) == [
        "steps=3, but nothing that a call returns fits its arguments, so that every call gets the same. Name "
        'what the next call gets, as in fed_back={"args[0]": "[1]"}, or give steps=1.'
    ]


def test_the_warning_is_a_user_warning() -> None:
    with pytest.warns(UntestedWarning, match="no call changed this State"):
        assert_equivalent(
            lambda state, x: (x, state),
            (sm.State(0.0), X),
            meshes=[{"x": 2}],
            in_specs=(None, P("x")),
            out_specs=(P("x"), None),
        )
    assert issubclass(UntestedWarning, UserWarning)


# From what is drawn


def exchanged(a: Any, b: Any) -> Any:
    """A loop that hands keys on before it draws."""

    def body(carry: Any, _: Any) -> Any:
        a, b, c = carry
        return (a, a, b), normal(c)

    return jax.lax.scan(body, (a, b, b), length=3)[1].sum()


def draw(k: dict[str, Any]) -> Any:
    zero: Any = lambda key: 0.0
    jax.random.split(k["split"])
    body: Any = lambda s: (s[0] + 1, s[1] + normal(s[2]), s[2])
    unused: Any = lambda s: (s[0] + 1, s[1], s[2])

    def loop(body: Any, key: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < 2, body, (0, 0.0, key))[1]

    drawn: list[Any] = [
        normal(k["alone"]),
        jax.jit(lambda key: jax.vmap(lambda y: y + normal(key))(jnp.ones(2)))(k["jit"]).sum(),
        normal(jax.random.fold_in(k["fold"], 3)),
        jax.lax.cond(jnp.ones(()) > 0, normal, zero, k["cond"]),
        exchanged(k["scan a"], k["scan b"]),
        loop(body, k["while"]),
        loop(unused, k["carried"]),
    ]
    return sum(drawn)


@pytest.mark.slow
def test_every_draw_is_found() -> None:
    """From keys, in calls, branches and loops. One that is split, or carried along, is not drawn from."""
    names = ["alone", "jit", "fold", "cond", "scan a", "scan b", "while"]
    keys = {name: jax.random.key(k) for k, name in enumerate([*names, "split", "carried"])}
    said = check(lambda keys, x: (x + draw(keys), keys), keys, X)
    assert said[:-1] == [draws_the_same(f"args[0]['{name}']") for name in sorted(names)]
    assert said[-1].endswith("its condition was never false, so that it is not tested.")


# What is left out


def only_on_shards(net: Net, x: Any) -> Any:
    """Wrong on two shards in every result but the parameter."""
    size = jax.lax.axis_size("x")
    rng = sm.RandomState(jax.random.key(size))
    return x * size, net.replace(mean=net.mean.value + size, rng=rng, seen=net.seen.value + size)


PATHS = {"y": "[0]", "mean": "[1].mean", "rng": "[1].rng", "seen": "[1].seen"}


@pytest.mark.parametrize(
    ("leave_out", "names"),
    [
        (None, ""),
        (False, ""),
        ((), ""),
        (sm.filters.Nothing(), ""),
        (sm.BatchState, "mean"),
        ("statistics", "mean"),
        (..., "mean rng seen"),
        ("[1].mean", "mean"),
        ("only_on_shards(...)[1].mean", "mean"),
        ("[1]", "mean rng seen"),
        ("[0]", "y"),
        (["[0]", sm.BatchState, "[1].rng.value"], "y mean rng"),
        (lambda path, state: state.name == "seen", "seen"),
        (sm.filters.Where(lambda result: result[1].mean), "mean"),
        (sm.filters.Where(lambda model: model.mean), "mean"),
        (sm.filters.PathContains("rng"), "rng"),
        (["[0]", "[1]"], "y mean rng seen"),
    ],
)
def test_what_is_left_out_is_not_compared(leave_out: Any, names: str) -> None:
    try:
        check(only_on_shards, net(), X, leave_out=leave_out, steps=1)
        text = ""
    except AssertionError as error:
        text = str(error)
    accused = {name for name, path in PATHS.items() if f"only_on_shards(...){path}" in text}
    assert accused == set(PATHS) - set(names.split())


@pytest.mark.parametrize("leave_out", ["[2]", "[1].men", "statistic", sm.HiddenState])
def test_names_of_nothing_are_refused(leave_out: Any) -> None:
    with pytest.raises(sm.StructureError) as raised:
        check(right, net(), X, leave_out=leave_out)
    assert str(raised.value) == (
        f"leave_out: {leave_out!r} names nothing in the result. The states are right(...)[1].w, "
        "right(...)[1].mean, right(...)[1].rng, right(...)[1].seen."
    )


def too_large(x: Any) -> Any:
    return x > 10


def too_small(x: Any) -> Any:
    """It is not so of NaN, and of the values of the check only of generic ones."""
    return jax.lax.psum(x.sum(), "x") < 4


@pytest.mark.parametrize(("bad", "values"), [(too_large, "large"), (too_small, "generic")])
def test_calls_that_raise_an_error_by_themselves_are_named(bad: Any, values: str) -> None:
    def limited(seen: Any, x: Any) -> Any:
        return eqx.error_if(x, bad(x), "bad numbers"), seen.set(seen.value + 1)

    (line,) = check(limited, sm.State(0), X)
    assert line.startswith(f"The function raises an error on mesh x=2 with {values} values, on one")
    assert "bad numbers" in line
    # The values of the caller are not left out.
    with pytest.raises(Exception, match="bad numbers"):
        check(limited, sm.State(0), 20 * X if bad is too_large else X / 2)


def test_nan_is_not_compared_where_the_same_values_without_it_raise() -> None:
    def limited(x: Any) -> Any:
        return eqx.error_if(x, too_small(x), "bad numbers")

    mesh = AbstractMesh((2,), ("x",))
    with pytest.warns(UntestedWarning, match="with generic values, on one device too"):
        checked = assert_equivalent(
            limited, (X,), meshes=[mesh], in_specs=P("x"), out_specs=P("x"), gradients=False
        )
    assert checked.agreed == ("on mesh x=2", "on mesh x=2 with large values")


def test_an_error_that_one_device_does_not_raise_is_raised() -> None:
    def limited(x: Any) -> Any:
        largest = 10 if jax.lax.axis_size("x") > 1 else 1e6
        return eqx.error_if(x, x > largest, "bad numbers")

    with pytest.raises(Exception, match="bad numbers"):
        check(limited, X)
