"""Static leaves: compared by their contents at the time of the call, and given back as the caller's own."""

import argparse
import collections
import dataclasses
import enum
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._base._tokens import may_change, token
from statemesh.testing import assert_equivalent, emulate
from tests.helpers import Count, counted, make_mesh


X = np.arange(8, dtype=np.float32)


@dataclasses.dataclass
class Config:
    rate: Any = 1.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: Any = 1.0
    note: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    rate: Any = 1.0


class Slots:
    __slots__ = ("__rate", "never")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rate: Any) -> None:
        self.__rate = rate


class Secret:
    """An object of which pickling keeps nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rate: Any) -> None:
        self.rate = rate
        self.lock = LOCK

    def __getstate__(self) -> Any:
        return {}


class Uncopied(Secret):
    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


class Words(dict[str, Any]):
    pass


class Raises:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")


class Arrays(Raises):
    __hash__ = Raises.__hash__

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


class Color(enum.Enum):
    RED = 1


LOCK = threading.Lock()

MAPS: dict[str, Callable[[Any], Any]] = {
    "shard_map": lambda f: sm.shard_map(f, make_mesh(), (None, P("x")), (P("x"), None)),
    "pmap2": lambda f: sm.pmap2(f, in_axes=(None, 0), out_axes=(0, None)),
    "vmap2": lambda f: sm.vmap2(f, in_axes=(None, 0), out_axes=(0, None)),
}


def scaled(config: Any, x: Any) -> Any:
    return x * config.rate, config


def rated(config: Any, x: Any) -> Any:
    return x * config.rate


def made(how: str) -> tuple[Any, Count]:
    fun, count = counted(scaled)
    return MAPS[how](fun), count


@pytest.mark.parametrize("how", MAPS)
def test_a_changed_object_is_another_program(how: str) -> None:
    call, count = made(how)
    config = Config()
    for rate in (1.0, 5.0, 5.0, 1.0, 5.0):
        config.rate = rate
        np.testing.assert_array_equal(call(config, X)[0], X * rate)
    assert count.times == 2


@pytest.mark.parametrize("how", MAPS)
def test_objects_of_one_content_share_a_program_and_come_back_themselves(how: str) -> None:
    call, count = made(how)
    model = {"w": sm.State(1.0)}
    for _ in range(3):
        config = Config(2.0, model and [{"deep": (1, "a")}])
        assert call(config, X)[1] is config
    assert count.times == 1


@pytest.mark.parametrize("how", MAPS)
def test_a_second_trace_sees_the_object_of_its_own_call(how: str) -> None:
    call, _ = made(how)
    first, second = Config(2.0), Config(2.0)
    call(first, X)
    first.rate = 7.0
    # This is the same program, traced again for another dtype. The object that it was made from now says 7.
    out, same = call(second, X.astype(np.int32))
    np.testing.assert_array_equal(out, X * 2)
    assert same is second


def test_under_transformations_too() -> None:
    call, count = made("shard_map")
    config = Config(2.0)

    def loss(x: Any) -> Any:
        return call(config, x)[0].sum()

    for rate in (2.0, 3.0):
        config.rate = rate
        np.testing.assert_array_equal(jax.grad(loss)(X), np.full(8, rate))
        np.testing.assert_array_equal(jax.jit(lambda x: call(config, x)[0])(X), X * rate)
        np.testing.assert_array_equal(call.unsharded(config, X)[0], X * rate)
    for rate in (2.0, 3.0):
        config.rate = rate
        np.testing.assert_array_equal(emulate(call, config, X)[0], X * rate)
        # This cannot be pickled either.
        unknown = Config(rate, LOCK)
        np.testing.assert_array_equal(emulate(call, unknown, X)[0], X * rate)
        specs: dict[str, Any] = {"in_specs": (None, P("x")), "out_specs": P("x")}
        assert_equivalent(rated, (config, X), meshes=[{"x": 2}], **specs)
    eager = sm.shard_map(scaled, make_mesh(), (None, P("x")), (P("x"), None), jit=False)
    for rate in (2.0, 3.0):
        config.rate = rate
        np.testing.assert_array_equal(eager(config, X)[0], X * rate)


def test_packed_models_beside_an_object_that_changes() -> None:
    class Model(sm.Module):
        config: Any
        count: sm.State

    def step(model: Any, x: Any) -> Any:
        return x * model.config.rate, model.replace(count=model.count.value + 1)

    mesh = make_mesh()
    call = sm.shard_map(step, mesh, (None, P("x")), (P("x"), None))
    config = Config(2.0)
    model = sm.pack(Model(config, sm.State(0)), mesh)
    for rate in (2.0, 3.0):
        config.rate = rate
        out, model = call(model, X)
        np.testing.assert_array_equal(out, X * rate)
        assert model.unpack().config is config
    assert int(model.unpack().count.value) == 2


@pytest.mark.parametrize("kind", [Raises, Arrays])
def test_objects_that_cannot_be_compared_are_told_apart(kind: type) -> None:
    fun, count = counted(lambda x, how: x * 2)
    for call in (
        sm.shard_map(fun, make_mesh(), (P("x"), None), P("x")),
        sm.pmap2(fun, static_broadcasted_argnums=1),
    ):
        one, other = kind(), kind()
        count.times = 0
        for how in (one, other, one, other):
            np.testing.assert_array_equal(call(X, how), X * 2)
        assert count.times == 2


def test_what_is_equal_and_computes_otherwise_is_another_program() -> None:
    call = sm.pmap2(lambda x, how: x / how[0], static_broadcasted_argnums=1)
    assert float(call(X, (0.0,))[1]) == np.inf
    assert float(call(X, (-0.0,))[1]) == -np.inf
    call = sm.shard_map(lambda x, c: x * c.rate, make_mesh(), (P("x"), None), P("x"))
    x = X.astype(np.int32)
    dtypes = [call(x, Frozen(rate)).dtype for rate in (1, 1.0, True, 1)]
    assert dtypes == [np.int32, np.float32, np.int32, np.int32]


def test_an_object_that_changes_with_its_hash() -> None:
    call, _ = made("shard_map")
    hashed = Hashed(2.0)
    for rate in (2.0, 3.0, 2.0):
        hashed.rate = rate
        np.testing.assert_array_equal(call(hashed, X)[0], X * rate)


def test_what_cannot_be_compared_by_anything_is_refused() -> None:
    call = MAPS["shard_map"](scaled)
    view = memoryview(bytearray(b"ab"))
    with pytest.raises(sm.StructureError) as caught:
        call(Config(view), X)
    text = str(caught.value).replace(repr(view), "<view>")
    assert text == (
        "scaled: these arguments are not arrays, and can be neither hashed nor compared by their "
        "contents, so a change in them would go unseen:\n"
        "  - config: Config(rate=<view>, inner=None) of type Config, which holds <view> of type "
        "memoryview\n"
        "Pass the values that the function uses, as arrays or in a @dataclass(frozen=True)."
    )


def test_a_lowered_call_is_for_the_content_that_it_was_lowered_with() -> None:
    config = Config(2.0)
    compiled = MAPS["shard_map"](scaled).lower(config, X).compile()
    config.rate = 3.0
    with pytest.raises(TypeError) as caught:
        compiled(config, X)
    assert str(caught.value) == (
        "scaled was called with other values of arguments that are not arrays than it was compiled for:\n"
        "  - compiled for Config(rate=2.0, inner=None), called with Config(rate=3.0, inner=None)\n"
        "Lower it for these arguments, or call the function itself, which compiles anew."
    )
    again = Config(2.0)
    out, same = compiled(again, X)
    np.testing.assert_array_equal(out, X * 2)
    assert same is again


WAYS: dict[str, Callable[[Any], Any]] = {
    "dataclass": Config,
    "nested": lambda v: Config([Config((1, v))], {"k": [v]}),
    "frozen that holds a list": lambda v: Frozen([v]),
    "frozen": Frozen,
    "slots": Slots,
    "pickled without": Secret,
    "never pickled": Uncopied,
    "namespace": lambda v: types.SimpleNamespace(a=v),
    "arguments": lambda v: argparse.Namespace(a=v),
    "mapping": lambda v: types.MappingProxyType({"a": v}),
    "subclass of dict": lambda v: Words(a=v),
    "deque": lambda v: collections.deque([v]),
    "set": lambda v: Config({v}),
    "NumPy": lambda v: Config(np.array([v])),
    "NumPy scalar": lambda v: Config(np.asarray(v)[()]),
    "JAX": lambda v: Config(jnp.asarray(v)),
    "objects": lambda v: Config(np.array([v, None], object)),
}


@pytest.mark.parametrize("way", WAYS)
def test_by_value_all_the_way_down(way: str) -> None:
    make = WAYS[way]
    for one, other in ((1.0, 2.0), (0.0, -0.0), (1, 1.0), (1, True)):
        assert token(make(one)) == token(make(one)) != token(make(other))
        assert hash(token(make(one))) == hash(token(make(one)))


def test_of_objects_within_themselves_and_of_keys() -> None:
    one, other, third = Config(), Config(), Config(rate=2.0)
    for each in (one, other, third):
        each.inner = [each]
    assert token(one) == token(other) != token(third)
    keys = [Config(jax.random.key(seed)) for seed in (0, 0, 1)]
    assert token(keys[0]) == token(keys[1]) != token(keys[2])
    gone = [Config(jnp.arange(3.0)) for _ in range(2)]
    gone[0].rate.delete()
    assert token(gone[0]) == token(gone[0]) != token(gone[1])


def test_only_what_may_change_is_looked_at_in_every_call() -> None:
    never = [
        1,
        "s",
        None,
        jax.nn.relu,
        jnp.tanh,
        int,
        np.dtype("f4"),
        Color.RED,
        Frozen(),
        object(),
    ]
    assert not any(map(may_change, never))
    assert all(map(may_change, [Config(), Frozen([1]), Hashed(), {1}, Raises()]))


def test_what_an_author_leaves_out_of_equality_is_left_out() -> None:
    assert token(Frozen(1, "a")) == token(Frozen(1, "b"))
    assert token(Frozen(1, LOCK)) == token(Frozen(1, memoryview(b"")))
