"""Where leaves go by axis: the rules of `pmap2` and `vmap2`."""

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from .._arguments import Arguments, Unit
from .._base import _errors as errors
from .._base import _explicit as explicit
from .._base import _jaxprs as jaxprs
from .._base._checks import check_lane_name
from .._base._prefix import broadcast_axes
from .._base._types import Filter, Place, Size
from .._exit import Wrong
from .._leave import roots
from .._match import Entered, values
from .._model._filters import to_predicate
from .._model._state import State
from .._resolve._lanes import choose_axes, fits, is_size
from .._resolve._processes import check_global_shapes
from .._resolve._specs import UNSAID
from ._binding import Binding
from ._carriers import Carrier


POLICIES = ("raise", "warn", "ignore", "auto")


@dataclasses.dataclass(frozen=True)
class ByAxis:
    """What `pmap2` or `vmap2` was told of axes.

    **Attributes:**

    - `carrier`: what carries the lanes: devices, or one `vmap`.
    - `state_in`, `state_out`: filters, each with its axis.
    - `unexpected`: what becomes of an undeclared state to which lanes wrote different values.
    - `fed`: paths of undeclared states that are fed per lane all the same.
    - `shared`: paths of states that are declared to enter without a lane axis.
    """

    transform: str
    carrier: Carrier
    in_axes: Any
    out_axes: Any
    axis_name: Any
    axis_size: Size | None
    state_in: Sequence[tuple[Filter, int | None]]
    state_out: Sequence[tuple[Filter, int | None]]
    unexpected: str = "raise"
    fed: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    global_shapes: tuple[tuple[int, ...] | None, ...] | None = None

    what = "in_axes"
    steady = True
    takes_set_mesh = False

    @property
    def has_own_mesh(self) -> bool:
        return self.carrier.has_mesh

    @property
    def entries_in(self) -> Any:
        return self.in_axes

    def check(self) -> None:
        if self.unexpected not in POLICIES:
            raise errors.unknown_mapping_policy(self.unexpected, POLICIES)
        size = self.axis_size
        if size is not None and not is_size(size):
            raise errors.bad_axis_size("axis_size", size)
        check_lane_name(self.transform, self.axis_name)
        for filter, _ in (*self.state_in, *self.state_out):
            to_predicate(filter)
        self.carrier.check(self.transform)

    def check_traced(self, name: str, leaves: Sequence[Any]) -> None:
        if self.has_own_mesh and explicit.explicit_around(leaves):
            raise errors.own_mesh_among_explicit(name)

    def ground(
        self, args: tuple[Any, ...], leaves: Sequence[Any], traced: bool
    ) -> tuple["ByAxis", Hashable]:
        return self, None

    def resolve(
        self,
        name: str,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        ground: Any,
    ) -> tuple[dict[int, Place], Binding, "ByAxis"]:
        axes, shared = self._arriving(arguments, args, kwargs, leaves)
        paths = {p: unit.path for unit in arguments.flat_units() for p in unit.positions}
        mapped = [(paths[p], axis, leaves[p]) for p, axis in axes.items() if axis is not None]
        binding = self.carrier.bind(
            name, self.axis_name, mapped, self.axis_size, self.unexpected == "auto"
        )
        if self.global_shapes is not None:
            lanes = binding.sizes[self.axis_name]
            check_global_shapes(name, self.global_shapes, arguments, args, axes, lanes)
        placements = {
            p: self.carrier.at(self.axis_name, axis, np.ndim(leaves[p])) for p, axis in axes.items()
        }
        return placements, binding, dataclasses.replace(self, shared=shared)

    def _arriving(
        self,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> tuple[dict[int, int | None], frozenset[str]]:
        """The axis of every leaf that becomes an input, by its position.

        And the paths of the states that are declared to have none.
        """
        named = arguments.named(args, kwargs)
        said = iter(choose_axes(self.state_in, named, "state_in_axes"))
        found: dict[int, int | None] = {}
        shared: set[str] = set()
        each = arguments.with_entries(named, self.in_axes, self.what, 0, broadcast_axes)
        for unit, node, axis in each:
            if unit.kind is not None:
                declared = next(said)
                if declared is None:
                    shared.add(unit.path)
                axis = self._entering(unit, node, declared)
                own = len(values(node))
                found.update((p, axis if k < own else None) for k, p in enumerate(unit.positions))
            elif unit.shaped or (unit.number and not unit.in_module and axis is not None):
                found[unit.positions[0]] = axis
        return found, frozenset(shared)

    def _entering(self, unit: Unit, state: State, said: Any) -> int | None:
        if said is UNSAID:
            return 0 if unit.path in self.fed else None
        axis: int | None = said
        # One key for all lanes: each gets its own stream of it.
        return None if state.always_replicated and _is_single(state) else axis

    def key(self, arrays: Sequence[Any]) -> Hashable:
        if self.unexpected == "auto" or self.carrier.has_mesh:
            return tuple(map(np.shape, arrays))
        return ()

    def reconsidered(self, program: Any, arrays: Sequence[Any]) -> "ByAxis":
        """With `'auto'`: these rules with the states that are to be fed per lane.

        They are those that the function reads, to which lanes write different values, and that have a
        lane axis already. To know them the function is traced once beforehand.
        """
        if self.unexpected != "auto":
            return self
        traced = jax.jit(program).trace(*program.layout.abstract(arrays))
        back = traced.out_info[1]
        read = jaxprs.inputs_read(traced.jaxpr)
        lanes = program.binding.count(program.declared.name, program.layout, arrays)
        fed = {
            path
            for path, inputs in back.stacked
            if any(read[k] for k in inputs)
            and all(np.shape(arrays[k])[:1] == (lanes,) for k in inputs)
        }
        return dataclasses.replace(self, fed=frozenset(fed)) if fed else self

    def alone(self) -> "ByAxis":
        return dataclasses.replace(self, carrier=self.carrier.alone(), global_shapes=None)

    def entries(self, result: Any, root: str) -> list[Any]:
        return broadcast_axes(self.out_axes, result, "out_axes", root)

    def said(self, result: Any, root: str) -> list[Any]:
        return choose_axes(self.state_out, roots(result, root), "state_out_axes")

    def for_array(self, entry: Any, x: Any, path: str, wrong: Wrong) -> Place:
        return self._at(entry, x, path, wrong)

    def leaves_as_it_came(self, where: Place) -> bool:
        """What all lanes share: with an axis more at each call, no model could be fed back."""
        return where.axis is None

    def for_state(
        self, state: State, entered: Entered | None, said: Any, path: str, wrong: Wrong
    ) -> list[Place]:
        leaves = values(state)
        if entered is None:
            if said is UNSAID:
                return [self._shared() for _ in leaves]
            return [self._at(said, x, path, wrong) for x in leaves]
        into = [where.axis for where in entered.placements]
        if all(axis is None for axis in into):
            if said is UNSAID or (state.always_replicated and _is_single(state)):
                return [self._shared() for _ in leaves]
            return [self._at(said, x, path, wrong) for x in leaves]
        if len(leaves) > len(into):
            return [self._at(into[0], x, path, wrong) for x in leaves]
        if said is not UNSAID and any(
            said is None or _from_end(said, x) != _from_end(axis, x)
            for x, axis in zip(leaves, into, strict=False)
        ):
            wrong.conflicts.append((path, state, into[0], said))
        places = list(entered.placements)
        for k, x in enumerate(leaves):
            if into[k] is not None:
                places[k] = self._at(into[k], x, path, wrong)
        return places

    def beside(self) -> Place:
        return self._shared()

    def otherwise(self, said: Any, x: Any, path: str) -> Place | None:
        """On axis 0, if the author let it: unless it is declared to be the same in all lanes."""
        if said is not UNSAID or path in self.shared or self.unexpected == "raise":
            return None
        return self.carrier.at(self.axis_name, 0, np.ndim(x) + 1)

    def refuse(self, fun_name: str, wrong: Wrong) -> None:
        if wrong.axes:
            raise errors.no_such_out_axis(fun_name, wrong.axes)
        if wrong.conflicts:
            raise errors.lane_axis_conflict(fun_name, wrong.conflicts)
        declared: list[errors.Diverged] = []
        others: list[errors.Diverged] = []
        for one in wrong.diverged:
            at_none = one.said is None or (one.said is UNSAID and one.path in self.shared)
            (declared if at_none else others).append(one)
        if declared or others:
            raise errors.lanes_wrote(fun_name, declared or others, declared_none=bool(declared))
        if wrong.varying:
            raise errors.lanes_vary(fun_name, wrong.varying)
        if wrong.stacked and self.unexpected == "warn":
            paths = [path for path, _ in wrong.stacked]
            warnings.warn(errors.lanes_stacked(fun_name, paths), stacklevel=2)

    def _at(self, axis: int | None, x: Any, path: str, wrong: Wrong) -> Place:
        ndim = np.ndim(x) + 1
        if axis is not None and not fits(axis, ndim):
            wrong.axes.append((path, axis, x))
            return self._shared()
        return self.carrier.at(self.axis_name, axis, ndim)

    def _shared(self) -> Place:
        return self.carrier.at(self.axis_name, None, 0)


def _is_single(state: State) -> bool:
    return all(not np.ndim(x) for x in values(state))


def _from_end(axis: int | None, x: Any) -> int | None:
    return None if axis is None else axis % (np.ndim(x) + 1)
