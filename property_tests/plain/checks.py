"""Compares programs over shards with the reference."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import statemesh as sm

from ..base.arrays import Array, Global, Values
from ..base.models import arrays_of, mesh_of, partition_spec
from ..base.runs import Comparison, Results
from ..programs import Case, Leaf
from . import reference
from .mapped import mapping


def check_program(case: Case, values: Values, *, how: str = "eager", home: str = "host") -> None:
    """Compares all calls."""
    _OnShards(case, values).check(values, how, home)


class Stream:
    """What an unsharded run draws, call after call."""

    def __init__(self, seed: int) -> None:
        self.rng = sm.RandomState(jax.random.key(seed))

    def __call__(self, count: int | None) -> Array:
        if count is None:
            key, self.rng = self.rng.split()
            return np.asarray(jax.random.uniform(key)).reshape(1)
        keys, self.rng = self.rng.rows(count)
        return np.asarray(jax.vmap(jax.random.uniform)(keys))


class _OnShards(Comparison):
    def __init__(self, case: Case, values: Values) -> None:
        super().__init__(case, mapping(case))
        self.stream = Stream(values.seed)

    def reference(self, gain: float, slots: list[list[Global]], inputs: Sequence[Array]) -> Results:
        return reference.run(self.case, gain, slots, inputs, self.stream)

    def check_stream(self, model: Any) -> None:
        if self.case.noisy:
            assert model[1].key == self.stream.rng.key

    def check_layout(self, outputs: Sequence[Any], model: Any) -> None:
        """Every state lies on the mesh as its placement says."""
        for slot, arrays in zip(self.case.slots, arrays_of(self.case, model), strict=True):
            for leaf, x in zip(slot.leaves, arrays, strict=True):
                wanted = self.sharding(leaf)
                assert x.sharding.is_equivalent_to(wanted, x.ndim), (slot, x.sharding)

    def sharding(self, leaf: Leaf) -> NamedSharding:
        spec = PartitionSpec(leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
        return NamedSharding(mesh_of(self.case.mesh), spec)
