"""The check feeds back what a function returns, and compares the copies that devices hold."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import UntestedWarning

from .checked import check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
ROWS, WHOLE = P("x"), P()


class Net(sm.Module):
    seen: sm.State


def net() -> Net:
    return Net(sm.State(jnp.zeros(2)))


# A mistake that only the second call shows


def moved(seen: Any, x: Any, times: float) -> Any:
    """Rows, and the new value. Mistaken where `times` is not 1 and the old value is not 0."""
    out = x + seen * (1 if lax.axis_size("x") == 1 else times)
    return out, seen + lax.pmean(x.mean(0), "x")


def cache_first(times: float) -> Callable[..., Any]:
    def decode(cache: Any, x: Any) -> Any:
        out, seen = moved(cache["seen"].value, x, times)
        return {"seen": cache["seen"].set(seen)}, out

    return decode


def model_and_slots(times: float) -> Callable[..., Any]:
    def train(net: Net, slots: Any, x: Any) -> Any:
        out, seen = moved(net.seen.value, x, times)
        return out, (net.replace(seen=seen), {"count": slots["count"] + 1})

    return train


def dictionary(times: float) -> Callable[..., Any]:
    def run(net: Net, x: Any) -> Any:
        out, seen = moved(net.seen.value, x, times)
        return {"net": net.replace(seen=seen), "rows": out}

    return run


def model_last(times: float) -> Callable[..., Any]:
    def run(x: Any, net: Net) -> Any:
        out, seen = moved(net.seen.value, x, times)
        return out, net.replace(seen=seen)

    return run


def array(times: float) -> Callable[..., Any]:
    return lambda seen, x: moved(seen, x, times)


def keyword(times: float) -> Callable[..., Any]:
    def run(x: Any, *, net: Net) -> Any:
        out, seen = moved(net.seen.value, x, times)
        return net.replace(seen=seen), out

    return run


SLOTS = {"count": np.int32(0)}
FORMS: dict[str, Any] = {
    "cache, out": (
        *(cache_first, ({"seen": sm.State(jnp.zeros(2))}, X), (None, ROWS), (WHOLE, ROWS)),
        *({}, ("args[0]", "[0]")),
    ),
    "loss, (net, slots)": (
        *(model_and_slots, (net(), SLOTS, X), (None, None, ROWS), (ROWS, WHOLE)),
        *({}, ("args[0]", "[1][0]")),
    ),
    "a dictionary": (
        *(dictionary, (net(), X), (None, ROWS), {"net": WHOLE, "rows": ROWS}),
        *({}, ("args[0]", "['net']")),
    ),
    "x, model": (
        *(model_last, (X, net()), (ROWS, None), (ROWS, WHOLE)),
        *({}, ("args[1]", "[1]")),
    ),
    "an array that is named": (
        *(array, (np.zeros(2, np.float32), X), (None, ROWS), (ROWS, WHOLE)),
        *({"fed_back": {"args[0]": "[1]"}}, ("args[0]", "[1]")),
    ),
    "a keyword argument": (
        *(keyword, (X,), ROWS, (WHOLE, ROWS)),
        *({"kwargs": {"net": net()}}, ("kwargs['net']", "[0]")),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_carried_is_found_wherever_it_stands(form: str) -> None:
    make, args, in_specs, out_specs, more, pair = FORMS[form]
    given = {"in_specs": in_specs, "out_specs": out_specs, "steps": None, **more}
    text = report(make(2.0), *args, **given)
    assert "On mesh x=2, call 2 of 3" in text


@pytest.mark.parametrize("form", ["loss, (net, slots)", "a keyword argument"])
def test_a_check_that_passes_says_what_was_fed_back(form: str) -> None:
    make, args, in_specs, out_specs, more, pair = FORMS[form]
    given = {"in_specs": in_specs, "out_specs": out_specs, "steps": None, **more}
    found = {at: of.rpartition("(...)")[2] for at, of in check(make(1.0), *args, **given).fed_back}
    assert found[pair[0]] == pair[1]


# Copies


def numbered(x: Any) -> Any:
    return lax.psum(x.sum(0), "x") + lax.axis_index("x")


def test_copies_that_differ_are_found_on_every_mesh() -> None:
    text = report(numbered, X, meshes=[{"x": 4}, {"x": 1}], check_vma=False)
    assert "On mesh x=4" in text
    assert (
        "is one copy for all shards along 'x', but differs by 3 at [0] between x=0 and x=3" in text
    )
    assert "Reduce it (jax.lax.psum, pmean)" in text


@pytest.mark.slow
def test_copies_that_differ_by_little_are_found() -> None:
    def nearly(x: Any) -> Any:
        return lax.psum(x.sum(0), "x") * (1 + 1e-3 * lax.axis_index("x"))

    text = report(nearly, jnp.asarray(X, jnp.bfloat16), meshes=[{"x": 2}], check_vma=False)
    assert "is one copy for all shards along 'x', but differs by" in text


@pytest.mark.slow
def test_copies_that_differ_by_rounding_pass() -> None:
    def summed(x: Any) -> Any:
        rows = lax.all_gather(x, "x", tiled=True)
        order = (jnp.arange(len(rows)) + lax.axis_index("x")) % len(rows)
        return jnp.cumsum(rows[order], axis=0)[-1]

    check(summed, X, check_vma=False)


# What no call tested


def test_a_state_that_no_call_changes_is_named() -> None:
    def forgetful(net: Net, x: Any) -> Any:
        return lax.pmean(x.mean(0), "x"), net

    with pytest.warns(UntestedWarning, match=r"args\[0\].seen: no call changed this State"):
        checked = check(forgetful, net(), X, in_specs=(None, ROWS), steps=None)
    assert len(checked.untested) == 1


@pytest.mark.slow
def test_a_key_that_does_not_come_back_is_named() -> None:
    def noisy(rng: sm.RandomState, x: Any) -> Any:
        keys, _ = rng.rows(len(x), "x")
        return x + jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)

    rng = sm.RandomState(jax.random.key(0))
    with pytest.warns(UntestedWarning, match="random numbers are drawn from this RandomState"):
        check(noisy, rng, X, in_specs=(None, ROWS), out_specs=ROWS)


@pytest.mark.slow
def test_a_mesh_of_one_device_is_no_test() -> None:
    with pytest.warns(UntestedWarning, match="Every mesh has one device"):
        check(lambda x: x.mean(0), X, meshes=[{"x": 1}], check_vma=False)


def test_several_calls_of_which_none_gets_a_result_are_no_test() -> None:
    with pytest.warns(UntestedWarning, match="nothing that a call returns fits its arguments"):
        check(lambda x: lax.pmean(x.mean(0), "x"), X, steps=2)
