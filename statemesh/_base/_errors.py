"""Every error that statemesh raises, and every word that it says.

A message names the argument or state by the path that the user would type, shows the value, the spec
and the mesh, lists all that is wrong at once, and says how to mend it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ._paths import describe, path_str
from ._types import UNNAMED, UNNAMED_DEVICES, AxisName, KeyPath, PerShard, is_state, written_axes


class StatemeshError(ValueError):
    """Anything that statemesh finds wrong."""


class SpecError(StatemeshError):
    """A spec that does not fit its array, its tree or the mesh."""


class BatchAxisError(StatemeshError):
    """A lane axis that does not fit a state or an array."""


class DivergedStateError(StatemeshError):
    """A state that shards wrote differently, although one copy of it is kept."""


class StructureError(StatemeshError):
    """Trees, values or filters that do not fit each other."""


@dataclasses.dataclass(frozen=True)
class Diverged:
    """A written state that still varies over `axis_names`, which `spec` does not mention."""

    path: str
    state: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None
    # What `state_out_specs` or `state_out_axes` says of it.
    said: Any


@dataclasses.dataclass(frozen=True)
class Varying:
    """A returned array that varies over `axis_names`, which `spec` does not mention."""

    path: str
    value: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class RankMismatch:
    """A returned array with fewer axes than its spec has entries."""

    path: str
    value: Any
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class ShapeMismatch:
    """An argument that its spec does not fit: its rank (`dim` is `None`), or the size of one axis."""

    path: str
    value: Any
    spec: PartitionSpec
    dim: int | None
    per_shard: bool


@dataclasses.dataclass(frozen=True)
class WholeState:
    """A state left whole beside an array of which each shard holds a part."""

    path: str
    state: Any
    part_path: str
    part: Any
    spec: PartitionSpec


def spec_str(spec: Any) -> str:
    """A spec as one types it."""
    if isinstance(spec, PartitionSpec):
        beside = {"unreduced": spec.unreduced, "reduced": spec.reduced}
        named = [f"{key}={set(names)!r}" for key, names in beside.items() if names]
        return f"P({', '.join([*map(repr, spec.partitions), *named])})"
    return repr(spec)


def filter_str(filter: Any) -> str:
    """A filter as one types it."""
    if filter is ...:
        return "..."
    return filter.__name__ if isinstance(filter, type) else repr(filter)


def mesh_str(mesh: Any) -> str:
    """A mesh by the sizes of its axes."""
    return f"Mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"


def _lines(items: Iterable[str]) -> str:
    """A list, without what it says already: leaves of one state are often alike."""
    return "\n".join(f"  - {item}" for item in dict.fromkeys(items))


def _names(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


# States


def state_is_no_array(kind: str, what: str) -> TypeError:
    return TypeError(
        f"a {kind} holds an array and is not one itself: apply {what} to `state.value`. A new value is "
        "written with `state.set(value)`."
    )


def immutable_state(kind: str, attribute: str) -> AttributeError:
    return AttributeError(
        f"{kind} is immutable; cannot assign to `{attribute}`. Write `new = state.set(value)`, or "
        f"`new = state.replace({attribute}=...)`, and return the new state."
    )


def bad_state_value(bad: Sequence[tuple[KeyPath, Any]]) -> TypeError:
    items = [
        f"value{path_str(path, ' ')[1:]} is {describe(leaf)} ({type(leaf).__name__})"
        for path, leaf in bad
    ]
    text = f"a State's value is a pytree of arrays, but:\n{_lines(items)}\n"
    if any(is_state(leaf) for _, leaf in bad):
        return TypeError(
            text
            + "A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep "
            "the two side by side in a Module."
        )
    return TypeError(text + "Keep what is no array in a field of the Module that holds the State.")


def unknown_reduce(reduce: Any, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"reduce={reduce!r} is not a write policy. Use None, {_names(known)}, or a function "
        "`(old, new, axis_names) -> value`."
    )


def cannot_reduce(how: str, dtype: Any) -> StatemeshError:
    other = "a function `(old, new, axis_names) -> value`"
    mend = {
        "mean": f"Use reduce='sum', 'max' or 'min' for integers, or {other}.",
        "sum": f"Use reduce='max' or 'min' for an integer in place of it, or {other}.",
    }.get(how, f"Use {other}.")
    return StatemeshError(f"reduce={how!r} cannot merge values of dtype {dtype}. {mend}")


def always_replicated(kind: str, spec: Any) -> SpecError:
    return SpecError(
        f"{kind} cannot be placed with spec={spec_str(spec)}: its key is the same on every shard, and "
        "every shard draws its own numbers from it. Leave `spec` out, or use "
        "sm.PerShard('axis') for keys that are really independent."
    )


def not_a_key(key: Any) -> TypeError:
    return TypeError(
        f"RandomState needs a typed key, got {describe(key)}. Write `sm.RandomState(jax.random.key(0))`; "
        "a raw key becomes a typed one with `jax.random.wrap_key_data(raw)`."
    )


def several_keys(keys: Any) -> StatemeshError:
    return StatemeshError(
        f"RandomState holds keys of shape {keys.shape}, and a shard or lane draws from one. Hold one key, "
        "from which each gets a stream of its own; or give each its key: "
        "RandomState(keys, spec=sm.PerShard('axis')) for shard_map, state_in_axes=sm.RandomState for pmap2 "
        "and vmap2."
    )


def drawn_in_lanes(what: str, impl: Any) -> StatemeshError:
    return StatemeshError(
        f"{what}: each lane has a key of its own, of the implementation {impl!r}. Of several such keys "
        "jax.vmap may use the first one only: the numbers would depend on how many lanes there are, and "
        "differ from those of shard_map and pmap2. Make the key with "
        "`jax.random.key(seed, impl='threefry2x32')`, or draw with `RandomState.rows`, whose keys are "
        "threefry keys."
    )


def kind_overrides_init(kind: str) -> TypeError:
    return TypeError(
        f"{kind} overrides __init__, which JAX calls whenever it rebuilds a state. Override `enter` and "
        f"`leave`, and give {kind} a classmethod for other ways to make one."
    )


def method_returned(method: str, returned: Any, expected: str, example: str) -> TypeError:
    shown = "None" if returned is None else f"{type(returned).__name__}: {describe(returned)}"
    return TypeError(
        f"{method} returned {shown}. It is to return {expected}, as in `{example}`; was a `return` forgotten?"
    )


def unknown_state_fields(kind: str, unknown: Sequence[str], known: Sequence[str]) -> StructureError:
    return StructureError(f"{kind}.replace got {_names(unknown)}; a State has {_names(known)}.")


def set_structure(label: str, old: Any, new: Any) -> StructureError:
    return StructureError(
        f"{label}: the new value has another tree structure.\n  old: {old}\n  new: {new}\n"
        "Use `state.replace(value=...)` to change the structure on purpose."
    )


def set_differs(label: str, differ: Sequence[tuple[KeyPath, Any, Any]]) -> StructureError:
    items = [
        f"value{path_str(path, ' ')[1:]}: was {describe(old)}, is {describe(new)}"
        for path, old, new in differ
    ]
    return StructureError(
        f"{label}: the new value differs in shape or dtype.\n{_lines(items)}\n"
        "Cast or reshape it, or use `state.replace(value=...)` to change it on purpose."
    )


def number_too_large(label: str, path: KeyPath, value: Any, dtype: Any) -> StructureError:
    finfo: Any = jax.numpy.finfo
    info: Any = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else finfo(dtype)
    return StructureError(
        f"{label}: value{path_str(path, ' ')[1:]} is {describe(value)}, which does not fit into {dtype} "
        f"({info.min} to {info.max}). Give the state a dtype that holds it, as in State(jnp.float32(0))."
    )


def no_old_value(label: str, old: Any, new: Any) -> StructureError:
    return StructureError(
        f"{label}: reduce='sum' adds the shards' increments to the old value, and the new value has another "
        f"tree structure.\n  old: {old}\n  new: {new}\nKeep the structure, or merge by a function: "
        "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)."
    )


# Loops


def not_carry_and_result(name: str, returned: Any) -> TypeError:
    return TypeError(
        f"scan: {name} must return (carry, y), but returned {_kind_of(returned)}. Write `return carry, None` "
        "where nothing is to be stacked."
    )


def carry_structure(name: str, gone: Sequence[str], added: Sequence[str]) -> StructureError:
    items = [f"{path} is missing" for path in gone] + [f"{path} is new" for path in added]
    return StructureError(
        f"scan: {name} returned a carry of another structure than it was given:\n{_lines(items)}\n"
        "Make before the loop whatever is carried through it."
    )


def carry_changed(name: str, bad: Sequence[tuple[str, Any, Any]]) -> StructureError:
    items = [f"{path}: was {describe(old)}, is {describe(new)}" for path, old, new in bad]
    return StructureError(
        f"scan: {name} returned a carry with other states, or with other leaves that are no arrays, than it "
        f"was given:\n{_lines(items)}\n"
        "A loop carries one form through all steps. Write states with `state.set(...)`; make an array of a "
        "number that changes, before the loop: `jnp.asarray(...)`."
    )


# Modules, filters, partition


def unknown_fields(module: str, unknown: Sequence[str], known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{module}.replace got {_names(unknown)}; the fields of {module} are {_names(known)}."
    )


def unused_init_arguments(module: str, unused: Sequence[str]) -> TypeError:
    return TypeError(
        f"{module}.init_all_states got {_names(unused)}, which no `init_state` in it takes. Name the "
        "argument in the signature of the `init_state` that needs it."
    )


def not_a_filter(filter: Any) -> TypeError:
    return TypeError(
        f"{filter!r} is not a filter. Use a type, a tag (string), `...`, None, a function "
        "`(path, state) -> bool`, a list of filters, or a class of statemesh.filters."
    )


def where_needs_tree() -> TypeError:
    return TypeError(
        "Where picks by position and needs the tree: write `to_predicate(filter, tree)`."
    )


def filter_matches_nothing(
    what: str, idle: Sequence[Any], states: Sequence[tuple[str, Any]]
) -> StructureError:
    there = _lines(f"{path}: {describe(state)}" for path, state in states) or "  (none)"
    return StructureError(
        f"{what}: no state matches {', '.join(map(filter_str, idle))}. The states there are:\n{there}"
    )


def combine_nothing() -> StructureError:
    return StructureError("combine needs at least one tree: `combine(*partition(tree, filter))`.")


def combine_structures(k: int, path: str, first: Any, other: Any) -> StructureError:
    where = f"at `{path.removeprefix('.')}`" if path else "at the root"
    return StructureError(
        f"combine: trees 0 and {k} differ in structure {where}.\n"
        f"  tree 0: {_short(first)}\n  tree {k}: {_short(other)}\n"
        "Parts of one `partition` have one structure; was a part changed by more than `set`?"
    )


def combine_disagrees(
    several: Sequence[tuple[str, Sequence[Any]]], none: Sequence[str]
) -> StructureError:
    items = [
        f"`{path}` is in {len(found)} trees: {', '.join(map(_short, found))}"
        for path, found in several
    ]
    items += [f"`{path}` is in none of the trees" for path in none]
    return StructureError(f"combine: each leaf must be in exactly one tree.\n{_lines(items)}")


def _short(value: Any) -> str:
    text = describe(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# What is declared


# What arguments have to be, by name. The same argument of another function is the same.
_WANTED = {
    "auto": "the names of mesh axes that are not mapped over, as in auto={'model'}",
    "axis_name": "a string, as in axis_name='data'; no number, for those are axes of arrays, and no tuple, "
    "for those are several names",
    "axis_name of several": "a string, or a tuple of several, as in axis_name=('data', 'model')",
    "axis_names": "the name of a mesh axis, or several, as in axis_names={'data'}; leave it out for all",
    "backend": "the name of a platform, as in backend='cpu'",
    "devices": "jax.Devices in the order of the lanes, as in devices=jax.devices()[:4]",
    "donate_argnums": "the position of an argument, or several, numbered from 0, as in donate_argnums=(0,)",
    "init_kwargs": "a dictionary of arguments by name, as in init_kwargs={'batch_size': 4}, or {} for none",
    "key": "the name of a field, the key of a dictionary or an index, as in PathContains('encoder')",
    "mesh": "a jax.sharding.Mesh, whose devices arrays are put on",
    "model": "the model that it was made of, as in pack(packed.unpack(), mesh)",
    "map": "the name of a method, as in map('update')",
    "n": "an int, 0 or more: the number of rows that this shard holds, as in rows(x.shape[0], 'data')",
    "name": "a string, as in name='mean'",
    "num": "an int, 0 or more: the number of keys, as in split(2)",
    "spmd_axis_name": "the name of a mesh axis, or a tuple of several, as in spmd_axis_name='data'",
    "state_tag": "a string, as in state_tag='new'",
    "static_broadcasted_argnums": "the position of an argument, or several, numbered from 0, as in "
    "static_broadcasted_argnums=(0,)",
    "tag": "a string or several, as in tag='slow' or tag=('slow', 'encoder')",
    "tag of a filter": "a string, as in WithTag('slow'); for several write [WithTag('a'), WithTag('b')]",
    "type": "a class, as in OfType(sm.ParamState)",
    "where": "a function of the tree, as in Where(lambda model: model.encoder)",
}


def wrong_argument(what: str, argument: str, given: Any) -> TypeError:
    """An argument that cannot be meant; `argument` as `_WANTED` lists it."""
    name, text = argument.partition(" of ")[0], _short(given)
    return TypeError(
        f"{what}: {name} is {text} of type {type(given).__name__}, but must be {_WANTED[argument]}."
    )


def wrong_count(what: str, argument: str, given: Any) -> StatemeshError:
    return StatemeshError(f"{what}: {argument} is {given}, but must be {_WANTED[argument]}.")


_CALLS = {
    "shard_map": "shard_map(fun, mesh, in_specs, out_specs)",
    "value_and_grad": "value_and_grad(loss_fn, axis_name='data')",
}


def not_callable(transform: str, fun: Any) -> TypeError:
    takes = "takes" if transform == "value_and_grad" else "maps"
    return TypeError(
        f"{transform} {takes} a function, got {fun!r} of type {type(fun).__name__}. The function comes "
        f"first: `{_CALLS.get(transform, f'{transform}(fn, in_axes=0)')}`."
    )


def not_a_plain_function(transform: str, name: str, kind: str) -> TypeError:
    return TypeError(
        f"{transform}: {name} is {kind}, whose call gives no values yet, but something that is still to "
        "run. JAX traces a function once, from its arguments to what it returns: write `def` without "
        "`async`, and `return` the values without `yield`."
    )


def out_specs_required() -> TypeError:
    return TypeError(
        "shard_map needs out_specs: `shard_map(fun, mesh, in_specs, out_specs)`, with P() for what is "
        "the same on every shard."
    )


def unknown_donate(donate: Any, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(f"donate={donate!r} is not known. Use {_names(known)}.")


def not_a_mesh(mesh: Any) -> TypeError:
    return TypeError(
        f"mesh must be a jax.sharding.Mesh, got {mesh!r} of type {type(mesh).__name__}. Make one with "
        "`jax.make_mesh((jax.device_count(),), ('x',))`."
    )


def empty_mesh(mesh: Any, what: str = "shard_map") -> SpecError:
    return SpecError(
        f"{what} requires a non-empty mesh, but {mesh} has no devices. Make one with "
        "`jax.make_mesh((jax.device_count(),), ('x',))`."
    )


def place_traced(name: str, paths: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name}: these arrays are traced, as by jit, grad or vmap around, and lie nowhere yet:\n"
        f"{_lines(paths)}\nPlace them before, outside of it. Where they are traced a mapped call lays its "
        "arguments out itself."
    )


def shapes_given(name: str, paths: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name}: these are shapes without values (jax.ShapeDtypeStruct), which is not a valid JAX type to "
        f"compute with:\n{_lines(paths)}\nPass arrays. For shapes there are `mapped.lower(...)` and "
        "`jax.eval_shape(mapped, ...)`."
    )


def no_mesh() -> SpecError:
    return SpecError(
        "no mesh: shard_map was given none, and none is set. The context mesh cannot be empty where `mesh` "
        "is left out. Pass `mesh=...`, or call inside `with jax.set_mesh(mesh):`."
    )


def mesh_differs_from_context(given: Any, context: Any) -> SpecError:
    return SpecError(
        f"shard_map was given {mesh_str(given)} {_axis_types(given)}, but the mesh that is set is "
        f"{mesh_str(context)} {_axis_types(context)}. Leave `mesh` out to use the one that is set, or "
        "call outside of `jax.set_mesh`."
    )


def _axis_types(mesh: Any) -> str:
    return f"with axis types ({', '.join(kind.name for kind in mesh.axis_types)})"


def unsharded_inside(taken: Sequence[AxisName]) -> SpecError:
    names = ", ".join(map(repr, taken))
    return SpecError(
        "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, which "
        f"has taken {names}. Call it outside of that one."
    )


def unsharded_traced(mesh: Any) -> SpecError:
    return SpecError(
        f"`unsharded` runs on a mesh of one device, but {mesh_str(mesh)} is set, and JAX takes no other one "
        "while something is traced. Where shard_map was given a mesh, call it outside of `jax.set_mesh`; "
        "where it was given none, inside `with jax.set_mesh(mesh):` of a mesh of one device."
    )


def abstract_mesh_outside_trace(mesh: Any) -> SpecError:
    return SpecError(
        f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Please pass `jax.Array`s with "
        "a `NamedSharding` as input to `shard_map` when passing `AbstractMesh` to the mesh argument, or pass "
        "a `jax.sharding.Mesh`."
    )


def other_mesh_of_input(x: Any, there: Any, mesh: Any) -> SpecError:
    return SpecError(
        f"Mesh shape of the input {describe(x)}, which lies on {mesh_str(there)}, does not match the mesh "
        f"shape passed to shard_map: {mesh_str(mesh)}, an AbstractMesh, whose devices are to be those of "
        "the arguments."
    )


def unknown_axis_names(unknown: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"axis_names has {_names(unknown)}, but the axes of {mesh_str(mesh)} are "
        f"{_names(mesh.axis_names)}."
    )


def mesh_partly_taken(given: Any, taken: Iterable[AxisName]) -> SpecError:
    left = [name for name in given.axis_names if name not in frozenset(taken)]
    return SpecError(
        f"shard_map was given {mesh_str(given)} to map over all of it, but an enclosing shard_map already "
        f"maps over {_names(taken)}: the context mesh, which has these taken, should match the mesh passed "
        f"to shard_map. Leave `mesh` out, or name the axes that are meant: axis_names={{{_names(left)}}}."
    )


def axis_of_vmap(taken: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"an operand of the jax.vmap around is split over {_names(taken)} of {mesh_str(mesh)}, so that its "
        "lanes are spread over that axis: jax.shard_map requires axis_names to be a subset of the others. "
        "Leave `axis_names` out to map over those, or lay the operand out otherwise."
    )


def axis_taken(again: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"axis_names has {_names(again)}, which an enclosing shard_map already maps over on "
        f"{mesh_str(mesh)}. Name other axes."
    )


def no_axes_left(mesh: Any) -> SpecError:
    return SpecError(
        f"an enclosing shard_map already maps over every axis of {mesh_str(mesh)}. Give the outer one "
        "`axis_names`, so that some are left."
    )


def bad_auto(auto: Iterable[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"auto={sorted(map(str, auto))} must be some, not all, of the axes of {mesh_str(mesh)}."
    )


def cannot_infer(mesh: Any) -> TypeError:
    return TypeError(
        f"in_specs can be left out only on a mesh of Explicit axes; this is {mesh_str(mesh)} "
        f"{_axis_types(mesh)}. Write in_specs=..., one entry for each positional argument."
    )


def not_a_spec(where: str, spec: Any) -> TypeError:
    return TypeError(
        f"{where} is {spec!r} of type {type(spec).__name__}, not a spec. Use P('axis'), P(), None, or for "
        "a state sm.PerShard('axis')."
    )


def per_shard_for_array(where: str, spec: PerShard) -> SpecError:
    axes = spec_str(PartitionSpec(*spec.axis_names))
    return SpecError(
        f"{where} is {spec!r}, which places States only. Use {axes} for an array; for a State write "
        f"state_in_specs={{...: {spec!r}}} or State(value, spec={spec!r})."
    )


def unknown_axes(
    unknown: Sequence[tuple[str, Any, Sequence[AxisName]]], mesh: Any, names: Sequence[AxisName]
) -> SpecError:
    items = [f"{where} refers to {_names(bad)}: {spec_str(spec)}" for where, spec, bad in unknown]
    left = [name for name in mesh.axis_names if name not in names]
    there = f"The axes to map over are {_names(names)} of {mesh_str(mesh)}"
    also = f"; {_names(left)} is not mapped over" if left else ""
    if any(PartitionSpec.UNCONSTRAINED in bad for _, _, bad in unknown):
        also += ". A call that is mapped has to know how each axis is split: write None for one that is not"
    return SpecError(f"specs name axes that there are not:\n{_lines(items)}\n{there}{also}.")


def axis_twice(twice: Sequence[tuple[str, Any, Sequence[AxisName]]]) -> SpecError:
    items = [f"{where} = {spec_str(spec)} has {_names(bad)} twice" for where, spec, bad in twice]
    return SpecError(f"a mesh axis can split one array axis only:\n{_lines(items)}")


# Calls


def other_structure(name: str, lowered: Any, given: Any) -> TypeError:
    return TypeError(
        f"{name}: Function compiled with input pytree does not match the input pytree it was called with. "
        f"It was compiled for {lowered}, and called with {given}."
    )


def other_statics(name: str, differ: Sequence[tuple[str, Any]]) -> TypeError:
    items = [f"{was}, and called with {now!r}" for was, now in differ]
    return TypeError(
        f"{name} was compiled for arguments that are no arrays, and called with others:\n{_lines(items)}\n"
        "Lower it for these, or call the function itself, which compiles anew."
    )


def unknowable_statics(name: str, bad: Sequence[tuple[str, Any, Any]]) -> StructureError:
    items = [
        f"{path}: {_short(value)} of type {type(value).__name__}"
        + (
            ""
            if part is value
            else f", in which there is {_short(part)} of type {type(part).__name__}"
        )
        for path, value, part in bad
    ]
    return StructureError(
        f"{name}: arguments that are no arrays can neither be hashed nor be compared by what is in them, so "
        f"that a change of them would not be seen:\n{_lines(items)}\n"
        "Pass the values that are used of it, in arrays or in a @dataclass(frozen=True)."
    )


def arity(name: str, what: str, entries: int, args: int) -> StatemeshError:
    kind: type[StatemeshError]
    if what == "in_specs":
        kind, left, keywords = SpecError, "is not sharded", "keyword arguments have none"
    else:
        kind, left = BatchAxisError, "all lanes share"
        keywords = "each argument passed by keyword is mapped over axis 0"
    return kind(
        f"{name} was called with {_plural(args, 'positional argument')}, but {what} has "
        f"{entries} {'entry' if entries == 1 else 'entries'}. {what} has one entry for each positional "
        f"argument (None for one that {left}); {keywords}."
    )


def check_signature(
    fun: Callable[..., Any], name: str, positional: int, keywords: Iterable[str]
) -> None:
    """Refuse arguments that `fun` does not take, in the words of Python."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{name}{signature} cannot be called like this: {error}.") from None


