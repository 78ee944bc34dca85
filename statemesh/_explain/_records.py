"""What an explanation holds: a record for each leaf, each collective, and the memory."""

import dataclasses
from collections.abc import Mapping

from .._base._types import AxisName


# Who placed a leaf, where its state's own spec did.
OWN_SPEC = "its own spec"
# How the reason begins for which a parameter stays whole that cannot be split.
NO_AXIS = "no axis is divisible by"


@dataclasses.dataclass(frozen=True, slots=True)
class LeafRow:
    """A leaf of the arguments of a call.

    **Attributes:**

    - `path`: its path, as one would type it.
    - `kind`: the type of its State, else `array`, `NumPy array` or `number`.
    - `dtype`, `shape`, `shard_shape`: its type, its shape, and the shape of the part that a device holds.
    - `enters`: where it lies: a spec or a lane axis.
    - `split`: the mesh axes that split each of its axes, as far as any do.
    - `placed_by`: what says so: an entry as the author wrote it, `its own spec`, `its kind` or `default`.
    - `leaves`: how it leaves: `untouched`, `not returned`, or that it is written, where, and which policy
        merges it over which axes.
    - `bytes`: what each device holds of it.
    - `moved`: what the call must lay out on each device before it runs.
    - `call`: the name of the mapped function.
    - `whole`: why a state stays whole whose own spec has an entry for each axis and names no mesh axis, as
        `fsdp` writes it: `no axis is divisible by x=4`, or `kept whole` where it could be split, as one that
        is smaller than `min_size`. Empty for all others.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    enters: str
    split: tuple[tuple[AxisName, ...], ...]
    placed_by: str
    leaves: str
    bytes: int
    moved: int
    call: str
    whole: str

    @property
    def splits_itself(self) -> bool:
        """Whether the spec of its own splits it."""
        return self.placed_by == OWN_SPEC and any(self.split)

    @property
    def fits_no_axis(self) -> bool:
        """Whether it is whole because a mesh axis divides none of its lengths."""
        return self.whole.startswith(NO_AXIS)


@dataclasses.dataclass(frozen=True, slots=True)
class ResultRow:
    """An array that a call makes and that is no leaf of its arguments, written.

    **Attributes:**

    - `path`: its path in the result.
    - `kind`, `dtype`, `shape`, `shard_shape`: as for a leaf of the arguments.
    - `leaves`: where it lies.
    - `bytes`: what each device holds of it.
    - `call`: the name of the mapped function.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    leaves: str
    bytes: int
    call: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """An exchange between devices.

    **Attributes:**

    - `operation`: JAX's name for it, or XLA's where XLA added it.
    - `axes`: the mesh axes over which devices exchange.
    - `times`: how often it runs in a call, loops multiplied out.
    - `unknown_loop`: whether it stands in a loop of which nobody knows how often it runs. `times` and `bytes`
        are then those of one turn.
    - `branch`: whether it stands in a branch of a `cond`, and may not run.
    - `bytes`: what a device sends in a call, as rings send it.
    - `arrays`: its operands on a device, by dtype and shape.
    - `cause`: the policy of which state, the gradient of which parameter, your code, or `XLA's own`.
    - `line`: the user's line, `file:line`; empty where there is none.
    - `compiled`: what the compiled program has of it: `as traced`, `merged with …`, `removed`, `XLA's own`;
        empty where nothing is compiled.
    - `instructions`: the instructions of the compiled program that do it.
    """

    operation: str
    axes: tuple[AxisName, ...]
    times: int
    unknown_loop: bool
    branch: bool
    bytes: int
    arrays: tuple[str, ...]
    cause: str
    line: str
    compiled: str
    instructions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a device needs for a call, by XLA's account.

    **Attributes:**

    - `arguments`, `results`, `temporaries`: the bytes of each.
    - `donated`: the bytes of arguments that results take over.
    - `peak`: the most that is held at once, as XLA tells it. Of a CPU it leaves temporaries out.
    - `allocated`: what is set aside in all: arguments, results and temporaries, less what is donated.
    - `by_argument`: the bytes of each argument, by its path. Those that the program does not read have none.
    - `by_result`: the bytes of each result, by its path.
    - `result_table`: the part of `results` that holds where the results are.
    """

    arguments: int
    results: int
    temporaries: int
    donated: int
    peak: int
    allocated: int
    by_argument: Mapping[str, int]
    by_result: Mapping[str, int]
    result_table: int
