"""`shard_map` and `pmap2` in the place of JAX's functions compute what these compute."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import statemesh as sm
from tests.drop_in.cases import CASES, Map, jnp, numbers
from tests.scripts.drop_in.__main__ import run


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_shards_as_with_jax(name: str) -> None:
    expected = CASES[name](jax.shard_map)
    compiled = CASES[name](sm.shard_map)
    assert_close(compiled, expected)
    assert replicated(compiled) == replicated(expected)
    assert_close(CASES[name](functools.partial(sm.shard_map, jit=False)), expected)


def collectives(x: Any) -> Any:
    around = lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)])
    return around, lax.pmax(x, "i"), lax.all_to_all(x, "i", 0, 0), lax.psum_scatter(x, "i")


def trees(tree: Any, y: Any) -> Any:
    return {"a": tree["a"] + y, "b": tree["b"] * lax.axis_index("i")}


def centered(x: Any) -> Any:
    return x - lax.pmean(x, "i")


def centered_twice(x: Any) -> Any:
    return x - lax.psum(x, "i") * lax.pmean(x, "j")


TREES = {"a": 1, "b": 0}
# Code written for `jax.pmap`.
LANES: dict[str, Callable[[Map], Any]] = {
    "trees and axes": lambda pmap: pmap(trees, "i", in_axes=(TREES, None), out_axes=TREES)(
        {"a": numbers(3, 8), "b": numbers(8, 2)}, numbers(3)
    ),
    "a static argument": lambda pmap: pmap(
        lambda x, n: x.reshape(n, -1), static_broadcasted_argnums=1
    )(numbers(8, 6), 2),
    "an argument given up": lambda pmap: pmap(jnp.add, donate_argnums=(0,))(numbers(8), numbers(8)),
    "a size": lambda pmap: pmap(lambda x: x + lax.axis_index("i"), "i", axis_size=4)(numbers(4)),
    "devices": lambda pmap: pmap(centered, "i", devices=jax.devices()[3::-1])(numbers(4, 2)),
    "a platform": lambda pmap: pmap(jnp.sin, backend="cpu")(numbers(8)),
    "fewer lanes than devices": lambda pmap: pmap(lambda x: lax.all_gather(x, "i"), "i")(
        numbers(3, 2)
    ),
    "collectives": lambda pmap: pmap(collectives, "i")(numbers(8, 8)),
    "a vmap inside": lambda pmap: pmap(jax.vmap(centered_twice, axis_name="j"), "i")(numbers(8, 3)),
    "no elements": lambda pmap: pmap(lambda x, y: (x, y + x.sum()))(jnp.zeros((8, 0)), numbers(8)),
    "NumPy arrays": lambda pmap: pmap(lambda x: x / 3)(np.arange(8.0, dtype=np.float32)),
    "keywords": lambda pmap: pmap(lambda x, y: x + y)(numbers(8), y=numbers(8)),
    "in jit": lambda pmap: jax.jit(lambda x: pmap(centered, "i")(2 * x).sum(0))(numbers(8, 2)),
    "in vmap": lambda pmap: jax.vmap(pmap(centered, "i"))(numbers(3, 8)),
    "in jvp": lambda pmap: jax.jvp(pmap(centered, "i"), (numbers(8),), (numbers(8),)),
    "in grad": lambda pmap: jax.grad(lambda x: (pmap(centered, "i")(x) ** 2).sum())(numbers(8, 3)),
    "shapes": lambda pmap: np.zeros(jax.eval_shape(pmap(centered, "i"), numbers(8, 2)).shape),
}


@pytest.mark.parametrize("name", LANES)
def test_lanes_as_with_jax(name: str) -> None:
    expected = LANES[name](jax.pmap)
    for mapping in (sm.pmap2, beside_a_state):
        assert_close(LANES[name](mapping), expected)


class Counter(sm.Module):
    count: sm.State


def beside_a_state(fun: Map, axis_name: Any = None, **options: Any) -> Map:
    """`pmap2` of a function with a state as its first argument and last result, which counts its calls."""

    def step(model: Counter, *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs), model.replace(count=model.count.value + 1)

    in_axes = options.pop("in_axes", 0)
    options["in_axes"] = (None, *in_axes) if isinstance(in_axes, tuple) else in_axes
    options["out_axes"] = (options.pop("out_axes", 0), 0)
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in options:
            options[name] = tuple(k + 1 for k in np.atleast_1d(options[name]).tolist())
    mapped: Callable[..., Any] = sm.pmap2(step, axis_name=axis_name, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        result, model = mapped(Counter(sm.State(0)), *args, **kwargs)
        if not isinstance(model.count.value, jax.core.Tracer):
            assert model.count.value == 1
        return result

    return call


def replicated(tree: Any) -> list[bool]:
    leaves = jax.tree.leaves(tree)
    return [x.sharding.is_fully_replicated for x in leaves if isinstance(x, jax.Array)]


def assert_close(result: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure
    assert structure(result) == structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
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


def test_a_test_file_of_jax_sees_the_variant(tmp_path: Path) -> None:
    file = tmp_path / "some_test.py"
    file.write_text(FILE)
    result = run(file, "statemesh", 1, "")
    assert [word for _, (word, _) in result["found"].items()] == ["passed"] * 2
    assert sum(count["called"] for count in result["counts"].values()) == 3
