"""What is fed back is found wherever it stands."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm
from statemesh.testing._equivalent._feedback import find


class Layer(sm.Module):
    w: sm.ParamState
    scale: Any


def carrier(kind: str, size: int) -> Any:
    """A part whose shapes no other part has."""
    x = np.zeros(size, np.float32)
    made: dict[str, Callable[[], Any]] = {
        "state": lambda: sm.State(x),
        "module": lambda: Layer(sm.ParamState(x), x[None]),
        "dictionary": lambda: {"k": x, "v": [x, "text"]},
        "tuple": lambda: (x, x[None]),
        "nested": lambda: [(sm.BatchState(x), None), {"act": np.tanh, "b": x}],
    }
    return made[kind]()


KINDS = ["state", "module", "dictionary", "tuple", "nested"]


@st.composite
def trees(draw: st.DrawFn, parts: list[Any], least: int) -> Any:
    """These parts in any order, in tuples and dictionaries, among arrays of `least` numbers or more."""
    nodes = [("part", part) for part in draw(st.permutations(parts))]
    for _ in range(draw(st.integers(0, 3))):
        nodes.insert(
            draw(st.integers(0, len(nodes))),
            ("noise", np.zeros(draw(st.integers(least, least + 5)))),
        )
    while len(nodes) > 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(nodes) - 1))
        stop = draw(st.integers(start + 1, len(nodes)))
        inner = [node for _, node in nodes[start:stop]]
        # The number of what stands beside it keeps the structure from being one of the arguments.
        wrapped = {f"{draw(st.uuids())}": inner} if draw(st.booleans()) else (*inner, "end")
        nodes[start:stop] = [("node", wrapped)]
    return tuple(node for _, node in nodes)


@given(st.data())
def test_parts_are_found_wherever_they_stand(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    old = [carrier(kind, 2 + k) for k, kind in enumerate(kinds)]
    new = [jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, part) for part in old]
    args, result = data.draw(trees(old, 90)), data.draw(trees(new, 100))
    found = find(args, {}, result)
    given, _ = found.apply(args, {}, result)
    assert str(jax.tree.structure(given)) == str(jax.tree.structure(args))
    for leaf, before in zip(jax.tree.leaves(given), jax.tree.leaves(args), strict=True):
        if not eqx.is_array(before) or before.size >= 90:
            assert leaf is before
        else:
            np.testing.assert_array_equal(leaf, 1)


@given(st.data())
def test_nothing_is_fed_back_twice(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    # Parts of few shapes, so that many look alike.
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=len(kinds), max_size=len(kinds)))
    parts = [carrier(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    args, result = data.draw(trees(parts, 90)), data.draw(trees(parts, 90))
    found = find(args, {}, result)
    to, source = zip(*found.numbers, strict=True) if found.numbers else ((), ())
    assert len(set(to)) == len(to) and len(set(source)) == len(source)
    before, after = jax.tree.leaves(args), jax.tree.leaves(result)
    for i, j in found.numbers:
        assert np.shape(before[i]) == np.shape(after[j])