def prefix_mismatch(bad: Sequence[tuple[str, Any, str, Any]]) -> SpecError:
    return SpecError(
        "specs must be a tree prefix of what they place:\n"
        + _prefix_lines(bad, "placed by `state_in_specs`, `state_out_specs` or their own `spec`")
        + "\nOne spec stands for a whole subtree: P() or P('axis') in its place fits anything."
    )


def axes_prefix_mismatch(bad: Sequence[tuple[str, Any, str, Any]]) -> BatchAxisError:
    return BatchAxisError(
        "axes must be a tree prefix of what they map:\n"
        + _prefix_lines(bad, "mapped by `state_in_axes` and `state_out_axes`")
        + "\nOne axis stands for a whole subtree: 0 or None in its place fits anything."
    )


def _prefix_lines(bad: Sequence[tuple[str, Any, str, Any]], how: str) -> str:
    return _lines(
        f"{what} = {prefix!r} reaches into the State {root}; States are {how}"
        if is_state(tree)
        else f"{what} is {_node(prefix)}, but {root} is {_node(tree)}"
        for what, prefix, root, tree in bad
    )


def _node(node: Any) -> str:
    if isinstance(node, dict):
        return f"a dict with keys {sorted(map(str, node))}"
    if isinstance(node, tuple | list):
        return f"a {type(node).__name__} of {_plural(len(node), 'element')}"
    if jax.tree_util.all_leaves([node]):
        return describe(node)
    return f"a {type(node).__name__}"


