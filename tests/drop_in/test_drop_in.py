"""`shard_map` and `pmap2` in the place of JAX's functions, also with a State next to the arrays."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import statemesh as sm

from .drop_in.__main__ import run
from .drop_in._stand_in import by_older_names
from .drop_in_cases import CASES, LANES, beside_a_state, lanes_beside_a_state


pytestmark = pytest.mark.slow


structure: Any = jax.tree.structure


@functools.cache
def expected(name: str) -> Any:
    return CASES[name](jax.shard_map)


def specs(tree: Any) -> list[Any]:
    """The specs of its arrays."""
    return [
        x.sharding.is_fully_replicated for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)
    ]


@pytest.mark.parametrize("name", CASES)
def test_as_with_jax(name: str) -> None:
    found = CASES[name](sm.shard_map)
    close(found, expected(name))
    assert specs(found) == specs(expected(name))


VARIANTS: dict[str, Any] = {
    "with a State": beside_a_state,
    "not compiled": functools.partial(sm.shard_map, jit=False),
    "older names": by_older_names,
}


@pytest.mark.parametrize(
    "variant",
    # `test_legacy.py` has the older names in the quick suite.
    [pytest.param(v, marks=[pytest.mark.slow] if v == "older names" else []) for v in VARIANTS],
)
@pytest.mark.parametrize("name", CASES)
def test_variants_compute_the_same(name: str, variant: str) -> None:
    close(CASES[name](VARIANTS[variant]), expected(name))


@functools.cache
def expected_of_lanes(name: str) -> Any:
    return LANES[name](jax.pmap)


@pytest.mark.parametrize(
    "mapping", [sm.pmap2, lanes_beside_a_state], ids=["arrays", "with a State"]
)
@pytest.mark.parametrize("name", LANES)
def test_lanes_as_with_jax(name: str, mapping: Any) -> None:
    close(LANES[name](mapping), expected_of_lanes(name))


def close(found: Any, wanted: Any) -> None:
    assert structure(found) == structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-6)


# A test file of JAX, as the code that replaces JAX's functions sees it.
FILE = """
import sys
import unittest
import jax
from jax import pmap
from jax._src.shard_map import shard_map
from jax._src import test_util as jtu
from jax.sharding import PartitionSpec as P

jtu.request_cpu_devices(8)

class Test(unittest.TestCase):
    def test_both(self):
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        x = jax.numpy.arange(8.0)
        for over in (jax.shard_map, shard_map):
            @over(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            def same(x):
                return x
            self.assertEqual(same(x).sum(), 28)
        self.assertEqual(pmap(lambda x: x)(x).sum(), 28)

    def test_of_jax_itself(self):
        self.assertIsNot(sys.modules["jax._src.shard_map"].shard_map, shard_map)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "words", "calls"),
    [
        ("jax", ["passed", "passed"], 3),
        ("statemesh", ["passed", "passed"], 3),
        ("not compiled", ["passed", "passed"], 3),
        ("broken", ["failed", "passed"], 1),
    ],
)
def test_a_test_file_of_jax_sees_the_variant(
    tmp_path: Path, variant: str, words: list[str], calls: int
) -> None:
    file = tmp_path / "some_test.py"
    file.write_text(FILE)
    result = run(file, variant, 1, "")
    assert [word for _, (word, _) in sorted(result["found"].items())] == words
    assert sum(count["called"] for count in result["counts"].values()) == calls
