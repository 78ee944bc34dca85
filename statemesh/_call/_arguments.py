"""Step 1: the arguments of a call as states, other arrays, and static leaves, which are constants."""

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import is_
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._base import _errors as errors
from .._base._checks import is_masked, is_shaped
from .._base._errors import (
    BatchAxisError,
    SpecError,
    StatemeshError,
    counted,
    error_listing,
    quoted,
)
from .._base._specs import Placement
from .._base._trees import describe, fun_name, is_state, path_str, positional_names
from .._base._types import NUMBERS, Fun, KeyPath, Leaf, PyTree, PyTreeDef
from .._jax import _compat as compat
from .._jax._compat import tree_util


class _Hashed:
    """A value, equal to others of its type that say so.

    The hash is taken once: an object whose hash changes later counts as another value.
    """

    __slots__ = ("hash", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Hashed) or self.hash != other.hash:
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or _equal(mine, theirs)


def _equal(value: Leaf, other: Leaf) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # Whatever a user's own `__eq__` raises, or the truth of what it returns.
        return False


def token(value: Leaf) -> Hashable:
    """The token of a static value: equal for values of one type that are equal and have one hash.

    **Raises:** `TypeError` for a value that cannot be hashed.
    """
    kind: Any = type(value)
    if isinstance(value, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind, value.dtype, value.tobytes()
    if kind is tuple:
        return kind, *map(token, value)
    if not is_hashable(value):
        raise TypeError(f"{type(value).__name__}")
    # Equal fields may still compute otherwise: 1 and 1.0, 0.0 and -0.0.
    return (
        kind,
        _Hashed(value),
        *[token(part) for part in _compared_fields(value) if is_hashable(part)],
    )


def _compared_fields(value: Leaf) -> list[object]:
    """What a frozen dataclass is compared by."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return []
    return [getattr(value, field.name) for field in dataclasses.fields(value) if field.compare]


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except Exception:  # Whatever a user's own `__hash__` raises.
        return False
    return True


def may_change(value: object) -> bool:
    """Whether an object may have another hash later, or has none.

    A hash written in C stays, and so does that of a container which cannot be changed, if its parts' do.
    """
    if not is_hashable(value):
        return True
    if isinstance(value, tuple | frozenset):
        return any(map(may_change, value))
    if parts := _compared_fields(value):
        return any(map(may_change, parts))
    in_c = isinstance(type(value).__hash__, types.WrapperDescriptorType)
    return not (in_c or isinstance(value, enum.Enum))


def alike(value: Leaf, other: Leaf) -> bool:
    """Whether two static values are equal now. Those that cannot be hashed are compared by `==` alone."""
    try:
        return value is other or token(value) == token(other)
    except TypeError:
        return _equal(value, other)


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the arguments that is an input of the program.

    **Attributes:**

    - `position`: its position among the leaves.
    - `path`: its path, for messages.
    - `placement`: where it lies.
    - `placed_by`: what says so: an entry as the author wrote it, the state's own spec, its kind or the
        default.
    - `kind`: its type.
    - `stateful`: whether it is a leaf of a State.
    - `in_module`: whether it stands in a Module, outside States.
    - `fresh`: whether it is a new array inside the program, which never comes back as it went in.
    """

    position: int
    path: str
    placement: Placement
    placed_by: str
    kind: type
    stateful: bool
    in_module: bool
    fresh: bool = False

    @property
    def strong(self) -> bool:
        """Whether it loses a weak type.

        What it becomes in the result is then no news to the compiler when it is fed back. An array outside
        States and Modules keeps its weak type, as under JAX's own maps.
        """
        return self.stateful or self.in_module


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

    def input(self, position: int, leaf: Leaf, placement: Placement, placed_by: str) -> Input:
        """The record of a leaf of this unit that becomes an input."""
        return Input(
            position,
            self.path,
            placement,
            placed_by,
            type(leaf),
            stateful=self.kind is not None,
            in_module=self.in_module,
        )


class Call:
    """The arguments of one call: as trees, as leaves, and as units, which are States and other leaves.

    **Arguments:**

    - `fun`: what the arguments are for; it names them.
    - `args`, `kwargs`: the arguments.
    - `flat`: the leaves and the structure of `(args, kwargs)`, where they are known.
    """

    def __init__(
        self,
        fun: Fun,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        flat: tuple[Sequence[Leaf], PyTreeDef] | None = None,
    ) -> None:
        self.fun = fun
        self.args = args
        self.kwargs = kwargs
        self.leaves: Sequence[Leaf]
        self.treedef: PyTreeDef
        self.leaves, self.treedef = flat or tree_util.tree_flatten((args, kwargs))
        self.positional = len(args)

    def without_arrays(self) -> "Call":
        """The structure of the arguments alone, which a program keeps for later calls like this one."""
        kept = Call(self.fun, (), {}, ((), self.treedef))
        kept.positional, kept.names, kept.units = self.positional, self.names, self.units
        kept.unit_def, kept.tied = self.unit_def, self.tied
        return kept

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of each argument. Keyword arguments come last, sorted by name."""
        return [*positional_names(self.fun, self.positional), *sorted(self.kwargs)]

    def named(self) -> list[tuple[str, Any]]:
        """Each argument with its name."""
        values = [*self.args, *(self.kwargs[name] for name in sorted(self.kwargs))]
        return list(zip(self.names, values, strict=True))

    @functools.cached_property
    def units(self) -> list[list[Unit]]:
        """The units of each argument."""
        units: list[list[Unit]] = []
        count = 0
        for name, value in self.named():
            units.append(_units(name, value, count))
            count += sum(len(unit.positions) for unit in units[-1])
        return units

    @functools.cached_property
    def unit_def(self) -> Any:
        """The structure of the arguments with a leaf for each unit."""
        return jax.tree_util.tree_structure((self.args, self.kwargs), is_leaf=is_state)

    @functools.cached_property
    def tied(self) -> list[list[str]]:
        """Paths at which one argument holds the very same State object."""
        tied: list[list[str]] = []
        for (_, value), units in zip(self.named(), self.units, strict=True):
            paths: dict[int, list[str]] = {}
            nodes = jax.tree_util.tree_leaves(value, is_leaf=is_state)
            for node, unit in zip(nodes, units, strict=True):
                if unit.kind is not None:
                    paths.setdefault(id(node), []).append(unit.path)
            tied += [shared for shared in paths.values() if len(shared) > 1]
        return tied

    def with_entries(
        self,
        entries: Any,
        what: str,
        keyword_entry: Any,
        broadcast: Callable[[Any, Any, str, str], list[Leaf]],
        first: int = 0,
    ) -> Iterator[tuple[Unit, Any, Any, str]]:
        """Each unit, the State or leaf that it is, its entry in `in_specs` or `in_axes`, and its name.

        **Arguments:**

        - `entries`, `what`: one for each positional argument, or one for all; what messages call them.
        - `keyword_entry`: that of a keyword argument.
        - `broadcast`: makes one for each unit of a prefix tree.
        - `first`: the number by which messages call the entry of the first argument.
        """
        is_sequence = isinstance(entries, tuple | list)
        for i, ((name, value), units) in enumerate(zip(self.named(), self.units, strict=True)):
            keyword = i >= self.positional
            prefix = keyword_entry if keyword else entries[i] if is_sequence else entries
            entry = f"{what}[{first + i}]" if is_sequence else what
            entries_of_units = broadcast(prefix, value, entry, name)
            nodes = jax.tree_util.tree_leaves(value, is_leaf=is_state)
            entry_name = "keyword argument" if keyword else entry
            for unit, node, unit_entry in zip(units, nodes, entries_of_units, strict=True):
                yield unit, node, unit_entry, entry_name

    def flat_units(self) -> list[Unit]:
        return [unit for units in self.units for unit in units]

    def paths(self) -> dict[int, str]:
        """The path of each leaf, by position."""
        return {p: unit.path for unit in self.flat_units() for p in unit.positions}

    def check_valued(self, name: str, *, shapes: bool = False) -> None:
        """Refuse what cannot be computed with: shapes without values, arrays whose memory was given up.

        **Arguments:**

        - `name`: what the arguments are for.
        - `shapes`: whether shapes will do.
        """
        bare = () if shapes else jax.ShapeDtypeStruct
        if bad := [k for k, x in enumerate(self.leaves) if isinstance(x, bare) or is_deleted(x)]:
            paths = self.paths()
            check_valued(name, [(paths[k], self.leaves[k]) for k in bad])

    def states(self) -> list[Unit]:
        return [unit for unit in self.flat_units() if unit.kind is not None]


def _units(name: str, value: Leaf, first: int) -> list[Unit]:
    """The units of the argument `name`, whose first leaf has this position."""
    flat = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_state)[0]
    if bad := [(path_str(keys, name), node) for keys, node in flat if is_masked(node)]:
        raise errors.masked(f"the argument {name}", bad)
    units: list[Unit] = []
    for (keys, node), in_module in zip(flat, inside_modules(value), strict=True):
        leaves, treedef = jax.tree_util.tree_flatten(node)
        units.append(
            Unit(
                path=path_str(keys, name),
                keys=keys,
                positions=tuple(range(first, first + len(leaves))),
                kind=type(node) if is_state(node) else None,
                treedef=treedef,
                in_module=in_module,
                shaped=is_state(node) or is_shaped(node),
                number=type(node) in NUMBERS,
            )
        )
        first += len(leaves)
    return units


def inside_modules(value: Leaf) -> list[bool]:
    """For each unit of `value` whether it stands in a Module."""
    inside: list[bool] = []
    for node in jax.tree_util.tree_leaves(
        value, is_leaf=lambda n: is_state(n) or isinstance(n, eqx.Module)
    ):
        count = len(jax.tree_util.tree_leaves(node, is_leaf=is_state))
        inside.extend([isinstance(node, eqx.Module) and not is_state(node)] * count)
    return inside


@jax.tree_util.register_static
class _Box:
    """A value as a node without leaves: part of the arguments' structure, compared by value."""

    __slots__ = ("token", "value")

    def __init__(self, value: Leaf) -> None:
        self.value = value
        self.token = token(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __repr__(self) -> str:
        return repr(self.value)


def boxed(fun: Fun, static: Sequence[int], args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """The arguments of a function, those at the `static` positions in boxes."""
    if bad := [i for i in static if not -len(args) <= i < len(args)]:
        raise bad_argnums("static_broadcasted_argnums", bad, len(args))
    in_boxes = list(args)
    for i in static:
        try:
            hash(args[i])
        except TypeError:
            path = positional_names(fun, len(args))[i]
            raise BatchAxisError(
                f"{fun_name(fun)}: {path} is {describe(args[i])} of type {type(args[i]).__name__}, "
                "which cannot be hashed, but static_broadcasted_argnums names it. Each value of a "
                "static argument has a compiled program of its own, found by its hash. Pass a value "
                "that can be hashed; or, for an array that all lanes share, give None in in_axes "
                "instead."
            ) from None
        in_boxes[i] = _Box(args[i])
    return tuple(in_boxes)


def opened(args: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The arguments as they were before some of them were put into boxes."""
    return tuple(x.value if isinstance(x, _Box) else x for x in args)


class Statics:
    """The static leaves of one call, and how those of a later call are compared with them.

    **Arguments:**

    - `positions`: where static leaves stand among all leaves.
    - `leaves`: all leaves of the call.
    """

    def __init__(self, positions: Sequence[int], leaves: Sequence[Leaf]) -> None:
        self.positions = positions
        self.values = [leaves[i] for i in positions]
        self.tokens = tokens_at(positions, leaves)
        # Their owner may have changed these since, so that they are hashed at every call.
        self.changing = [i for i in positions if may_change(leaves[i])]
        self.changing_tokens = tokens_at(self.changing, leaves)
        # Lists, because every call goes through them.
        self.fixed_at = [i for i in positions if i not in self.changing]
        self.fixed = [leaves[i] for i in self.fixed_at]

    def same(self, leaves: Sequence[Leaf]) -> bool:
        """Whether a call has the same static leaves, and nobody has changed them."""
        if not all(map(is_, map(leaves.__getitem__, self.fixed_at), self.fixed)):
            return False
        return not self.changing or tokens_at(self.changing, leaves) == self.changing_tokens

    def other_in(self, leaves: Sequence[Leaf]) -> list[int]:
        """The positions of static leaves that differ in another call."""
        pairs = zip(self.positions, self.tokens or (), strict=True)
        return [i for i, known in pairs if tokens_at([i], leaves) != [known]]

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """The static leaves as they are now, by position, for messages."""
        return {i: repr(leaf) for i, leaf in zip(self.positions, self.values, strict=True)}


def tokens_at(positions: Sequence[int], leaves: Sequence[Leaf]) -> list[Hashable] | None:
    """What static leaves are compared by; `None` if one of them cannot be hashed."""
    try:
        return [token(leaves[position]) for position in positions]
    except TypeError:
        return None


def unhashable(call: Call) -> list[tuple[str, PyTree]]:
    """The static leaves and fields of a call that cannot be hashed, with their paths."""
    return [
        (path_str(keys, name), value)
        for name, tree in call.named()
        for keys, value in _unhashable(tree, ())
    ]


def _unhashable(node: Leaf, keys: KeyPath) -> Iterator[tuple[KeyPath, PyTree]]:
    parts = tree_util.default_registry.flatten_one_level_with_keys(node)
    if parts is None:
        if not (is_shaped(node) or is_hashable(node)):
            yield keys, node
        return
    children, metadata = parts
    if type(node) is not dict and not is_hashable(metadata):
        fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
        of_children = {getattr(key, "name", None) for key, _ in children}
        static = [
            (f.name, getattr(node, f.name, None)) for f in fields if f.name not in of_children
        ]
        bad = [(tree_util.GetAttrKey(name), x) for name, x in static if not is_hashable(x)]
        yield from [((*keys, key), x) for key, x in bad] or [(keys, metadata)]
    for key, child in children:
        yield from _unhashable(child, (*keys, key))


def check_valued(what: str, named: Sequence[tuple[str, Any]]) -> None:
    """Refuse what has a shape and no value."""
    if bare := [path for path, x in named if isinstance(x, jax.ShapeDtypeStruct)]:
        raise error_listing(
            TypeError,
            f"{what}: these arguments are shapes without values (jax.ShapeDtypeStruct)",
            bare,
            "Pass arrays. For shapes there are `mapped.lower(...)` and `jax.eval_shape(mapped, ...)`.",
        )
    if gone := [path for path, x in named if is_deleted(x)]:
        raise deleted(what, gone)


def check_alive(name: str, inputs: Sequence[Input], arrays: Sequence[Leaf]) -> None:
    """Refuse inputs whose memory was given up."""
    pairs = zip(inputs, arrays, strict=True)
    if gone := [source.path for source, x in pairs if is_deleted(x)]:
        raise deleted(name, gone)


def is_deleted(x: Leaf) -> bool:
    """Whether it is an array whose memory was given up."""
    return isinstance(x, jax.Array) and not compat.is_tracer(x) and x.is_deleted()


def deleted(name: str, paths: Sequence[str]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{name}: these arguments were given up to an earlier call that donates its arguments",
        paths,
        "Go on with what that call returned, as in `out, model = step(model, x)`.",
    )


def arity(name: str, what: str, entries: int, args: int) -> StatemeshError:
    kind: type[StatemeshError]
    if what == "in_specs":
        kind, none, keywords = SpecError, "is not sharded", "keyword arguments have none"
    else:
        kind, none = BatchAxisError, "all lanes share"
        keywords = "each argument passed by keyword is mapped over axis 0"
    return kind(
        f"{name} was called with {counted(args, 'positional argument')}, but {what} has "
        f"{counted(entries, 'entry', 'entries')}. {what} has one entry for each positional "
        f"argument (None for one that {none}); {keywords}."
    )


def bad_argnums(what: str, bad: Sequence[int], args: int) -> StatemeshError:
    return StatemeshError(
        f"{what} has {quoted(bad)}, but the call has {counted(args, 'positional argument')}, numbered from 0."
    )
