"""`assert_equivalent`: what it compares, what it says, what it costs; and `set_devices`, `load_profile`."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent, load_profile, set_devices
from tests.helpers import assert_says, compiles, make_mesh, slow

from . import checked


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)

# In double precision only, which costs less.
NO_DEVICES: list[Any] = [AbstractMesh((2,), ("x",))]


def defaults(args: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Of a model and rows, or of rows, called as often as is usual, with gradients."""
    two = len(args) == 2
    return {
        "in_specs": (None, P("x")) if two else P("x"),
        "out_specs": (P("x"), P()) if two else P("x"),
        "steps": None,
        "gradients": None,
        **more,
    }


def check(fun: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return checked.check(fun, *args, **defaults(args, more))


def report(fun: Callable[..., Any], *args: Any, **more: Any) -> str:
    return checked.report(fun, *args, **defaults(args, more))


def on_one(right: Any, mistaken: Any) -> Any:
    return right if lax.axis_size("x") == 1 else mistaken


def centered(seen: sm.State, x: Any) -> Any:
    return x - lax.pmean(x.mean(0), "x"), seen.set(seen.value + x.sum())


def centered_here(seen: sm.State, x: Any) -> Any:
    return x - x.mean(0), seen.set(seen.value + x.sum())


def counter() -> sm.State:
    return sm.State(0.0, reduce="sum")


# What passes


@pytest.mark.parametrize(
    ("kind", "check_vma"), [(AxisType.Explicit, True), slow(AxisType.Auto, False)]
)
def test_right_code_passes(kind: AxisType, check_vma: bool) -> None:
    meshes = [make_mesh(name, kind) for name in ("1", "4", "2")]
    result = check(centered, counter(), X, meshes=meshes, check_vma=check_vma)
    # All ways to call it were compared.
    assert result.agreed == (
        *("on mesh x=1", "on mesh x=4", "on mesh x=2", "inside jit on mesh x=2"),
        "saved on mesh x=4 and placed on mesh x=2",
        *(f"on mesh x={n} with generic values" for n in (1, 4, 2)),
        *(f"on mesh x={n} with generic values and the next batch" for n in (1, 4, 2)),
        *(f"on mesh x={n} with large values" for n in (1, 4, 2)),
        *(f"on mesh x={n} with one NaN" for n in (1, 4, 2)),
    )


@pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")
def test_static_leaves_and_numbers_of_python_pass() -> None:
    model = {"odd": {1, 2}, "flag": False, "rate": 0.5, "w": sm.ParamState(1.0)}
    check(lambda model, x: (x, model), model, X, gradients=False)


def test_specs_of_states_are_those_of_the_call() -> None:
    def add(buffer: Any, x: Any) -> Any:
        return x, buffer.set(buffer.value + x)

    check(add, sm.State(X), X, state_in_specs=P("x"), gradients=False)
    with pytest.raises(TypeError):
        check(add, sm.State(X), X)


@pytest.mark.slow
def test_results_that_depend_on_the_mesh_are_compared_with_their_emulation() -> None:
    def numbered(seen: Any, x: Any) -> Any:
        return x + lax.axis_index("x"), seen.set(seen.value + x.max())

    check(numbered, counter(), X, unsharded=False, gradients=False)
    assert "compared with the function on one device" in report(numbered, counter(), X)


def test_functions_of_numpy_are_references() -> None:
    def plain(seen: sm.State, x: Any) -> Any:
        wide = np.asarray(x, np.float64)
        return wide - wide.mean(0), seen.set(seen.value + np.float32(wide.sum()))

    more: Any = {"unsharded": plain, "gradients": False}
    check(centered, counter(), X, **more)
    assert "compared with the unsharded function" in report(centered_here, counter(), X, **more)


def test_integers_are_equal_or_not() -> None:
    assert "off by 1 at [0]" in report(lambda x: 1000000 * x + on_one(0, 1), np.arange(8))


@pytest.mark.slow
def test_what_cancels_is_held_to_the_digits_that_it_has_in_double_precision() -> None:
    """Of large numbers less their mean, summed in another order, few digits are right in float32."""
    less_mean: Callable[[Any], Any] = lambda x: x - lax.pmean(x.mean(0), "x")
    more: Any = {"meshes": NO_DEVICES, "gradients": False}
    check(less_mean, X + 1e4, **more)
    wrong: Callable[[Any], Any] = lambda x: less_mean(x) + 1e-6 * lax.axis_index("x")
    assert "off by 1e-06" in report(wrong, X + 1e4, **more)


# What is compared


def of_other_forms(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x")
    return {
        "right": total,
        "dtype": on_one(total, total.astype(jnp.bfloat16)),
        "weak": on_one(jnp.asarray(2.0, jnp.float32), jnp.asarray(2.0)),
        "static": on_one("one", "several"),
        "structure": on_one((total, total), [total, total]),
    }


def test_the_form_of_results_is_compared() -> None:
    text = report(of_other_forms, X, out_specs=P())
    assert text.splitlines()[2:] == [
        "On mesh x=2, compared with the function on one device:",
        "  - of_other_forms(...)['dtype']: of dtype bfloat16, should be of float32.",
        "  - of_other_forms(...)['static']: 'several', should be 'one'.",
        "  - of_other_forms(...)['structure']: a list of 2, should be a tuple of 2.",
        "  - of_other_forms(...)['weak']: of a weak type (a Python number's), should be of a strong type.",
    ]


def backwards(factor: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that is right but for the way back."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g * factor(g),))
    return lambda x: same(x)


def test_gradients_are_compared() -> None:
    wrong = backwards(lambda g: lax.axis_size("x"))
    check(wrong, X, gradients=False)
    text = report(wrong, X)
    assert "The derivatives stop being those of one device here:" in text
    assert "same.defvjp(lambda x: (x, None), lambda _, g: (g * factor(g),))" in text
    assert "\n  - the gradient by args[0]: float32[8,2], off by " in text


@pytest.mark.slow
def test_what_goes_wrong_inside_jit_is_found() -> None:
    """Where gradients are taken on devices: of this one, float16 overflows on the mesh."""

    def factor(g: Any) -> Any:
        return 1 + jnp.isinf((g * 0 + 300) * (1 + 299 * on_one(0, 1)))

    wrong = backwards(factor)
    text = report(wrong, np.asarray(X, np.float16))
    assert "Inside jit on mesh x=2, compared with the function on one device:" in text
    assert "  - the gradient by args[0]: float16[8,2], off by " in text
    assert "It agrees on mesh x=2, on mesh x=2 with generic values" in text


@pytest.mark.slow
def test_later_calls_are_compared() -> None:
    def late(seen: Any, x: Any) -> Any:
        return x, seen.set(seen.value + jnp.where(seen.value > 2, lax.axis_size("x"), 1))

    check(late, sm.State(0), X, steps=3, gradients=False, keep="args[0]")
    assert "On mesh x=2, call 4 of 4, compared with" in report(late, sm.State(0), X, steps=4)


def test_a_model_that_another_mesh_saved_is_compared() -> None:
    def sized(size: sm.State, x: Any) -> Any:
        """Rows are off by one where the state comes from a mesh of another size."""
        here = lax.axis_size("x")
        same = (size.value == here) | (size.value == 0)
        return x + jnp.where(same, 0, 1), size.set(size.value * 0 + here)

    more: Any = {"meshes": [{"x": 4}, {"x": 2}], "leave_out": "[1]", "keep": ["args[0]"]}
    assert (
        "Saved on mesh x=4 and placed on mesh x=2, call 2 of 3, compared with the function on one device:"
        in report(sized, sm.State(0), X, gradients=False, **more)
    )


@pytest.mark.slow
def test_results_without_a_derivative_are_named() -> None:
    """A state of `reduce=\"max\"` has one."""

    def with_extremes(model: Any, x: Any) -> Any:
        far = lambda y: jnp.abs(y).max() > 0.1
        halved = lax.while_loop(far, lambda y: y / 2, model["loop"].value)
        top, loop = model["top"].set(x.max(0)), model["loop"].set(halved + 0.1)
        return lax.psum(x.sum(0), "x"), {"top": top, "loop": loop}

    model = {"top": sm.State(jnp.zeros(2), reduce="max"), "loop": sm.State(jnp.ones(2))}
    result = check(with_extremes, model, X, out_specs=P(), steps=1, meshes=NO_DEVICES)
    assert result.constant == ("with_extremes(...)[1]['loop'].value",)
    assert "the gradient by args[1]" in result.differentiated


@pytest.mark.slow
def test_a_function_without_a_derivative_needs_no_word_for_it() -> None:
    """As a step that solves a differential equation: it has one of the first order only."""
    traces = []

    def halves(model: Any, x: Any) -> Any:
        traces.append(len(model))
        total = lax.psum(x.sum(0), "x")
        small = lax.while_loop(lambda y: y.max() > 0.1, lambda y: y / 2, total)
        return [w + small.sum() for w in model]

    model = [jnp.ones(2)] * 40
    result = check(halves, model, X, out_specs=P(), steps=1, meshes=NO_DEVICES)
    assert len(result.constant) == 40 and not result.differentiated
    assert len(traces) < 30
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        check(halves, model, X, out_specs=P(), steps=1, meshes=NO_DEVICES, gradients=True)


# What it says


@pytest.mark.slow
def test_the_line_comes_first_and_then_what_is_off() -> None:
    lines = report(centered_here, counter(), X, steps=1).splitlines()
    number = centered_here.__code__.co_firstlineno + 1
    assert lines[:4] == [
        f"centered_here: the calls do not agree, see test_equivalent.py:{number}: "
        "centered_here(...)[0] is off by 0.1283 on mesh x=2.",
        "",
        "On mesh x=2, compared with the function on one device:",
        "  Values stop being those of one device here:",
    ]
    source = "return x - x.mean(0), seen.set(seen.value + x.sum())"
    assert lines[4].endswith(f"test_equivalent.py:{number}: {source}")
    off = "  - centered_here(...)[0]: float32[8,2], off by 0.1283 at [0, 0], where it is "
    assert off in lines[-1]
    assert lines[-1].endswith("(1e-15 would be rounding in double precision).")


@pytest.mark.slow
def test_further_meshes_take_a_line() -> None:
    text = report(centered_here, counter(), X, meshes=[{"x": 1}, {"x": 2}, {"x": 8}])
    assert "On mesh x=2, call 1 of 3, compared with" in text
    assert (
        "\n\nOn mesh x=8, call 1 of 3, 1 result is off too.\n\nIt agrees on mesh x=1.\n\n" in text
    )
    assert text.endswith("From call to call centered_here(...)[1] becomes args[0].")
    assert len(text.splitlines()) <= 25


# Bad input


@pytest.mark.slow
def test_what_the_call_raises_comes_through_with_a_note() -> None:
    with pytest.raises(sm.SpecError, match="3") as raised:
        check(centered, counter(), X[:3], meshes=[{"x": 1}, {"x": 2}], gradients=False)
    assert raised.value.__notes__[-1:] == ["While assert_equivalent called `centered` on mesh x=2."]


def test_functions_without_a_gradient_are_told_of_the_argument() -> None:
    def loop(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < -99, lambda x: x + 1, x)

    with compiles() as count, pytest.raises(ValueError, match="everse-mode") as raised:
        check(loop, X, gradients=True)
    # Nothing was compiled in vain.
    assert count.times == 0
    assert raised.value.__notes__[-2:] == [
        "While assert_equivalent called `loop` for the gradient on mesh x=2.",
        "Give gradients=False where a function has none.",
    ]
    assert check(loop, X).constant == ("loop(...)",)


def test_meshes_that_cannot_be_made() -> None:
    specs: Any = {"in_specs": P("x"), "out_specs": P("x")}
    assert_says(
        lambda: assert_equivalent(jnp.sin, (X,), meshes=[], **specs),
        ValueError,
        'meshes: the list is empty. Give at least one mesh: meshes=[{"x": 2}].',
    )
    assert_says(
        lambda: assert_equivalent(jnp.sin, (X,), meshes=[{"x": 4, "y": 4}], **specs),
        sm.StatemeshError,
        "meshes: x=4, y=4 needs 16 devices, and JAX has 8. Simulate them: statemesh.testing.set_devices(16) "
        "in the first lines of conftest.py; or emulate the mesh on one device with "
        "statemesh.testing.emulate.",
    )


# What it costs


@pytest.mark.slow
def test_many_values_cost_the_compiles_of_one() -> None:
    plain = lambda seen, x: (x - x.mean(0), seen.set(seen.value + x.sum()))
    for unsharded in (None, plain):
        fun = lambda seen, x: centered(seen, x)
        check(fun, counter(), X, unsharded=unsharded, gradients=False)
        with compiles() as again:
            for k in (1, 2):
                check(fun, counter(), X + k, unsharded=unsharded, gradients=False)
        assert again.times == 0


@pytest.mark.slow
def test_a_check_compiles_the_function_on_the_mesh_and_inside_jit_alone() -> None:
    """With all other values and ways of calling."""
    checked.check(lambda x: lax.psum(x.sum(0), "x"), X)
    with compiles() as count:
        checked.check(lambda x: lax.pmean(x.mean(0), "x"), X)
    assert count.times == 2


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

    for fun in (Add(), functools.partial(jnp.add, 1)):
        check(fun, X, gradients=False)


# The helpers


def run_python(code: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_devices_are_set_before_jax_starts() -> None:
    set_devices(4)  # Enough devices are enough.
    assert jax.device_count() == 8
    code = "from statemesh.testing import set_devices; set_devices(5); import jax; print(jax.device_count())"
    flags = "--xla_force_host_platform_device_count=2"
    run = run_python(code, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert run.stdout == "5\n", run.stderr


@pytest.mark.slow
def test_without_hypothesis_it_is_said_how_to_get_it() -> None:
    run = run_python("import sys; sys.modules['hypothesis'] = None; import statemesh.testing")
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
