"""How it is known, while an instance is traced, over which axes a value may differ between instances."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from ._base import _compat as compat
from ._base import _jaxprs as jaxprs
from ._base._axes import meshes_and_lanes, varying_over
from ._base._compat import tree_util
from ._base._links import Links
from ._base._types import NO_AXES, Axes, AxisName
from ._flow import all_axes, settled
from ._traced import Traced, trace


@runtime_checkable
class Varying(Protocol):
    """Of one instance's run."""

    # Whether anything tells at all.
    tells: bool

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        """The instance's inputs, and over which axes each is kept apart."""

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """What `fun` makes of trees; all that is run inside an instance is run by this or by `run`."""

    def run(
        self, fun: Callable[..., Any], operands: Sequence[Any], links: Links | None, counted: bool
    ) -> Any:
        """The same of the user's function.

        **Arguments:**

        - `links`: for the states in it, if it is to be known which of them its results continue.
        - `counted`: whether some state's policy depends on how many instances have the same value.
        """

    def of(self, values: Sequence[Any]) -> list[Axes]:
        """The axes over which each array may differ; all of them where nothing tells."""

    def same(self, x: Any) -> Axes:
        """The axes over which an array is the same although its type says that it may differ."""


class _Known:
    """Axes by the identity of arrays."""

    def __init__(self) -> None:
        # Beside the axes the array, lest another one take its place.
        self._axes: dict[int, tuple[Any, Axes]] = {}

    def note(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        for x, over in zip(arrays, axes, strict=True):
            self._axes[id(x)] = x, over

    def of(self, x: Any) -> Axes | None:
        return self._axes[id(x)][1] if id(x) in self._axes else None


class Told:
    """By JAX: by its types on a mesh, by what is batched in lanes.

    **Arguments:**

    - `axis_names`: the axes that are asked about.
    """

    tells = True

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        self.axis_names = axis_names
        # What the program shows beside the types: after an `all_gather`, say, all have the same.
        self.shown = _Known()

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        """JAX knows."""

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return fun(*operands)

    def run(
        self, fun: Callable[..., Any], operands: Sequence[Any], links: Links | None, counted: bool
    ) -> Any:
        # In lanes the types say no more than the program.
        meshes, _ = meshes_and_lanes(self.axis_names)
        if links is None and not (counted and meshes):
            return fun(*operands)
        if not compat.under_jit():
            return _run_eagerly(fun, operands, None, links, self._note)
        program = trace(fun, operands, None, links)
        made = jaxprs.run_jaxpr(program.closed, program.given)
        self._note(program, made)
        return program.result(made)

    def _note(self, program: Traced, made: Sequence[Any]) -> None:
        given = [compat.varying(x) for x in program.given]
        self.shown.note(made, all_axes(jaxprs.open_jaxpr(program.closed), given))

    def of(self, values: Sequence[Any]) -> list[Axes]:
        return varying_over(values, self.axis_names)

    def same(self, x: Any) -> Axes:
        shown = self.shown.of(x)
        if shown is None:
            return NO_AXES
        return (compat.varying(x) & frozenset(self.axis_names)) - shown


class Followed:
    """By following the program: each function is traced to a jaxpr first, which is walked, then put in.

    So a gradient that is taken inside is that of the one lane, as under `vmap`: where JAX types what
    varies, it sums the gradient of what all lanes share over them.

    **Arguments:**

    - `axis_names`: the axes that are followed.
    """

    tells = True
    lanes = True

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        self.mark = compat.FollowedAxes(axis_names, self.lanes)
        self.known = _Known()

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        self.known.note(arrays, axes)

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return self.run(fun, operands, None, False)

    def run(
        self, fun: Callable[..., Any], operands: Sequence[Any], links: Links | None, counted: bool
    ) -> Any:
        program = trace(fun, operands, self.mark, links)
        axes, own = self._axes(program.given), frozenset(self.mark.axis_names)
        closed = settled(program.closed, axes, own)
        made = jaxprs.run_jaxpr(closed, program.given)
        self._note(dataclasses.replace(program, closed=closed), made)
        return program.result(made)

    def _note(self, program: Traced, made: Sequence[Any]) -> None:
        axes = self._axes(program.given)
        self.known.note(made, all_axes(jaxprs.open_jaxpr(program.closed), axes))

    def of(self, values: Sequence[Any]) -> list[Axes]:
        return self._axes(values)

    def same(self, x: Any) -> Axes:
        return NO_AXES

    def _axes(self, values: Sequence[Any]) -> list[Axes]:
        return [self.known.of(x) or NO_AXES for x in values]


class Untold(Followed):
    """By nothing: the author turned JAX's check off, and is believed.

    The program is followed all the same, where there is one: a gradient inside depends on it.
    """

    tells = False
    lanes = False

    def run(
        self, fun: Callable[..., Any], operands: Sequence[Any], links: Links | None, counted: bool
    ) -> Any:
        if compat.under_jit():
            return super().run(fun, operands, links, counted)
        if links is None and not counted:
            return fun(*operands)
        return _run_eagerly(fun, operands, self.mark, links, self._note)

    def of(self, values: Sequence[Any]) -> list[Axes]:
        known = [self.known.of(x) for x in values]
        return [frozenset(self.mark.axis_names) if axes is None else axes for axes in known]


def _run_eagerly(
    fun: Callable[..., Any],
    operands: Sequence[Any],
    mark: compat.FollowedAxes | None,
    links: Links | None,
    note: Callable[[Traced, Sequence[Any]], None],
) -> Any:
    """The function itself runs, and is traced only for what its program shows."""
    result = fun(*operands)
    try:
        program = trace(fun, operands, mark, links)
    except compat.NEEDS_VALUES:
        # It goes by the values of its arguments, and has no program.
        return result
    made = [x for x in tree_util.tree_leaves(result) if isinstance(x, jax.Array)]
    if len(made) == len(program.closed.out_avals):
        note(program, made)
    return program.remembered(result)
