"""Which parameters there are, and over which mesh axes each of their arrays is split."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from .._base import errors
from .._base._arrays import is_inexact
from .._base._nodes import is_state
from .._base._prefix import broadcast_specs
from .._base._specs import entry_of, mentioned, written_axes
from .._base._types import AxisName, PyTree, SpecTree, Value
from .._model._kinds import ParamState
from .._model._state import State


class SplitArray(ParamState[Value]):
    """A parameter of a layer whose parameters are plain arrays, until `gather` makes it an array again."""

    __slots__ = ()

    def _no_array(self, what: str) -> TypeError:
        return errors.not_gathered(what)


def is_plain_parameter(unit: PyTree) -> bool:
    """Whether `unit` is an array of floats outside of any State, which `value_and_grad` differentiates."""
    return not is_state(unit) and is_inexact(unit)


def specs_of(state: State, path: str) -> list[SpecTree]:
    """The spec of each array of a state's value."""
    return broadcast_specs(state.spec, state.value, f"the spec of {path}", f"{path}.value")


def axes_of(spec: SpecTree, ndim: int) -> list[tuple[AxisName, ...]]:
    """The mesh axes that split each axis of an array.

    A spec may have entries for leading axes that a loop or a `vmap` around has taken away.
    """
    entries = list(written_axes(spec)) if isinstance(spec, PartitionSpec) else []
    entries = entries[max(len(entries) - ndim, 0) :]
    return entries + [()] * (ndim - len(entries))


def spec_with(
    axes: Sequence[tuple[AxisName, ...]], position: int | None, added: tuple[AxisName, ...]
) -> PartitionSpec:
    """The spec with an entry for every axis, and the mesh axes `added` at one of them, if at any."""
    named = [(*names, *added) if k == position else names for k, names in enumerate(axes)]
    return PartitionSpec(*map(entry_of, named))


def spec_without(spec: SpecTree, removed: Sequence[AxisName]) -> SpecTree:
    """A spec without these mesh axes; `None` where it names them and no other."""
    if not isinstance(spec, PartitionSpec) or mentioned(spec).isdisjoint(removed):
        return spec
    left = [tuple(name for name in names if name not in removed) for names in written_axes(spec)]
    return PartitionSpec(*map(entry_of, left)) if any(left) else None
