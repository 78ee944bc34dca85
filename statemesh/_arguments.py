"""Step 1 for a call: its arguments as states, other arrays, and static leaves."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax

from ._base import errors
from ._base._arrays import is_masked, is_shaped
from ._base._nodes import is_state
from ._base._paths import path_str, positional_names
from ._base._types import NUMBERS, Fun, KeyPath, Leaf, PyTree, PyTreeDef


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One State of the arguments, or one leaf outside any State."""

    path: str
    keys: KeyPath
    positions: tuple[int, ...]
    # For a State: its type and the structure that rebuilds it. None for other leaves.
    kind: type | None
    treedef: PyTreeDef
    # Whether the leaf stands in a Module, where Python numbers are static.
    in_module: bool
    # Whether a spec that covers this leaf leaves it static: it is neither array nor number.
    shaped: bool
    number: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, as trees and as leaves."""

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    leaves: Sequence[Leaf]


class Arguments:
    """The structure of a call's arguments, without their arrays.

    **Arguments:**

    - `fun`: what the arguments are for; it names them.
    - `args`, `kwargs`: the arguments.
    """

    __slots__ = ("count", "names", "positional", "tied", "treedef", "unit_def", "units")

    def __init__(self, fun: Fun, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        self.names = [*positional_names(fun, len(args)), *sorted(kwargs)]
        self.treedef: PyTreeDef = jax.tree_util.tree_structure((args, kwargs))
        self.unit_def: Any = jax.tree_util.tree_structure((args, kwargs), is_leaf=is_state)
        self.positional = len(args)
        self.units: list[tuple[Unit, ...]] = []
        self.count = 0
        # Paths at which one argument holds the very same State object.
        self.tied: list[list[str]] = []
        for name, value in self.named(args, kwargs):
            self.units.append(tuple(self._split(name, value)))
            self.tied += _tied(value, self.units[-1])

    def named(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[tuple[str, Any]]:
        """Each argument with its name, keyword arguments last and by name."""
        values = [*args, *(kwargs[name] for name in sorted(kwargs))]
        return list(zip(self.names, values, strict=True))

    def with_entries(
        self,
        named: Sequence[tuple[str, Any]],
        entries: Any,
        what: str,
        keyword_entry: Any,
        broadcast: Callable[[Any, Any, str, str], list[Leaf]],
        first: int = 0,
    ) -> Iterator[tuple[Unit, Any, Any, str]]:
        """Each unit, the State or leaf that it is, its entry in `in_specs` or `in_axes`, and its name.

        **Arguments:**

        - `named`: the arguments, as `named` gives them.
        - `entries`, `what`: one for each positional argument, or one for all; what messages call them.
        - `keyword_entry`: that of a keyword argument.
        - `broadcast`: makes one for each unit of a prefix tree.
        - `first`: the number by which messages call the entry of the first argument.
        """
        several = isinstance(entries, tuple | list)
        for i, ((name, value), units) in enumerate(zip(named, self.units, strict=True)):
            keyword = i >= self.positional
            prefix = keyword_entry if keyword else entries[i] if several else entries
            entry = f"{what}[{first + i}]" if several else what
            found = broadcast(prefix, value, entry, name)
            nodes = jax.tree_util.tree_leaves(value, is_leaf=is_state)
            called = "keyword argument" if keyword else entry
            for unit, node, one in zip(units, nodes, found, strict=True):
                yield unit, node, one, called

    def _split(self, name: str, value: Leaf) -> list[Unit]:
        inside = inside_modules(value)
        units = []
        flat = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_state)[0]
        if bad := [(path_str(keys, name), node) for keys, node in flat if is_masked(node)]:
            raise errors.masked(f"the argument {name}", bad)
        for (keys, node), in_module in zip(flat, inside, strict=True):
            leaves, treedef = jax.tree_util.tree_flatten(node)
            positions = tuple(range(self.count, self.count + len(leaves)))
            self.count += len(leaves)
            units.append(
                Unit(
                    path=path_str(keys, name),
                    keys=keys,
                    positions=positions,
                    kind=type(node) if is_state(node) else None,
                    treedef=treedef,
                    in_module=in_module,
                    shaped=is_state(node) or is_shaped(node),
                    number=type(node) in NUMBERS,
                )
            )
        return units

    def flat_units(self) -> list[Unit]:
        return [unit for units in self.units for unit in units]

    def paths(self) -> dict[int, str]:
        """That of each leaf, by position."""
        return {p: unit.path for unit in self.flat_units() for p in unit.positions}

    def with_states(self) -> list[tuple[Unit, ...]]:
        """The arguments that have a State in them."""
        return [units for units in self.units if any(unit.kind is not None for unit in units)]

    def states(self) -> list[Unit]:
        return [unit for unit in self.flat_units() if unit.kind is not None]


def _tied(value: Leaf, units: Sequence[Unit]) -> list[list[str]]:
    paths: dict[int, list[str]] = {}
    for node, unit in zip(jax.tree_util.tree_leaves(value, is_leaf=is_state), units, strict=True):
        if is_state(node):
            paths.setdefault(id(node), []).append(unit.path)
    return [several for several in paths.values() if len(several) > 1]


def inside_modules(value: Leaf) -> list[bool]:
    """For each unit of `value` whether it stands in a Module."""
    inside: list[bool] = []
    for node in jax.tree_util.tree_leaves(
        value, is_leaf=lambda n: is_state(n) or isinstance(n, eqx.Module)
    ):
        count = len(jax.tree_util.tree_leaves(node, is_leaf=is_state))
        inside.extend([isinstance(node, eqx.Module) and not is_state(node)] * count)
    return inside


def check_arity(name: str, what: str, entries: Any, positional: int) -> None:
    """Refuse a call with more or fewer arguments than `in_specs` or `in_axes` has entries."""
    if isinstance(entries, tuple | list) and len(entries) != positional:
        raise errors.arity(name, what, len(entries), positional)
