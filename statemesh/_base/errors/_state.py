"""Errors of a state and its value."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from .._nodes import is_state
from .._paths import describe, path_str
from .._types import KeyPath
from ._classes import SpecError, StatemeshError, StructureError
from ._text import error_listing, quoted, spec_str


def state_is_no_array(kind: str, what: str) -> TypeError:
    return TypeError(
        f"a {kind} holds an array and is not one itself: apply {what} to `state.value`. Write a new value "
        "with `state.set(value)`."
    )


def immutable_state(kind: str, attribute: str) -> AttributeError:
    return AttributeError(
        f"{kind} is immutable; cannot assign to `{attribute}`. Write `new = state.set(value)`, or "
        f"`new = state.replace({attribute}=...)`, and return the new state."
    )


def _value_path(path: KeyPath) -> str:
    return "value" + path_str(path, " ")[1:]


def bad_state_value(bad: Sequence[tuple[KeyPath, object]]) -> TypeError:
    items = [
        f"{_value_path(path)} is {describe(leaf)} ({type(leaf).__name__})" for path, leaf in bad
    ]
    mend = "Keep values that are not arrays in a field of the Module that holds the State."
    if any(is_state(leaf) for _, leaf in bad):
        mend = (
            "A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep the two "
            "side by side in a Module."
        )
    return error_listing(TypeError, "a State's value is a pytree of arrays, but", items, mend)


def masked(what: str, bad: Sequence[tuple[str, Any]]) -> TypeError:
    """Masked arrays, each with its path."""
    path = bad[0][0]
    return error_listing(
        TypeError,
        f"{what} has a mask, which JAX would drop",
        [f"{path} is a masked array, {x.dtype}{list(x.shape)}" for path, x in bad],
        f"Pass the numbers and the mask as two arrays: `{path}.filled(0)` and "
        f"`numpy.ma.getmaskarray({path})`.",
    )


def unknown_reduce(reduce: object, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(
        f"reduce={reduce!r} is not a write policy. Use None, {quoted(known)}, or a function "
        "`(old, new, axis_names) -> value`."
    )


def cannot_reduce(how: str, dtype: object) -> StatemeshError:
    other = "a function `(old, new, axis_names) -> value`"
    mend = {
        "mean": f"Use reduce='sum', 'max' or 'min' for integers, or {other}.",
        "sum": f"Use an integer with reduce='max' or 'min' instead, or {other}.",
    }.get(how, f"Use {other}.")
    return StatemeshError(f"reduce={how!r} cannot merge values of dtype {dtype}. {mend}")


def always_replicated(kind: str, spec: object) -> SpecError:
    return SpecError(
        f"{kind} cannot be placed with spec={spec_str(spec)}: every shard holds the same key and draws its "
        "own numbers from it. Leave `spec` out, or use sm.PerShard('axis') for independent keys."
    )


def not_a_key(key: object) -> TypeError:
    return TypeError(
        f"RandomState needs a typed key, got {describe(key)}. Write `sm.RandomState(jax.random.key(0))`; "
        "`jax.random.wrap_key_data(raw)` makes a typed key of a raw one."
    )


def key_and_value() -> TypeError:
    return TypeError(
        "RandomState got both key and value, which are two names of one thing. Give the key only: "
        "`sm.RandomState(jax.random.key(0))`."
    )


def several_keys(keys: jax.Array) -> StatemeshError:
    return StatemeshError(
        f"RandomState holds keys of shape {keys.shape}, but a shard or lane draws from one key. Hold one "
        "key; each shard or lane then gets a stream of its own. Or give each its own key: RandomState(keys, "
        "spec=sm.PerShard('axis')) for shard_map, state_in_axes=sm.RandomState for pmap2 and vmap2."
    )


def drawn_in_lanes(what: str, impl: object) -> StatemeshError:
    return StatemeshError(
        f"{what}: each lane has its own key, of the implementation {impl!r}. For such keys jax.vmap may use "
        "only the first lane's key: the numbers would depend on the number of lanes, and differ from those "
        "of shard_map and pmap2. Make the key with `jax.random.key(seed, impl='threefry2x32')`, or draw with "
        "`RandomState.rows`, whose keys are threefry keys."
    )


def kind_overrides_init(kind: str) -> TypeError:
    return TypeError(
        f"{kind} overrides __init__, which JAX calls whenever it rebuilds a state. Override `enter` and "
        f"`leave`, and give {kind} a classmethod for other ways to make one."
    )


def method_returned(method: str, returned: object, expected: str, example: str) -> TypeError:
    shown = "None" if returned is None else f"{type(returned).__name__}: {describe(returned)}"
    return TypeError(
        f"{method} returned {shown}. It must return {expected}, as in `{example}`. Is a `return` missing?"
    )


def set_structure(label: str, old: PyTreeDef, new: PyTreeDef) -> StructureError:
    return StructureError(
        f"{label}: the new value has a different tree structure.\n  old: {old}\n  new: {new}\n"
        "To change the structure on purpose, use `state.replace(value=...)`."
    )


def set_differs(label: str, differ: Sequence[tuple[KeyPath, object, object]]) -> StructureError:
    items = [
        f"{_value_path(path)}: was {describe(old)}, is {describe(new)}" for path, old, new in differ
    ]
    mend = "Cast or reshape it; to change it on purpose, use `state.replace(value=...)`."
    return error_listing(
        StructureError, f"{label}: the new value has a different shape or dtype", items, mend
    )


def number_too_large(label: str, path: KeyPath, value: object, dtype: Any) -> StructureError:
    finfo: Any = jax.numpy.finfo
    info: Any = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else finfo(dtype)
    return StructureError(
        f"{label}: {_value_path(path)} is {describe(value)}, which does not fit into {dtype} "
        f"({info.min} to {info.max}). Give the state a dtype that holds it, as in State(jnp.float32(0))."
    )


def no_old_value(label: str, old: PyTreeDef, new: PyTreeDef) -> StructureError:
    return StructureError(
        f"{label}: reduce='sum' adds the shards' increments to the old value, but the new value has a "
        f"different tree structure.\n  old: {old}\n  new: {new}\nKeep the structure, or merge with a "
        "function: reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)."
    )