def shapes(what: str, bad: Sequence[ShapeMismatch], mesh: Any) -> SpecError:
    return SpecError(
        f"{what}: arrays do not fit their specs on {mesh_str(mesh)}:\n"
        + _lines(_shape_line(one, mesh) for one in bad)
        + "\nPad the array, choose another spec, or, to replicate it, consider using an in_specs entry of "
        "`P()`."
    )


def _shape_line(one: ShapeMismatch, mesh: Any) -> str:
    shown = f"{one.path}: {describe(one.value)} with spec {spec_str(one.spec)}"
    axes = written_axes(one.spec)
    if one.dim is None:
        if one.per_shard:
            return f"{shown} (PerShard) is a scalar; it needs a leading axis of one entry per shard"
        return _rank_line(one.path, one.value, one.spec)
    size, names = np.shape(one.value)[one.dim], axes[one.dim]
    sizes = [mesh.shape[name] for name in names if name in mesh.shape]
    parts = int(np.prod(sizes, dtype=int))
    product = " * ".join(map(str, sizes)) + (f" = {parts}" if len(sizes) > 1 else "")
    if one.per_shard:
        return (
            f"{shown} (PerShard): axis {one.dim} has size {size}, one entry per shard is {product}"
        )
    return (
        f"{shown}: axis {one.dim} has size {size}, not divisible by {_names(names)} of size {product} "
        f"({size} % {parts} = {size % parts})"
    )


