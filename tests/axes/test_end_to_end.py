"""Small arrays put end to end and taken apart again, in programs that compile quickly."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from statemesh._axes._end_to_end import end_to_end, taken_apart, written_end_to_end


# More than one operation takes at once, with a scalar and an empty array.
SHAPES = [(), (3,), (0,), (2, 2), *[(2,)] * 17]


def arrays() -> list[np.ndarray]:
    numbers = np.random.default_rng(0)
    return [numbers.normal(size=shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("put", [end_to_end, written_end_to_end])
@pytest.mark.parametrize("at_once", [1, 8])
def test_arrays_come_back_as_they_were(put: Callable[..., jax.Array], at_once: int) -> None:
    given = arrays()
    whole = put([jnp.asarray(x) for x in given])
    np.testing.assert_array_equal(whole, np.concatenate([x.ravel() for x in given]))
    for x, y in zip(given, taken_apart(whole, SHAPES, at_once), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.shape == y.shape


def test_the_transpose_of_taking_apart_is_one_concatenation() -> None:
    def total(whole: jax.Array) -> jax.Array:
        pieces = taken_apart(whole, SHAPES)
        return jnp.stack([(k * x).sum() for k, x in enumerate(pieces)]).sum()

    given = arrays()
    size = sum(x.size for x in given)
    found = jax.grad(total)(jnp.ones(size))
    assert found.tolist() == [k for k, x in enumerate(given) for _ in range(x.size)]
    made = re.findall(
        r"dynamic_update_slice|concatenate|pad", str(jax.make_jaxpr(jax.grad(total))(found))
    )
    assert made == ["concatenate"]


@pytest.mark.parametrize("at_once", [1, 8])
def test_no_loop_begins_at_a_constant(at_once: int) -> None:
    def both(*given: jax.Array) -> list[jax.Array]:
        return taken_apart(written_end_to_end(given), SHAPES, at_once)

    text = jax.jit(both).lower(*arrays()).as_text()
    sliced = re.findall(r"dynamic(?:_update)?_slice .*", text)
    assert len(sliced) >= 3
    hidden = set(re.findall(r"(%\d+)(?::\d+)? = stablehlo.optimization_barrier", text))
    for line in sliced:
        start = line.split(",")[2 if "update" in line else 1]
        assert start.strip().split("#")[0] in hidden, line
