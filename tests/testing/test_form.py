"""What must agree in two results besides the numbers: structure, static values, dtypes and kinds of keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent
from tests.helpers import jnp


X = np.ones(2, np.float32)
NAN = float("nan")
START = "  - f(...)"


class Net(sm.Module):
    w: Any
    act: Any = None
    size: Any = sm.field(static=True, default=0)


class Two(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x: Any, data: Any) -> None:
        self.x, self.data = x, data

    def tree_flatten(self) -> Any:
        return (self.x,), self.data

    @classmethod
    def tree_unflatten(cls, data: Any, kids: Any) -> Any:
        new: Any = cls
        return new(*kids, data)


class Plain:
    """An object without an equality of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Raising:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        return "Raising()"


def scaled(scale: Any, shift: float = 0.0) -> Any:
    return lambda x, y=shift: x * scale + y


def differences(got: Callable[[Any], Any], want: Callable[[Any], Any]) -> list[str]:
    """What is said of a function beside the one that says what it should return."""

    def f(x: Any) -> Any:
        return got(x)

    options: Any = {"meshes": [{"x": 2}], "in_specs": P(), "out_specs": P(), "gradients": False}
    try:
        assert_equivalent(f, (X,), unsharded=want, steps=1, **options)
    except AssertionError as error:
        lines = str(error).splitlines()
        found = [line.removeprefix(START) for line in lines if line.startswith(START)]
        return [line.removesuffix(".") for line in found]
    return []


# Of each result what it is, what it should be, and what is said; nothing if the two agree.
Case = tuple[Callable[[Any], Any], Callable[[Any], Any], str]
STRUCTURES: list[Case] = [
    (lambda x: (x,), lambda x: [x], ": a tuple of 1, should be a list of 1"),
    (lambda x: [x], lambda x: [x, x], ": a list of 1, should be a list of 2"),
    (lambda x: (x, [x, x]), lambda x: (x, x), "[1]: a list of 2, should be float32[2]"),
    (lambda x: {"a": None}, lambda x: {"a": x}, "['a']: None, should be float32[2]"),
    (lambda x: Net(x), lambda x: {"w": x}, ": a Net, should be a dict of 1"),
    (
        lambda x: Net(sm.State(x)),
        lambda x: Net(sm.BatchState(x)),
        ".w: a State, should be a BatchState",
    ),
    (lambda x: Two(x, 2 * x), lambda x: Two(x, 2 * x), ""),
]


def of_states(got: Any, want: Any, said: str) -> Case:
    return lambda x: sm.State(x, **got), lambda x: sm.State(x, **want), said


METADATA: list[Case] = [
    (
        lambda x: {"a": x, "b": x},
        lambda x: {"a": x, "c": x, "d": x},
        ": a dict that has the key 'b' and lacks the keys 'c', 'd', unlike what it should be",
    ),
    (
        lambda x: {"a": x},
        lambda x: {"a": x, "b": x},
        ": a dict that lacks the key 'b', unlike what it should be",
    ),
    of_states({"name": "a"}, {"name": "b"}, ".name: 'a', should be 'b'"),
    of_states({"tag": "a"}, {}, ".tag: frozenset({'a'}), should be frozenset()"),
    of_states({"reduce": "sum"}, {"reduce": "mean"}, ".reduce: 'sum', should be 'mean'"),
    (lambda x: [Net(x, size=1)], lambda x: [Net(x, size=2)], "[0].size: 1, should be 2"),
    (
        lambda x: Node(x, "a"),
        lambda x: Node(x, "b"),
        ": a Node whose static data differ from what they should be",
    ),
]
DTYPES: list[Case] = [
    (
        lambda x: x,
        lambda x: x.astype(jnp.bfloat16),
        ": of dtype float32, should be of bfloat16",
    ),
    (
        lambda x: jnp.asarray(1.0),
        lambda x: jnp.ones(()),
        ": of a weak type (a Python number's), should be of a strong type",
    ),
    (
        lambda x: jnp.ones(()),
        lambda x: jnp.asarray(1.0),
        ": of a strong type, should be of a weak type (a Python number's)",
    ),
    (
        lambda x: jax.random.key(0),
        lambda x: jax.random.key(0, impl="rbg"),
        ": random keys of dtype key<fry>, should be of key<rbg>",
    ),
    (lambda x: jax.random.key(0), lambda x: x, ": key<fry>[], should be float32[2]"),
    (lambda x: jnp.ones(()), lambda x: "text", ": float32[], should be 'text'"),
]