def _rank_line(path: str, value: Any, spec: PartitionSpec) -> str:
    return (
        f"{path}: {describe(value)}, which has rank {np.ndim(value)}, with spec {spec_str(spec)}, which has "
        f"length {len(spec.partitions)}"
    )


def with_hint(text: str, hints: Sequence[WholeState]) -> str:
    items = [
        f"{h.path} ({_short(h.state.value)}) is whole on every shard, but {h.part_path} is "
        f"{describe(h.part)} there, split by {spec_str(h.spec)}"
        for h in hints
    ]
    spec = spec_str(hints[0].spec)
    return (
        f"{text}\n\nHint: a state that is replicated met data that is sharded:\n{_lines(items)}\n"
        f"If the state is to be split like the data, write state_in_specs={spec} (or "
        f"{{filter: {spec}}}), or give the state its own spec={spec}."
    )


def with_type_hint(text: str, states: Sequence[tuple[str, Any, tuple[AxisName, ...]]]) -> str:
    items = [
        f"{path}: {describe(state)} is the same over {_names(axes)}" for path, state, axes in states
    ]
    path, _, axes = states[0]
    return (
        f"{text}\n\nHint: a state that enters the same on every shard is written differently by shards in a "
        f"loop or a branch, for which both must have one type:\n{_lines(items)}\n"
        "Type it as differing before the loop or branch, and its policy merges it when it leaves:\n"
        f"    {path}.set(jax.lax.pcast({path}.value, {axes!r}, to='varying'))"
    )


def deleted(name: str, paths: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"{name}: these arguments were given up to an earlier call that donates its arguments:\n"
        f"{_lines(paths)}\nGo on with what that call returned, as in `out, model = step(model, x)`."
    )


def old_tracer(name: str, paths: Sequence[str]) -> Exception:
    return jax.errors.UnexpectedTracerError(
        f"{name}: a traced value outlived its trace. Among the arguments these are traced:\n"
        f"{_lines(paths)}\nReturn values from the traced function instead of keeping them: a model that "
        "was written inside `jax.jit` or `jax.grad` leaves it as a result."
    )


def unbound_axis(
    what: str, unbound: Sequence[AxisName], bound: Sequence[AxisName]
) -> StatemeshError:
    return StatemeshError(
        f"{what}: no axis is called {_names(unbound)} here; the axes mapped over are "
        f"{_names(bound) or 'none'}."
    )


