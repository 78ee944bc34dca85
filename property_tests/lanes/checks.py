"""Programs over lanes held against the loop over lanes, as plain checks."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm

from ..base.arrays import Array, Global, widen
from ..base.checks import assert_close, assert_kept, assert_near, at_home, input_shardings, jitted
from ..base.models import arrays_of, model_of
from ..plain.cases import Values
from ..plain.gradients import assert_slope, loss_of
from ..trees import Setting, structure
from . import reference
from .cases import Axis, LaneCase
from .mapped import (
    as_in_the_reference,
    lanes_first,
    mapping_of,
    passed,
    slots_lanes_first,
    slots_with_axes,
    with_axes,
)
from .reference import unstacked


HOMES = ("host", "device", "another")


def check_lanes(
    lane: LaneCase, values: Values, transform: str, *, how: str = "eager", home: str = "host"
) -> None:
    """Calls in a row, the model fed back: results and states are what the loop over lanes says.

    **Arguments:**

    - `how`: `'eager'`, `'jit'` (the call stands inside `jax.jit`) or `'unsharded'`.
    - `home`: where the inputs lie.
    """
    case, mapped = lane.case, mapping_of(lane, transform)
    call: Any = mapped.unsharded if how == "unsharded" else mapped
    model = model_of(case, slots_with_axes(lane, values.slots))
    world = [[Global(widen(x)) for x in leaves] for leaves in values.slots]
    for number, (gain, inputs) in enumerate(values.calls):
        given = at_home(home, with_axes(inputs, lane.inputs), input_shardings(case))
        args, kwargs = passed(lane, given)
        if how == "eager" and number == 0:
            model = mapped.place(model, Setting(gain), *args, **kwargs)[0]
        this: Any = functools.partial(call, **kwargs)
        before = model
        with _warned(lane, number):
            outputs, model = (jitted(this) if how == "jit" else this)(model, Setting(gain), *args)
        wanted, world = reference.run(lane, gain, world, inputs)
        results = zip(lanes_first(lane, list(map(np.asarray, outputs))), wanted, strict=True)
        for i, (got, want) in enumerate(results):
            assert_close(got, want, f"call {number}, out{i}")
        assert structure(model) == structure(before)
        slots = arrays_of(case, model)
        apart = slots_lanes_first(lane, [list(map(np.asarray, leaves)) for leaves in slots])
        for k, (leaves, wants) in enumerate(zip(apart, world, strict=True)):
            for n, (got, want) in enumerate(zip(leaves, wants, strict=True)):
                assert_close(got, want, f"call {number}, s{k}.{n}")
        if how == "eager":
            assert_kept(case, before, model)
        if how == "eager" and transform.startswith("pmap2"):
            devices = jax.devices()[:: -1 if "backwards" in transform else 1]
            for x, axis in zip(outputs, lane.outputs, strict=True):
                assert_on_devices(x, axis, devices)
            for leaves, axis in zip(slots, lane.slots, strict=True):
                for x in leaves:
                    assert_on_devices(x, axis, devices)
        if lane.stacked:
            # They have another shape now: they begin anew.
            for s in lane.stacked:
                slots[s.slot][s.leaf] = jnp.asarray(values.slots[s.slot][s.leaf])
                world[s.slot][s.leaf] = Global(widen(values.slots[s.slot][s.leaf]))
            model = model_of(case, slots)


def _warned(lane: LaneCase, number: int) -> Any:
    """A first call warns of states that lanes wrote unexpectedly; later ones when they compile anew."""
    unexpected = any(not s.declared for s in lane.stacked)
    if lane.mapping != "warn" or not unexpected:
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="state_out_axes") if number == 0 else _silent()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*state_out_axes", UserWarning)
        yield


def assert_on_devices(x: Any, axis: Axis, devices: Sequence[jax.Device]) -> None:
    """Each lane lies on its own device, in order."""
    if axis is not None:
        for shard in x.addressable_shards:
            assert shard.data.shape[axis] == 1
            assert shard.device == devices[shard.index[axis].start or 0]


def check_refused(lane: LaneCase, values: Values, transform: str) -> None:
    """A call in which lanes differ where one value is to be."""
    (gain, inputs), *_ = values.calls
    model = model_of(lane.case, slots_with_axes(lane, values.slots))
    args, kwargs = passed(lane, with_axes(inputs, lane.inputs))
    with pytest.raises(sm.BatchAxisError):
        mapping_of(lane, transform)(model, Setting(gain), *args, **kwargs)


def check_lane_gradient(
    lane: LaneCase, values: Values, transforms: Sequence[str], *, jit: bool = False
) -> None:
    """Gradients around the call of a smooth program, with respect to all states and inputs.

    They are the same however the lanes are mapped, and the slope of the loop over lanes.
    """
    case, (gain, inputs) = unstacked(lane), values.calls[0]
    slots = [[jnp.asarray(x) for x in arrays] for arrays in values.slots]
    found = []
    for transform in transforms:
        call = as_in_the_reference(lane, mapping_of(lane, transform))
        gradient = jax.grad(loss_of(case, call, gain), argnums=(0, 1))
        gradient = jax.jit(gradient) if jit else gradient
        with _warned(lane, 0):
            found.append(gradient(slots, [jnp.asarray(x) for x in inputs]))
        assert_near(found[-1], found[0])
        assert_slope(case, gain, values.slots, inputs, found[-1])


def check_unexpected(
    transform: str, mapping: str, old: Array, calls: Sequence[Array], *, read: bool
) -> None:
    """A state that nothing is declared of, written per lane call after call, under `'auto'` or `'ignore'`.

    Lanes are stacked on axis 0. Under `'auto'` a state that is `read` too and has a lane axis already is
    fed per lane; under `'ignore'` it is not, and gets one more axis at each call.
    """

    def write(state: sm.State, x: Any) -> Any:
        return x, state.set(state.value + x if read else jnp.full_like(state.value, x))

    lanes = len(calls[0])
    mapped = getattr(sm, transform)(write, in_axes=(None, 0), unexpected_out_state_mapping=mapping)
    state = sm.State(jnp.asarray(old))
    for x in calls:
        _, state = mapped(state, x)
        fed = mapping == "auto" and read and old.shape[:1] == (lanes,)
        each = [old[i] if fed else old for i in range(lanes)]
        old = np.stack([one * read + x[i] for i, one in enumerate(each)])
        np.testing.assert_array_equal(np.asarray(state.value), old)
