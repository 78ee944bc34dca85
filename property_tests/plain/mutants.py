"""Mutants that the checks of programs over shards must notice."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..base.mutants import POLICY_MUTANTS, Mutant, always, engine, last_match, with_result


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
    return lambda self, outputs, arguments: right(self, outputs, [*map(jax.numpy.copy, arguments)])


MUTANTS = [
    *POLICY_MUTANTS,
    Mutant(
        "links not followed",
        "statemesh._traced",
        "continued",
        lambda right: lambda jaxpr: [frozenset()] * len(jaxpr.outvars),
    ),
    Mutant("nothing linked", "statemesh._call._per_shard", "links_for", always(None)),
    Mutant(
        "tokens of other traces believed",
        "statemesh._base._links.Links",
        "rebuilt",
        lambda right: lambda self, value, token: (value, token),
    ),
    Mutant(
        "a gathered value counted by every shard",
        "statemesh._varying.Told",
        "same",
        always(frozenset()),
    ),
    Mutant(
        "reduced over the first axis only",
        "statemesh._leave._rules.LeavingRules",
        "in_order",
        with_result(lambda axes: axes[:1]),
    ),
    Mutant(
        "reduced over every axis",
        "statemesh._leave._rules.LeavingRules",
        "in_order",
        lambda right: lambda self, names: self.axis_names if names else (),
    ),
    Mutant(
        "predicates ignored",
        "statemesh._axes._differing.Differing",
        "chosen",
        lambda right: lambda self, predicate, of_predicate, results, same: results,
    ),
    Mutant("a written state forgotten", "statemesh._leave._leave", "_untouched", always(True)),
    Mutant("untouched arrays copied", "statemesh._write_back.WriteBack", "__call__", copied),
    Mutant(
        "outputs in the wrong order",
        "statemesh._write_back.WriteBack",
        "__call__",
        lambda right: lambda self, outputs, arguments: right(self, outputs[::-1], arguments),
    ),
    Mutant(
        "states taken for one another",
        "statemesh._leave._leave",
        "find_origins",
        with_result(lambda found: found[1:] + found[:1]),
    ),
    Mutant(
        "placements of states exchanged",
        "statemesh._call._spec_rules",
        "choose_specs",
        with_result(lambda specs: specs[::-1]),
    ),
    Mutant(
        "state_in_specs ignored",
        "statemesh._call._spec_rules",
        "choose_specs",
        with_result(lambda specs: [engine("_resolve._specs.UNSAID")] * len(specs)),
    ),
    Mutant(
        "arrays replicated instead of sharded",
        "statemesh._call._spec_rules",
        "placement",
        lambda right: lambda spec: engine("_resolve._specs.REPLICATED"),
    ),
    Mutant(
        "axes of a spec backwards",
        "statemesh._resolve._specs.Placement",
        "__post_init__",
        axes_backwards,
    ),
    Mutant(
        "another shard's entry",
        "statemesh._resolve._specs.Placement",
        "take",
        of_another_shard,
    ),
    Mutant(
        "arguments of the first call",
        "statemesh._resolve._layout.MeshLayout",
        "concrete",
        first_arguments_kept,
    ),
    Mutant(
        "static leaves not compared",
        "statemesh._call._statics.Statics",
        "same",
        always(True),
    ),
    Mutant("static leaves not a key", "statemesh._call._cache", "_tokens", always(())),
    Mutant(
        "common stream not advanced",
        "statemesh.RandomState",
        "_advanced",
        lambda right: lambda self, value: self._rebuilt(value, self._shared),
    ),
    Mutant("rows numbered on each shard", "statemesh._model._random", "shard_index", always(0)),
    Mutant(
        "key left unadvanced",
        "statemesh.RandomState",
        "leave",
        lambda right: lambda self, old, axes: old,
    ),
    Mutant(
        "set without checks",
        "statemesh._model._state",
        "conform",
        lambda right: lambda old, new, label: new,
    ),
    Mutant(
        "set without metadata",
        "statemesh.State",
        "set",
        lambda right: lambda self, value: type(self)(right(self, value).value),
    ),
    Mutant("the last filter wins", "statemesh._partition", "first_matches", last_match),
    Mutant("combine keeps one part", "statemesh", "combine", lambda right: lambda *parts: parts[0]),
    Mutant(
        "All is Any",
        "statemesh._model._filters.All",
        "bind",
        lambda right: engine("_model._filters.Any.bind"),
    ),
    Mutant(
        "Not is nothing",
        "statemesh._model._filters.Not",
        "bind",
        lambda right: lambda self, tree: engine("_model._filters._bind")(self.filters[0], tree),
    ),
]
