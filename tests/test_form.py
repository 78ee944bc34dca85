"""What must agree in two results besides the numbers."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import statemesh as sm
from statemesh.testing._equivalent._form import form_differences, same_value


jnp: Any = jax.numpy


class Net(sm.Module):
    w: Any
    act: Any = None
    size: Any = sm.field(static=True, default=0)


class Two(NamedTuple):
    a: Any
    b: Any


def differences(got: Any, want: Any, **more: Any) -> list[str]:
    return form_differences("f(...)", got, want, **more)


def difference(got: Any, want: Any, **more: Any) -> str:
    (line,) = differences(got, want, **more)
    return line.removeprefix("f(...)")


def test_equal_results() -> None:
    def tree() -> Any:
        return {
            "net": Net(sm.State(jnp.ones(2), name="w", tag="a"), jnp.tanh, [1, 2]),
            "statics": (float("nan"), "text", None, np.float32, np.array(["a", "b"]), 1, -0.0),
            "keys": sm.RandomState(jax.random.key(0)),
            "two": Two(jnp.ones(()), 2.0),
        }

    assert differences(tree(), tree()) == []


def test_numbers_and_shapes_are_not_compared() -> None:
    assert differences(jnp.ones(3), jnp.zeros((2, 2))) == []


def test_structures() -> None:
    x = jnp.ones(2)
    assert difference((x,), [x]) == ": a tuple of 1, should be a list of 1"
    assert difference([x], [x, x]) == ": a list of 1, should be a list of 2"
    assert difference((x, [x, x]), (x, x)) == "[1]: a list of 2, should be float32[2]"
    assert difference({"a": None}, {"a": x}) == "['a']: None, should be float32[2]"
    assert difference(Net(x), {"w": x}) == ": a Net, should be a dict of 1"
    assert difference(Net(sm.State(x)), Net(sm.BatchState(x))) == (
        ".w: a State, should be a BatchState"
    )


def test_keys_of_dictionaries() -> None:
    got, want = {"a": 1, "b": 2, 3: 0}, {"a": 1, 3: 0, "c": 2, "d": 3}
    got, want = {str(k): v for k, v in got.items()}, {str(k): v for k, v in want.items()}
    assert difference(got, want) == (
        ": a dict that has the key 'b' and lacks the keys 'c', 'd', unlike what it should be"
    )
    assert difference({"a": 1}, {"a": 1, "b": 2}) == (
        ": a dict that lacks the key 'b', unlike what it should be"
    )
    assert difference({"a": 1, "b": 2}, {"b": 2}) == (
        ": a dict that has the key 'a', unlike what it should be"
    )


def test_metadata() -> None:
    x = jnp.ones(2)
    assert difference(sm.State(x, name="a"), sm.State(x, name="b")) == ".name: 'a', should be 'b'"
    assert differences(sm.State(x, tag="a", reduce="sum"), sm.State(x, reduce="mean")) == [
        "f(...).tag: frozenset({'a'}), should be frozenset()",
        "f(...).reduce: 'sum', should be 'mean'",
    ]
    assert difference([Net(x, size=1)], [Net(x, size=2)]) == "[0].size: 1, should be 2"


def test_metadata_of_other_nodes() -> None:
    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, x: Any, data: Any) -> None:
            self.x, self.data = x, data

        def tree_flatten(self) -> Any:
            return (self.x,), self.data

        @classmethod
        def tree_unflatten(cls, data: Any, kids: Any) -> Any:
            made: Any = cls
            return made(*kids, data)

    make: Any = Node
    assert difference(make(1, "a"), make(1, "b")) == (
        ": a Node whose static data differ from what they should be"
    )


def test_dtypes() -> None:
    one, two = jnp.ones(2), jnp.ones(2, jnp.bfloat16)
    line = ": of dtype float32, should be of bfloat16"
    assert difference(one, two) == line
    assert difference(np.asarray(one), two) == line
    assert difference(one, jax.ShapeDtypeStruct((2,), jnp.bfloat16)) == line
    assert differences(one, two, dtypes=False) == []


def test_weak_types() -> None:
    weak, strong = jnp.asarray(1.0), jnp.ones(())
    assert difference(weak, strong) == (
        ": of a weak type (a Python number's), should be of a strong type"
    )
    assert difference(jax.eval_shape(lambda: strong), weak) == (
        ": of a strong type, should be of a weak type (a Python number's)"
    )
    assert differences(weak, strong, dtypes=False) == []
    assert differences(weak, np.ones((), np.float32)) == []


def test_keys() -> None:
    one, two = jax.random.key(0), jax.random.key(0, impl="rbg")
    for dtypes in (True, False):
        assert difference(one, two, dtypes=dtypes) == (
            ": random keys of dtype key<fry>, should be of key<rbg>"
        )
        assert difference(one, jnp.ones(2), dtypes=dtypes) == ": key<fry>[], should be float32[2]"
    assert differences(one, jax.random.key(1)) == []


def test_numbers_for_arrays() -> None:
    assert difference(jnp.ones(()), 1.0) == ": float32[], should be 1.0"
    assert differences(jnp.ones(()), 1.0, dtypes=False) == []
    assert difference(jnp.ones(()), "text", dtypes=False) == ": float32[], should be 'text'"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (float("nan"), 0.0),
        ("a", "b"),
        (jnp.tanh, jnp.sin),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array(["a"]), np.array(["a", "a"])),
        (np.float32, np.float16),
    ],
)
def test_static_leaves(got: Any, want: Any) -> None:
    assert len(differences((got,), (want,))) == 1


def test_functions_that_every_call_makes_anew() -> None:
    def make(scale: Any, shift: float = 0.0) -> Any:
        return lambda x, y=shift: x * scale + y

    assert same_value(make(2), make(2))
    assert same_value(make(np.ones(2)), make(np.ones(2)))
    assert not same_value(make(2), make(3))
    assert not same_value(make(2), make(2, 1.0))
    assert not same_value(make(2), lambda x, y=0.0: x * 2 + y)
    assert same_value(functools.partial(make, 1, shift=2), functools.partial(make, 1, shift=2))
    assert not same_value(functools.partial(make, 1), functools.partial(make, 2))
    assert not same_value(functools.partial(make, 1), functools.partial(make, 1, 2))


def test_objects_without_equality() -> None:
    assert same_value(Plain(1), Plain(1))
    assert not same_value(Plain(1), Plain(2))
    assert not same_value(object(), Plain(2))
    # What can be compared in no way is not the same.
    assert not same_value(Plain(lambda: 1), Plain(lambda: 1))


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


def test_equality_that_raises_is_a_difference() -> None:
    class Bad:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

    one, two = Bad(), Bad()
    assert same_value(one, one) and not same_value(one, two)


def test_every_difference_is_listed_with_its_path() -> None:
    got = {"a": [jnp.ones(2), "x"], "b": Net(jnp.ones(1), act=1)}
    want = {"a": [jnp.ones(2, int), "y"], "b": Net(jnp.ones(1), act=2)}
    assert differences(got, want) == [
        "f(...)['a'][0]: of dtype float32, should be of int32",
        "f(...)['a'][1]: 'x', should be 'y'",
        "f(...)['b'].act: 1, should be 2",
    ]
