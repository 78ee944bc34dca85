"""`assert_equivalent`: what it compares, what it says, what it costs; and `set_devices`, `load_profile`."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent, load_profile, set_devices
from statemesh.testing._equivalent import _check, _programs

from .helpers import compiles, make_mesh


jnp: Any = jax.numpy
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
TWO: list[Any] = [{"x": 2}]


def check(fun: Callable[..., Any], *args: Any, **more: Any) -> None:
    """On two shards, of a model and rows, unless the test gives something else."""
    given: dict[str, Any] = {
        "meshes": TWO,
        "in_specs": (None, P("x")) if len(args) == 2 else P("x"),
        "out_specs": (P("x"), P()) if len(args) == 2 else P("x"),
    }
    assert_equivalent(fun, args, **{**given, **more})


def report(fun: Callable[..., Any], *args: Any, **more: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        check(fun, *args, **more)
    return str(raised.value)


def centered(seen: sm.State, x: Any) -> Any:
    return x - jax.lax.pmean(x.mean(0), "x"), seen.set(seen.value + x.sum())


def centered_here(seen: sm.State, x: Any) -> Any:
    return x - x.mean(0), seen.set(seen.value + x.sum())


def counter() -> sm.State:
    return sm.State(0.0, reduce="sum")


# What passes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
def test_right_code_passes(kind: AxisType, check_vma: bool) -> None:
    meshes = [make_mesh(name, kind) for name in ("8", "1", "4")]
    check(centered, counter(), X, meshes=meshes, check_vma=check_vma)


@pytest.mark.slow
def test_trees_of_states_keys_and_static_leaves_pass() -> None:
    def step(model: Any, opt: Any, x: Any, scale: float) -> Any:
        keys, rng = model["rng"].rows(len(x), "x")
        y = model["act"](x * scale) + jax.vmap(jax.random.normal)(keys)[:, None]
        model = {**model, "rng": rng, "mean": model["mean"].set(y.mean(0))}
        return {"y": y}, model, opt.set(opt.value + 1)

    model = {
        "mean": sm.BatchState(np.zeros(2, np.float32), reduce="mean"),
        "rng": sm.RandomState(jax.random.key(0)),
        "low": sm.ParamState(jnp.ones(3, jnp.bfloat16)),
        "act": jnp.tanh,
    }
    assert_equivalent(
        step,
        (model, sm.State(0), X, 2.0),
        meshes=[{"x": 4}, {"x": 2, "y": 2}],
        in_specs=(None, None, P("x"), None),
        out_specs=(P("x"), P(), P()),
    )


def test_results_that_hold_numbers_of_python_pass() -> None:
    norm = sm.nn.BatchNorm(2, axis_name="x")  # its `inference` is False
    checked = assert_equivalent(
        lambda norm, x: norm(x),
        (norm, X),
        meshes=TWO,
        in_specs=(None, P("x")),
        out_specs=(P("x"), P()),
    )
    assert checked.differentiated


def test_specs_of_states_are_those_of_the_call() -> None:
    def add(buffer: Any, x: Any) -> Any:
        return x, buffer.set(buffer.value + x)

    check(add, sm.State(X), X, state_in_specs=P("x"))
    with pytest.raises(TypeError):
        check(add, sm.State(X), X)


@pytest.mark.slow
def test_results_that_depend_on_the_mesh_are_compared_with_their_emulation() -> None:
    def where(seen: Any, x: Any) -> Any:
        return x + jax.lax.axis_index("x"), seen.set(seen.value + x.max())

    check(where, counter(), X, unsharded=False, meshes=[{"x": 2}, {"x": 4}])
    assert "compared with the function on one device" in report(where, counter(), X)


def test_functions_of_numpy_are_references() -> None:
    def plain(seen: sm.State, x: Any) -> Any:
        wide = np.asarray(x, np.float64)
        return wide - wide.mean(0), seen.set(seen.value + np.float32(wide.sum()))

    check(centered, counter(), X, unsharded=plain, gradients=False)
    assert "compared with the unsharded function" in report(
        centered_here, counter(), X, unsharded=plain, gradients=False
    )


def test_integers_are_equal_or_not() -> None:
    def nearly(x: Any) -> Any:
        return 1000000 * x + (jax.lax.axis_size("x") > 1)

    assert "off by 1 at [0]" in report(nearly, np.arange(8))


def test_what_cancels_is_held_to_the_digits_that_it_has_in_double_precision() -> None:
    """Of large numbers less their mean, summed in another order, few digits are right in float32."""
    less_mean: Callable[[Any], Any] = lambda x: x - jax.lax.pmean(x.mean(0), "x")
    check(less_mean, X + 1e4, gradients=False)
    wrong: Callable[[Any], Any] = lambda x: less_mean(x) + 1e-6 * jax.lax.axis_index("x")
    assert "off by 1e-06" in report(wrong, X + 1e4, gradients=False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
def test_tolerance_follows_the_dtype(dtype: Any) -> None:
    x = np.asarray(X, dtype)
    total: Callable[[Any], Any] = lambda x: x * 0 + jax.lax.psum(x.sum(0), "x")
    check(total, x, gradients=False)
    off = {jnp.bfloat16: 0.5, jnp.float16: 0.1, np.float32: 1e-4}[dtype]
    wrong = lambda x: total(x) + jnp.asarray(off * jax.lax.axis_size("x"), dtype)
    assert "would be rounding" in report(wrong, x, gradients=False)


def test_a_tolerance_may_be_given() -> None:
    wrong = lambda x: x + 1e-3 * (jax.lax.axis_size("x") - 1)
    assert "would be rounding" in report(wrong, X)
    check(wrong, X, tolerance=1e-2)


# What fails


def test_gradients_are_compared() -> None:
    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    # Right but for the way back.
    same.defvjp(lambda x: (x, None), lambda _, g: (g * jax.lax.axis_size("x"),))
    wrong = lambda x: same(x)
    check(wrong, X, gradients=False)
    text = report(wrong, X)
    assert "The derivatives stop being those of one device here:" in text
    assert "wrong = lambda x: same(x)" in text
    assert "\n  - the gradient by args[0]: float32[8,2], off by " in text


def test_later_calls_are_compared() -> None:
    def late(seen: Any, x: Any) -> Any:
        shards = jnp.where(seen.value > 2, jax.lax.axis_size("x"), 1)
        return x, seen.set(seen.value + shards)

    check(late, sm.State(0), X, steps=3)
    assert "On mesh x=2, call 4 of 4, compared with" in report(late, sm.State(0), X, steps=4)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing kept of what is broken on purpose."""
    _programs._cached.cache_clear()
    yield
    _programs._cached.cache_clear()


