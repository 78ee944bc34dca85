"""Static leaves and fields: compared by hash and `==`; without a hash, looked at anew at each call."""

import dataclasses
import gc
import pathlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent, emulate
from tests.helpers import (
    Count,
    assert_says,
    compiles,
    counted,
    make_mesh,
    older_objects_frozen,
    run_script,
)


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


class Raises:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")


class Arrays(Raises):
    __hash__ = Raises.__hash__

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


MAPS: dict[str, Callable[[Any], Any]] = {
    "shard_map": lambda f: sm.shard_map(f, make_mesh(), (None, P("x")), (P("x"), None)),
    "pmap2": lambda f: sm.pmap2(f, in_axes=(None, 0), out_axes=(0, None)),
    "vmap2": lambda f: sm.vmap2(f, in_axes=(None, 0), out_axes=(0, None)),
}


def scaled(config: Any, x: Any) -> Any:
    return x * config.rate, config


def made(how: str) -> tuple[Any, Count]:
    fun, count = counted(scaled)
    return MAPS[how](fun), count


retraced = pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")


@contextmanager
def retraced_warnings() -> Iterator[list[str]]:
    """The texts of the warnings about calls that are traced anew."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", sm.RetracedWarning)
        yield texts
    texts += [str(one.message) for one in shown if one.category is sm.RetracedWarning]


each_map = pytest.mark.parametrize("how", MAPS)


class Model(sm.Module):
    w: sm.State
    options: Any = sm.field(static=True)


# What cannot be hashed: how it is made of a number, how another number is put into it, and how it is read.
CHANGED: dict[
    str, tuple[Callable[[Any], Any], Callable[[Any, Any], None], Callable[[Any], Any]]
] = {
    "dataclass": (Config, lambda o, v: setattr(o, "rate", v), lambda o: o.rate),
    "list": (lambda v: [v], lambda o, v: o.__setitem__(0, v), lambda o: o[0]),
    "dictionary": (lambda v: {"a": v}, lambda o, v: o.update(a=v), lambda o: o["a"]),
    "frozen, with a list": (
        lambda v: Frozen([v]),
        lambda o, v: o.rate.__setitem__(0, v),
        lambda o: o.rate[0],
    ),
    "NumPy": (
        lambda v: np.array([v, 0.0]),
        lambda o, v: o.__setitem__(0, v),
        lambda o: float(o[0]),
    ),
}


@each_map
@pytest.mark.parametrize("field", [True, False], ids=["field", "leaf"])
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_what_is_changed_in_place(how: str, field: bool) -> None:
    for kind, (make, change, read) in CHANGED.items():
        if not field and kind not in ("dataclass", "frozen, with a list"):
            continue  # JAX looks into these itself.
        fun, count = counted(lambda m, x, read=read: (x * read(m.options if field else m), m))
        call = MAPS[how](fun)
        options = make(1.0)
        given = Model(sm.State(1.0), options) if field else options
        with retraced_warnings() as shown:
            for rate in (1.0, 5.0, 5.0, 1.0):
                change(options, rate)
                out, same = call(given, X)
                np.testing.assert_array_equal(out, X * rate)
                assert (same.options if field else same) is options
        (text,) = shown
        assert "\n  - args[0].options: " in text or not field
        assert count.times == 4


def test_the_warning() -> None:
    class Layer(sm.Module):
        sizes: Any = sm.field(static=True)
        hooks: Any = None

    def scaled_by(models: Any, x: Any, *, options: Any) -> Any:
        return x * models["a"].sizes[0] * options.rate

    call = MAPS["shard_map"](lambda models, x, **options: (scaled_by(models, x, **options), None))
    models = {"a": Layer([2, 3]), "b": (Layer((2, 3), Config()),)}
    with retraced_warnings() as shown:
        call(models, X, options=Config(2.0))
        call(models, X, options=Config(2.0))
        call({**models, "c": [Layer({1})]}, X, options=Config(2.0))
    mend = (
        "\nMake the class a @dataclass(frozen=True), use a tuple in place of a list, or pass the values that "
        "the function uses as arrays."
    )
    assert shown == [
        "<lambda>: these arguments are not arrays and cannot be hashed, so a change in them would go unseen. "
        "Each call traces and compiles the function anew:\n"
        "  - models['a'].sizes: [2, 3] of type list\n"
        "  - models['b'][0].hooks: Config(rate=1.0, inner=None) of type Config\n"
        "  - options: Config(rate=2.0, inner=None) of type Config" + mend,
        "<lambda>: these arguments are not arrays and cannot be hashed, so a change in them would go unseen. "
        "Each call traces and compiles the function anew:\n"
        "  - models['c'][0].sizes: {1} of type set" + mend,
    ]


LINE = """
import jax.numpy as jnp, statemesh as sm
call = sm.vmap2(lambda options, x: x * options[0], in_axes=(None, 0))
class Options(list): pass
call(Options([1.0]), jnp.ones(3))  # this line
"""


@pytest.mark.slow
def test_the_warning_points_at_the_line_of_the_call(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LINE)
    shown = run_script(script, folder=tmp_path).stderr
    assert f"{script}:5: RetracedWarning: <lambda>: these arguments" in shown
    assert "# this line" in shown


@each_map
def test_under_an_outer_trace_nothing_is_kept_and_nothing_is_said(how: str) -> None:
    fun, _ = counted(lambda model, x: (x * model.options[0], model))
    call = MAPS[how](fun)
    model = Model(sm.State(1.0), [1.0])
    for rate in (1.0, 5.0):
        model.options[0] = rate
        np.testing.assert_array_equal(jax.jit(lambda x: call(model, x)[0])(X), X * rate)
        np.testing.assert_array_equal(
            jax.make_jaxpr(lambda x: call(model, x)[0])(X).out_avals[0].shape, 8
        )
    with retraced_warnings() as shown:
        for rate in (1.0, 5.0):
            model.options[0] = rate
            slopes = jax.grad(lambda x: call(model, x)[0].sum())(X)
            np.testing.assert_array_equal(slopes, np.full(8, rate))
    assert len(shown) == 1


@retraced
def test_between_calls_that_can_be_compared() -> None:
    fun, count = counted(lambda model, x: (x * model.options[0], model))
    call = MAPS["shard_map"](fun)
    model, rows = call.place(Model(sm.State(1.0), (1.0,)), X)
    for _ in range(3):
        call(model, rows)
    assert count.times == 1
    changing = model.replace(options=[3.0])
    for rate in (3.0, 4.0):
        changing.options[0] = rate
        np.testing.assert_array_equal(call(changing, rows)[0], X * rate)
        with compiles() as seen:
            np.testing.assert_array_equal(call(model, rows)[0], X)
        assert seen.times == 0
    assert count.times == 3


@retraced
@older_objects_frozen()
def test_such_a_call_leaves_nothing_behind() -> None:
    specs = (None, P("x")), (P("x"), None)
    donating = sm.shard_map(scaled, make_mesh(), *specs, donate="states")
    for call in (MAPS["vmap2"](scaled), MAPS["shard_map"](scaled), donating):
        for _ in range(2):
            config = Config(2.0)
            gone = weakref.ref(config)
            result = call(config, X)
            assert result[1] is config
            del config, result
            gc.collect()
            assert gone() is None


def test_explain_names_what_makes_each_call_compile() -> None:
    call = MAPS["vmap2"](lambda model, x: (x * model.options[0], None))
    assert "model.options: a call was compiled anew" in str(
        call.explain(Model(sm.State(1.0), [1.0]), X)
    )


@each_map
def test_a_second_trace_sees_the_object_of_its_own_call(how: str) -> None:
    call, _ = made(how)
    first, second = Hashed(2.0), Hashed(2.0)
    call(first, X)
    first.rate = 7.0
    # This is the same program, traced again for another dtype. The object that it was made from now says 7.
    out, same = call(second, X.astype(np.int32))
    np.testing.assert_array_equal(out, X * 2)
    assert same is second


@retraced
def test_in_the_references_too() -> None:
    call, _ = made("shard_map")
    eager = sm.shard_map(scaled, make_mesh(), (None, P("x")), (P("x"), None), jit=False)
    config = Config()
    for rate in (2.0, 3.0):
        config.rate = rate
        # This cannot be pickled either.
        unknown = Config(rate, threading.Lock())
        for out in (
            eager(config, X)[0],
            call.unsharded(config, X)[0],
            emulate(call, config, X)[0],
            emulate(call, unknown, X)[0],
        ):
            np.testing.assert_array_equal(out, X * rate)
        specs: dict[str, Any] = {"in_specs": (None, P("x")), "out_specs": P("x")}
        assert_equivalent(
            lambda config, x: x * config.rate, (config, X), meshes=[{"x": 2}], **specs
        )


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


def test_a_lowered_call_is_for_the_values_that_it_was_lowered_with() -> None:
    config = Hashed(2.0)
    compiled = MAPS["shard_map"](scaled).lower(config, X).compile()
    config.rate = 3.0
    with pytest.raises(
        TypeError, match=r"compiled for Hashed\(rate=2.0\), called with Hashed\(rate=3"
    ):
        compiled(config, X)
    config.rate = 2.0
    out, same = compiled(config, X)
    np.testing.assert_array_equal(out, X * 2)
    assert same is config


def test_a_lowered_call_is_not_run_with_what_cannot_be_compared() -> None:
    def scaled_by_both(model: Any, config: Any, x: Any) -> Any:
        return x * model.options[0] * config.rate, config

    model, config = Model(sm.State(1.0), [2.0]), Config(3.0)
    call = sm.shard_map(scaled_by_both, make_mesh(), (None, None, P("x")), (P("x"), None))
    compiled = call.lower(model, config, X).compile()
    assert compiled.out_info[0].shape == (8,) and compiled.out_info[1] is config
    assert_says(
        lambda: compiled(model, config, X),
        TypeError,
        "scaled_by_both was compiled for arguments that are not arrays and cannot be hashed, so a change in "
        "them would go unseen:\n"
        "  - model.options: [2.0] of type list\n"
        "  - config: Config(rate=3.0, inner=None) of type Config\n"
        "Make the class a @dataclass(frozen=True), use a tuple in place of a list, or call the function "
        "itself, which traces it anew.",
    )


@each_map
def test_what_is_compared(how: str) -> None:
    makes: list[tuple[Any, Callable[[Any], Any]]] = [
        (Frozen, lambda config: config.rate),
        (Hashed, lambda config: config.rate),
        (lambda v: Frozen(Frozen((v,))), lambda config: config.rate.rate[0]),
    ]
    for make, read in makes:
        fun, count = counted(lambda config, x, read=read: (x / read(config), None))
        call = MAPS[how](fun)
        for rate in (1.0, 2.0, 0.5, 1.0) * 2:
            np.testing.assert_array_equal(call(make(rate), X)[0], X / rate)
        assert count.times == 3


def test_what_an_author_leaves_out_of_equality_is_left_out() -> None:
    call, count = made("vmap2")
    for note in ("a", "b", threading.Lock(), memoryview(b"")):
        call(Frozen(1.0, note), X)
    assert count.times == 1
