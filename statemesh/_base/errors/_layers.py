"""Errors of the layers in `statemesh.nn`."""

from collections.abc import Sequence
from typing import Any

from .._paths import describe
from ._classes import StatemeshError, StructureError
from ._text import bullets, counted


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
        f"{layer}: x is {describe(x)} with {counted(x.shape[axis], 'channel')} on axis {axis}, but the layer "
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
        f"{layer}: {what} must hold arrays of the shapes that the layer was made with:\n{bullets(items)}"
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
        f"{layer}: {counted(tokens, 'token')} at once do not fit into a capacity of {capacity}: some would "
        "overwrite each other. Write them in several calls."
    )


def slots_unnamed(layer: str, local: int, shards: int, capacity: int) -> StatemeshError:
    return StatemeshError(
        f"{layer}: {counted(local, 'slot')} in each of {counted(shards, 'shard')} (by axis_name) make "
        f"{local * shards}, and the capacity is {capacity}. Name the mesh axes that split the slots, and no "
        "others: KVCache(..., spec=P('data'), axis_name='data')."
    )
