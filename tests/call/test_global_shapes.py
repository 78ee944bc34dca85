"""`global_arg_shapes` in one process, which has all lanes: they are the shapes of the arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm


def step(x: Any, y: Any, z: Any) -> Any:
    return jnp.sum(x) + y * jax.tree.leaves(z)[0]


def test_global_shapes_that_fit_change_nothing() -> None:
    # That of what all lanes share is its own shape.
    shapes: Any = ([3, np.int64(8)], (8,), (2,)), ([3, 8], None, None)
    args = np.arange(24).reshape(3, 8), np.arange(8), {"z": jnp.arange(2)}
    expected = args[0].sum(0)[:, None] + args[1][:, None] * np.arange(2)
    for global_shapes in (*shapes, None):
        mapped = sm.pmap2(step, in_axes=(-1, 0, None), global_arg_shapes=global_shapes)
        np.testing.assert_array_equal(mapped(*args), expected)


def test_shapes_are_checked_at_every_call_also_of_a_state() -> None:
    double = sm.pmap2(lambda s: s.set(s.value * 2), state_in_axes=..., global_arg_shapes=((8, 3),))
    x = jnp.arange(24).reshape(8, 3)
    state = double(double(sm.State(x)))
    with pytest.raises(sm.BatchAxisError, match=r"State\(int32\[8,2\]\) here"):
        double(sm.State(x[:, :2]))
    np.testing.assert_array_equal(double(state).value, x * 8)


def test_all_arguments_that_are_not_of_their_global_shapes_are_named() -> None:
    mapped = sm.pmap2(step, in_axes=(1, 0, 0), global_arg_shapes=((3, 9), (8, 1), (8,)))
    pair = [jnp.ones(8), jnp.ones(8)]
    with pytest.raises(sm.BatchAxisError) as caught:
        mapped(jnp.ones((3, 8)), jnp.ones(8), pair)
    assert str(caught.value) == (
        "step: arguments do not fit global_arg_shapes:\n"
        "  - x: float32[3,8] here, but global_arg_shapes has (3, 9), of which this process's part is (3, 9)\n"
        "  - y: float32[8] here, but global_arg_shapes has (8, 1), of which this process's part is (8, 1)\n"
        "  - z: [float32[8], float32[8]] here, but global_arg_shapes has (8,), of which this process's part "
        "is (8,)\n"
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give None "
        "for any other argument."
    )


def test_every_positional_argument_has_an_entry() -> None:
    mapped = sm.pmap2(step, global_arg_shapes=((8,),))
    with pytest.raises(sm.BatchAxisError) as caught:
        mapped(*[jnp.ones(8)] * 3)
    assert str(caught.value) == (
        "step was called with 3 positional arguments, but global_arg_shapes has 1 entry. It has one for "
        "each positional argument: its global shape, or None."
    )


@pytest.mark.parametrize("shapes", [8, (8,), ((8, 2.0),), "8"])
def test_shapes_are_tuples_of_ints(shapes: Any) -> None:
    with pytest.raises(TypeError) as caught:
        sm.pmap2(step, global_arg_shapes=shapes)
    assert str(caught.value) == (
        f"global_arg_shapes={shapes!r} is not a shape (a tuple of ints) or None for each positional argument."
    )