def one_more(x: Any) -> Any:
    return x + 1 if eqx.is_inexact_array(x) else x


@pytest.mark.slow
def test_a_model_that_does_not_survive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _check.saved
    monkeypatch.setattr(_check, "saved", lambda tree: jax.tree.map(one_more, right(tree)))
    text = report(centered, counter(), X)
    assert (
        "Saved on mesh x=2 and placed on mesh x=2, call 2 of 3, compared with the function" in text
    )
    text = report(centered, counter(), X, meshes=[{"x": 1}, {"x": 4}, {"x": 2}])
    assert (
        "Saved on mesh x=4 and placed on mesh x=2, call 2 of 3, compared with the function" in text
    )


@pytest.mark.usefixtures("fresh")
def test_what_goes_wrong_inside_jit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = property(lambda self: lambda *args: jax.tree.map(one_more, self.mapped(*args)))
    monkeypatch.setattr(_programs.Programs, "jitted", broken)
    text = report(centered, counter(), X)
    assert "Inside jit on mesh x=2, call 1 of 3, compared with the function on one device:" in text
    assert "It agrees on mesh x=2, saved on mesh x=2 and" in text


def test_the_line_comes_first_and_then_what_is_off() -> None:
    lines = report(centered_here, counter(), X, steps=1).splitlines()
    assert lines[:4] == [
        "centered_here: the calls do not agree.",
        "",
        "On mesh x=2, compared with the function on one device:",
        "  Values stop being those of one device here:",
    ]
    assert lines[4].endswith(
        "test_equivalent.py:50: return x - x.mean(0), seen.set(seen.value + x.sum())"
    )
    assert (
        "  - centered_here(...)[0]: float32[8,2], off by 0.1283 at [0, 0], where it is "
        in lines[-1]
    )
    assert lines[-1].endswith("(1e-15 would be rounding in double precision).")


@pytest.mark.slow
def test_results_that_are_off_are_counted() -> None:
    many = lambda x: [x - x.mean(0) * k for k in range(8)]
    text = report(many, X)
    assert text.count("\n  - <lambda>(...)") == 4 and text.endswith("\n  and 3 more.")


def test_further_meshes_take_a_line() -> None:
    text = report(centered_here, counter(), X, meshes=[{"x": 1}, {"x": 2}, {"x": 8}])
    assert "On mesh x=2, call 1 of 3, compared with" in text
    assert (
        "\n\nOn mesh x=8, call 1 of 3, 1 result is off too.\n\nIt agrees on mesh x=1.\n\n" in text
    )
    assert text.endswith("From call to call centered_here(...)[1] becomes args[0].")
    assert len(text.splitlines()) <= 25


def test_other_structures_are_told() -> None:
    text = r"<lambda>\(...\): a tuple of 3, should be a tuple of 2"
    with pytest.raises(AssertionError, match=text):
        check(
            lambda seen, x: (x, x, seen),
            counter(),
            X,
            unsharded=lambda seen, x: (x, seen),
            out_specs=(P("x"), P("x"), P()),
        )


# Bad input


