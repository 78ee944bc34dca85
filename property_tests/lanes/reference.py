"""The reference of programs over lanes: the loop over coordinates, in which stacked states are outputs.

Nothing here knows JAX or statemesh.
"""

import dataclasses
from collections.abc import Sequence

from ..base.arrays import Array, Global
from ..plain import reference
from ..programs import Binary, Case, Output, Read, Step
from .cases import LaneCase


def unstacked(lane: LaneCase) -> Case:
    """The same program with one more output in place of each stacked leaf."""
    case, steps, outputs = lane.case, list[Step](lane.case.steps), list(lane.case.outputs)
    stacked = {(s.slot, s.leaf) for s in lane.stacked}
    written = {(write.slot, write.leaf): write.step for write in case.writes}
    for slot, leaf in ((s.slot, s.leaf) for s in lane.stacked):
        # Adding zeros of the leaf's shape broadcasts the written value to it.
        read = len(steps)
        step = written.get((slot, leaf), read)
        steps += [Read(slot, leaf), Binary("sub", read, read), Binary("add", step, read + 1)]
        outputs.append(Output(read + 2, ((lane.lanes,),)))
    return dataclasses.replace(
        case,
        steps=tuple(steps),
        writes=tuple(write for write in case.writes if (write.slot, write.leaf) not in stacked),
        outputs=tuple(outputs),
    )


def run(
    lane: LaneCase, gain: float, slots: Sequence[Sequence[Global]], inputs: Sequence[Array]
) -> tuple[list[Global], list[list[Global]]]:
    """One call: the outputs and the model's new values, with lanes on axis 0 where they differ."""
    results, after = reference.run(unstacked(lane), gain, slots, inputs)
    count = len(lane.case.outputs)
    for s, result in zip(lane.stacked, results[count:], strict=True):
        shape = lane.count, *lane.case.slots[s.slot].leaves[s.leaf].shape
        after[s.slot][s.leaf] = Global(result.value.reshape(shape), result.error)
    return results[:count], after
