"""Results are correct whichever leaves share memory, and a call deletes only what `donate` names.

The leaves of a model come from few sources, in all the ways in which arrays can share memory. The expected
value of a leaf is its source's number, plus one for each time that it was written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh

from .base.arrays import aligned


pytestmark = pytest.mark.slow


jnp: Any = jax.numpy

KINDS = [AxisType.Auto, AxisType.Explicit]

# How a leaf is made from its source. For the first group the call, or `sm.place`, has to move data.
MOVED = ("host", "another device", "placed", "numpy", "part")
LAID = ("put", "again", "view")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a model."""

    source: int
    how: str
    state: bool
    split: bool
    written: bool


MESHES = st.builds(make_mesh, st.sampled_from(["1", "2", "8", "2x2"]), st.sampled_from(KINDS))

MODELS = st.lists(
    st.builds(
        Leaf,
        source=st.sampled_from([0, 0, 0, 1]),
        how=st.sampled_from(MOVED + LAID),
        state=st.booleans(),
        split=st.booleans(),
        written=st.booleans(),
    ),
    min_size=3,
    max_size=5,
)


class Sources:
    """The arrays that leaves are made from. The caller keeps references to them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.host = [jnp.full(8, float(k)) for k in range(2)]
        self.elsewhere = [jax.device_put(x, jax.devices()[1]) for x in self.host]
        self.numpy = [aligned(np.full(8, k, np.float32)) for k in range(2)]
        self.laid: dict[tuple[int, bool], Any] = {}

    def array(self, leaf: Leaf) -> Any:
        k, there = leaf.source, NamedSharding(self.mesh, spec_of(leaf))
        match leaf.how:
            case "host":
                return self.host[k]
            case "another device":
                return self.elsewhere[k]
            case "placed":
                return sm.place(self.host[k], self.mesh, spec_of(leaf))
            case "numpy":
                return self.numpy[k]
            case "put":
                return jax.device_put(self.host[k], there)
        # These leaves have a source of their own, which no other way uses.
        split = leaf.split and leaf.how != "part"
        there = NamedSharding(self.mesh, P("x") if split else P())
        own = self.laid.setdefault((k, split), jax.device_put(jnp.full(8, float(k)), there))
        if leaf.how == "part":
            return own.addressable_data(0)
        if leaf.how == "again":
            return own
        parts = [shard.data for shard in own.addressable_shards]
        return jax.make_array_from_single_device_arrays((8,), there, parts)


def spec_of(leaf: Leaf) -> P:
    return P("x") if leaf.split else P()


def is_one(x: Any, number: float) -> bool:
    return not (isinstance(x, jax.Array) and x.is_deleted()) and bool((np.array(x) == number).all())


@given(MODELS, MESHES, st.sampled_from(["none", "states", "all"]))
def test_shared_memory(leaves: list[Leaf], mesh: Mesh, donate: Any) -> None:
    sources = Sources(mesh)
    given = [sources.array(leaf) for leaf in leaves]
    model = [
        sm.State(x, spec=spec_of(leaf)) if leaf.state else x
        for leaf, x in zip(leaves, given, strict=True)
    ]
    # A State converts NumPy arrays.
    given = [m.value if isinstance(m, sm.State) else m for m in model]
    specs = [spec_of(leaf) for leaf in leaves]

    def fun(model: list[Any]) -> list[Any]:
        return [
            jax.tree.map(lambda x: x + 1, m) if leaf.written else m
            for leaf, m in zip(leaves, model, strict=True)
        ]

    call = sm.shard_map(fun, mesh, (specs,), specs, donate=donate)
    first = call(model)
    before = [x.copy() for x in sources.numpy]
    for x in sources.numpy:
        x[:] = -1
    check_results(leaves, first, 1)
    for x, filled in zip(sources.numpy, before, strict=True):
        x[:] = filled
    check_held(leaves, given, sources, mesh, donate)
    second = call(first)
    check_results(leaves, second, 2)
    left = [(leaf, m) for leaf, m in zip(leaves, first, strict=True) if not leaf.written]
    for leaf, m in left:
        check_results([leaf], [m], 1)
        # On one device JAX may describe the same layout by another sharding.
        if not leaf.state and leaf.how != "numpy":
            assert m.sharding == NamedSharding(mesh, spec_of(leaf))


def check_results(leaves: Sequence[Leaf], results: Sequence[Any], times: int) -> None:
    """Every result is the expected value after this many calls."""
    for leaf, m in zip(leaves, results, strict=True):
        assert is_one(m.value if leaf.state else m, leaf.source + times * leaf.written)


def check_held(
    leaves: Sequence[Leaf], given: Sequence[Any], sources: Sources, mesh: Mesh, donate: str
) -> None:
    """Arguments still exist unless they were donated, and so do the arrays that they were moved from."""
    for leaf, x in zip(leaves, given, strict=True):
        there = NamedSharding(mesh, spec_of(leaf))
        laid = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(there, 1)
        wanted = donate == "all" or (donate == "states" and leaf.state)
        assert (leaf.written and laid and wanted) or is_one(x, leaf.source)
    # On one device `placed` is the same layout under another name.
    by_name = ("put", "placed") if mesh.size == 1 else ("put",)
    put = {leaf.source for leaf in leaves if leaf.how in by_name}
    for k in range(2):
        assert is_one(sources.elsewhere[k], k)
        assert is_one(sources.numpy[k], k)
        # JAX may share memory between an array and its `device_put`.
        assert k in put or is_one(sources.host[k], k)
