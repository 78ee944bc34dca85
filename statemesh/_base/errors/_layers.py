"""Errors of the layers in `statemesh.nn`."""

from collections.abc import Sequence

import jax

from .._paths import describe
from ._classes import StatemeshError, StructureError
from ._text import counted, error_listing, typed_str


def bad_setting(layer: str, argument: str, value: object, expected: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {argument}={value!r}, but it must be {expected}.")


def inference_is_traced(layer: str) -> TypeError:
    return TypeError(
        f"{layer}: `inference` is traced here, but must be True or False. jax.jit, scan and grad trace the "
        "Python numbers in a model. Give them only its arrays: `arrays, rest = equinox.partition(model, "
        "equinox.is_array)`, or use equinox.filter_jit."
    )


def not_floating(layer: str, x: jax.Array) -> TypeError:
    return TypeError(
        f"{layer}: x is {describe(x)}, but must hold floating numbers: `x.astype(jnp.float32)`."
    )


def no_such_array_axis(layer: str, argument: str, axis: int, x: jax.Array) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {argument}={axis}, but x is {describe(x)} and has no such axis."
    )


def channels_differ(layer: str, x: jax.Array, axis: int, size: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)} with {counted(x.shape[axis], 'channel')} on axis {axis}, but the layer "
        f"holds {size}. Make the layer for as many, or name the axis of the channels by channel_axis."
    )


def no_rows(layer: str, x: jax.Array) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)}, and no rows have no mean. Give every shard at least one row: if rows "
        "do not divide evenly, pad them, and mark with `where` which of them count."
    )


def single_row(layer: str, x: jax.Array) -> StatemeshError:
    return StatemeshError(
        f"{layer}: x is {describe(x)}, a single row, which has no statistics. Give the layer all rows at "
        "once; or name the axis that they are mapped over, in the layer and in the map: axis_name='rows'."
    )


def bad_mask(layer: str, mask: jax.Array, x: jax.Array, axis: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: where is {describe(mask)}, but must be bool and have the leading axes of x, which is "
        f"{describe(x)} with its channels on axis {axis}."
    )


def count_required(layer: str) -> StatemeshError:
    return StatemeshError(
        f"{layer}: with momentum=None all values count the same, whenever they were seen, so with_statistics "
        "must know how many values these are of: `with_statistics(mean, var, count=...)`."
    )


def not_numeric(layer: str, path: str, leaf: object) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {path} is {typed_str(leaf)}, but must be an array or a number."
    )


def values_differ(
    layer: str, what: str, bad: Sequence[tuple[str, object, object]]
) -> StructureError:
    items = [
        f"{path}: was {'nothing' if old is None else describe(old)}, "
        f"is {'nothing' if new is None else describe(new)}"
        for path, old, new in bad
    ]
    return error_listing(
        StructureError,
        f"{layer}: {what} must hold arrays of the shapes that the layer was made with",
        items,
    )


def no_hidden_value(layer: str) -> StatemeshError:
    return StatemeshError(
        f"{layer} has no hidden value yet. Make it with `init_state(batch_size)`, or those of a whole model "
        "with `model.init_all_states(batch_size=...)`."
    )


def bad_shape(layer: str, what: str, x: object, expected: str, why: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {what} is {describe(x)}, but must be {expected}: {why}.")


def too_many_tokens(layer: str, tokens: int, capacity: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {counted(tokens, 'token')} at once do not fit into a capacity of {capacity}: some would "
        "overwrite others. Write them in several calls."
    )


def slots_unnamed(layer: str, local: int, shards: int, capacity: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {counted(local, 'slot')} in each of {counted(shards, 'shard')} (by axis_name) make "
        f"{local * shards}, but the capacity is {capacity}. Name the mesh axes that split the slots, and no "
        "others: KVCache(..., spec=P('data'), axis_name='data')."
    )
