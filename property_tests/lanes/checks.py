"""Compares programs over lanes with the loop over lanes."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..base.arrays import Array, Global, Values, widen
from ..base.checks import assert_near
from ..base.models import arrays_of, model_of
from ..base.runs import Comparison, Results
from ..plain.gradients import assert_slope, loss_of
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
    """Compares all calls with the loop over lanes."""
    _OverLanes(lane, transform).check(values, how, home)


class _OverLanes(Comparison):
    def __init__(self, lane: LaneCase, transform: str) -> None:
        super().__init__(lane.case, mapping_of(lane, transform))
        self.lane = lane
        self.transform = transform

    def reference(self, gain: float, slots: list[list[Global]], inputs: Sequence[Array]) -> Results:
        return reference.run(self.lane, gain, slots, inputs)

    def model(self, values: Values) -> Any:
        return model_of(self.case, slots_with_axes(self.lane, values.slots))

    def arguments(self, inputs: Sequence[Array], home: str) -> tuple[list[Any], dict[str, Any]]:
        inputs = with_axes(inputs, self.lane.inputs)
        return passed(self.lane, super().arguments(inputs, home)[0])

    def outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        return lanes_first(self.lane, list(map(np.asarray, outputs)))

    def slots(self, model: Any) -> Sequence[Sequence[Any]]:
        arrays = [list(map(np.asarray, leaves)) for leaves in arrays_of(self.case, model)]
        return slots_lanes_first(self.lane, arrays)

    def warned(self, number: int) -> contextlib.AbstractContextManager[Any]:
        return _warned(self.lane, number)

    def check_layout(self, outputs: Sequence[Any], model: Any) -> None:
        if not self.transform.startswith("pmap2"):
            return
        devices = jax.devices()[:: -1 if "backwards" in self.transform else 1]
        for x, axis in zip(outputs, self.lane.outputs, strict=True):
            assert_on_devices(x, axis, devices)
        for leaves, axis in zip(arrays_of(self.case, model), self.lane.slots, strict=True):
            for x in leaves:
                assert_on_devices(x, axis, devices)

    def restarted(self, values: Values, model: Any, world: Any) -> tuple[Any, Any]:
        if not self.lane.stacked:
            return model, world
        # Stacked states have another shape now, so that they start again.
        slots = arrays_of(self.case, model)
        for s in self.lane.stacked:
            slots[s.slot][s.leaf] = jnp.asarray(values.slots[s.slot][s.leaf])
            world[s.slot][s.leaf] = Global(widen(values.slots[s.slot][s.leaf]))
        return model_of(self.case, slots), world


def _warned(lane: LaneCase, number: int) -> contextlib.AbstractContextManager[Any]:
    """A first call warns of states that lanes wrote unexpectedly. Later calls may warn where they compile."""
    if lane.unexpected != "warn" or all(s.declared for s in lane.stacked):
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


def check_lane_gradient(
    lane: LaneCase, values: Values, transforms: Sequence[str], *, jit: bool = False
) -> None:
    """Compares the gradients around a smooth program with respect to all states and inputs.

    All transforms give the same gradients, and the slope of the loop over lanes.
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