def axis_by_position(what: str, axis: int) -> TypeError:
    return TypeError(
        f"{what}: axis_name={axis} is the position of an array's axis, not the name of a mapped one. Give "
        "the name, such as 'data'; over an array's own axis there are jnp.sum, jnp.mean, jnp.max and jnp.min."
    )


# Gradients


def unknown_reduction(reduce: Any) -> StatemeshError:
    return StatemeshError(f"value_and_grad: reduce={reduce!r} is unknown. Write 'mean' or 'sum'.")


def cannot_differentiate(what: str, bad: Sequence[tuple[str, Any]]) -> StructureError:
    items = [f"{path}: {describe_unit(unit)}" for path, unit in bad]
    return StructureError(
        f"{what}: wrt picks what holds no floating or complex numbers:\n{_lines(items)}\n"
        "Let it pick parameters, as `wrt=sm.ParamState` does; several filters are joined by "
        "sm.filters.All, Any and Not."
    )


def nothing_to_differentiate(
    what: str, wrt: Any, units: Sequence[tuple[str, Any]]
) -> StructureError:
    items = [f"{path}: {describe_unit(unit)}" for path, unit in units]
    picks = (
        "the model has no ParamState of floating or complex numbers, and no such array outside a State"
        if wrt is None
        else f"wrt={filter_str(wrt)} picks nothing in the model"
    )
    has = f"It has:\n{_lines(items)}" if items else "It has no states and no arrays."
    return StructureError(f"{what}: {picks}. {has}")


def picks_part_of_buffer(
    what: str, wrt: Any, torn: Sequence[Sequence[Sequence[str]]]
) -> StructureError:
    lines = [f"picked: {_some(picked)}; not picked: {_some(left)}" for picked, left in torn]
    return StructureError(
        f"{what}: wrt={filter_str(wrt)} picks some of the states that are packed in one buffer, and a buffer "
        f"has one gradient:\n{_lines(lines)}\n"
        "Take the gradient inside the mapped call, which sees the model, or give this call the model "
        "itself: `packed.unpack()`."
    )


def _some(paths: Sequence[str]) -> str:
    more = [f"{len(paths) - 3} more"] if len(paths) > 3 else []
    return ", ".join([*paths[:3], *more])


def describe_unit(unit: Any) -> str:
    return describe(unit)


def not_loss_and_model(name: str, returned: Any, has_aux: bool) -> StructureError:
    wanted = "((loss, aux), model)" if has_aux else "(loss, model)"
    kind = _kind_of(returned)
    if isinstance(returned, tuple):
        kind = f"a tuple of {', '.join(map(_kind_of, returned))}" if returned else "()"
    text = f"value_and_grad: {name} must return {wanted}, but returned {kind}."
    if not has_aux:
        text += (
            " Where it writes no state, return the model as it came in; where it returns more, say "
            "`has_aux=True` and return ((loss, aux), model)."
        )
    return StructureError(text)


def _kind_of(value: Any) -> str:
    return describe(value) if isinstance(value, jax.Array) else type(value).__name__


def not_a_loss(name: str, loss: Any) -> StructureError:
    return StructureError(
        f"value_and_grad: the loss that {name} returns must be one real floating number, but is "
        f"{describe(loss)}. Reduce it: `loss.mean()`."
    )


def loss_differs(name: str, axes: Sequence[AxisName], params: Sequence[str]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns differs over {_names(axes)}, which axis_name does not "
        f"name, while one copy is kept there of:\n{_lines(params)}\n"
        "JAX would sum their gradients over the shards. Write one of:\n"
        f"{_lines(_loss_mends(axis))}"
    )


def loss_typed_apart(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns is typed as differing over {_names(axes)}, which "
        "axis_name does not name, and comes of what the shards exchange there. JAX would sum the gradients "
        f"of all their losses. Write one of:\n{_lines(_loss_mends(axis))}"
    )


def loss_exchanged(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns differs over {_names(axes)}, which axis_name does not "
        "name, and comes of what is exchanged there. JAX would sum the gradients of all their losses. Write "
        f"one of:\n{_lines(_loss_mends(axis))}"
    )


def _loss_mends(axis: Any) -> list[str]:
    return [
        f"`axis_name={axis!r}` (with the other axes that are meant), for the mean of the shards' losses",
        f"`jax.lax.psum(..., {axis!r})` in the function, where each shard has computed a part of one result",
    ]


def loss_counted_twice(axes: Iterable[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: with reduce='sum' the loss is to be summed over {_names(axes)}, but it is the same "
        "there on every shard: the sum would count it once for each. Where the function has reduced it "
        "already, write reduce='mean', which takes such a loss as it is, or leave the axis out of axis_name."
    )


def gradient_unfollowed(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: nothing tells here over which of {_names(axes)} the parameters are split, on which "
        "their gradients depend: this is a map that does not check what varies, run by JAX alone or with "
        "jit=False. Write `statemesh.shard_map` (without jit=False), or leave check_vma as it is."
    )


def gradient_in_mixed_maps(
    apart: Sequence[AxisName], unchecked: Sequence[AxisName], checked: Sequence[AxisName]
) -> StatemeshError:
    inner, outer = (
        ("checks", "does not") if checked else ("does not check", "does, or is run by JAX alone")
    )
    return StatemeshError(
        f"value_and_grad: nothing tells here over which of {_names(apart)} the parameters are split, on "
        f"which their gradients depend: the map over {_names(checked or unchecked)} {inner} what varies, and "
        f"stands inside the map over {_names(apart)}, which {outer}. Write `statemesh.shard_map` for both, "
        "and leave check_vma as it is."
    )


def gradient_in_gradient(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {_names(axes)} it cannot reduce "
        "over the same axes: there each shard has parameters of its own, of which nothing tells that they "
        "are equal. Leave axis_name out inside, for the gradient of this shard's own loss."
    )


def loss_exchanged_inside(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {_names(axes)}, the loss that "
        f"{name} returns comes of what is exchanged over the same axes. There each shard has parameters of "
        "its own, of which nothing tells that they are equal. Let it return this shard's own loss, without "
        f"a collective over {_names(axes)}."
    )


def reduced_twice(name: str, bad: Sequence[tuple[str, AxisName]]) -> StatemeshError:
    items = [f"the {what}: over {axis!r}" for what, axis in bad]
    return StatemeshError(
        f"{name}: a sum over shards is taken of gradients that value_and_grad has already reduced there, "
        f"which makes them as many times too large as there are shards:\n{_lines(items)}\n"
        "Leave `jax.lax.psum` out; value_and_grad has reduced them once."
    )


# Results


def diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    if declared := [one for one in bad if one.state.needs_old]:
        return _merged_apart(name, declared)
    items = [
        f"{one.path}: {describe(one.state)} varies over {_names(one.axis_names)} but leaves with "
        f"{spec_str(one.spec)}, which keeps one copy"
        for one in bad
    ]
    axes = bad[0].axis_names
    axis = axes[0] if len(axes) == 1 else axes
    own = ", ".join(map(repr, axes))
    return DivergedStateError(
        f"{name}: shards wrote different values to states of which one copy is kept:\n{_lines(items)}\n"
        "Mend it in one of three ways:\n"
        f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axis!r}));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. keep one value per shard: State(value, spec=sm.PerShard({own})), or a spec that names "
        f"{own}, as in state_out_specs."
    )


