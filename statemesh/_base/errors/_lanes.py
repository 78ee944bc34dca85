"""Errors of `pmap2`, `vmap2` and their lanes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._paths import describe
from .._types import UNNAMED, UNNAMED_DEVICES, AxisName
from ._classes import BatchAxisError, StatemeshError
from ._leave import Diverged, Varying
from ._text import counted, error_listing, first_items, listed, policy_name, quoted


_AXIS_ON_BOTH_SIDES = (
    "state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on"
)


def no_such_axis(name: str, bad: Sequence[tuple[str, int, Any]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} has {counted(np.ndim(x), 'axis', 'axes')}, but is mapped over axis {axis}"
        for path, axis, x in bad
    ]
    mend = "Name an axis that they have, or None for what all lanes share."
    return error_listing(
        BatchAxisError,
        f"{name}: arguments do not have the axes that they are mapped over",
        items,
        mend,
    )


def no_such_out_axis(name: str, bad: Sequence[tuple[str, int, object]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} in each lane, with lanes to go on axis {axis}"
        for path, axis, x in bad
    ]
    mend = "With the lanes a result has one axis more than in each lane; 0 always fits."
    return error_listing(
        BatchAxisError,
        f"{name}: results have too few axes for where their lanes should go",
        items,
        mend,
    )


def lanes_disagree(
    name: str, mapped: Sequence[tuple[str, int, Any]], axis_size: int | None
) -> BatchAxisError:
    by_size: dict[int, list[str]] = {}
    for path, axis, x in mapped:
        size = np.shape(x)[axis]
        by_size.setdefault(size, []).append(f"{path}: {describe(x)} has {size} on axis {axis}")
    items: list[str] = []
    for lines in by_size.values():
        # A model has many arrays that agree.
        items += lines[:3]
        if lines[3:]:
            items.append(f"and {len(lines) - 3} more like it")
    if axis_size is not None:
        items.append(f"axis_size={axis_size}")
    mend = "All mapped axes must have one size; give None as the axis of what all lanes share."
    return error_listing(BatchAxisError, f"{name}: the number of lanes is not clear", items, mend)


def axes_of_states(
    name: str, bad: Sequence[tuple[str, int, str, object]], of_map: bool
) -> BatchAxisError:
    items = [
        f"{entry} = {axis} stands for {path}, a {type(state).__name__}"
        for entry, axis, path, state in bad
    ]
    lanes = f"say which States have lanes: state_in_axes={{{bad[0][1]}: filter}}"
    if of_map:
        lanes = "keep States that have lanes in the module of the Map"
    return error_listing(
        BatchAxisError,
        f"{name}: in_axes maps arrays outside of States, so these axes would map nothing",
        items,
        f"Write None there, and {lanes}. A RandomState needs neither, because each lane draws from a stream "
        "of its own.",
    )


def nothing_to_infer(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: nothing is mapped, so nothing shows how many lanes there are. Give axis_size=..., or an "
        "axis in in_axes or state_in_axes."
    )


def no_lanes(name: str, mapped: Sequence[tuple[str, int, object]]) -> BatchAxisError:
    items = [f"{path}: {describe(x)} has 0 on axis {axis}" for path, axis, x in mapped[:3]]
    return error_listing(
        BatchAxisError, f"{name}: there are no lanes", items, "Map over an axis of size 1 or more."
    )


def too_many_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {counted(lanes, 'lane')} on {counted(devices, 'device')}; pmap2 gives every lane a device "
        f"of its own. Use {devices} at most, each with a part of the batch, as in "
        f"x.reshape({devices}, -1, *x.shape[1:]); or use vmap2 or shard_map."
    )


def process_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: this process passed {counted(lanes, 'lane')}, but has {counted(devices, 'device')}. With "
        "several processes, each passes one lane for each of its own devices, and gets these lanes back."
    )


def no_such_backend(name: str, backend: object, devices: Sequence[jax.Device]) -> StatemeshError:
    return StatemeshError(
        f"{name}: devices={list(devices)!r} are not of backend={backend!r}. Give only one of the two."
    )


def bad_argnums(what: str, bad: Sequence[int], args: int) -> StatemeshError:
    return StatemeshError(
        f"{what} has {quoted(bad)}, but the call has {counted(args, 'positional argument')}, numbered from 0."
    )


def unhashable_static(name: str, path: str, value: object) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {path} is {describe(value)} of type {type(value).__name__}, which cannot be hashed, but "
        "static_broadcasted_argnums names it. Each value of a static argument has a compiled program of its "
        "own, found by its hash. Pass a value that can be hashed; or, for an array that all lanes share, "
        "give None in in_axes instead."
    )


def lane_axis_conflict(
    name: str, bad: Sequence[tuple[str, object, int | None, int | None]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
        for path, state, into, out in bad
    ]
    mend = (
        "A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or give it "
        "the same axis there."
    )
    return error_listing(
        BatchAxisError, f"{name}: states enter on one axis and leave on another", items, mend
    )


def lanes_diverged(name: str, bad: Sequence[Diverged], declared_none: bool) -> BatchAxisError:
    axis = bad[0].axis_names[0]
    if merged := [one for one in bad if one.state.needs_old]:
        return _policies_diverged(name, merged, axis)
    items = [f"{one.path}: {describe(one.state)}" for one in bad]
    if declared_none:
        head = "states that state_out_axes declares to be the same in all (axis None)"
        mend = (
            f"Reduce the value, as with {_pmean('value', axis)}; or declare how writes are merged, "
            "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
            "NonBatchState cannot have an axis: use another kind of state."
        )
    else:
        head = "states without a declared axis"
        mend = (
            "Mend it in one of three ways:\n"
            f"  1. keep one value per lane: {_AXIS_ON_BOTH_SIDES};\n"
            "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
            "function;\n"
            f"  3. reduce the value before it is set, as with {_pmean('value', axis)}."
        )
    return error_listing(
        BatchAxisError,
        f"{name}: lanes wrote different values to {head}",
        first_items(items),
        mend,
    )


def _policies_diverged(name: str, bad: Sequence[Diverged], axis: AxisName) -> BatchAxisError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    shown = "without a name" if axis in (UNNAMED, UNNAMED_DEVICES) else repr(axis)
    items = [
        f"{one.path}: {describe(one.state)}: {policy_name(one.state)} returned it, but must return the same "
        "value in every lane"
        for one in bad
    ]
    mends = [
        f"reduce it in {policy_name(one.state)}, as with jax.lax.psum(value, axis_names)"
        for one in bad
    ]
    mend = listed("Mend it", mends, f"Or keep one value per lane: {_AXIS_ON_BOTH_SIDES}.")
    head = (
        f"{name}: the policies of these states gave values that differ between lanes ({shown}), but one copy "
        "is kept"
    )
    return error_listing(BatchAxisError, head, first_items(items), mend)


def _pmean(value: str, axis: AxisName) -> str:
    """Code that reduces over lanes; if they have no name, it gives them one."""
    if axis in (UNNAMED, UNNAMED_DEVICES):
        return f"jax.lax.pmean({value}, 'lanes') with axis_name='lanes'"
    return f"jax.lax.pmean({value}, {axis!r})"


def lanes_stacked(name: str, paths: Sequence[str]) -> str:
    return listed(
        f"{name}: lanes wrote different values to states without a declared axis, and these were stacked on "
        "axis 0",
        paths,
        "Declare it: state_out_axes={0: filter}.",
    )


def lanes_vary(name: str, bad: Sequence[Varying]) -> BatchAxisError:
    return error_listing(
        BatchAxisError,
        f"{name}: out_axes=None is for results that are the same in all lanes, but",
        [f"{one.path}: {describe(one.value)} differs between lanes" for one in bad],
        f"Reduce it, as with {_pmean('value', bad[0].axis_names[0])}, or give it an axis: out_axes=0.",
    )


def lane_name_taken(name: str, axis: AxisName) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: axis_name={axis!r} is a mesh axis that an enclosing shard_map maps over. Give the lanes "
        "another name."
    )


def pmap2_inside(name: str, taken: Sequence[AxisName]) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 gives each lane a device, but an enclosing mapped call uses the devices already "
        f"(axes {quoted(taken)}). Use vmap2 inside it."
    )


def own_mesh_among_explicit(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on Explicit "
        "mesh axes during a trace. Call it outside the trace; or call it outside `jax.set_mesh` and on "
        "arrays that do not lie on such a mesh; or use shard_map, which runs on the mesh that is set."
    )


def lane_collective(name: str, axis: AxisName) -> StatemeshError:
    return StatemeshError(
        f"{name}: inside a checked shard_map JAX has no collectives over the lanes of a vmap ({axis!r}). "
        "Write instead:\n"
        f"  1. statemesh's own, which run over lanes there: sm.psum(x, {axis!r}), or sm.pmean, sm.pmax, "
        "sm.pmin, sm.all_gather, sm.axis_index;\n"
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


def untraced_in_lanes(axis: AxisName) -> StatemeshError:
    name = axis if isinstance(axis, str) else "rows"
    return StatemeshError(
        f"The lanes of a vmap ({axis!r}) inside a checked shard_map got a state with reduce='sum' or a "
        "function, and what they run cannot be traced. So it is unknown which written values are the same in "
        "all lanes, and count once. The reason is usually jax.lax.axis_index over the lanes, or a branch on "
        f"the value of an array. Write sm.axis_index({name!r}) instead of jax.lax.axis_index({name!r}), and "
        "jax.lax.cond or jnp.where instead of the branch."
    )


def lanes_on_mesh(name: str, transform: str) -> StatemeshError:
    return StatemeshError(
        f"{name}.on_mesh: {transform} maps over lanes, and not over a mesh with named axes. Give its "
        "function to shard_map."
    )
