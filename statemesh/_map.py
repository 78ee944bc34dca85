"""`Map`: a module whose states have a lane axis, and whose methods run over the lanes."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from jax.tree_util import GetAttrKey

from ._base import errors
from ._base._checks import check_lane_name, check_text
from ._base._frames import without_own_frames
from ._base._types import KeyPath, LaneName, Name, PyTree, Size, Text
from ._call._axis_rules import POLICIES
from ._call._mapping import StatefulMapping
from ._model._filters import to_predicate
from ._model._module import Module, field
from ._new_states import TRANSFORMS, create
from ._resolve._lanes import AxesOfMap, Pairs, as_pairs, is_size


if TYPE_CHECKING:
    M = TypeVar("M", bound=Module)
else:
    M = TypeVar("M")


class _MappedMethods:
    """The options of a `Map`, and its methods mapped by them.

    It is static. Two with the same options are equal, and a copy of a `Map` uses what was compiled for the
    first.
    """

    def __init__(
        self,
        options: dict[str, PyTree],
        distributed: tuple[tuple[int | None, frozenset[KeyPath]], ...] = (),
    ) -> None:
        self.options = options
        # Each lane axis with the paths, in the `Map`, of the states that were created with it.
        self.distributed = distributed
        self._mapped: dict[tuple[type[Module], str, int], StatefulMapping] = {}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _MappedMethods)
            and self.options == other.options
            and self.distributed == other.distributed
        )

    def __hash__(self) -> int:
        return hash((_MappedMethods, self.distributed))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def __deepcopy__(self, memo: dict[int, object]) -> "_MappedMethods":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # The mapped methods are left out: what is compiled cannot be pickled.
        return _MappedMethods, (self.options, self.distributed)

    def mapped(self, module: type[Module], name: str, args: int) -> StatefulMapping:
        """The method called `name`, mapped for `args` positional arguments."""
        key = (module, name, args)
        if key not in self._mapped:
            self._mapped[key] = self._make(module, name, args)
        return self._mapped[key]

    def _make(self, module: type[Module], name: str, args: int) -> StatefulMapping:
        def call(map: "Map[Module]", /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            result = getattr(map.module, name)(*args, **kwargs)
            if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], Module):
                raise errors.not_a_pair(type(map.module).__name__, name, result)
            out, module = result
            return out, map.replace(module=module)

        call.__name__ = call.__qualname__ = name
        # With this signature messages name the arguments as the method does.
        signature = inspect.signature(getattr(module, name))
        first, *others = signature.parameters.values()
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first.replace(name="map", annotation=Map), *others]
        )
        transform, _ = TRANSFORMS[self.options["behavior"]]
        mapping: StatefulMapping = transform(
            call,
            in_axes=AxesOfMap(self.options["in_axes"], args),
            out_axes=(self.options["out_axes"], None),
            axis_name=self.options["axis_name"],
            axis_size=self.options["init_map_size"],
            state_in_axes=Pairs(
                (functools.partial(_is_at, paths), axis) for axis, paths in self.distributed
            ),
            unexpected_out_state_mapping=self.options["unexpected_out_state_mapping"],
        )
        return mapping


def _is_at(paths: frozenset[KeyPath], path: KeyPath, state: PyTree) -> bool:
    return path in paths


class Map(Module, Generic[M]):
    """A module whose states have a lane axis, and whose methods run over the lanes.

    **Arguments:**

    - `module`: the module for one lane. Its methods return `(out, module)`.
    - `init_map_size`: the number of lanes.
    - `init_state_axes`: where new states get their lane axis: a filter (axis 0), or `{axis: filter}`.
        Before it a `NonBatchState` gets none; after it all others get axis 0.
    - `state_tag`: a tag that the states get when they are created.
    - `in_axes`, `out_axes`: of the methods' arguments and results: one axis for all, or one for each. A State
        among the arguments is shared by all lanes.
    - `axis_name`: what collectives in the methods call the lanes.
    - `behavior`: `'vmap'` runs the lanes on one device, `'pmap'` gives each a device.
    - `unexpected_out_state_mapping`: as for `vmap2`.

    **Raises:** `StatemeshError` for a size that is no positive int, an unknown behavior or policy.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> class Counter(sm.Module):
        ...     count: sm.State | None = None
        ...     def init_state(self):
        ...         return self.replace(count=sm.ShortTermState(0))
        ...     def update(self, x):
        ...         return x + 1, self.replace(count=self.count.value + x)
        >>> counters = sm.Map(Counter(), 3).init_all_states()
        >>> out, counters = counters(jnp.arange(3))
        >>> counters.module.count.value
        Array([0, 1, 2], dtype=int32)

        ```
    """

    module: M
    _methods: _MappedMethods = field(static=True, repr=False)

    def __init__(
        self,
        module: M,
        init_map_size: Size,
        *,
        init_state_axes: PyTree = None,
        state_tag: Text = None,
        in_axes: PyTree = 0,
        out_axes: PyTree = 0,
        axis_name: LaneName | None = None,
        behavior: Name = "vmap",
        unexpected_out_state_mapping: str = "raise",
    ) -> None:
        if not isinstance(module, Module):
            raise errors.not_a_module(module)
        if not is_size(init_map_size):
            raise errors.bad_axis_size("init_map_size", init_map_size)
        if not isinstance(behavior, str) or behavior not in TRANSFORMS:
            raise errors.unknown_choice("behavior", behavior, tuple(TRANSFORMS))
        if unexpected_out_state_mapping not in POLICIES:
            raise errors.unknown_choice(
                "unexpected_out_state_mapping", unexpected_out_state_mapping, POLICIES
            )
        check_text("Map", "state_tag", state_tag)
        if axis_name is not None:
            check_lane_name("Map", axis_name)
        for filter, _ in as_pairs(init_state_axes, "init_state_axes"):
            to_predicate(filter)
        self.module = module
        self._methods = _MappedMethods(
            {
                "init_map_size": init_map_size,
                "init_state_axes": init_state_axes,
                "state_tag": state_tag,
                "in_axes": in_axes,
                "out_axes": out_axes,
                "axis_name": axis_name,
                "behavior": behavior,
                "unexpected_out_state_mapping": unexpected_out_state_mapping,
            }
        )

    @without_own_frames
    def init_all_states(self, **kwargs: PyTree) -> "Map[M]":
        """Create the module's states with their lane axis.

        **Arguments:**

        - `kwargs`: arguments of the `init_state` methods.

        **Returns:** the `Map` with its states made.
        """
        options = self._methods.options
        module, axes = create(
            options["behavior"],
            self.module,
            kwargs,
            options["state_tag"],
            options["init_map_size"],
            options["init_state_axes"],
            options["axis_name"],
            "init_state_axes",
        )
        by_axis: dict[int | None, set[KeyPath]] = {}
        for path, axis in axes.items():
            by_axis.setdefault(axis, set()).add((GetAttrKey("module"), *path))
        distributed = tuple((axis, frozenset(paths)) for axis, paths in by_axis.items())
        return self.replace(module=module, _methods=_MappedMethods(options, distributed))

    @without_own_frames
    def update(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, "Map[M]"]:
        """Run the module's `update` over the lanes.

        **Arguments:**

        - `args`, `kwargs`: its arguments: the positional ones mapped as `in_axes` says, the others over
            axis 0.

        **Returns:** `(out, map)`.

        **Raises:** `BatchAxisError` for another number of lanes.
        """
        return self._run("update", *args, **kwargs)

    @without_own_frames
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, "Map[M]"]:
        """As `update`."""
        return self._run("update", *args, **kwargs)

    def map(self, name: Name) -> Callable[..., tuple[PyTree, "Map[M]"]]:
        """Another method of the module, run over the lanes in the same way.

        **Arguments:**

        - `name`: the method's name. It returns `(out, module)`.

        **Returns:** a function of the method's arguments that returns `(out, map)`.

        **Raises:** `StructureError` when the module has no such method.
        """
        _check_method(self.module, name)
        return functools.partial(self._run, name)

    @without_own_frames
    def _run(self, name: Name, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, "Map[M]"]:
        _check_method(self.module, name)
        axes = self._methods.options["in_axes"]
        if isinstance(axes, tuple | list) and len(axes) != len(args):
            raise errors.arity(name, "in_axes", len(axes), len(args))
        out, new = self._methods.mapped(type(self.module), name, len(args))(self, *args, **kwargs)
        return out, new


def _check_method(module: Module, name: Name) -> None:
    if not isinstance(name, str):
        raise errors.invalid_argument("Map", "map", name)
    if not callable(getattr(type(module), name, None)):
        own = [n for n in dir(type(module)) if not n.startswith("_") and not hasattr(Module, n)]
        names = [n for n in own if callable(getattr(type(module), n))]
        raise errors.unknown_method(type(module).__name__, name, names)