def _merged_apart(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    """The policy was declared and followed, and what it gave differs."""
    items, mends = [], []
    for one in bad:
        axes = _names(one.axis_names)
        axis = one.axis_names[0] if len(one.axis_names) == 1 else one.axis_names
        if one.state.reduce == "sum":
            reason = f"adds the increments to the old value, which entered split over {axes}"
            mend = (
                "let it leave as it entered; or say what the shards' values become, as in "
                "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)"
            )
        else:
            own = _policy_of(one.state)
            reason = f"returned by {own}, which is to return the same on every shard"
            mend = (
                f"reduce it in {own}, as with jax.lax.psum(value, {axis!r}) or "
                f"jax.lax.all_gather(value, {axis!r}, to='invarying')"
            )
        items.append(
            f"{one.path}: {describe(one.state)} varies over {axes} but leaves with "
            f"{spec_str(one.spec)}: {reason}"
        )
        mends.append(mend)
    return DivergedStateError(
        f"{name}: the policies of these states leave values that differ between shards, of which one copy is "
        f"kept:\n{_lines(items)}\nMend it:\n{_lines(list(dict.fromkeys(mends)))}"
    )


def _policy_of(state: Any) -> str:
    """What merges the writes to a state, by the name that its author gave it."""
    return getattr(state.reduce, "__name__", None) or f"{type(state).__name__}.leave"


def tied(name: str, groups: Sequence[Sequence[str]]) -> StructureError:
    items = [f"{' and '.join(paths)} are one State object" for paths in groups]
    return StructureError(
        f"{name}: a state that stands in several places was written:\n{_lines(items)}\n"
        "Each place is a state of its own as soon as one is written. Keep it in one place; tie what must "
        "be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`."
    )


def diverged_in_branch(
    name: str, found: Sequence[tuple[str, tuple[AxisName, ...], PartitionSpec]]
) -> DivergedStateError:
    items = [
        f"{path} may differ over {_names(axes)}, but its spec is {spec_str(spec)}"
        for path, axes, spec in found
    ]
    return DivergedStateError(
        f"{name}: shards that take different branches write different values to states of which one copy is "
        f"kept:\n{_lines(items)}\n"
        "JAX's types do not follow a `cond` or `while` whose predicate differs between shards. Choose with "
        "`jnp.where(predicate, new, old)` instead; or make the predicate the same on all shards, as with "
        "jax.lax.pmax(predicate, axis)."
    )


def unsure_origin(name: str, unsure: Sequence[tuple[str, Sequence[str]]]) -> StructureError:
    items = [f"{path} may be {' or '.join(several)}" for path, several in unsure]
    return StructureError(
        f"{name}: these states are alike in all but where they came from, and it cannot be known which one "
        f"each of them continues:\n{_lines(items)}\n"
        "It is lost where the branches of a `cond` return different states, and where a loop exchanges them. "
        "Tell them apart by a name or tag: State(value, name='a'); or write the values into the states that "
        "came in, after that: `state.set(new.value)`."
    )


def out_varies(name: str, bad: Sequence[Varying]) -> SpecError:
    items = [
        f"{one.path}: {describe(one.value)} varies over {_names(one.axis_names)} but its out_spec is "
        f"{spec_str(one.spec)}"
        for one in bad
    ]
    axes = bad[0].axis_names
    axis = axes[0] if len(axes) == 1 else axes
    return SpecError(
        f"{name}: out_specs require replication, but results were statically inferred to vary:\n"
        f"{_lines(items)}\n"
        f"Reduce it, as with jax.lax.psum(value, {axis!r}), or name {_names(axes)} in out_specs to join the "
        "shards' parts."
    )


def out_rank(name: str, bad: Sequence[RankMismatch]) -> SpecError:
    items = [_rank_line(one.path, one.value, one.spec) for one in bad]
    return SpecError(
        f"{name}: results have fewer axes than their specs have entries:\n{_lines(items)}\n"
        "Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is the "
        "same on every shard."
    )


def _axes(value: Any) -> str:
    rank = len(np.shape(value))
    return f"{rank} axis" if rank == 1 else f"{rank} axes"


def none_for_array(path: str, value: Any) -> SpecError:
    return SpecError(
        f"{path} is {describe(value)}, but its out_spec is None, which fits only what holds no array "
        "outside of States. Write P() or P('axis')."
    )


# Lanes


def not_an_axis(where: str, axis: Any) -> TypeError:
    return TypeError(
        f"{where} is {axis!r} of type {type(axis).__name__}, not an axis. Use an int (negative ones count "
        "from the end), or None for what all lanes share."
    )


def unknown_mapping_policy(policy: Any, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"unexpected_out_state_mapping={policy!r} is not known. Use {_names(known)}."
    )


def bad_axis_size(what: str, size: Any) -> StatemeshError:
    return StatemeshError(f"{what}={size!r} is not a positive int.")


def no_such_axis(name: str, bad: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} has {_axes(x)}, but is mapped over axis {axis}"
        for path, axis, x in bad
    ]
    return BatchAxisError(
        f"{name}: arguments do not have the axes that they are mapped over:\n{_lines(items)}\n"
        "Name an axis that is there, or None for what all lanes share."
    )


def no_such_out_axis(name: str, bad: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} in each lane has no place for lanes at axis {axis}"
        for path, axis, x in bad
    ]
    return BatchAxisError(
        f"{name}: results have too few axes for where their lanes should go:\n{_lines(items)}\n"
        "With the lanes a result has one axis more than in each lane; 0 always fits."
    )


def lanes_disagree(
    name: str, mapped: Sequence[tuple[str, int, Any]], axis_size: int | None
) -> BatchAxisError:
    by_size: dict[int, list[str]] = {}
    for path, axis, x in mapped:
        line = f"{path}: {describe(x)} has {np.shape(x)[axis]} on axis {axis}"
        by_size.setdefault(np.shape(x)[axis], []).append(line)
    items = [
        line
        for lines in by_size.values()
        # A model has many that agree.
        for line in (*lines[:3], *([f"and {len(lines) - 3} more like it"] if lines[3:] else []))
    ]
    if axis_size is not None:
        items.append(f"axis_size={axis_size}")
    return BatchAxisError(
        f"{name}: it is not clear how many lanes there are:\n{_lines(items)}\n"
        "All that is mapped must have one size; give None as the axis of what all lanes share."
    )


def nothing_to_infer(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: nothing is mapped, so nothing says how many lanes there are. Give axis_size=..., or an "
        "axis in in_axes or state_in_axes."
    )


def no_lanes(name: str, mapped: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [f"{path}: {describe(x)} has 0 on axis {axis}" for path, axis, x in mapped[:3]]
    return BatchAxisError(
        f"{name}: there are no lanes:\n{_lines(items)}\nMap over an axis of size 1 or more."
    )


def bad_axis_name(name: Any) -> TypeError:
    return TypeError(
        f"axis_name={name!r} of type {type(name).__name__} cannot be hashed. Use a string."
    )


def no_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} has none, but the 'devices' argument to pmap must be non-empty, "
        "or None. Leave it out, or pass some, as in devices=jax.devices()[:4]."
    )


def bad_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} must be different jax.Devices, as in "
        "devices=jax.devices()[:4]."
    )


