"""How it is known, while an instance is traced, over which axes a value may differ between instances."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from ._base import _compat as compat
from ._base._axes import varying_over
from ._base._compat import tree_util
from ._base._types import NO_AXES, Axes, AxisName
from ._flow import all_axes, settled
from ._model._state import origins, with_origins


@runtime_checkable
class Varying(Protocol):
    """Of one instance's run."""

    # Whether anything tells at all.
    tells: bool

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        """The instance's inputs, and over which axes each is kept apart."""

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """What `fun` makes of trees; all that is run inside an instance is run by this."""

    def of(self, values: Sequence[Any]) -> list[Axes] | None:
        """The axes over which each array may differ; `None` where nothing tells."""


class Told:
    """By JAX: by its types on a mesh, by what is batched in lanes.

    **Arguments:**

    - `axis_names`: the axes that are asked about.
    """

    tells = True

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        self.axis_names = axis_names

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        """JAX knows."""

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return fun(*operands)

    def of(self, values: Sequence[Any]) -> list[Axes] | None:
        return varying_over(values, self.axis_names)


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
        # By identity; beside it the array, lest another one take its place.
        self.known: dict[int, tuple[Any, Axes]] = {}

    def start(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        self._note(arrays, axes)

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        flat, treedef = tree_util.tree_flatten(operands)
        arrays_at = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
        marks = origins(operands)
        results: list[tuple[list[Any], Any, list[object]]] = []

        def traced(*arrays: Any) -> list[Any]:
            for i, x in zip(arrays_at, arrays, strict=True):
                flat[i] = x
            result = fun(*with_origins(treedef.unflatten(flat), marks))
            leaves, structure = tree_util.tree_flatten(result)
            results[:] = [(leaves, structure, origins(result))]
            return [x for x in leaves if isinstance(x, jax.Array)]

        given = [flat[i] for i in arrays_at]
        axes, own = self._axes(given), frozenset(self.mark.axis_names)
        closed = settled(compat.trace_followed(traced, given, self.mark), axes, own)
        made = compat.run_jaxpr(closed, given)
        self._note(made, all_axes(compat.open_jaxpr(closed), axes))
        ((leaves, structure, marks),) = results
        outputs = iter(made)
        leaves = [next(outputs) if isinstance(x, jax.Array) else x for x in leaves]
        return with_origins(structure.unflatten(leaves), marks)

    def of(self, values: Sequence[Any]) -> list[Axes] | None:
        return self._axes(values)

    def _axes(self, values: Sequence[Any]) -> list[Axes]:
        return [self.known[id(x)][1] if id(x) in self.known else NO_AXES for x in values]

    def _note(self, arrays: Sequence[Any], axes: Sequence[Axes]) -> None:
        for x, over in zip(arrays, axes, strict=True):
            self.known[id(x)] = x, over


class Untold(Followed):
    """By nothing: the author turned JAX's check off, and is believed.

    The program is followed all the same, where there is one: a gradient inside depends on it.
    """

    tells = False
    lanes = False

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return super().call(fun, operands) if compat.under_jit() else fun(*operands)

    def of(self, values: Sequence[Any]) -> list[Axes] | None:
        return None
