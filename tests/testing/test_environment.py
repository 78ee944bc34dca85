"""The check traces a function anew if what it depends on, besides arguments, has changed, and only then."""

import abc
import dataclasses
import enum
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent
from statemesh.testing._caches import environment
from tests.helpers import compiles, make_mesh, traces

from .checked import check, report


jnp: Any = jax.numpy
X = np.ones(4, np.float32)
ROWS = P("x")
# What functions below name.
SCALE: Any = 1.0
HELD: Any = None


def of_global(x: Any) -> Any:
    return x * SCALE


def reads(x: Any) -> Any:
    return (HELD, x)[1]


def is_traced(fun: Any = reads, args: Any = (X,), in_specs: Any = ROWS) -> bool:
    """Whether the check traces anything. It does not run on devices, so that it costs little."""
    with traces() as count:
        assert_equivalent(
            fun,
            args,
            meshes=[AbstractMesh((2,), ("x",))],
            in_specs=in_specs,
            out_specs=P("x"),
            gradients=False,
            steps=1,
        )
    return count.times > 0


def put(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Change globals of this file."""
    for name, value in values.items():
        monkeypatch.setattr(sys.modules[__name__], name, value)


@pytest.mark.slow
def test_a_value_that_was_closed_over_and_changed_is_seen() -> None:
    factor = [1.0]

    def scaled(x: Any) -> Any:
        return jax.lax.psum(x.sum(0), "x") * (factor[0] if jax.lax.axis_size("x") > 1 else 1.0)

    check(scaled, X)
    with compiles() as again:
        check(scaled, 2 * X)
    assert again.times == 0
    factor[0] = 2.0
    assert "scaled(...): float32[], off by" in report(scaled, X)


# Values that functions name


class Net(sm.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return of_global(self.w * x)


def closing(value: Any) -> Callable[[Any], Any]:
    return lambda x: x * value


def deep() -> Any:
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    return nested


# Each is another than all others, and the same when it is made again.
VALUES: list[Callable[[], Any]] = [
    *(lambda: 1.0, lambda: 1, lambda: True, lambda: 0.0, lambda: -0.0, lambda: float("nan")),
    *(lambda: "1.0", lambda: [1, {"a": 2}], lambda: (1, {"a": 2}), lambda: {"a"}, deep),
    *(lambda: np.arange(4), lambda: np.arange(4.0), lambda: np.arange(4).reshape(2, 2)),
    *(lambda: jnp.ones(()), lambda: jnp.asarray(1.0), lambda: jnp.arange(4), lambda: np.ones(())),
    *(lambda: jax.random.key(0), lambda: jax.random.key(1), lambda: np.array(["a", None], object)),
    *(lambda: sm.State(1.0), lambda: sm.State(2.0), lambda: sm.BatchState(1.0)),
    *(lambda: sm.State(1.0, reduce="sum"), lambda: Net(np.ones(2)), lambda: Net(np.zeros(2))),
    *(lambda: P("x"), lambda: P("y"), lambda: make_mesh("2"), lambda: make_mesh("4")),
    *(lambda: np.dtype("float32"), lambda: jax.devices()[0], lambda: jax.tree.structure([1, 2])),
    *(lambda: jnp.sin, lambda: jnp.cos, lambda: np.sin, lambda: closing(1), lambda: closing(2)),
    *(lambda: lambda x: x + 1, lambda: lambda x: x - 1, lambda: Net(1.0).__call__),
    *(lambda: functools.partial(closing, 1), lambda: eqx.Partial(closing, 1)),
    *(lambda: functools.partial(closing, 2), lambda: closing([closing(np.ones(3))])),
]


@pytest.mark.slow
def test_equal_values_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in VALUES:
        put(monkeypatch, HELD=make())
        assert is_traced(), HELD
        put(monkeypatch, HELD=make())
        assert not is_traced(), HELD


def test_large_arrays_are_told_apart_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    large = jnp.ones(5000)
    put(monkeypatch, HELD=closing(large))
    assert is_traced()
    put(monkeypatch, HELD=closing(large))
    assert not is_traced()
    put(monkeypatch, HELD=closing(large + 0))
    assert is_traced()


@pytest.mark.slow
def test_what_cannot_be_known_is_traced_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[k] for k in range(20_000)]
    for value in (iter([1]), object(), jax.new_ref(1.0), many):
        put(monkeypatch, HELD=closing(value))
        assert is_traced() and is_traced()


# Values that change in place


class Config:
    def __init__(self, scale: Any) -> None:
        self.scale = scale


@dataclasses.dataclass(frozen=True)
class Frozen:
    fun: Any


def changes() -> list[tuple[Any, Callable[[], object], bool]]:
    """Values, something that changes each in place, and whether their code names what changes."""
    array, config, inner = np.ones(3), Config(1), [1]

    def with_defaults(x: Any, scale: Any = 1, *, shift: Any = 1) -> Any:
        return x * scale + shift

    attributed = closing("attributed")
    module: Any = types.ModuleType("config_of_a_test")
    module.scale = 1.0
    names: dict[str, Any] = {"config": module, "__name__": "user"}
    return [
        (array, lambda: array.fill(2), True),
        (closing(config), lambda: setattr(config, "scale", 2), True),
        (closing(Frozen(closing(inner))), lambda: inner.append(2), True),
        (with_defaults, lambda: setattr(with_defaults, "__kwdefaults__", {"shift": 2}), True),
        (attributed, lambda: setattr(attributed, "attribute", 2), True),
        (eval("lambda x: x * config.scale", names), lambda: setattr(module, "scale", 2.0), True),
        (eval("lambda x: helper(x)", names), lambda: names.setdefault("helper", of_global), True),
        (eval("lambda x: config.scale * x", names), lambda: setattr(module, "other", 2.0), False),
    ]


def test_values_that_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, change, counts in changes():
        put(monkeypatch, HELD=value)
        assert is_traced(), value
        change()
        assert is_traced() == counts, value
        assert not is_traced(), value


# Each reads the scale of a module in a package of the user's, or of the environment.
READING = [
    "lambda x: x * package_of_a_test.inner.config.scale",
    "lambda x: x * getattr(package_of_a_test.inner.config, 'scale')",
    "lambda x: x * package_of_a_test.inner.config.read()",
    "lambda x: x * vars(package_of_a_test.inner.config)['scale']",
    "lambda x: x * globals()['scale']",
    "lambda x: x * float(os.environ['SCALE_OF_A_TEST'])",
    "lambda x: x * float(os.getenv('SCALE_OF_A_TEST', 1))",
    "def imports(x):\n    import package_of_a_test.inner.config as c\n    return x * c.scale",
    "def imports(x):\n    from .inner.config import scale\n    return x * scale",
    "def imports(x):\n    from .inner import config\n    return x * config.scale",
]


@pytest.mark.parametrize("text", READING)
def test_modules_in_packages_and_environment_variables(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["package_of_a_test", "package_of_a_test.inner", "package_of_a_test.inner.config"]
    package, inner, config = modules = [types.ModuleType(path) for path in paths]
    for path, module in zip(paths, modules, strict=True):
        monkeypatch.setitem(sys.modules, path, module)
    package.inner, inner.config = inner, config  # type: ignore[attr-defined]
    exec("scale = 1.0\ndef read(): return scale", vars(config))
    names: dict[str, Any] = {"package_of_a_test": package, "os": os, "scale": 1.0}
    names |= {"__name__": "package_of_a_test.user", "__package__": "package_of_a_test"}
    exec(text if text.startswith("def") else f"imports = {text}", names)
    before = environment(names["imports"])
    assert before is not None and before == environment(names["imports"])
    monkeypatch.setenv("SCALE_OF_A_TEST", "2.0")
    config.scale = names["scale"] = 2.0  # type: ignore[attr-defined]
    assert environment(names["imports"]) != before


# What leads to a global that changes


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
    def make(cls) -> Any:
        return cls(1)

    @abc.abstractmethod
    def __call__(self, x: Any) -> Any: ...


def through_a_function(x: Any) -> Any:
    return jax.vmap(lambda y: of_global(y))(x)


def even(n: Any) -> Any:
    return n == 0 or odd(n - 1)


def odd(n: Any) -> Any:
    return n != 0 and even(n - 1) and of_global(n)


LEADING: list[Any] = [
    *(through_a_function, lambda x: Net(1.0)(x), Net, Net(1.0), Tally, Abstract, even),
    *(jax.jit(of_global), eqx.filter_jit(of_global)),
    sm.vmap2(of_global),
]


def test_globals_are_found_through_whatever_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in LEADING:
        put(monkeypatch, HELD=value, SCALE=1.0)
        assert is_traced(), value
        put(monkeypatch, SCALE=2.0)
        assert is_traced(), value
        put(monkeypatch, SCALE=1.0)
        assert not is_traced(), value


def test_classes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Slots, Abstract, Kind, sm.State, dict):
        put(monkeypatch, HELD=cls)
        is_traced()
        assert not is_traced(), cls
        if cls in (Slots, Abstract):
            monkeypatch.setattr(cls, "half", staticmethod(abs), raising=False)
            assert is_traced(), cls


def test_methods_and_functions_of_arguments_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(tree: Any, x: Any) -> Any:
        return tree["net"](x)

    def is_anew() -> bool:
        tree = {"net": Net(sm.LongTermState(1.0).value), "fun": of_global}
        return is_traced(call, (tree, X), (P(), P("x")))

    assert is_anew() and not is_anew()
    put(monkeypatch, SCALE=2.0)
    assert is_anew() and not is_anew()
    monkeypatch.setattr(Net, "__call__", lambda self, x: x)
    assert is_anew()