def devices_not_here(platform: str, missing: Sequence[int], there: Sequence[int]) -> StatemeshError:
    return StatemeshError(
        f"This was pickled with {platform} devices of the numbers {list(missing)}, and this process has "
        f"{list(there)}. Make the mesh here and map the function over it, or leave the mesh out and "
        "set it by jax.set_mesh(mesh)."
    )


def too_many_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {_plural(lanes, 'lane')} on {_plural(devices, 'device')}; pmap2 gives every lane a device "
        f"of its own. Give it {devices} at most, each with a part of the batch, as in "
        f"x.reshape({devices}, -1, *x.shape[1:]); or use vmap2, or shard_map."
    )


def process_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: this process passed {_plural(lanes, 'lane')} and has {_plural(devices, 'device')}. With "
        "several processes each passes one lane for each of its own devices, and gets these back."
    )


def no_such_backend(name: str, backend: Any, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{name}: devices={list(devices)!r} are not of backend={backend!r}. Give one of the two."
    )


def bad_argnums(what: str, bad: Sequence[Any], args: int) -> StatemeshError:
    return StatemeshError(
        f"{what} has {_names(bad)}, but the call has {_plural(args, 'positional argument')}, numbered from 0."
    )


def unhashable_static(name: str, path: str, value: Any) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {path} is {describe(value)} of type {type(value).__name__}, which cannot be hashed, and "
        "stands in static_broadcasted_argnums. Non-hashable static arguments are not supported, for they are "
        "a part of the program's signature; give None in in_axes for an array that all lanes share."
    )


def global_shape(
    name: str, bad: Sequence[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} here, global_arg_shapes says {given}, of which this process's part is {part}"
        for path, x, given, part in bad
    ]
    return BatchAxisError(
        f"{name}: arguments do not fit global_arg_shapes:\n{_lines(items)}\n"
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give None "
        "for any other argument."
    )


def lane_axis_conflict(
    name: str, bad: Sequence[tuple[str, Any, int | None, int | None]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
        for path, state, into, out in bad
    ]
    return BatchAxisError(
        f"{name}: states enter on one axis and leave on another:\n{_lines(items)}\n"
        "The axis in state_in_axes is also the one it leaves on: leave it out of state_out_axes, or name the "
        "same one."
    )


def lanes_wrote(name: str, bad: Sequence[Diverged], declared_none: bool) -> BatchAxisError:
    axis = bad[0].axis_names[0]
    if merged := [one for one in bad if one.state.needs_old]:
        return _lanes_merged_apart(name, merged, axis)
    items = [f"{one.path}: {describe(one.state)}" for one in bad]
    if declared_none:
        return BatchAxisError(
            f"{name}: lanes wrote different values to states that state_out_axes declares to be the same in "
            f"all (axis None):\n{_lines(items)}\n"
            f"Reduce the value, as with {_pmean('value', axis)}; or declare how writes are merged, "
            "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
            "NonBatchState never has one: make it of another kind."
        )
    return BatchAxisError(
        f"{name}: lanes wrote different values to states without a declared axis:\n{_lines(items)}\n"
        "Mend it in one of three ways:\n"
        "  1. keep one value per lane: state_out_axes={0: filter}, and state_in_axes={0: filter} from the "
        "next call on;\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. reduce the value before it is set, as with {_pmean('value', axis)}."
    )


def _lanes_merged_apart(name: str, bad: Sequence[Diverged], axis: AxisName) -> BatchAxisError:
    """The policy was followed, and what it gave differs."""
    items, mends = [], []
    for one in bad:
        own = _policy_of(one.state)
        items.append(
            f"{one.path}: {describe(one.state)}: returned by {own}, which is to return the same in every lane"
        )
        mends.append(f"reduce it in {own}, as with jax.lax.psum(value, axis_names)")
    return BatchAxisError(
        f"{name}: the policies of these states leave values that differ between lanes ({_lanes_str(axis)}), "
        f"of which one copy is kept:\n{_lines(items)}\nMend it:\n{_lines(list(dict.fromkeys(mends)))}\n"
        "Or keep one value per lane: state_out_axes={0: filter}, and state_in_axes={0: filter} from the next "
        "call on."
    )


def _lanes_str(axis: AxisName) -> str:
    return "without a name" if axis in (UNNAMED, UNNAMED_DEVICES) else repr(axis)


def _pmean(value: str, axis: AxisName) -> str:
    """Code that reduces over lanes; those without a name are given one."""
    named = "jax.lax.pmean({}, {!r})"
    if axis in (UNNAMED, UNNAMED_DEVICES):
        return named.format(value, "lanes") + " with axis_name='lanes'"
    return named.format(value, axis)


def lanes_stacked(name: str, paths: Sequence[str]) -> str:
    return (
        f"{name}: lanes wrote different values to states without a declared axis, and these were stacked on "
        f"axis 0:\n{_lines(paths)}\nDeclare it: state_out_axes={{0: filter}}."
    )


def lanes_vary(name: str, bad: Sequence[Varying]) -> BatchAxisError:
    items = [f"{one.path}: {describe(one.value)} differs between lanes" for one in bad]
    axis = bad[0].axis_names[0]
    return BatchAxisError(
        f"{name}: out_axes=None says that results are the same in all lanes, but:\n{_lines(items)}\n"
        f"Reduce it, as with {_pmean('value', axis)}, or give it an axis: out_axes=0."
    )


def lane_name_taken(name: str, axis: AxisName) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: axis_name={axis!r} is a mesh axis that an enclosing shard_map maps over. Call the lanes "
        "something else."
    )


def pmap2_inside(name: str, taken: Sequence[AxisName]) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 takes whole devices, and an enclosing mapped call has them already (axes "
        f"{_names(taken)}). Use vmap2 inside of it."
    )


def own_mesh_among_explicit(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 runs on a mesh of its own, and its results cannot be mixed with arrays that Explicit "
        "mesh axes type. While something is traced, call it outside of `jax.set_mesh` and on arrays that do "
        "not lie on such a mesh; or use shard_map, which runs on the mesh that there is."
    )


def lane_collective(name: str, axis: AxisName) -> StatemeshError:
    return StatemeshError(
        f"{name}: inside a checked shard_map JAX has no collectives over the lanes of a vmap ({axis!r}). "
        "Write instead:\n"
        f"  1. statemesh's own, which run over lanes there: sm.psum(x, {axis!r}), or sm.pmean, sm.pmax, "
        "sm.pmin, sm.all_gather;\n"
        "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges the lanes' "
        "writes;\n"
        "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as with "
        "jnp.sum(out, axis=0)."
    )


def policy_over_lanes(label: str, policy: Any, axis: AxisName) -> StatemeshError:
    name = getattr(policy, "__name__", repr(policy))
    return StatemeshError(
        f"{label}: inside a checked shard_map the function reduce={name} cannot merge what the lanes of "
        f"vmap2 ({axis!r}) wrote, because JAX has no collectives over lanes there. Write instead:\n"
        "  1. a named policy: reduce='mean', or 'sum', 'max', 'min';\n"
        "  2. one value for each lane, with state_out_axes={0: ...}, and merge them after vmap2, as with "
        "jnp.mean(state.value, axis=0)."
    )


# Modules over lanes


def new_states_need_size() -> BatchAxisError:
    return BatchAxisError(
        "vmap2_new_states needs axis_size=..., the number of lanes: nothing else says it."
    )


