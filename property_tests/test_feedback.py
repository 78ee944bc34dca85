"""What is fed back is found wherever it stands."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent

from .base.settings import fewer


class Layer(sm.Module):
    w: sm.ParamState
    scale: Any


# Parts whose shapes no other part has.
CARRIERS: dict[str, Callable[[Any], Any]] = {
    "state": lambda x: sm.State(x),
    "module": lambda x: Layer(sm.ParamState(x), x[None]),
    "dictionary": lambda x: {"k": x, "v": [x, "text"]},
    "tuple": lambda x: (x, x[None]),
    "nested": lambda x: [(sm.BatchState(x), None), {"act": np.tanh, "b": x}],
}


@st.composite
def trees(draw: st.DrawFn, parts: list[Any], least: int) -> Any:
    """These parts in any order, in tuples and dictionaries, among arrays of `least` numbers or more."""
    nodes = list(draw(st.permutations(parts)))
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(least, least + 5))
        nodes.insert(draw(st.integers(0, len(nodes))), np.zeros(size, np.float32))
    while len(nodes) > 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(nodes) - 1))
        stop = draw(st.integers(start + 1, len(nodes)))
        inner = nodes[start:stop]
        # What stands beside it keeps the structure from being one of the arguments.
        name = f"{draw(st.uuids())}"
        nodes[start:stop] = [{name: inner} if draw(st.booleans()) else (*inner, "end")]
    return tuple(nodes)


def sizes_under(paths: Iterable[str], tree: Any, name: str) -> list[int]:
    """The sizes of the arrays that stand under these paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    places = [(name + jax.tree_util.keystr(keys), x) for keys, x in leaves if eqx.is_array_like(x)]
    return sorted(np.size(x) for path in paths for at, x in places if at.startswith(path))


@pytest.mark.slow
# A check of what was not computed says so.
@pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")
@fewer(0.3)
@given(st.data())
def test_parts_are_found_wherever_they_stand_and_each_once(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(CARRIERS)), min_size=1, max_size=4))
    parts = [CARRIERS[kind](np.zeros(2 + k, np.float32)) for k, kind in enumerate(kinds)]
    args, result = data.draw(trees(parts, 90)), data.draw(trees(parts, 100))

    def step(*args: Any) -> Any:
        some = next(x for x in jax.tree.leaves(args) if eqx.is_inexact_array(x))
        return jax.tree.map(lambda x: x + 0 * some.sum() if eqx.is_array(x) else x, result)

    checked = assert_equivalent(
        *(step, args),
        meshes=[AbstractMesh((2,), ("x",))],
        in_specs=P(),
        out_specs=P(),
        steps=1,
        gradients=False,
    )
    old, new = zip(*checked.fed_back, strict=True)
    # All parts, and none of what stands among them.
    wanted = sorted(np.size(x) for part in parts for x in jax.tree.leaves(part) if eqx.is_array(x))
    assert sizes_under(old, args, "args") == sizes_under(new, result, "step(...)") == wanted
