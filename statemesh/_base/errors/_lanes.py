"""Errors of `pmap2`, `vmap2` and their lanes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._paths import describe
from .._types import UNNAMED, UNNAMED_DEVICES, AxisName
from ._classes import BatchAxisError, StatemeshError
from ._leave import Diverged, Varying
from ._text import bullets, counted, policy_name, quoted


def no_such_axis(name: str, bad: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} has {_axes(x)}, but is mapped over axis {axis}"
        for path, axis, x in bad
    ]
    return BatchAxisError(
        f"{name}: arguments do not have the axes that they are mapped over:\n{bullets(items)}\n"
        "Name an axis that is there, or None for what all lanes share."
    )


def _axes(value: Any) -> str:
    rank = len(np.shape(value))
    return f"{rank} axis" if rank == 1 else f"{rank} axes"


def no_such_out_axis(name: str, bad: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} in each lane has no place for lanes at axis {axis}"
        for path, axis, x in bad
    ]
    return BatchAxisError(
        f"{name}: results have too few axes for where their lanes should go:\n{bullets(items)}\n"
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
        f"{name}: it is not clear how many lanes there are:\n{bullets(items)}\n"
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
        f"{name}: there are no lanes:\n{bullets(items)}\nMap over an axis of size 1 or more."
    )


def too_many_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {counted(lanes, 'lane')} on {counted(devices, 'device')}; pmap2 gives every lane a device "
        f"of its own. Give it {devices} at most, each with a part of the batch, as in "
        f"x.reshape({devices}, -1, *x.shape[1:]); or use vmap2, or shard_map."
    )


def process_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: this process passed {counted(lanes, 'lane')} and has {counted(devices, 'device')}. With "
        "several processes each passes one lane for each of its own devices, and gets these back."
    )


def no_such_backend(name: str, backend: Any, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{name}: devices={list(devices)!r} are not of backend={backend!r}. Give one of the two."
    )


def bad_argnums(what: str, bad: Sequence[Any], args: int) -> StatemeshError:
    return StatemeshError(
        f"{what} has {quoted(bad)}, but the call has {counted(args, 'positional argument')}, numbered from 0."
    )


def unhashable_static(name: str, path: str, value: Any) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {path} is {describe(value)} of type {type(value).__name__}, which cannot be hashed, and "
        "stands in static_broadcasted_argnums. Non-hashable static arguments are not supported, for they are "
        "a part of the program's signature; give None in in_axes for an array that all lanes share."
    )


def lane_axis_conflict(
    name: str, bad: Sequence[tuple[str, Any, int | None, int | None]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
        for path, state, into, out in bad
    ]
    return BatchAxisError(
        f"{name}: states enter on one axis and leave on another:\n{bullets(items)}\n"
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
            f"all (axis None):\n{bullets(items)}\n"
            f"Reduce the value, as with {_pmean('value', axis)}; or declare how writes are merged, "
            "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
            "NonBatchState never has one: make it of another kind."
        )
    return BatchAxisError(
        f"{name}: lanes wrote different values to states without a declared axis:\n{bullets(items)}\n"
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
        own = policy_name(one.state)
        items.append(
            f"{one.path}: {describe(one.state)}: returned by {own}, which is to return the same in every lane"
        )
        mends.append(f"reduce it in {own}, as with jax.lax.psum(value, axis_names)")
    return BatchAxisError(
        f"{name}: the policies of these states leave values that differ between lanes ({_lanes_str(axis)}), "
        f"of which one copy is kept:\n{bullets(items)}\nMend it:\n{bullets(list(dict.fromkeys(mends)))}\n"
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
        f"axis 0:\n{bullets(paths)}\nDeclare it: state_out_axes={{0: filter}}."
    )


def lanes_vary(name: str, bad: Sequence[Varying]) -> BatchAxisError:
    items = [f"{one.path}: {describe(one.value)} differs between lanes" for one in bad]
    axis = bad[0].axis_names[0]
    return BatchAxisError(
        f"{name}: out_axes=None says that results are the same in all lanes, but:\n{bullets(items)}\n"
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
        f"{quoted(taken)}). Use vmap2 inside of it."
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
