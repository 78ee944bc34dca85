"""What one call returns that the next call gets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import UntestedWarning
from tests.helpers import slow

from .checked import check, report


# What is returned here was not computed.
pytestmark = pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")

jnp: Any = jax.numpy
X = np.ones((8, 3), np.float32)
W = np.ones(3, np.float32)
N = np.int32(1)
LOSS = np.float32(0)
ROWS, WHOLE = P("x"), P()
# Nothing runs on devices, so that a check costs little.
NO_DEVICES = AbstractMesh((2,), ("x",))


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState


class Slots(NamedTuple):
    count: Any
    mu: Any


class Listed(sm.Module):
    w: Any
    sizes: Any = sm.field(static=True)


def net(width: int = 3) -> Net:
    return Net(sm.ParamState(jnp.zeros(width)), sm.BatchState(jnp.zeros(width), reduce="mean"))


def specs_of(tree: Any) -> Any:
    """Specs that split the matrices of a tree."""

    def spec(x: Any) -> Any:
        if sm.is_state(x) or not eqx.is_array_like(x):
            return None
        return ROWS if np.ndim(x) == 2 else P()

    return jax.tree.map(spec, tree, is_leaf=sm.is_state)


def pairs(
    args: tuple[Any, ...],
    result: Any,
    ins: Any = WHOLE,
    outs: Any = WHOLE,
    kwargs: Mapping[str, Any] | None = None,
    named: Any = None,
) -> dict[str, str]:
    """The path in the result of what replaces each argument, for a function that returns `result`."""

    def step(*args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in jax.tree.leaves((args, kwargs)) if eqx.is_inexact_array(x)]
        # Nothing is added, but so the results are computed.
        nothing = (inputs[0] == -1e30).any() if inputs else False
        return jax.tree.map(lambda x: x + nothing * x if eqx.is_array(x) else x, result)

    # The result is the same for every argument, and split or not.
    options: Any = {"check_vma": False, "unsharded": False, "meshes": [NO_DEVICES]}
    carried: Any = {"kwargs": kwargs, "fed_back": named}
    checked = check(step, *args, in_specs=ins, out_specs=outs, **options, **carried)
    return {argument: path.removeprefix("step(...)") for argument, path in checked.fed_back}


# What one of two shards returns of X.
HALF = X[:4]
CACHE = {"k": X, "v": X}
OLD, NEW = sm.State(0.0, name="old"), sm.State(0.0, name="new")

# The arguments, the result, and what is fed back. Arrays are split, and states are whole.
WHEREVER_IT_STANDS: dict[str, tuple[Any, ...]] = {
    "a cache comes first": ((CACHE, X), ({"k": HALF, "v": HALF}, HALF), {"args[0]": "[0]"}),
    "a loss, then a net and a state": (
        *((net(), {"mu": OLD}, X), (LOSS, (net(), {"mu": OLD}))),
        {"args[0]": "[1][0]", "args[1]": "[1][1]"},
    ),
    "the model is all": ((X, net()), net(), {"args[1]": ""}),
    "in another structure": (({"net": net()}, X), [net(), HALF], {"args[0]['net']": "[0]"}),
    "a model in parts": (
        *((net(),), {"w": net().w, "mean": net().mean}),
        {"args[0].mean": "['mean']", "args[0].w": "['w']"},
    ),
    "static leaves are not compared": (
        *(({"act": jnp.tanh, "w": net()},), ({"act": jnp.sin, "w": net()},), {"args[0]": "[0]"}),
    ),
    "static fields are": (
        *((X, Listed(net(), [1, 2])), Listed(net(), [1, 3]), {"args[1].w": ".w"}),
    ),
    # Equal parts
    "by their names": (
        *(({"ema": net(), "net": net()},), (LOSS, {"net": net(), "ema": net(), "x": HALF})),
        {"args[0]['ema']": "[1]['ema']", "args[0]['net']": "[1]['net']"},
    ),
    "by the names of states": ((OLD, NEW), (NEW, OLD), {"args[0]": "[1]", "args[1]": "[0]"}),
    "without names, in order": (
        *((net(), net()), (LOSS, net(), net())),
        {"args[0]": "[1]", "args[1]": "[2]"},
    ),
    "the first arguments": (({"w": W}, {"w": W}, X), (LOSS, {"w": W}), {"args[0]": "[1]"}),
    # Tuples and lists
    "a tuple for a list": (([W, net()], X), (LOSS, (W, net())), {"args[0]": "[1]"}),
    "a list for a tuple": (
        *(({"p": (W, (W, N))}, X), (LOSS, {"p": [W, [W, N]]}), {"args[0]": "[1]"}),
    ),
    "the same structure first": (*(([W, N], X), (LOSS, [W, N], (W, N)), {"args[0]": "[1]"}),),
    "of several tuples none": (([W, N], X), (LOSS, (W, N), (W, N)), {}),
    # What is not fed back
    "a batch of the same shape": ((X, LOSS), (LOSS, HALF), {}),
    "other shapes": ((net(), X), (HALF, net(4).w), {}),
    "other kinds of numbers": ((sm.State(jax.random.key(0)), X), sm.State(jnp.zeros(())), {}),
    "another dtype is no other kind": (
        *((sm.State(jnp.zeros(3)),), sm.State(jnp.zeros(3, jnp.bfloat16)), {"args[0]": ""}),
    ),
}


# Arguments, result and the specs of both. An array by itself is carried if it is split nowhere, and no
# other fits.
BY_PLACEMENT: dict[str, tuple[Any, ...]] = {
    "split nowhere": ((W, X), (W, LOSS), (P(), ROWS), P(), {"args[0]": "[0]"}),
    "slots": (*((Slots(N, W), X), (LOSS, Slots(N, W)), (P(), ROWS), P(), {"args[0]": "[1]"}),),
    "a dictionary": (
        *(({"p": {"w": W}, "n": N},), {"p": {"w": W}, "n": N, "loss": LOSS}, P(), P()),
        {"args[0]['p']": "['p']", "args[0]['n']": "['n']"},
    ),
    "of two equal ones the last": (
        *(({"w": W}, X), (LOSS, {"w": W}, {"w": W}), (P(), ROWS), P(), {"args[0]": "[2]"}),
    ),
    "split in the result": ((X, X), (HALF, LOSS), (P(), ROWS), (ROWS, P()), {}),
    "one of several arguments": ((W, W, X), (W, LOSS), (P(), P(), ROWS), P(), {}),
    "one of several results": ((W, X), (W, W), (P(), ROWS), P(), {}),
    "a split result is no rival": (
        *((X, W), (HALF, X), (P(), P()), (ROWS, P()), {"args[0]": "[1]"}),
    ),
    "another dtype under one name": (*(({"w": W},), {"w": W.astype(np.int32)}, P(), P(), {}),),
    "placements of structures agree": (
        *((CACHE, X), ({"k": HALF, "v": HALF}, X), (P("x", None), P()), (P(("x",)), ROWS)),
        {"args[0]": "[0]"},
    ),
    "placements of structures differ": (
        *((CACHE, X), (CACHE, HALF), (ROWS, P()), (P(), ROWS), {}),
    ),
}


@pytest.mark.parametrize("form", [*WHEREVER_IT_STANDS, *map(slow, BY_PLACEMENT)])
def test_what_is_carried_is_found_wherever_it_stands(form: str) -> None:
    args, result, *specs, expected = (WHEREVER_IT_STANDS | BY_PLACEMENT)[form]
    ins, outs = specs or (specs_of(args), specs_of(result))
    assert pairs(args, result, ins, outs) == expected


@pytest.mark.slow
def test_keyword_arguments() -> None:
    kwargs = {"model": net(), "train": True}
    assert pairs((X,), (HALF, net()), (ROWS,), (ROWS, None), kwargs) == {"kwargs['model']": "[1]"}
    # They are whole.
    assert pairs((X,), (LOSS, W), ROWS, P(), {"w": W}) == {"kwargs['w']": "[1]"}


# By name


def test_named_pairs_replace_what_would_be_found() -> None:
    assert pairs((W, W), (W, LOSS), named={"args[0]": "[0]"}) == {"args[0]": "[0]"}
    crossed = [("args[1]", "step(...)[0]")]
    assert pairs((net(), net()), (net(), net()), named=crossed) == {"args[1]": "[0]"}
    assert pairs((net(),), net(), named={}) == {}
    inside = pairs((net(),), {"a": net()}, named={"args[0].w": '["a"].w'})
    assert inside == {"args[0].w": "['a'].w"}
    assert pairs((), W, kwargs={"w": W}, named={"kwargs['w']": ""}) == {"kwargs['w']": ""}


MISTAKES: list[tuple[tuple[Any, ...], Any, Any, str]] = [
    (
        *((net(),), net(), {"args[1]": ""}),
        "fed_back: the arguments have no arrays at args[1], but at 5 other paths, such as args[0], "
        "args[0].w, args[0].mean, args[0].w.value.",
    ),
    (
        *((W,), W, {"args[0]": "[1]"}),
        "fed_back: the result has no arrays at step(...)[1], but at 1 other path, such as step(...).",
    ),
    (
        *((W,), (X, net()), {"args[0]": "[0]"}),
        "fed_back: step(...)[0] cannot become args[0], because structures or shapes differ: "
        "float32[8,3], and the argument is float32[3].",
    ),
    (
        *((W,), (X, net()), {"args[0]": "[1]"}),
        "fed_back: step(...)[1] cannot become args[0], because structures or shapes differ: "
        "a Net of float32[3], float32[3], and the argument is float32[3].",
    ),
    (
        *((net(),), (net(), net()), [("args[0]", "[0]"), ("args[0].w", "[1].w")]),
        "fed_back: step(...)[1].w becomes args[0].w, and one of the two is in another pair already. "
        "Name each part once.",
    ),
]


@pytest.mark.parametrize(("args", "result", "named", "text"), MISTAKES)
def test_named_pairs_that_do_not_fit(args: Any, result: Any, named: Any, text: str) -> None:
    with pytest.raises(sm.StructureError) as raised:
        pairs(args, result, named=named)
    assert str(raised.value) == text


# The next call gets it


def count_twice(times: float) -> Callable[..., Any]:
    """A step that is mistaken where `times` is not 1 and something was carried."""

    def step(slots: Any, x: Any, *, total: sm.State) -> Any:
        share = 1 if jax.lax.axis_size("x") == 1 else times
        out = x + total.value * share + slots["mu"]
        return {
            "slots": {"count": slots["count"] + 1, "mu": slots["mu"] + 0.5},
            "rest": [out, total.set(total.value + jax.lax.pmean(x.mean(0), "x"))],
        }

    return step


@pytest.mark.slow
def test_a_mistake_that_only_the_second_call_makes_is_found() -> None:
    slots = {"count": np.int32(0), "mu": np.float32(0)}
    options: Any = {
        "in_specs": (P(), ROWS),
        "out_specs": {"slots": P(), "rest": [ROWS, None]},
        "kwargs": {"total": sm.State(jnp.zeros(3))},
        "steps": None,
    }
    checked = check(count_twice(1.0), slots, X, **options)
    assert checked.fed_back == (
        ("args[0]", "step(...)['slots']"),
        ("kwargs['total']", "step(...)['rest'][1]"),
    )
    text = report(count_twice(2.0), slots, X, **options)
    assert "On mesh x=2, call 2 of 3" in text
    assert text.endswith(
        "From call to call step(...)['slots'] becomes args[0], "
        "step(...)['rest'][1] becomes kwargs['total']."
    )


def test_an_array_that_its_name_and_its_shape_tell_is_fed_back_once() -> None:
    def step(x: Any, mean: Any) -> Any:
        return x - mean, {"mean": 2 * mean}

    options: Any = {"kwargs": {"mean": W}, "out_specs": (ROWS, WHOLE), "meshes": [NO_DEVICES]}
    assert check(step, X, **options).fed_back == (("kwargs['mean']", "step(...)[1]['mean']"),)


def test_a_list_that_several_tuples_could_replace_is_named() -> None:
    def step(carried: Any, x: Any) -> Any:
        new = tuple(a + jax.lax.psum(x.sum(), "x") for a in carried)
        return new, new

    options: Any = {"in_specs": (P(), ROWS), "meshes": [NO_DEVICES], "steps": None}
    with pytest.warns(UntestedWarning, match="every call gets the same") as caught:
        checked = check(step, [W, W[:2]], X, **options)
    assert checked.fed_back == ()
    assert [str(warning.message) for warning in caught] == [
        "args[0]: every call gets the same. step(...)[0] and step(...)[1] could replace it, but for a tuple "
        'in the place of a list. Name what it gets, as in fed_back={"args[0]": "step(...)[1]"}, or nothing: '
        "fed_back={}."
    ]
    named = {"args[0]": "step(...)[1]"}
    checked = check(step, [W, W[:2]], X, **options, fed_back=named)
    assert dict(checked.fed_back) == named
