"""Errors of a call: of its arguments, and of the function while it is traced."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from .._paths import describe
from .._types import AxisName
from ._classes import BatchAxisError, SpecError, StatemeshError
from ._text import counted, error_listing, first_items, listed, quoted, shortened, spec_str


@dataclasses.dataclass(frozen=True)
class WholeState:
    """A state that is whole on every shard, and an array of which each shard holds a part."""

    path: str
    state: Any
    part_path: str
    part: object
    spec: PartitionSpec


def place_traced(name: str, paths: Sequence[str]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name}: these arrays are traced, as inside jit, grad or vmap, and cannot be placed",
        paths,
        "Place them before, outside the traced function. Inside it, a mapped call lays out its "
        "arguments itself.",
    )


def shapes_given(name: str, paths: Sequence[str]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name}: these arguments are shapes without values (jax.ShapeDtypeStruct)",
        paths,
        "Pass arrays. For shapes there are `mapped.lower(...)` and `jax.eval_shape(mapped, ...)`.",
    )


def other_structure(name: str, lowered: PyTreeDef, given: PyTreeDef) -> TypeError:
    return TypeError(
        f"{name} was compiled for arguments of one tree structure, and called with another.\n"
        f"  compiled for: {lowered}\n  called with: {given}\n"
        "Lower it for these arguments, or call the function itself, which compiles anew."
    )


def other_statics(name: str, differ: Sequence[tuple[str, object]]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name} was called with other values of arguments that are not arrays than it was compiled for",
        [f"compiled for {compiled}, called with {given!r}" for compiled, given in differ],
        "Lower it for these arguments, or call the function itself, which compiles anew.",
    )


def retraced(name: str, bad: Sequence[tuple[str, object]]) -> str:
    return listed(
        f"{name}: these arguments are not arrays and cannot be hashed, so a change in them would go unseen. "
        "Each call traces and compiles the function anew",
        _typed(bad),
        _HASHABLE + "pass the values that the function uses as arrays.",
    )


def compiled_for_unhashable(name: str, bad: Sequence[tuple[str, object]]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name} was compiled for arguments that are not arrays and cannot be hashed, so a change in them "
        "would go unseen",
        _typed(bad),
        _HASHABLE + "call the function itself, which traces it anew.",
    )


_HASHABLE = "Make the class a @dataclass(frozen=True), use a tuple in place of a list, or "


def _typed(bad: Sequence[tuple[str, object]]) -> list[str]:
    return [f"{path}: {shortened(value)} of type {type(value).__name__}" for path, value in bad]


def mapping_is_fixed(name: str, transform: str, attribute: str) -> AttributeError:
    mend = f"Map the function again, as in {transform}({name}, {attribute}=...)"
    if transform == "shard_map" and attribute == "mesh":
        mend += f", or call {name}.on_mesh(mesh)"
    if attribute in ("lower", "explain", "place", "unsharded", "on_mesh"):
        mend = "Give what you set another name"
    return AttributeError(
        f"{name}.{attribute} cannot be set: what {transform} returned does not change. {mend}."
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


def with_hint(text: str, hints: Sequence[WholeState]) -> str:
    items = [
        f"{h.path} ({shortened(h.state.value)}) is whole on every shard, but {h.part_path}, split by "
        f"{spec_str(h.spec)}, is {describe(h.part)} there"
        for h in hints
    ]
    spec = spec_str(hints[0].spec)
    mend = (
        f"To split the state like the data, write state_in_specs={spec} (or {{filter: {spec}}}), or give the "
        f"state its own spec={spec}."
    )
    return f"{text}\n\n" + listed(
        "Hint: a replicated state met sharded data", first_items(list(dict.fromkeys(items))), mend
    )


def with_type_hint(text: str, states: Sequence[tuple[str, object, tuple[AxisName, ...]]]) -> str:
    items = [
        f"{path}: {describe(state)} is the same over {quoted(axes)}" for path, state, axes in states
    ]
    path, _, axes = states[0]
    head = (
        "Hint: a loop or branch needs one type for what goes in and what comes out, but shards write "
        "different values in it to states that enter the same on every shard"
    )
    if all(getattr(state, "reduce", None) is not None for _, state, _ in states):
        merged = "; its policy merges it when it leaves"
    else:
        merged = (
            ", and declare how it is merged when it leaves, as in State(value, reduce='mean'), or give it "
            f"a spec that names {quoted(axes)}"
        )
    mend = (
        f"Mark the value as varying before the loop or branch{merged}:\n"
        f"    {path}.set(jax.lax.pcast({path}.value, {axes!r}, to='varying'))"
    )
    return f"{text}\n\n" + listed(head, items, mend)


def deleted(name: str, paths: Sequence[str]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{name}: these arguments were given up to an earlier call that donates its arguments",
        paths,
        "Go on with what that call returned, as in `out, model = step(model, x)`.",
    )


def old_tracer(name: str, paths: Sequence[str]) -> Exception:
    return error_listing(
        jax.errors.UnexpectedTracerError,
        f"{name}: a traced value outlived its trace. These arguments are traced",
        paths,
        "Return values from the traced function instead of keeping them: a model that is written inside "
        "`jax.jit` or `jax.grad` leaves it as a result.",
    )


def unbound_axis(
    what: str, unbound: Sequence[AxisName], bound: Sequence[AxisName]
) -> StatemeshError:
    return StatemeshError(
        f"{what}: no axis is called {quoted(unbound)} here; the axes mapped over are "
        f"{quoted(bound) or 'none'}."
    )


def axis_by_position(what: str, axis: int) -> TypeError:
    return TypeError(
        f"{what}: axis_name={axis} is the position of an array's axis, not the name of a mapped one. Give "
        "the name, such as 'data'. To reduce over an array's own axis, use jnp.sum, jnp.mean, jnp.max or "
        "jnp.min."
    )
