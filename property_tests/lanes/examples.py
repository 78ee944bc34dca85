"""Fixed examples over lanes that together touch every part of the engine. Each is a check to call.

Each makes its mapping again, so that it runs the engine as a mutant has changed it.
"""

from collections.abc import Callable

import numpy as np

from ..plain.examples import COUNT, SCALAR, case_of, values_for
from ..plain.streams import SPLIT
from ..programs import (
    FLOAT,
    INT,
    Binary,
    Collect,
    Fold,
    Index,
    Input,
    Leaf,
    MeshShape,
    Output,
    Read,
    Slot,
    Unary,
    Write,
)
from .cases import MISTAKES, LaneCase, Stacked, mistaken
from .checks import check_lane_gradient, check_lanes, check_refused, check_unexpected
from .modules import AROUND, KINDS, RETURNS, FedBack, Item, check_fed_back, check_nested_maps
from .streams import check_key_per_lane, check_lane_streams


THREE = MeshShape((3,))
X = ("x",)
PAIR, PAIRS = Leaf((2,)), Leaf((2,), per_shard=X)

# Every policy, on values that differ on every lane. A state and an array have lanes on their last axis, two
# states have no policy.
POLICIES = LaneCase(
    case_of(
        THREE,
        (PAIRS, PAIR),
        (
            Slot("BatchState", (SCALAR,), "mean", True),
            Slot("State", (SCALAR,), "sum", True),
            Slot("State", (COUNT,), "max", True),
            Slot("State", (COUNT,), "min", True),
            Slot("LongTermState", (PAIR,), "range", True),
            Slot("HiddenState", (PAIRS, Leaf((), INT, per_shard=X)), "max", True),
            Slot("ParamState", (PAIR,), None, True),
            Slot("State", (SCALAR,), None, True),
            Slot("array", (PAIRS,)),
        ),
        (
            Input(0),
            Fold("sum", 0, 0),
            Index(X),
            Read(5),
            Binary("add", 0, 3),
            Collect("sum", 4, X),
            Fold("max", 5, 0),
            Read(8),
            Binary("sub", 7, 0),
            Input(1),
        ),
        (
            Write(0, 0, 1),
            Write(1, 0, 1),
            Write(2, 0, 2),
            Write(3, 0, 2),
            Write(4, 0, 0),
            Write(5, 0, 4),
            Write(5, 1, 2),
            Write(7, 0, 6),
            Write(8, 0, 8),
        ),
        (Output(4, (X,)), Output(5, ()), Output(9, (X,))),
    ),
    inputs=(-1, None),
    slots=(*(None,) * 5, -1, None, None, -1),
    outputs=(-1, None, 0),
    state_out_axes=((7, None),),
)

# All axes are the same, and the options name them once.
BRIEF = LaneCase(
    case_of(
        MeshShape((4,)),
        (PAIRS,),
        (Slot("State", (PAIRS,), None, True), Slot("State", (SCALAR,), "sum")),
        (Input(0), Read(0), Binary("add", 0, 1), Fold("mean", 0, 0)),
        (Write(0, 0, 2), Write(1, 0, 3)),
        (Output(2, (X,)),),
    ),
    inputs=(0,),
    slots=(0, None),
    outputs=(0,),
    brief=True,
)

# States that get their lanes on the way out: declared ones, one with a leaf that is not written, and one
# that is not declared.
STACKED = LaneCase(
    case_of(
        THREE,
        (PAIRS,),
        (
            Slot("State", (PAIR, SCALAR), None, True),
            Slot("State", (PAIR,), "mean", True),
            Slot("State", (PAIR,), None, True),
            Slot("State", (PAIR,), None, True),
        ),
        (Input(0), Read(0), Binary("add", 0, 1), Unary("half", 2)),
        (Write(0, 0, 2), Write(1, 0, 3), Write(3, 0, 0)),
        (Output(0, (X,)),),
    ),
    inputs=(0,),
    slots=(None,) * 4,
    outputs=(1,),
    state_out_axes=((0, 0), (1, -1), (2, 1)),
    stacked=(
        Stacked(0, 0, 0, True),
        Stacked(0, 1, 0, True),
        Stacked(1, 0, -1, True),
        Stacked(3, 0, 0, False),
    ),
    unexpected="ignore",
)

