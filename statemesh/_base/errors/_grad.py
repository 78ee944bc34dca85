"""Errors of gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

from .._paths import describe
from .._types import AxisName
from ._classes import StatemeshError, StructureError
from ._text import bullets, filter_str, first_paths, kind_str, quoted


def unknown_reduction(reduce: Any) -> StatemeshError:
    return StatemeshError(f"value_and_grad: reduce={reduce!r} is unknown. Write 'mean' or 'sum'.")


def cannot_differentiate(what: str, bad: Sequence[tuple[str, Any]]) -> StructureError:
    items = [f"{path}: {describe_unit(unit)}" for path, unit in bad]
    return StructureError(
        f"{what}: wrt picks what holds no floating or complex numbers:\n{bullets(items)}\n"
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
    has = f"It has:\n{bullets(items)}" if items else "It has no states and no arrays."
    return StructureError(f"{what}: {picks}. {has}")


def picks_part_of_buffer(
    what: str, wrt: Any, torn: Sequence[Sequence[Sequence[str]]]
) -> StructureError:
    lines = [
        f"picked: {first_paths(picked)}; not picked: {first_paths(left)}" for picked, left in torn
    ]
    return StructureError(
        f"{what}: wrt={filter_str(wrt)} picks some of the states that are packed in one buffer, and a buffer "
        f"has one gradient:\n{bullets(lines)}\n"
        "Take the gradient inside the mapped call, which sees the model, or give this call the model "
        "itself: `packed.unpack()`."
    )


def describe_unit(unit: Any) -> str:
    return describe(unit)


def not_loss_and_model(name: str, returned: Any, has_aux: bool) -> StructureError:
    wanted = "((loss, aux), model)" if has_aux else "(loss, model)"
    kind = kind_str(returned)
    if isinstance(returned, tuple):
        kind = f"a tuple of {', '.join(map(kind_str, returned))}" if returned else "()"
    text = f"value_and_grad: {name} must return {wanted}, but returned {kind}."
    if not has_aux:
        text += (
            " Where it writes no state, return the model as it came in; where it returns more, say "
            "`has_aux=True` and return ((loss, aux), model)."
        )
    return StructureError(text)


def not_a_loss(name: str, loss: Any) -> StructureError:
    return StructureError(
        f"value_and_grad: the loss that {name} returns must be one real floating number, but is "
        f"{describe(loss)}. Reduce it: `loss.mean()`."
    )


def loss_differs(name: str, axes: Sequence[AxisName], params: Sequence[str]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns differs over {quoted(axes)}, which axis_name does not "
        f"name, while one copy is kept there of:\n{bullets(params)}\n"
        "JAX would sum their gradients over the shards. Write one of:\n"
        f"{bullets(_loss_mends(axis))}"
    )


def loss_typed_apart(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns is typed as differing over {quoted(axes)}, which "
        "axis_name does not name, and comes of what the shards exchange there. JAX would sum the gradients "
        f"of all their losses. Write one of:\n{bullets(_loss_mends(axis))}"
    )


def loss_exchanged(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    return StatemeshError(
        f"value_and_grad: the loss that {name} returns differs over {quoted(axes)}, which axis_name does not "
        "name, and comes of what is exchanged there. JAX would sum the gradients of all their losses. Write "
        f"one of:\n{bullets(_loss_mends(axis))}"
    )


def _loss_mends(axis: Any) -> list[str]:
    return [
        f"`axis_name={axis!r}` (with the other axes that are meant), for the mean of the shards' losses",
        f"`jax.lax.psum(..., {axis!r})` in the function, where each shard has computed a part of one result",
    ]


def loss_counted_twice(axes: Iterable[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: with reduce='sum' the loss is to be summed over {quoted(axes)}, but it is the same "
        "there on every shard: the sum would count it once for each. Where the function has reduced it "
        "already, write reduce='mean', which takes such a loss as it is, or leave the axis out of axis_name."
    )


def gradient_unfollowed(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: nothing tells here over which of {quoted(axes)} the parameters are split, on which "
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
        f"value_and_grad: nothing tells here over which of {quoted(apart)} the parameters are split, on "
        f"which their gradients depend: the map over {quoted(checked or unchecked)} {inner} what varies, and "
        f"stands inside the map over {quoted(apart)}, which {outer}. Write `statemesh.shard_map` for both, "
        "and leave check_vma as it is."
    )


def gradient_in_gradient(axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)} it cannot reduce "
        "over the same axes: there each shard has parameters of its own, of which nothing tells that they "
        "are equal. Leave axis_name out inside, for the gradient of this shard's own loss."
    )


def loss_exchanged_inside(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: inside the loss of another value_and_grad over {quoted(axes)}, the loss that "
        f"{name} returns comes of what is exchanged over the same axes. There each shard has parameters of "
        "its own, of which nothing tells that they are equal. Let it return this shard's own loss, without "
        f"a collective over {quoted(axes)}."
    )


def reduced_twice(name: str, bad: Sequence[tuple[str, AxisName]]) -> StatemeshError:
    items = [f"the {what}: over {axis!r}" for what, axis in bad]
    return StatemeshError(
        f"{name}: a sum over shards is taken of gradients that value_and_grad has already reduced there, "
        f"which makes them as many times too large as there are shards:\n{bullets(items)}\n"
        "Leave `jax.lax.psum` out; value_and_grad has reduced them once."
    )
