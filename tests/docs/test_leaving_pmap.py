"""Programs of others run with `pmap2` in the place of `jax.pmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import DOCS, module_at


programs = module_at(DOCS / "leaving_pmap" / "programs.py")

PAGE = (DOCS / "pages" / "leaving-pmap.md").read_text()


def assert_same(x: Any, y: Any) -> None:
    if isinstance(x, str):
        assert x == y
        return
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x), np.asarray(y)
    assert (np.shape(x), x.dtype) == (np.shape(y), y.dtype)
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_it_gives_what_it_gave(name: str) -> None:
    program = programs.PROGRAMS[name]
    expected = program.expected() if program.expected else program.run(jax.pmap)
    got = program.run(sm.pmap2)
    assert jax.tree.leaves(expected)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert_same(x, y)


def test_the_page_lists_every_program() -> None:
    for name, program in programs.PROGRAMS.items():
        row = f"| {name.replace('_', ' ')} | {program.source} | {program.changes or 'nothing'} |"
        assert row in PAGE
    same = sum(not program.changes for program in programs.PROGRAMS.values())
    assert f"Of {len(programs.PROGRAMS)} programs {same} run unchanged." in PAGE
    assert len(programs.PROGRAMS) >= 30


def test_a_result_that_is_off_is_seen() -> None:
    """The comparison can fail."""
    with pytest.raises(AssertionError):
        assert_same(np.ones(3), np.ones(3) * 1.001)
    with pytest.raises(AssertionError):
        assert_same(np.ones(3, np.float32), np.ones(3))
