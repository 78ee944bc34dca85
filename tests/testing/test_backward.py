"""Lines of backward functions. A test fails here if JAX no longer lets them be recorded."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from statemesh.testing._program._backward import backward_lines, is_handed_on, is_of_backward
from statemesh.testing._program._jaxprs import Equation, all_equations
from statemesh.testing._program._lines import line_of


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


def doubled_back(cosine: Any, g: Any) -> tuple[Any]:
    half = cosine * g  # computed
    return (half + g,)  # added


doubled.defvjp(lambda x: (doubled(x), jnp.cos(x)), doubled_back)


@jax.custom_vjp
def same(x: Any) -> Any:
    return x


same.defvjp(lambda x: (x, None), lambda _, g: (g,))  # handed on


def line_with(text: str) -> int:
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = (k for k, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))
    return number


def equations(fun: Any) -> Iterator[Equation]:
    with backward_lines():
        yield from all_equations(jax.make_jaxpr(jax.grad(fun))(1.0))


def lines_of_backward(fun: Any) -> list[int]:
    lines = [line_of(eqn) for eqn in equations(fun) if is_of_backward(eqn)]
    return [*dict.fromkeys(line.number for line in lines if line is not None)]


def test_lines() -> None:
    lines = lines_of_backward(lambda x: doubled(x) ** 2)
    assert lines == [line_with("computed"), line_with("added")]


def test_what_is_handed_on_has_a_line() -> None:
    assert lines_of_backward(lambda x: same(x) ** 2) == [line_with("handed on")]
    assert sum(map(is_handed_on, equations(lambda x: same(x) ** 2))) == 1
    assert not any(map(is_handed_on, equations(lambda x: doubled(x) ** 2)))


@pytest.mark.parametrize(
    "around", [jax.jit, jax.checkpoint, functools.partial(jax.vmap, in_axes=0)]
)
def test_lines_inside_of_others(around: Any) -> None:
    mapped = around(lambda x: doubled(x) ** 2)
    lines = lines_of_backward(lambda x: mapped(jnp.full(3, x)).sum())
    assert lines == [line_with("computed"), line_with("added")]


def test_lines_in_a_loop() -> None:
    def loss(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (doubled(x), None), x, length=3)[0]

    assert lines_of_backward(loss) == [line_with("computed"), line_with("added")]


def test_functions_of_libraries_keep_the_line_of_the_call() -> None:
    make: Any = eqx.filter_custom_vjp
    of_library = make(lambda x: 2 * x)
    of_library.def_fwd(lambda perturbed, x: (2 * x, None))
    of_library.def_bwd(lambda residuals, g, perturbed, x: 2 * g)
    assert lines_of_backward(lambda x: of_library(x) ** 2) == []


def test_values_stay_and_nothing_is_left_behind() -> None:
    def loss(x: Any) -> Any:
        return same(doubled(x)) ** 2

    with backward_lines(), backward_lines():
        inside = jax.grad(loss)(0.5)
    np.testing.assert_array_equal(inside, jax.grad(loss)(0.5))
    assert vars(jax.custom_vjp).get("bwd") is None
    assert not any(map(is_of_backward, all_equations(jax.make_jaxpr(jax.grad(loss))(1.0))))


def test_an_error_of_the_function_is_raised() -> None:
    @jax.custom_vjp
    def failing(x: Any) -> Any:
        return x

    def back(_: None, g: Any) -> tuple[Any]:
        raise ValueError("as the user wrote it")

    failing.defvjp(lambda x: (x, None), back)
    with pytest.raises(ValueError, match="as the user wrote it"):
        list(equations(failing))
    assert vars(jax.custom_vjp).get("bwd") is None
