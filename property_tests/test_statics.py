"""Objects that are not arrays change between calls, and every call uses them as they are now."""

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

import statemesh as sm


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")]


@dataclasses.dataclass
class Config:
    value: Any


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    value: Any


@dataclasses.dataclass(slots=True)
class Slots:
    value: Any


class Model(sm.Module):
    state: sm.State
    options: Any = sm.field(static=True)


class Words(dict[str, Any]):
    """A dictionary that JAX takes for a leaf."""


# How an object holds a number: a function that makes it, one that changes it, one that reads it.
Holder = tuple[Callable[[Any], Any], Callable[[Any, Any], None], Callable[[Any], Any]]


def by_attribute(kind: Any) -> Holder:
    return kind, lambda o, v: setattr(o, "value", v), lambda o: o.value


def by_key(kind: Any, key: Any) -> Holder:
    return kind, lambda o, v: o.__setitem__(key, v), lambda o: o[key]


HOLDERS: dict[str, Holder] = {
    "dataclass": by_attribute(Config),
    "hashed": by_attribute(Hashed),
    "slots": by_attribute(Slots),
    "namespace": by_attribute(lambda v: types.SimpleNamespace(value=v)),
    "words": by_key(lambda v: Words(value=v), "value"),
    "deque": by_key(lambda v: collections.deque([v]), 0),
    "objects": by_key(lambda v: np.array([v, None], object), 0),
}
# Objects around that one, each with a function that finds it inside.
AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nothing": (lambda o: o, lambda o: o),
    "tuple": (lambda o: Config((1, o)), lambda o: o.value[1]),
    "dictionary": (lambda o: Slots({"a": [o]}), lambda o: o.value["a"][0]),
    "static field": (lambda o: Model(sm.State(0.0), o), lambda o: o.options),
    "static field of a model in a list": (
        lambda o: [{"a": Model(sm.State(0.0), (1, o))}],
        lambda o: o[0]["a"].options[1],
    ),
}
NUMBERS = [0.0, -0.0, 1, 1.0, True, 2, -3.5]


def on_mesh(kind: AxisType, f: Callable[..., Any]) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(kind,))
    return sm.shard_map(f, mesh, (None, PartitionSpec("x")), (PartitionSpec("x"), None))


MAPS: dict[str, Callable[[Any], Any]] = {
    "shard_map": lambda f: on_mesh(AxisType.Explicit, f),
    "shard_map, Auto axes": lambda f: on_mesh(AxisType.Auto, f),
    "vmap2": lambda f: sm.vmap2(f, in_axes=(None, 0), out_axes=(0, None)),
    "pmap2": lambda f: sm.pmap2(f, in_axes=(None, 0), out_axes=(0, None)),
}
# Before a call: a number is written, perhaps to a copy, and `x` has so many columns.
Change = tuple[Any, bool, int]
changes = st.tuples(st.sampled_from(NUMBERS), st.booleans(), st.sampled_from([1, 2]))


@given(
    st.sampled_from(list(HOLDERS)),
    st.sampled_from(list(AROUND)),
    st.sampled_from(list(MAPS)),
    st.lists(changes, min_size=2, max_size=5),
)
def test_a_call_computes_with_what_is_there_now(
    held: str, around: str, how: str, steps: list[Change]
) -> None:
    # As under `jax.jit`: a static field that can be hashed must not change. An array in Modules is no static.
    assume(not (held in ("hashed", "objects") and "static field" in around))
    make, write, read = HOLDERS[held]
    wrap, unwrap = AROUND[around]
    traces: list[None] = []

    def scaled(config: Any, x: Any) -> Any:
        traces.append(None)
        return x * read(unwrap(config)), config

    call = MAPS[how](scaled)
    config = wrap(make(steps[0][0]))
    seen: set[tuple[str, int]] = set()
    for number, copied, columns in steps:
        if copied:
            # The original must differ from the copy from now on.
            write(unwrap(config), 100)
            config = copy.deepcopy(config)
        write(unwrap(config), number)
        x = np.arange(1, 2 * columns + 1, dtype=np.int32).reshape(2, columns)
        out, same = call(config, x)
        assert unwrap(same) is unwrap(config)
        expected = x * np.float32(number) if isinstance(number, float) else x * number
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))
        assert np.issubdtype(out.dtype, np.floating) == isinstance(number, float)
        seen.add((f"{type(number).__name__} {number!r}", columns))
    can_be_compared = held == "hashed" and around == "nothing"
    assert len(traces) == (len(seen) if can_be_compared else len(steps))