def static(got: Any, want: Any, said: str | None) -> Case:
    """A static leaf of a Module; `None` where the same is said of all."""
    said = f".act: {got!r}, should be {want!r}" if said is None else said
    return lambda x: Net(x, got), lambda x: Net(x, want), said


LEAVES: list[Case] = [
    static("a", "b", None),
    static(1, 2, None),
    static(1, 1.0, None),
    static(1, True, None),
    static(NAN, 0.0, None),
    static(np.float32, np.float16, None),
    static(NAN, NAN, ""),
    static(-0.0, -0.0, ""),
    static(np.array(["a", "b"]), np.array(["a", "b"]), ""),
]
# Whose texts are only whether they differ: they have addresses in them.
DIFFERENT = [
    (jnp.tanh, jnp.sin),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.array(["a"]), np.array(["a", "a"])),
    (scaled(2), scaled(3)),
    (scaled(2), scaled(2, 1.0)),
    (scaled(2), lambda x, y=0.0: x * 2 + y),
    (functools.partial(scaled, 1), functools.partial(scaled, 2)),
    (functools.partial(scaled, 1), functools.partial(scaled, 1, 2)),
    (Plain(1), Plain(2)),
    (object(), Plain(2)),
    # What can be compared in no way is not the same.
    (Plain(iter([1])), Plain(iter([1]))),
]
SAME = [
    (jnp.tanh, jnp.tanh),
    # Functions and objects that every call makes anew.
    (scaled(2), scaled(2)),
    (scaled(np.ones(2)), scaled(np.ones(2))),
    (functools.partial(scaled, 1, shift=2), functools.partial(scaled, 1, shift=2)),
    (Plain(1), Plain(1)),
    (Raising(), Raising()),
]


@pytest.mark.parametrize("cases", [STRUCTURES, METADATA, DTYPES, LEAVES])
def test_every_difference_is_listed_with_its_path(cases: list[Case]) -> None:
    got = lambda x: {f"r{k:02}": case[0](x) for k, case in enumerate(cases)}
    want = lambda x: {f"r{k:02}": case[1](x) for k, case in enumerate(cases)}
    said = [f"['r{k:02}']{case[2]}" for k, case in enumerate(cases) if case[2]]
    assert differences(got, want) == said


@pytest.mark.parametrize(("pairs", "differ"), [(SAME, False), (DIFFERENT, True)])
def test_static_leaves_are_compared_by_what_they_hold(pairs: Any, differ: bool) -> None:
    got = lambda x: {f"r{k:02}": Net(x, pair[0]) for k, pair in enumerate(pairs)}
    want = lambda x: {f"r{k:02}": Net(x, pair[1]) for k, pair in enumerate(pairs)}
    paths = [line.partition(":")[0] for line in differences(got, want)]
    assert paths == [f"['r{k:02}'].act" for k in range(len(pairs)) if differ]


def test_a_function_of_numpy_is_compared_without_dtypes() -> None:
    assert differences(lambda x: x.sum(), lambda x: np.asarray(x).astype(np.float64).sum()) == []
    assert differences(lambda x: x.sum(), lambda x: float(np.asarray(x).sum())) == []
    said = differences(lambda x: jax.random.key(0), lambda x: np.asarray(x))
    assert said == [": key<fry>[], should be float32[2]"]


def test_arrays_of_strings_are_static_in_every_way_to_call() -> None:
    def f(x: Any) -> Any:
        return Net(x, np.array(["a", "b"]))

    assert_equivalent(f, (X,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x"))
