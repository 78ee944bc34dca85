"""Where results are fed back, no call moves, traces or compiles anything, on Auto and on Explicit meshes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import statemesh as sm
from statemesh.testing import assert_budget, meshes, specs
from tests.helpers import compiles, counted


pytestmark = pytest.mark.slow

jnp: Any = jax.numpy

FORMS = ("state", "array", "key", "per shard")


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a model, its spec, and whether the call writes it."""

    form: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    written: bool
    full_rank: bool

    def leaf(self, mesh: Mesh) -> Any:
        """The State or array, laid out by its owner under either spelling of the spec."""
        if self.form == "key":
            return sm.RandomState(jax.random.key(0))
        if self.form == "per shard":
            size = int(np.prod(mesh.devices.shape))
            return sm.State(np.zeros((size, 2), np.float32), spec=sm.PerShard(*mesh.axis_names))
        missing = len(self.shape) - len(self.spec.partitions)
        spec = PartitionSpec(*self.spec.partitions, *[None] * missing * self.full_rank)
        x = jax.device_put(np.zeros(self.shape, np.float32), NamedSharding(mesh, spec))
        return sm.ParamState(x, spec=self.spec) if self.form == "state" else x

    def after(self, leaf: Any) -> Any:
        """What the call makes of it."""
        if not self.written:
            return leaf
        return leaf.split()[1] if self.form == "key" else jax.tree.map(lambda x: x + 1, leaf)


@st.composite
def parts(draw: st.DrawFn, mesh: Mesh) -> Part:
    # Sizes that every mesh divides, so that any axis may be split.
    shape = draw(st.sampled_from([(8,), (8, 8), (64, 8), (8, 8, 8)]))
    form = draw(st.sampled_from(FORMS))
    spec = draw(specs(shape=shape, mesh=mesh))
    return Part(form, shape, spec, draw(st.booleans()), draw(st.booleans()))


@given(st.data(), st.sampled_from(["none", "states", "all"]))
def test_nothing_is_moved_and_what_is_donated_is_deleted(data: st.DataObject, donate: Any) -> None:
    mesh = data.draw(meshes(), "mesh")
    drawn = data.draw(st.lists(parts(mesh), min_size=1, max_size=4), "parts")
    fun, count = counted(
        lambda model: [part.after(leaf) for part, leaf in zip(drawn, model, strict=True)]
    )
    plain = [part.spec if part.form == "array" else PartitionSpec() for part in drawn]
    call = sm.shard_map(fun, mesh, (plain,), plain, donate=donate)
    (model,) = call.place([part.leaf(mesh) for part in drawn])
    model = call(model)
    assert count.times == 1
    with compiles() as seen:
        for _ in range(3):
            old, model = model, call(model)
            for part, before, now in zip(drawn, old, model, strict=True):
                (x,), (y,) = jax.tree.leaves(before), jax.tree.leaves(now)
                given_up = donate == "all" or (donate == "states" and part.form != "array")
                assert x.is_deleted() == (part.written and given_up)
                assert (x is y) == (not part.written)
    assert count.times == 1 and seen.times == 0
    assert_budget(call, model, moved=0)
