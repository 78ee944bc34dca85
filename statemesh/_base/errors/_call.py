"""Errors of a call: its arguments, and what happens while the function is traced."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._paths import describe
from .._types import AxisName
from ._classes import BatchAxisError, SpecError, StatemeshError, StructureError
from ._text import bullets, counted, quoted, shortened, spec_str


@dataclasses.dataclass(frozen=True)
class WholeState:
    """A state left whole beside an array of which each shard holds a part."""

    path: str
    state: Any
    part_path: str
    part: Any
    spec: PartitionSpec


def place_traced(name: str, paths: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name}: these arrays are traced, as by jit, grad or vmap around, and lie nowhere yet:\n"
        f"{bullets(paths)}\nPlace them before, outside of it. Where they are traced a mapped call lays its "
        "arguments out itself."
    )


def shapes_given(name: str, paths: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name}: these are shapes without values (jax.ShapeDtypeStruct), which is not a valid JAX type to "
        f"compute with:\n{bullets(paths)}\nPass arrays. For shapes there are `mapped.lower(...)` and "
        "`jax.eval_shape(mapped, ...)`."
    )


def other_structure(name: str, lowered: Any, given: Any) -> TypeError:
    return TypeError(
        f"{name}: Function compiled with input pytree does not match the input pytree it was called with. "
        f"It was compiled for {lowered}, and called with {given}."
    )


def other_statics(name: str, differ: Sequence[tuple[str, Any]]) -> TypeError:
    items = [f"{was}, and called with {now!r}" for was, now in differ]
    return TypeError(
        f"{name} was compiled for arguments that are no arrays, and called with others:\n{bullets(items)}\n"
        "Lower it for these, or call the function itself, which compiles anew."
    )


def unknowable_statics(name: str, bad: Sequence[tuple[str, Any, Any]]) -> StructureError:
    items = [
        f"{path}: {shortened(value)} of type {type(value).__name__}"
        + (
            ""
            if part is value
            else f", in which there is {shortened(part)} of type {type(part).__name__}"
        )
        for path, value, part in bad
    ]
    return StructureError(
        f"{name}: arguments that are no arrays can neither be hashed nor be compared by what is in them, so "
        f"that a change of them would not be seen:\n{bullets(items)}\n"
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
        f"{name} was called with {counted(args, 'positional argument')}, but {what} has "
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


def with_hint(text: str, hints: Sequence[WholeState]) -> str:
    items = [
        f"{h.path} ({shortened(h.state.value)}) is whole on every shard, but {h.part_path} is "
        f"{describe(h.part)} there, split by {spec_str(h.spec)}"
        for h in hints
    ]
    spec = spec_str(hints[0].spec)
    return (
        f"{text}\n\nHint: a state that is replicated met data that is sharded:\n{bullets(items)}\n"
        f"If the state is to be split like the data, write state_in_specs={spec} (or "
        f"{{filter: {spec}}}), or give the state its own spec={spec}."
    )


def with_type_hint(text: str, states: Sequence[tuple[str, Any, tuple[AxisName, ...]]]) -> str:
    items = [
        f"{path}: {describe(state)} is the same over {quoted(axes)}" for path, state, axes in states
    ]
    path, _, axes = states[0]
    return (
        f"{text}\n\nHint: a state that enters the same on every shard is written differently by shards in a "
        f"loop or a branch, for which both must have one type:\n{bullets(items)}\n"
        "Type it as differing before the loop or branch, and its policy merges it when it leaves:\n"
        f"    {path}.set(jax.lax.pcast({path}.value, {axes!r}, to='varying'))"
    )


def deleted(name: str, paths: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"{name}: these arguments were given up to an earlier call that donates its arguments:\n"
        f"{bullets(paths)}\nGo on with what that call returned, as in `out, model = step(model, x)`."
    )


def old_tracer(name: str, paths: Sequence[str]) -> Exception:
    return jax.errors.UnexpectedTracerError(
        f"{name}: a traced value outlived its trace. Among the arguments these are traced:\n"
        f"{bullets(paths)}\nReturn values from the traced function instead of keeping them: a model that "
        "was written inside `jax.jit` or `jax.grad` leaves it as a result."
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
        "the name, such as 'data'; over an array's own axis there are jnp.sum, jnp.mean, jnp.max and jnp.min."
    )
