"""Errors of gradients."""

from collections.abc import Iterable, Sequence

from .._paths import describe
from .._types import AxisName
from ._classes import DivergedStateError, StatemeshError, StructureError
from ._text import axes_argument, error_listing, filter_str, first_paths, kind_str, listed, quoted


def cannot_differentiate(what: str, bad: Sequence[tuple[str, object]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{what}: wrt picks values that hold no floating or complex numbers",
        [f"{path}: {describe(value)}" for path, value in bad],
        "Let it pick parameters, as `wrt=sm.ParamState` does; sm.filters.All, Any and Not join several "
        "filters.",
    )


def nothing_to_differentiate(
    what: str, wrt: object, values: Sequence[tuple[str, object]]
) -> StructureError:
    picks = f"wrt={filter_str(wrt)} picks nothing in the model"
    if wrt is None:
        picks = "the model has no ParamState of floating or complex numbers, and no such array outside States"
    if not values:
        return StructureError(f"{what}: {picks}. It has no states and no arrays.")
    items = [f"{path}: {describe(value)}" for path, value in values]
    return error_listing(StructureError, f"{what}: {picks}. It has", items)


def picks_part_of_buffer(
    what: str, wrt: object, split: Sequence[Sequence[Sequence[str]]]
) -> StructureError:
    return error_listing(
        StructureError,
        f"{what}: wrt={filter_str(wrt)} picks only some of the states that share a packed buffer, and a "
        "buffer has one gradient",
        [
            f"picked: {first_paths(picked)}; not picked: {first_paths(left)}"
            for picked, left in split
        ],
        "Take the gradient inside the mapped call, which sees the model, or pass the model itself to "
        "this call: `packed.unpack()`.",
    )


def not_loss_and_model(name: str, returned: object, has_aux: bool) -> StructureError:
    expected = "((loss, aux), model)" if has_aux else "(loss, model)"
    kind = kind_str(returned)
    if isinstance(returned, tuple):
        kind = f"a tuple of {', '.join(map(kind_str, returned))}" if returned else "()"
    text = f"value_and_grad: {name} must return {expected}, but returned {kind}."
    if not has_aux:
        text += (
            " If it writes no state, return the model as it came in; if it returns more, pass "
            "`has_aux=True` and return ((loss, aux), model)."
        )
    return StructureError(text)


def not_the_model(
    name: str,
    model: object,
    returned: object,
    missing: Sequence[str],
    added: Sequence[str],
    has_aux: bool,
) -> StructureError:
    expected = "((loss, aux), model)" if has_aux else "(loss, model)"
    items = [f"{path} is missing" for path in missing] + [f"{path} is new" for path in added]
    head = (
        f"value_and_grad: {name} must return {expected} with the model that it was given, a "
        f"{type(model).__name__}, but returned {_model_str(returned)} in its place"
    )
    return error_listing(
        StructureError,
        head,
        items,
        "Return the model as it came in, or with what was written to its states. What else is returned goes "
        "beside the loss: pass `has_aux=True` and return ((loss, aux), model).",
    )


def _model_str(value: object) -> str:
    whole = value is None or isinstance(value, int | float | str)
    return repr(value) if whole else f"a {type(value).__name__}"


def not_a_loss(name: str, loss: object) -> StructureError:
    return StructureError(
        f"{_loss(name)} must be one real floating number, but is {describe(loss)}. Reduce it: `loss.mean()`."
    )


def loss_differs(name: str, axes: Sequence[AxisName], params: Sequence[str]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{_loss(name)} differs over {quoted(axes)}, which axis_name does not name, but all shards there "
        "share one copy of",
        params,
        listed("JAX would sum their gradients over the shards. Write one of", _loss_mends(axes)),
    )


def loss_exchanged(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{_loss(name)} varies over {quoted(axes)}, which axis_name does not name, and depends on what "
        "the shards exchange there. JAX would sum the gradients of all shards' losses. Write one of",
        _loss_mends(axes),
    )


def _loss(name: str) -> str:
    return f"value_and_grad: the loss that {name} returns"


def _loss_mends(axes: Sequence[AxisName]) -> list[str]:
    axis = axes_argument(axes)
    return [
        f"`axis_name={axis!r}` (and any other axes to reduce over), for the mean of the shards' losses",
        f"`jax.lax.psum(..., {axis!r})` in the function, if each shard computes a part of one result",
    ]


def loss_counted_twice(axes: Iterable[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: reduce='sum' is to sum the loss over {quoted(axes)}, but it is the same there on "
        "every shard: the sum would count it once for each shard. If the function has reduced it already, "
        "write reduce='mean', which leaves such a loss as it is, or leave the axis out of axis_name."
    )


def gradient_unchecked(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"{_split_unknown(axes)} this map does not check what varies, and is run by JAX itself or with "
        "jit=False. Use `statemesh.shard_map` (without jit=False), or leave check_vma at its default."
    )


def gradient_in_mixed_maps(
    apart: Sequence[AxisName], unchecked: Sequence[AxisName], checked: Sequence[AxisName]
) -> StatemeshError:
    inner, outer = (
        ("checks", "does not") if checked else ("does not check", "does, or is run by JAX itself")
    )
    return StatemeshError(
        f"{_split_unknown(apart)} the map over {quoted(checked or unchecked)} {inner} what varies, and "
        f"stands inside the map over {quoted(apart)}, which {outer}. Use `statemesh.shard_map` for both, "
        "and leave check_vma at its default."
    )


def _split_unknown(axes: Sequence[AxisName]) -> str:
    return (
        f"value_and_grad cannot know over which of {quoted(axes)} the parameters are split, on which their "
        "gradients depend:"
    )


def gradient_in_gradient(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, it cannot reduce "
        "over the same axes: there each shard has its own parameters, which may differ. Leave axis_name out "
        "inside, for the gradient of this shard's own loss."
    )


def loss_exchanged_inside(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, the loss that "
        f"{name} returns depends on what the shards exchange over the same axes. There each shard has its "
        "own parameters, which may differ. Return this shard's own loss, without a collective over "
        f"{quoted(axes)}."
    )


def reduced_twice(name: str, bad: Sequence[tuple[str, AxisName]]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{name}: gradients that value_and_grad has already reduced over shards are summed over them "
        "again, which makes them too large by a factor of the number of shards",
        [f"the {what}: over {axis!r}" for what, axis in bad],
        "Leave `jax.lax.psum` out; value_and_grad has reduced them once.",
    )


def gathered_before(bad: Sequence[tuple[str, AxisName]]) -> StatemeshError:
    axis = bad[0][1]
    return error_listing(
        StatemeshError,
        "value_and_grad does not sum the gradients of these parameters over shards, although all_gather made "
        "them one value on all shards",
        [f"{path}: over {axis!r}" for path, axis in bad],
        "Inside `jax.jit`, `jax.checkpoint` and loops, and with jit=False, it does not see how a parameter "
        "was made, whose type says that each shard has its own. Gather inside the function of "
        f"value_and_grad; or write `jax.lax.all_gather(..., {axis!r}, to='invarying')`, of which the type "
        "says that it is one value.",
    )


def rows_not_divisible(
    name: str, count: int, bad: Sequence[tuple[str, object, int]]
) -> StructureError:
    return error_listing(
        StructureError,
        f"value_and_grad: microbatches={count} does not divide the leading axis of arguments of {name}",
        [
            f"{path}: {describe(x)}, {size} = {size // count} x {count} + {size % count}"
            for path, x, size in bad
        ],
        "Inside a mapped call these are the rows of one shard. Choose a number that divides them; or pad "
        "the rows and leave them out of the loss by a mask.",
    )


def no_rows_to_split(name: str, count: int, bad: Sequence[tuple[str, object]]) -> StructureError:
    key = bad[0][0]
    return error_listing(
        StructureError,
        f"value_and_grad: microbatches={count} splits the leading axis of every array in the positional "
        f"arguments of {name} after the model, but these have none",
        [f"{path}: {describe(x)}" for path, x in bad],
        f"Pass what all microbatches share as a keyword argument: `{key.split('.')[0].split('[')[0]}=...`.",
    )


def bad_microbatches(given: object) -> StatemeshError:
    return StatemeshError(
        "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is "
        f"{given!r}."
    )


def microbatches_in_microbatches(name: str) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: the microbatches of {name} stand inside those of another value_and_grad. Split "
        "the rows once: leave `microbatches` out inside, and give the outer one the product of both."
    )


def microbatches_diverged(
    name: str, bad: Sequence[tuple[str, object]], arrays: Sequence[tuple[str, object]]
) -> DivergedStateError:
    mends = []
    if bad:
        mends.append(
            "declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
            "function"
        )
    if arrays:
        mends.append(
            "put an array that is written into a State, which can say how writes are merged"
        )
    mends.append("return the microbatches' own values as auxiliary ones, with `has_aux=True`")
    return error_listing(
        DivergedStateError,
        f"value_and_grad: the microbatches of {name} wrote different values, but the model keeps one",
        [f"{path}: {describe(value)}" for path, value in (*bad, *arrays)],
        listed("Mend it in one of these ways", mends),
    )


def microbatch_policies_diverged(name: str, bad: Sequence[tuple[str, str]]) -> DivergedStateError:
    return error_listing(
        DivergedStateError,
        f"value_and_grad: policies that merge what the microbatches of {name} wrote gave values that still "
        "differ between these",
        [f"{path}: merged by {policy}" for path, policy in bad],
        "A policy must return one value for all instances, as with jax.lax.psum(value, axis_names).",
    )


def microbatches_share_loss(name: str) -> StatemeshError:
    return StatemeshError(
        f"{_loss(name)} is the same in every microbatch: reduce='sum' would count it once for each. Compute "
        "it from the rows, or write reduce='mean', which leaves such a loss as it is."
    )


def rows_of_stranger(what: str) -> StatemeshError:
    return StatemeshError(
        f"{what}: inside the microbatches of value_and_grad, a RandomState must come with the model or as a "
        "keyword argument. One that the function makes or closes over does not know which rows a microbatch "
        "has."
    )


def rows_of_set_key(what: str) -> StatemeshError:
    return StatemeshError(
        f"{what}: inside the microbatches of value_and_grad, rows cannot be drawn after a key was set, "
        "because only the first microbatch knows that key. Set the key before value_and_grad."
    )
