"""Compares programs over shards with the reference."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

import statemesh as sm

from ..base.arrays import Array, Global, Values
from ..base.models import arrays_of, mesh_of, partition_spec
from ..base.runs import Comparison, Results
from ..programs import Case, Leaf
from . import reference
from .mapped import mapping


def check_program(
    case: Case,
    values: Values,
    *,
    how: str = "eager",
    home: str = "host",
    mapped: sm.StatefulMapping | None = None,
) -> None:
    """Compares all calls. Without `mapped`, the case's own mapped program runs, which is kept."""
    _OnShards(case, mapped or mapping(case)).check(values, how, home)


class _OnShards(Comparison):
    def reference(self, gain: float, slots: list[list[Global]], inputs: Sequence[Array]) -> Results:
        return reference.run(self.case, gain, slots, inputs)

    def check_layout(self, outputs: Sequence[Any], model: Any) -> None:
        """Every state lies on the mesh as its placement says."""
        for slot, arrays in zip(self.case.slots, arrays_of(self.case, model), strict=True):
            for leaf, x in zip(slot.leaves, arrays, strict=True):
                wanted = self.sharding(leaf)
                assert x.sharding.is_equivalent_to(wanted, x.ndim), (slot, x.sharding)

    def sharding(self, leaf: Leaf) -> NamedSharding:
        spec = PartitionSpec(leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
        return NamedSharding(mesh_of(self.case.mesh), spec)
