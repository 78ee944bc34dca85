"""Gradients of parameters that an `all_gather` made whole, which `value_and_grad` does not sum over shards.

By its type such a parameter may differ between shards, and that each shard has one of its own is the usual
case. Only the program shows that it is one value, and `value_and_grad` sees no more of the program than what
made the parameter in the `jit` or loop that is being traced. So it names each parameter whose type varies
over an axis that it reduces over, and the walk along the finished program looks at these names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from jax.ad_checkpoint import checkpoint_name

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._compat import Equation, Jaxpr
from .._base._types import Array, Axes, AxisName
from ._differing import Gathered, whole_over
from ._equations import sizes_mapped, split_over


# In the program the names of these parameters begin so.
_PARAMETER = "parameter that varies by its type: "
# While a function runs without a program: whether it has left the gradient of such a parameter to its shard.
_left: ContextVar[list[bool] | None] = ContextVar("_left", default=None)


def name_varying(param: Array, axes: Sequence[AxisName], whole: Axes, path: str) -> None:
    """Name a parameter whose type varies.

    **Arguments:**

    - `axes`: those over which its type varies and its loss is reduced.
    - `whole`: those of them over which it is known to be one value.
    - `path`: what messages call it.
    """
    if (left := _left.get()) is not None and not whole.issuperset(axes):
        left.append(True)
    for axis in axes if compat.under_jit() else ():
        checkpoint_name(param, _name(axis, axis in whole, path))


def has_varying(names: Iterable[str]) -> bool:
    """Whether a program that gives these names has parameters that vary."""
    return any(name.startswith(_PARAMETER) for name in names)


def check_summed(mapped: Equation) -> None:
    """Refuse a program of one shard that does not sum the gradient of what was gathered.

    **Arguments:**

    - `mapped`: the equation of its `shard_map`.

    **Raises:** `StatemeshError` that names each such parameter.
    """
    walk = _Unsummed(sizes_mapped(mapped))
    walk.through(jaxprs.open_jaxpr(mapped.params["jaxpr"]), split_over(mapped))
    walk.refuse()


@contextmanager
def looking_for_left() -> Iterator[list[bool]]:
    """While a function runs without a program. The list fills if a program is to be checked after."""
    left: list[bool] = []
    token = _left.set(left)
    try:
        yield left
    finally:
        _left.reset(token)


def check_unrecorded(jaxpr: Jaxpr, given: Sequence[Axes], sizes: Mapping[AxisName, int]) -> None:
    """As `check_summed`, of a function that ran without its program.

    There `value_and_grad` does not see how any parameter was made, but inside of a `jit` or a loop.

    **Arguments:**

    - `jaxpr`: the program of the function, traced after the run.
    - `given`: the axes over which its arguments may differ.
    - `sizes`: of the axes that are mapped over.
    """
    walk = _Unsummed(sizes, unrecorded=list(jaxpr.eqns))
    walk.through(jaxpr, given)
    walk.refuse()


class _Unsummed(Gathered):
    """It finds the parameters that are one value, and whose gradient was left to each shard.

    **Arguments:**

    - `sizes`: of the axes that are mapped over.
    - `unrecorded`: the equations that stood in no program when they ran.
    """

    def __init__(self, sizes: Mapping[AxisName, int], unrecorded: Sequence[Equation] = ()) -> None:
        # The sum over one shard changes nothing.
        self.axes = [axis for axis, size in sizes.items() if size > 1]
        self.unrecorded = {id(eqn) for eqn in unrecorded}
        self.found: dict[tuple[str, AxisName], None] = {}

    def made(self, eqn: Equation, given: Axes) -> Axes:
        if (name := jaxprs.name_given(eqn) or "").startswith(_PARAMETER):
            for axis in whole_over(given).intersection(self.axes):
                for known in (False, True) if id(eqn) in self.unrecorded else (False,):
                    if name.startswith(start := _name(axis, known, "")):
                        self.found[name.removeprefix(start), axis] = None
        return super().made(eqn, given)

    def refuse(self) -> None:
        if self.found:
            raise errors.gathered_before(sorted(self.found, key=str))


def _name(axis: AxisName, known: bool, path: str) -> str:
    return f"{_PARAMETER}{'summed' if known else 'not summed'} over {axis!r}: {path}"