SMOOTH = LaneCase(
    case_of(
        THREE,
        (PAIRS,),
        (
            Slot("BatchState", (SCALAR,), "mean", True),
            Slot("State", (PAIR,), "sum", True),
            Slot("ParamState", (PAIR,), None, True),
        ),
        (Input(0), Read(2), Binary("gate", 0, 1), Fold("sum", 2, 0), Read(1), Binary("gate", 2, 4)),
        (Write(0, 0, 3), Write(1, 0, 5)),
        (Output(2, (X,)),),
    ),
    inputs=(-1,),
    slots=(None,) * 3,
    outputs=(-1,),
)

# Lanes on each of two shards.
Y = ("y",)
ON_SHARDS = LaneCase(
    case_of(
        MeshShape((2, 3)),
        (Leaf((4,), FLOAT, (X,), Y), Leaf((2,), FLOAT, (), Y)),
        (
            Slot("BatchState", (SCALAR,), "mean", True),
            Slot("State", (SCALAR, COUNT), "sum", True),
            Slot("State", (Leaf((4,), FLOAT, (X,)),), "max", True),
            Slot("State", (Leaf((4,), FLOAT, (X,), Y),), None, True),
        ),
        (
            Input(0),
            Input(1),
            Fold("sum", 0, 0),
            Fold("sum", 1, 0),
            Index(Y),
            Read(3),
            Binary("add", 0, 5),
            Collect("sum", 2, X),
        ),
        (Write(0, 0, 2), Write(1, 0, 3), Write(1, 1, 4), Write(2, 0, 0), Write(3, 0, 6)),
        (Output(6, (("y", "x"),)), Output(7, (Y,))),
    ),
    inputs=(-1, 0),
    slots=(None, None, None, -1),
    outputs=(-1, 0),
)


def lanes(lane: LaneCase, *transforms: str, how: str = "eager") -> Callable[[], None]:
    def check() -> None:
        for transform in transforms:
            check_lanes(lane, values_for(lane.case), transform, how=how)

    return check


def gradient() -> None:
    check_lane_gradient(SMOOTH, values_for(SMOOTH.case), ["vmap2", "pmap2"])


def refusals() -> None:
    for mistake in MISTAKES:
        lane = mistaken(BRIEF, mistake)
        for transform in ("vmap2", "pmap2"):
            check_refused(lane, values_for(lane.case), transform)


def unexpected() -> None:
    calls = [np.arange(k, k + 3, dtype=np.int32) for k in (1, 5)]
    for transform in ("vmap2", "pmap2"):
        for mapping, read in (("auto", True), ("auto", False), ("ignore", True)):
            check_unexpected(transform, mapping, np.ones(2, np.int32), calls, read=read)


def modules() -> None:
    """Everything that may be in a Module: read, written per lane, or written the same in all lanes."""
    read = tuple(Item(kind, "read", (2,) * (kind == "layer")) for kind in KINDS)
    written = (Item("array", "each", (2,)), Item("numpy", "each", ()))
    alike = (Item("array", "alike", (2,)),)
    for transform in ("vmap2", "pmap2"):
        check_fed_back(FedBack(3, (*read, *written, *alike), -1, "replace", "eager"), transform)
    for returns, around in (
        *((one, "eager") for one in RETURNS),
        *((RETURNS[0], a) for a in AROUND),
    ):
        check_fed_back(FedBack(2, (*read, *written), 0, returns, around), "vmap2")


def streams() -> None:
    check_lane_streams("vmap2", 3, 2, (SPLIT,), 3)
    check_lane_streams("pmap2", 3, 2, (), 3)


CHECKS: dict[str, Callable[[], None]] = {
    "refusals": refusals,
    "stacked": lanes(STACKED, "vmap2", "pmap2"),
    "brief": lanes(BRIEF, "vmap2", "pmap2 backwards"),
    "policies": lanes(POLICIES, "vmap2", "pmap2"),
    "unexpected": unexpected,
    "on shards": lanes(ON_SHARDS, "vmap2"),
    "inside jit": lanes(BRIEF, "pmap2", how="jit"),
    "unsharded": lanes(BRIEF, "pmap2", how="unsharded"),
    "gradient": gradient,
    "streams": streams,
    "modules": modules,
    "maps in maps": lambda: check_nested_maps((2, 3), (1, 2), (0, -1), 3, "pmap"),
    "keys per lane": lambda: check_key_per_lane("pmap2", 3, (SPLIT,), 3, -1),
}