def test_what_the_call_raises_comes_through_with_a_note() -> None:
    with pytest.raises(sm.SpecError, match="3") as raised:
        check(centered, counter(), X[:3], meshes=[{"x": 1}, {"x": 2}])
    assert raised.value.__notes__[-1:] == ["While assert_equivalent called `centered` on mesh x=2."]


def test_functions_without_a_gradient_are_told_of_the_argument() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < -99, lambda x: x + 1, x)

    with pytest.raises(ValueError, match="everse-mode") as raised:
        check(loop, X)
    assert raised.value.__notes__[-2:] == [
        "While assert_equivalent called `loop` for the gradient on mesh x=2.",
        "Give gradients=False where a function has none.",
    ]
    check(loop, X, gradients=False)


@pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")
def test_static_leaves_that_cannot_be_hashed_pass() -> None:
    check(lambda model, x: (x, model), {"odd": {1, 2}, "w": sm.ParamState(1.0)}, X)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"args": X},
        TypeError,
        "args: a ndarray. Give the arguments of the function in a tuple: args=(model, x).",
    ),
    (
        {"meshes": []},
        ValueError,
        'meshes: the list is empty. Give at least one mesh: meshes=[{"x": 2}].',
    ),
    (
        {"meshes": [8]},
        TypeError,
        "meshes: 8 is a int. Give a list of jax.sharding.Mesh, or of the sizes of their axes: "
        'meshes=[{"x": 2}, {"x": 4, "y": 2}].',
    ),
    (
        {"meshes": [{"x": 4, "y": 4}]},
        sm.StatemeshError,
        "meshes: x=4, y=4 needs 16 devices, and JAX has 8. Simulate them: statemesh.testing.set_devices(16) "
        "in the first lines of conftest.py; or emulate the mesh on one device with "
        "statemesh.testing.emulate.",
    ),
    ({"steps": 0}, ValueError, "steps: 0. Give the number of calls in a row, at least 1."),
]


@pytest.mark.parametrize(("given", "error", "text"), MISTAKES)
def test_the_text_is_exactly(given: dict[str, Any], error: type[Exception], text: str) -> None:
    right: dict[str, Any] = {
        "args": (X,),
        "meshes": TWO,
        "in_specs": P("x"),
        "out_specs": P("x"),
    }
    with pytest.raises(error) as raised:
        assert_equivalent(jnp.sin, **{**right, **given})
    assert type(raised.value) is error
    assert str(raised.value) == text


# What it costs


def test_many_values_cost_the_compiles_of_one() -> None:
    fun = lambda seen, x: centered(seen, x)
    meshes = [{"x": 2}, {"x": 4}]
    with compiles() as first:
        check(fun, counter(), X, meshes=meshes)
    with compiles() as again:
        for k in range(3):
            check(fun, counter(), X + k, meshes=meshes)
    assert again.times == 0
    assert first.times > 0


def test_many_values_cost_one_compile_of_the_unsharded_function() -> None:
    fun = lambda seen, x: centered(seen, x)
    plain = lambda seen, x: (x - x.mean(0), seen.set(seen.value + x.sum()))
    check(fun, counter(), X, unsharded=plain)
    with compiles() as again:
        check(fun, counter(), X + 1, unsharded=plain)
    assert again.times == 0


def test_models_of_several_kinds_are_not_mixed_up() -> None:
    def scaled(w: Any, x: Any) -> Any:
        return x * w.value, w

    for kind in (sm.LongTermState, sm.ParamState, sm.LongTermState):
        check(scaled, kind(np.float32(2)), X, gradients=False)


def test_functions_that_cannot_be_hashed_are_compared_too() -> None:
    class Add:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x + 1

    check(Add(), X)
    check(functools.partial(jnp.add, 1), X)


# The helpers


def test_enough_devices_are_enough() -> None:
    set_devices(4)
    assert jax.device_count() == 8


def test_too_few_devices_are_an_error() -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        set_devices(16)
    assert str(raised.value) == (
        "set_devices(16): JAX has started already, with 8 devices. Call it in the first lines of "
        "conftest.py, before anything asks JAX for its devices or makes an array; in a shell, `export "
        "XLA_FLAGS=--xla_force_host_platform_device_count=16` does the same."
    )


@pytest.mark.parametrize("before", ["", "--xla_force_host_platform_device_count=2"])
def test_devices_are_set_before_jax_starts(before: str) -> None:
    code = "from statemesh.testing import set_devices; set_devices(5); import jax; print(jax.device_count())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"XLA_FLAGS": before, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "5\n", run.stderr


def test_without_hypothesis_it_is_said_how_to_get_it() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import statemesh.testing"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr.endswith(
        "ImportError: statemesh.testing needs Hypothesis: pip install 'statemesh[testing]'.\n"
    )


def test_profiles() -> None:
    try:
        load_profile("deep")
        assert (settings().max_examples, settings().deadline) == (1000, None)
        load_profile("quick")
        assert (settings().max_examples, settings().deadline) == (25, None)
    finally:
        load_profile()
