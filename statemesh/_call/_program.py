"""Steps 1, 2 and 3 put together for one signature: a pure function over arrays."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from .._arguments import Arguments
from .._base import _compat as compat
from .._base import _errors as errors
from .._base._prefix import broadcast_specs
from .._base._types import NUMBERS, is_state
from .._leave import Exit
from .._resolve._layout import Layout
from .._resolve._mesh import check_specs, manual_names
from .._resolve._specs import (
    REPLICATED,
    UNSAID,
    Placement,
    choose_specs,
    own_placements,
    placement,
)
from .._write_back import WriteBack
from ._declared import Declared, check_declared_specs
from ._pure import Instance


class Program:
    """A mapped call with one tree structure, one set of static leaves and one mesh.

    Calling it with the inputs' arrays gives the outputs and how the result is put together. It is
    pure, and traces the user's function once each time it is itself traced.

    **Arguments:**

    - `declared`: what the author declared.
    - `args`, `kwargs`: the arguments of the first such call. Their arrays are not kept.
    - `leaves`: the leaves of `(args, kwargs)`.
    - `mesh`: the mesh to run on.
    """

    def __init__(
        self,
        declared: Declared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        mesh: Mesh | AbstractMesh,
    ) -> None:
        self.declared = declared
        self.mesh = mesh
        names = manual_names(mesh, declared.axis_names)
        if not names:
            raise errors.no_axes_left(mesh)
        check_declared_specs(declared, mesh, names)
        arguments = Arguments(declared.fun, args, kwargs)
        resolved = _resolve(declared, arguments, args, kwargs)
        self.inputs = sorted(resolved)
        paths = {p: unit.path for unit in arguments.flat_units() for p in unit.positions}
        placements = [resolved[p] for p in self.inputs]
        named = [(f"the spec of {paths[p]}", where.spec) for p, where in resolved.items()]
        check_specs(named, mesh, names)
        kinds = [type(leaves[p]) for p in self.inputs]
        chosen = frozenset(self.inputs)
        self.statics_at = [i for i in range(len(leaves)) if i not in chosen]
        self.statics = [leaves[i] for i in self.statics_at]
        keeps_weak = {
            p
            for unit in arguments.flat_units()
            if unit.kind is None and not unit.in_module
            for p in unit.positions
        }
        self.layout = Layout(
            declared.name,
            mesh,
            names,
            [paths[p] for p in self.inputs],
            placements,
            kinds,
            [p not in keeps_weak for p in self.inputs],
            alias=declared.donate == "none",
        )
        self.instance = Instance(
            declared.fun,
            arguments,
            [None if i in chosen else leaf for i, leaf in enumerate(leaves)],
            self.inputs,
            placements,
            frozenset(k for k, kind in enumerate(kinds) if kind in NUMBERS),
            Exit(
                declared.name,
                declared.out_specs,
                declared.state_out_specs,
                names,
                declared.check_vma,
                arguments.tied,
                declared.donate != "none",
            ),
        )
        self.__name__ = self.__qualname__ = declared.name

    def arrays(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The program's inputs among all leaves."""
        return [leaves[i] for i in self.inputs]

    def static_leaves(self, leaves: Sequence[Any]) -> Iterable[Any]:
        """The leaves that are not inputs."""
        return map(leaves.__getitem__, self.statics_at)

    def tracer_paths(self, arrays: Sequence[Any]) -> list[str]:
        """Which inputs are being traced."""
        pairs = zip(self.layout.paths, arrays, strict=True)
        return [path for path, x in pairs if compat.is_tracer(x)]

    def __call__(self, *arrays: Any) -> tuple[list[Any], WriteBack]:
        self.layout.check(arrays)
        # `shard_map` lays the out specs over the result after it has traced the function. So the
        # list may be filled while tracing, and no second trace is needed to learn the structure.
        out_specs: list[Any] = []
        found: list[WriteBack] = []

        def instance(*shards: Any) -> list[Any]:
            outputs, specs, back = self.instance(shards, self.mesh)
            out_specs[:] = specs
            found[:] = [back]
            return outputs

        instance.__name__ = instance.__qualname__ = self.declared.name
        outputs = jax.shard_map(
            instance,
            mesh=self.mesh,
            in_specs=tuple(where.spec for where in self.layout.placements),
            out_specs=out_specs,
            axis_names=set(self.instance.exit.axis_names),
            check_vma=self.declared.check_vma,
        )(*arrays)
        return outputs, found[0]


def _resolve(
    declared: Declared, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Placement]:
    """A placement for every leaf that becomes an input of the program, by its position."""
    in_specs = declared.in_specs
    several = isinstance(in_specs, tuple | list)
    roots = [
        (name, value)
        for name, value in zip(
            arguments.names, [*args, *(kwargs[k] for k in sorted(kwargs))], strict=True
        )
    ]
    said = iter(choose_specs(declared.state_in_specs, roots, "state_in_specs"))
    placements: dict[int, Placement] = {}
    for i, ((name, value), units) in enumerate(zip(roots, arguments.units, strict=True)):
        keyword = i >= arguments.positional
        prefix = None if keyword else in_specs[i] if several else in_specs
        what = f"in_specs[{i}]" if several else "in_specs"
        specs = broadcast_specs(prefix, value, what, name)
        nodes = jax.tree_util.tree_leaves(value, is_leaf=is_state)
        for unit, spec, node in zip(units, specs, nodes, strict=True):
            if unit.kind is not None:
                chosen = next(said)
                own = own_placements(node, node.spec if chosen is UNSAID else chosen, unit.path)
                own += [REPLICATED] * (len(unit.positions) - len(own))
                placements.update(zip(unit.positions, own, strict=True))
            elif unit.shaped or (unit.number and not unit.in_module and spec is not None):
                placements[unit.positions[0]] = placement(spec)
    return placements
