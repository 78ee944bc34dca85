"""Errors of a state and its value."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._paths import describe, path_str
from .._types import KeyPath, is_state
from ._classes import SpecError, StatemeshError, StructureError
from ._text import bullets, quoted, spec_str


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
    text = f"a State's value is a pytree of arrays, but:\n{bullets(items)}\n"
    if any(is_state(leaf) for _, leaf in bad):
        return TypeError(
            text
            + "A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep "
            "the two side by side in a Module."
        )
    return TypeError(text + "Keep what is no array in a field of the Module that holds the State.")


def unknown_reduce(reduce: Any, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"reduce={reduce!r} is not a write policy. Use None, {quoted(known)}, or a function "
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
    return StructureError(f"{kind}.replace got {quoted(unknown)}; a State has {quoted(known)}.")


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
        f"{label}: the new value differs in shape or dtype.\n{bullets(items)}\n"
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