def not_a_module(module: Any) -> TypeError:
    return TypeError(
        f"states are created for a statemesh.Module, got {describe(module)} of type {type(module).__name__}. "
        "Derive its class from sm.Module and make its states in `init_state(self, **kwargs)`."
    )


def unknown_behavior(behavior: Any, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(f"behavior={behavior!r} is not known. Use {_names(known)}.")


def unknown_method(module: str, name: Any, known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{module} has no method {name!r}. Its methods are {_names(known) or 'none'}."
    )


def not_a_pair(module: str, name: str, result: Any) -> StructureError:
    return StructureError(
        f"Map: {module}.{name} returned {_node(result)}, not `(out, module)`. Return the result and the "
        "module with what was written: `return out, self.replace(state=...)`, or `return out, self`."
    )


# Several processes


def not_shapes(given: Any) -> TypeError:
    return TypeError(
        f"global_arg_shapes={given!r} is not a shape (a tuple of ints) or None for each positional argument."
    )


def global_shapes_count(name: str, entries: int, args: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name} was called with {_plural(args, 'positional argument')}, but global_arg_shapes has {entries} "
        f"{'entry' if entries == 1 else 'entries'}. It has one for each positional argument: its shape, or "
        "None where nothing is said."
    )


def no_own_devices(name: str, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: none of the {_plural(devices, 'device')} is this process's. Only processes that have "
        "devices among them can make the call."
    )


def processes_traced(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 over the devices of several processes is being traced, as by jit, grad, vmap or scan "
        "around it. It takes and gives this process's lanes, which are there only while it runs. Call it by "
        "itself, and transform the function that it maps; or use shard_map."
    )


def processes_disagree(name: str, bad: Sequence[tuple[str, Any]]) -> StructureError:
    items = [f"{path}: {describe(value)} in this one" for path, value in bad]
    what = _lines(items or ["the structure of the arguments, or where their arrays lie"])
    return StructureError(
        f"{name}: the processes passed different values where all of them have to pass the same:\n{what}\n"
        "Make them from the same seed or file in every process, or send one process's array or seed to all: "
        "jax.experimental.multihost_utils.broadcast_one_to_all(x). Where each process has a part of the "
        "data, make one array of the parts: jax.make_array_from_process_local_data(sharding, part)."
    )


def processes_alone() -> BatchAxisError:
    return BatchAxisError(
        "unsharded: each of several processes has only its own lanes. Gather them, as with "
        "jax.experimental.multihost_utils.process_allgather, and call vmap2."
    )


# Layers


def bad_setting(layer: str, argument: str, value: Any, wanted: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {argument}={value!r}, but it must be {wanted}.")


def inference_is_traced(layer: str) -> TypeError:
    return TypeError(
        f"{layer}: `inference` is traced here, where it has to be True or False. jax.jit, scan and grad "
        "trace the Python numbers in a model that they are given. Give them its arrays alone: `arrays, rest "
        "= equinox.partition(model, equinox.is_array)`, or use equinox.filter_jit."
    )


def not_floating(layer: str, x: Any) -> TypeError:
    return TypeError(
        f"{layer}: x is {describe(x)}, but must hold floating numbers: `x.astype(jnp.float32)`."
    )


def no_such_array_axis(layer: str, argument: str, axis: int, x: Any) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {argument}={axis}, but x is {describe(x)} and has no such axis."
    )


def wrong_channels(layer: str, x: Any, axis: int, size: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)} with {_plural(x.shape[axis], 'channel')} on axis {axis}, but the layer "
        f"holds {size}. Make it for as many, or say with channel_axis where the channels are."
    )


def no_rows(layer: str, x: Any) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)}, and nothing has no mean. Give every shard a row at least: where rows "
        "do not divide evenly, pad them, and say with `where` which of them count."
    )


def row_alone(layer: str, x: Any) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)}, a row alone, of which there are no statistics. Give the layer all "
        "rows at once; or name the axis that they are mapped over, in the layer and in the map: "
        "axis_name='rows'."
    )


def bad_mask(layer: str, mask: Any, x: Any, axis: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: where is {describe(mask)}, but must be bool and have the leading axes of x, which is "
        f"{describe(x)} with its channels on axis {axis}."
    )


def count_wanted(layer: str) -> StatemeshError:
    return StatemeshError(
        f"{layer}: with momentum=None values count the same whenever they were seen, so with_statistics has "
        "to know of how many these are: `with_statistics(mean, var, count=...)`."
    )


def values_differ(layer: str, what: str, bad: Sequence[tuple[str, Any, Any]]) -> StructureError:
    items = [
        f"{path}: {'nothing' if old is None else describe(old)} then, "
        f"{'nothing' if new is None else describe(new)} now"
        for path, old, new in bad
    ]
    return StructureError(
        f"{layer}: {what} must hold arrays of the shapes that the layer was made with:\n{_lines(items)}"
    )


def no_hidden_value(layer: str) -> StatemeshError:
    return StatemeshError(
        f"{layer} has no hidden value yet. Make it with `init_state(batch_size)`, or those of a whole model "
        "with `model.init_all_states(batch_size=...)`."
    )


def wrong_shape(layer: str, what: str, x: Any, wanted: str, why: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {what} is {describe(x)}, but must be {wanted}: {why}.")


def too_many_tokens(layer: str, tokens: int, capacity: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {_plural(tokens, 'token')} at once do not fit into a capacity of {capacity}: some would "
        "overwrite each other. Write them in several calls."
    )


def slots_unnamed(layer: str, local: int, shards: int, capacity: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {_plural(local, 'slot')} in each of {_plural(shards, 'shard')} (by axis_name) make "
        f"{local * shards}, and the capacity is {capacity}. Name the mesh axes that split the slots, and no "
        "others: KVCache(..., spec=P('data'), axis_name='data')."
    )


def other_buffer(paths: Sequence[str], buffer: Any, shape: tuple[int, ...]) -> StructureError:
    return StructureError(
        f"Packed: the buffer with {_some(paths)} is {describe(buffer)}, but was packed with shape {shape}, "
        "by which states are found in it. Change shapes in the model, and pack that one anew."
    )


def fixed_packed(attribute: str) -> AttributeError:
    return AttributeError(
        f"Packed is immutable; cannot assign to `{attribute}`. Its values change in a mapped call, by "
        "`jax.tree.map`, or in the model: `packed.unpack()`."
    )


def packed_for_other_sizes(
    name: str, packed: Mapping[AxisName, int], sizes: Mapping[AxisName, int]
) -> SpecError:
    return SpecError(
        f"{name}: a model is packed for a mesh with {_sizes_str(packed)}, and this call is on "
        f"{_sizes_str(sizes)}. Pack it for the mesh that it goes to: statemesh.pack(packed.unpack(), mesh)."
    )


def packed_otherwise(name: str, found: Sequence[tuple[str, Any, Any]]) -> SpecError:
    lines = (
        f"{path}: packed to lie by {spec_str(packed)}, this call wants {spec_str(wanted)}"
        for path, packed, wanted in found
    )
    return SpecError(
        f"{name}: states that are packed to lie otherwise than this call places them:\n{_lines(lines)}\n"
        "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in state_in_specs."
    )


def _sizes_str(sizes: Mapping[AxisName, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
