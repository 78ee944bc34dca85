"""Mutants that the checks of programs over shards must notice."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..base.mutants import (
    POLICY_MUTANTS,
    always,
    argument,
    engine,
    last_match,
    mutants,
    with_result,
)


def of_another_shard(right: Any) -> Any:
    """`PerShard` entries handed to the next shard."""

    def take(self: Any, shard: Any) -> Any:
        if self.axis is not None:
            # One of the axes is enough; JAX refuses several in another order than the mesh's.
            names = jax.tree.leaves(tuple(self.spec))[0]
            count = jax.lax.axis_size(names)
            shard = jax.lax.ppermute(shard, names, [(i, (i + 1) % count) for i in range(count)])
        return right(self, shard)

    return take


def axes_backwards(right: Any) -> Any:
    """Axes that split one array axis together, minor to major."""

    def post_init(self: Any) -> None:
        entries = [e[::-1] if isinstance(e, tuple) else e for e in self.written.partitions]
        object.__setattr__(self, "written", PartitionSpec(*entries))
        right(self)

    return post_init


def first_arguments_kept(right: Any) -> Any:
    """A call that goes on with the arrays of the first one."""
    kept: dict[int, Any] = {}
    return lambda self, given: kept.setdefault(id(self), right(self, given))


def copied(right: Any) -> Any:
    """A result in which every array is a new one."""
    return lambda self, outputs, arguments=(), given=(): right(
        self, outputs, [*map(jax.numpy.copy, arguments)], given
    )


MUTANTS = POLICY_MUTANTS + mutants(
    {
        # Step 1: partition.
        "_partition.first_matches": {"the last filter wins": last_match},
        "combine": {"combine keeps one part": argument(0)},
        "_model._filters.All._joined": {
            "All is Any": lambda right: engine("_model._filters.Any._joined")
        },
        "_model._filters.Not.bind": {
            "Not is nothing": lambda right: (
                lambda self, tree: engine("_model._filters._bind")(self.filters[0], tree)
            ),
        },
        "_model._lines.shard_index": {"rows numbered on each shard": always(0)},
        # Step 2: resolve.
        "_call._spec_rules.choices": {
            "placements of states exchanged": with_result(lambda found: found[::-1]),
            "state_in_specs ignored": with_result(
                lambda found: [engine("_resolve._specs.UNMENTIONED")] * len(found)
            ),
        },
        "_call._spec_rules.placement": {
            "arrays replicated instead of sharded": with_result(
                lambda placement: engine("_resolve._specs.REPLICATED")
            ),
        },
        "_resolve._specs.SpecPlacement.__post_init__": {"axes of a spec backwards": axes_backwards},
        "_resolve._specs.SpecPlacement.take": {"another shard's entry": of_another_shard},
        "_resolve._layout.MeshLayout.concrete": {
            "arguments of the first call": first_arguments_kept
        },
        # Step 3: call.
        "_call._statics.Statics.same": {"static leaves not compared": always(True)},
        "_call._cache._tokens": {"static leaves not a key": always(())},
        "_call._per_shard.links_for": {"nothing linked": always(None)},
        "_base._links.Links.rebuilt": {
            "tokens of other traces believed": lambda right: (
                lambda self, value, token: (value, token)
            ),
        },
        "_leave._traced.continued": {
            "links not followed": lambda right: lambda jaxpr: [frozenset()] * len(jaxpr.outvars),
        },
        "_leave._varying.FromTypes.same_over": {
            "a gathered value counted by every shard": always(frozenset())
        },
        "_axes._differing.Differing.chosen": {
            "predicates ignored": lambda right: (
                lambda self, predicate, of_predicate, results, same: results
            ),
        },
        # Step 4: leave.
        "_leave._rules.LeavingRules.in_order": {
            "reduced over the first axis only": with_result(lambda axes: axes[:1]),
            "reduced over every axis": lambda right: (
                lambda self, names: self.axis_names if names else ()
            ),
        },
        "_leave._leave.has_same_leaves": {"a written state forgotten": always(True)},
        "_leave._leave.find_origins": {
            "states taken for one another": with_result(lambda found: found[1:] + found[:1]),
        },
        "RandomState._advanced": {
            "common stream not advanced": lambda right: (
                lambda self, value: self._rebuilt(value, self._shared)
            ),
        },
        "RandomState.leave": {"key left unadvanced": argument(1)},
        "_model._state.conform": {"set without checks": argument(1)},
        "State.set": {
            "set without metadata": lambda right: (
                lambda self, value: type(self)(right(self, value).value)
            ),
        },
        # Step 5: write back.
        "_write_back.WriteBack.filled": {
            "untouched arrays copied": copied,
            "outputs in the wrong order": lambda right: (
                lambda self, outputs, *more: right(self, outputs[::-1], *more)
            ),
        },
    }
)
