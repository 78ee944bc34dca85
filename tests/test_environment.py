"""What the result of a function can depend on besides its arguments."""

import abc
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest

import statemesh as sm
from statemesh.testing._equivalent._environment import environment, held_by

from .helpers import make_mesh


jnp: Any = jax.numpy
SCALE: Any = 1.0


def of_global(x: Any) -> Any:
    return x * SCALE


def through_a_function(x: Any) -> Any:
    return jax.vmap(lambda y: of_global(y))(x)


class Net(sm.Module):
    w: Any
    act: Any = None

    def __call__(self, x: Any) -> Any:
        return of_global(self.w * x)


def calls_a_class(x: Any) -> Any:
    return Net(1.0)(x)


def closing(value: Any) -> Callable[[Any], Any]:
    return lambda x: x * value


def known(*values: Any) -> Any:
    key = environment(*values)
    assert key is not None and key == key and hash(key) == hash(environment(*values))
    return key


# Globals


@pytest.mark.parametrize("fun", [of_global, through_a_function, calls_a_class, Net, Net(1.0)])
def test_globals(fun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = known(fun)
    assert known(fun) == before
    for other in (2.0, 1, True, np.float32(1), np.ones(2), jnp.ones(()), "1.0"):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", other)
        assert known(fun) != before
    monkeypatch.undo()
    assert known(fun) == before


def test_arrays_that_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.ones(3)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", array)
    before = known(through_a_function)
    array[1] = 2
    assert known(through_a_function) != before
    array[1] = 1
    assert known(through_a_function) == before


def test_values_of_a_module_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = types.ModuleType("config_of_a_test")
    config.scale, config.other = 1.0, 1.0
    fun = eval("lambda x: x * config.scale", {"config": config, "__name__": "user"})
    before = known(fun)
    config.other = 2.0
    assert known(fun) == before
    config.scale = 2.0
    assert known(fun) != before


def test_global_that_is_defined_later() -> None:
    names: dict[str, Any] = {"__name__": "user"}
    fun = eval("lambda x: helper(x)", names)
    before = known(fun)
    names["helper"] = of_global
    assert known(fun) != before


# What a function holds


SAME: list[tuple[Any, Any]] = [
    (1.0, 1.0),
    (float("nan"), float("nan")),
    ([1, {"a": 2}], [1, {"a": 2}]),
    (np.arange(3), np.arange(3)),
    (jnp.arange(3), jnp.arange(3)),
    (jax.random.key(0), jax.random.key(0)),
    (sm.State(1.0), sm.State(1.0)),
    (Net(np.ones(2)), Net(np.ones(2))),
    (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec("x")),
    (np.dtype("float32"), np.dtype("float32")),
    (jax.devices()[0], jax.devices()[0]),
    (make_mesh("2"), make_mesh("2")),
    (jax.tree.structure([1, 2]), jax.tree.structure([1, 2])),
    ({"a"}, {"a"}),
    (np.array(["a", None], object), np.array(["a", None], object)),
]
OTHER: list[tuple[Any, Any]] = [
    (1.0, 2.0),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (None, 0),
    ([1], (1,)),
    ([1, 2], [1, 3]),
    ({"a": 1}, {"b": 1}),
    (np.arange(3), np.arange(3.0)),
    (np.arange(4), np.arange(4).reshape(2, 2)),
    (np.ones(1), jnp.ones(1)),
    (jnp.ones(()), jnp.asarray(1.0)),
    (jnp.arange(3), jnp.arange(3) + 1),
    (jax.random.key(0), jax.random.key(1)),
    (sm.State(1.0), sm.State(2.0)),
    (sm.State(1.0), sm.BatchState(1.0)),
    (sm.State(1.0, reduce="sum"), sm.State(1.0, reduce="mean")),
    (Net(np.ones(2)), Net(np.zeros(2))),
    (jnp.sin, jnp.cos),
    (np.sin, np.cos),
    (closing(1), closing(2)),
    (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec("y")),
    (make_mesh("2"), make_mesh("4")),
    (functools.partial(closing, 1), functools.partial(closing, 2)),
    (eqx.Partial(closing, 1), eqx.Partial(closing, 2)),
    (Net(1.0).__call__, Net(2.0).__call__),
    (jax.jit(closing(1)), jax.jit(closing(2))),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_same_values_in_closures(one: Any, two: Any) -> None:
    assert known(closing(one)) == known(closing(two))


@pytest.mark.parametrize(("one", "two"), OTHER)
def test_other_values_in_closures(one: Any, two: Any) -> None:
    assert known(closing(one)) != known(closing(two))
    assert known(functools.partial(of_global, one)) != known(functools.partial(of_global, two))
    assert known(closing([closing(one)])) != known(closing([closing(two)]))


def test_defaults_and_attributes() -> None:
    def make(value: Any) -> Any:
        def fun(x: Any, scale: Any = value, *, shift: Any = value) -> Any:
            return x * scale + shift

        return fun

    assert known(make(1)) == known(make(1)) != known(make(2))
    one, two = make(1), make(1)
    two.__kwdefaults__ = {"shift": 2}
    assert known(one) != known(two)
    one.scale, before = 1, known(one)
    one.scale = 2
    assert known(one) != before


def test_other_code() -> None:
    assert known(lambda x: x + 1) != known(lambda x: x + 2)
    assert known(lambda x: x + 1) != known(lambda x: x - 1)


def test_objects_of_the_users() -> None:
    class Config:
        def __init__(self, scale: Any) -> None:
            self.scale = scale

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        fun: Any

    config = Config(1)
    fun = closing(config)
    before = known(fun)
    config.scale = 2
    assert known(fun) != before
    inner = [1]
    frozen = closing(Frozen(closing(inner)))
    before = known(frozen)
    inner[0] = 2
    assert known(frozen) != before


class Slots(NamedTuple):
    count: Any


class Tally(sm.State):
    __slots__ = ()

    def leave(self, old: Any, axis_names: Any) -> Any:
        return of_global(self)


class Kind(enum.Enum):
    ONE = 1


class Abstract(eqx.Module):
    size: int = eqx.field(static=True)

    @property
    def double(self) -> Any:
        return of_global(self.size)

    @staticmethod
    def half(x: Any) -> Any:
        return x / 2

    @classmethod
    def made(cls) -> Any:
        return cls(1)

    @abc.abstractmethod
    def __call__(self, x: Any) -> Any: ...


@pytest.mark.parametrize("cls", [Slots, Tally, Kind, Abstract, sm.State, dict])
def test_classes(cls: Any) -> None:
    assert known(cls) == known(cls) != known(Net)


def test_classes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, name, other in [(Slots, "scale", 3), (Abstract, "half", staticmethod(abs))]:
        before = known(cls)
        monkeypatch.setattr(cls, name, other, raising=False)
        assert known(cls) != before
    before = known(Abstract), known(Tally)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert known(Abstract) != before[0] and known(Tally) != before[1]


def test_what_a_decorated_function_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = sm.vmap2(of_global)
    for fun in (jax.jit(of_global), eqx.filter_jit(of_global), jax.checkpoint(of_global), mapped):
        before = known(fun)
        assert known(fun) == before
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
        assert known(fun) != before
        monkeypatch.undo()


def test_functions_that_call_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(n: Any) -> Any:
        return n == 0 or odd(n - 1)

    def odd(n: Any) -> Any:
        return n != 0 and even(n - 1) and of_global(n)

    before = known(even)
    assert known(even) == before
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert known(even) != before


def test_deep_structures() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert known(closing(deep))


# What cannot be known


def test_unknown() -> None:
    for value in (
        iter([1]),
        (x for x in [1]),
        np.random.default_rng(0),
        object(),
        jax.new_ref(1.0),
    ):
        assert environment(closing(value)) is None
    assert environment(closing([[k] for k in range(20_000)])) is None


def test_tracers_are_unknown() -> None:
    found = []

    def fun(x: Any) -> Any:
        found.append(environment(closing(x)))
        return x

    jax.make_jaxpr(fun)(1.0)
    assert found == [None]


def test_large_arrays() -> None:
    large = jnp.ones(5000)
    assert known(closing(large)) == known(closing(large)) != known(closing(large + 0))


# What arguments hold


def test_classes_and_functions_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ({"net": Net(jnp.ones(1), of_global)}, 1.0, sm.State(1.0))
    assert held_by(args) == [Net, of_global]
    before = known(jnp.sin, *held_by(args))
    monkeypatch.setattr(Net, "__call__", lambda self, x: x)
    assert known(jnp.sin, *held_by(args)) != before
