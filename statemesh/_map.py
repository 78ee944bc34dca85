"""Modules whose states are created over lanes, and `Map`, whose methods run over them."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import jax
from jax.tree_util import GetAttrKey

from ._base import _errors as errors
from ._base._checks import check_lane_name, check_text
from ._base._errors import BatchAxisError, StructureError, node_str, quoted
from ._base._trees import describe, is_state, path_str, unpacked
from ._base._types import (
    UNNAMED,
    UNNAMED_DEVICES,
    AxisName,
    Filter,
    Fun,
    KeyPath,
    Keywords,
    LaneName,
    Name,
    PyTree,
    Size,
    Text,
)
from ._call._arguments import arity
from ._call._lanes import AxesOfMap, Pairs, as_pairs, choose_axes, is_size
from ._call._mapping import StatefulMapping
from ._call._pmap2_and_vmap2 import pmap2, vmap2
from ._call._rules import POLICIES, bad_axis_size
from ._jax._compat import tree_util
from ._jax._frames import without_own_frames
from ._state._filters import Perhaps, first_matches, to_predicate
from ._state._module import Module, field
from ._state._state import NEW, NonBatchState, State, mark_origin, origin


if TYPE_CHECKING:
    M = TypeVar("M", bound=Module)
else:
    # We check it by hand, so that users get our message.
    M = TypeVar("M")

# For each behavior the transformation, and the name of lanes to which the user gave none.
TRANSFORMS: dict[str, tuple[Fun, AxisName]] = {
    "vmap": (vmap2, UNNAMED),
    "pmap": (pmap2, UNNAMED_DEVICES),
}


_TAG = "a string, as in state_tag='new'"


def new_states(before: PyTree, after: PyTree, filter: Filter = ...) -> dict[str, State]:
    """The states that `after` has and `before` does not: what an initialisation created.

    A state is new where `before` has none at its path, or one of another kind, with other metadata,
    tree structure, shapes or dtypes.

    **Arguments:**

    - `before`, `after`: a tree, and the tree that was made from it.
    - `filter`: which of the new states.

    **Returns:** the new states by path, as `states` gives them.

    **Raises:** `StructureError` for a filter that matches no state of `after`.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.new_states({"a": sm.State(0)}, {"a": sm.State(0), "b": sm.State(1)})
        {"['b']": State(int32(1))}

        ```
    """
    before, after = unpacked(before), unpacked(after)
    matched = first_matches([filter], [("after", after)], "filter")
    chosen = {path for path, hit in zip(_by_path(after), matched, strict=True) if hit is not None}
    created = _created(before, after)
    return {path_str(path): state for path, state in created.items() if path in chosen}


@without_own_frames
def vmap2_new_states(
    module: M,
    init_kwargs: Keywords,
    state_tag: Text = None,
    axis_size: Size | None = None,
    state_out_axes: PyTree = None,
    *,
    axis_name: LaneName | None = None,
) -> tuple[M, dict[int | None, list[State]]]:
    """Create a module's states for each of several lanes, on one device.

    `module.init_all_states(**init_kwargs)` runs once for all lanes. What it draws from a `RandomState`
    of `module` or of `init_kwargs` differs between lanes.

    **Arguments:**

    - `module`: the module to initialise.
    - `init_kwargs`: arguments of its `init_state` methods.
    - `state_tag`: a tag that the new states get.
    - `axis_size`: the number of lanes.
    - `state_out_axes`: where new states get their lane axis: a filter (axis 0), or `{axis: filter}` of
        which the first match counts. Before it a `NonBatchState` gets none; after it all others
        get axis 0.
    - `axis_name`: what collectives in `init_state` call the lanes.

    **Returns:** the module, and its new states by their lane axis. A new `RandomState` holds a key for
    each lane.

    **Raises:** `BatchAxisError` without `axis_size`, and for a `NonBatchState` made of values that differ
    between lanes; `StructureError` for a filter that matches no state.

    !!! example

        ```python
        >>> import jax, statemesh as sm
        >>> class Counter(sm.Module):
        ...     count: sm.State | None = None
        ...     def init_state(self):
        ...         return self.replace(count=sm.ShortTermState(0))
        >>> counter, axes = sm.vmap2_new_states(Counter(), {}, axis_size=3)
        >>> counter.count.value.shape, list(axes)
        ((3,), [0])

        ```
    """
    after, paths = create(
        "vmap", module, init_kwargs, state_tag, axis_size, state_out_axes, axis_name
    )
    return after, _states_at(after, paths)


@without_own_frames
def pmap2_new_states(
    module: M,
    init_kwargs: Keywords,
    state_tag: Text = None,
    axis_size: Size | None = None,
    state_out_axes: PyTree = None,
    *,
    axis_name: LaneName | None = None,
) -> tuple[M, dict[int | None, list[State]]]:
    """Create a module's states for each of several lanes, each on a device of its own.

    Everything is as for `vmap2_new_states`, and equal to what it makes.

    **Arguments:**

    - `module`, `init_kwargs`, `state_tag`, `state_out_axes`, `axis_name`: as for `vmap2_new_states`.
    - `axis_size`: the number of lanes; left out, the number of devices.

    **Returns:** the module, and its new states by their lane axis.

    **Raises:** as `vmap2_new_states`; and `BatchAxisError` for more lanes than devices.

    !!! example

        ```python
        >>> import jax, statemesh as sm
        >>> class Counter(sm.Module):
        ...     count: sm.State | None = None
        ...     def init_state(self):
        ...         return self.replace(count=sm.ShortTermState(0))
        >>> counter, axes = sm.pmap2_new_states(Counter(), {})
        >>> counter.count.value.shape == (jax.device_count(),)
        True

        ```
    """
    after, paths = create(
        "pmap", module, init_kwargs, state_tag, axis_size, state_out_axes, axis_name
    )
    return after, _states_at(after, paths)


def create(
    behavior: str,
    module: M,
    init_kwargs: Keywords,
    state_tag: Text,
    axis_size: Size | None,
    state_out_axes: PyTree,
    axis_name: LaneName | None,
    what: str = "state_out_axes",
) -> tuple[M, dict[int | None, list[KeyPath]]]:
    """The module with its states made over lanes, and the paths of the new states by their lane axis.

    **Arguments:**

    - `behavior`: `'vmap'` or `'pmap'`.
    - `what`: the name that messages give to `state_out_axes`.
    """
    if not isinstance(module, Module):
        raise _not_a_module(module)
    if behavior == "vmap" and axis_size is None:
        raise BatchAxisError(
            "vmap2_new_states needs axis_size=..., the number of lanes: nothing else shows it."
        )
    by = f"{behavior}2_new_states"
    if not (isinstance(init_kwargs, dict) and all(isinstance(name, str) for name in init_kwargs)):
        expected = (
            "a dictionary of arguments by name, as in init_kwargs={'batch_size': 4}, or {} for none"
        )
        raise errors.invalid_argument(by, "init_kwargs", init_kwargs, expected)
    check_text(by, "state_tag", state_tag, _TAG)
    transform, unnamed = TRANSFORMS[behavior]
    lanes = unnamed if axis_name is None else axis_name
    declared = Pairs([(Perhaps(NonBatchState), None), *as_pairs(state_out_axes, what), (..., 0)])
    # Filled while the initialisation is traced, which is before `is_on` is asked.
    axes: dict[KeyPath, int | None] = {}

    def init(module: Module, init_kwargs: dict[str, PyTree]) -> Module:
        after = module.init_all_states(**init_kwargs)
        news = _created(module, after)
        chosen = zip(_by_path(after), choose_axes(declared, [("module", after)], what), strict=True)
        axes.clear()
        axes.update((path, axis) for path, axis in chosen if path in news)

        def distribute(path: KeyPath, node: PyTree) -> PyTree:
            if path not in news:
                return node
            # A random stream is made alike in all lanes. Here each lane gets a stream of its own.
            state = node._made((lanes,))
            if origin(node) is None:
                state = mark_origin(state, NEW)
            return state if state_tag is None else state.replace(tag=state.tag | {state_tag})

        return jax.tree_util.tree_map_with_path(distribute, after, is_leaf=is_state)

    def is_on(axis: int | None, path: KeyPath, state: State) -> bool:
        return path in axes and axes[path] == axis

    init.__name__ = init.__qualname__ = f"{type(module).__name__}.init_all_states"
    possible = dict.fromkeys(axis for _, axis in declared)
    mapped = transform(
        init,
        in_axes=None,
        out_axes=None,
        axis_name=lanes,
        axis_size=axis_size,
        state_out_axes=Pairs([(Perhaps(partial(is_on, axis)), axis) for axis in possible]),
    )
    after: M = mapped(module, init_kwargs)
    paths: dict[int | None, list[KeyPath]] = {}
    for path, axis in axes.items():
        paths.setdefault(axis, []).append(path)
    return after, paths


def _states_at(
    module: Module, paths: dict[int | None, list[KeyPath]]
) -> dict[int | None, list[State]]:
    states = _by_path(module)
    return {axis: [states[path] for path in at] for axis, at in paths.items()}


def _by_path(tree: PyTree) -> dict[KeyPath, State]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
    return {path: node for path, node in flat if is_state(node)}


def _created(before: PyTree, after: PyTree) -> dict[KeyPath, State]:
    """The states of `after` that continue none of `before`, by path."""
    olds = _by_path(before)
    return {p: state for p, state in _by_path(after).items() if not _continues(state, olds.get(p))}


def _continues(new: State, old: State | None) -> bool:
    """Whether `new` is the old state, or was written from it."""
    # The structure of a State holds its kind and metadata.
    if old is None or tree_util.tree_structure(new) != tree_util.tree_structure(old):
        return False
    pairs = zip(jax.tree.leaves(new.value), jax.tree.leaves(old.value), strict=True)
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    # Inside a mapped call states remember where they came from.
    return origin(old) is None or origin(new) is origin(old)


@dataclasses.dataclass(frozen=True, repr=False)
class _MappedMethods:
    """The options of a `Map`, and its methods mapped by them.

    It is static. Two with the same options are equal, and a copy of a `Map` uses what was compiled for the
    first.

    **Attributes:**

    - `options`: by name. They may be unhashable.
    - `distributed`: each lane axis with the paths, in the `Map`, of the states that were created with it.
    """

    options: dict[str, PyTree] = dataclasses.field(hash=False)
    distributed: tuple[tuple[int | None, frozenset[KeyPath]], ...] = ()
    _mapped: dict[tuple[type[Module], str, int], StatefulMapping] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

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
        if key in self._mapped:
            return self._mapped[key]

        def call(map: "Map[Module]", /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            result = getattr(map.module, name)(*args, **kwargs)
            if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], Module):
                raise StructureError(
                    f"Map: {type(map.module).__name__}.{name} returned {node_str(result)}, not `(out, "
                    "module)`. Return the result and the module with its new states: `return out, "
                    "self.replace(state=...)`, or `return out, self`."
                )
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
        self._mapped[key] = transform(
            call,
            in_axes=AxesOfMap(self.options["in_axes"], args),
            out_axes=(self.options["out_axes"], None),
            axis_name=self.options["axis_name"],
            axis_size=self.options["init_map_size"],
            state_in_axes=Pairs((partial(_is_at, paths), axis) for axis, paths in self.distributed),
            unexpected_out_state_mapping=self.options["unexpected_out_state_mapping"],
        )
        return self._mapped[key]


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
            raise _not_a_module(module)
        if not is_size(init_map_size):
            raise bad_axis_size("init_map_size", init_map_size)
        if not isinstance(behavior, str) or behavior not in TRANSFORMS:
            raise errors.unknown_choice("behavior", behavior, tuple(TRANSFORMS))
        if unexpected_out_state_mapping not in POLICIES:
            raise errors.unknown_choice(
                "unexpected_out_state_mapping", unexpected_out_state_mapping, POLICIES
            )
        check_text("Map", "state_tag", state_tag, _TAG)
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
        module, paths = create(
            options["behavior"],
            self.module,
            kwargs,
            options["state_tag"],
            options["init_map_size"],
            options["init_state_axes"],
            options["axis_name"],
            "init_state_axes",
        )
        root = GetAttrKey("module")
        distributed = tuple(
            (axis, frozenset((root, *path) for path in at)) for axis, at in paths.items()
        )
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
        return partial(self._run, name)

    @without_own_frames
    def _run(self, name: Name, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, "Map[M]"]:
        _check_method(self.module, name)
        axes = self._methods.options["in_axes"]
        if isinstance(axes, tuple | list) and len(axes) != len(args):
            raise arity(name, "in_axes", len(axes), len(args))
        out, new = self._methods.mapped(type(self.module), name, len(args))(self, *args, **kwargs)
        return out, new


def _check_method(module: Module, name: Name) -> None:
    if not isinstance(name, str):
        expected = "the name of a method, as in map('update')"
        raise errors.invalid_argument("Map", "map", name, expected)
    if not callable(getattr(type(module), name, None)):
        public = [n for n in dir(type(module)) if not n.startswith("_") and not hasattr(Module, n)]
        names = [n for n in public if callable(getattr(type(module), n))]
        raise StructureError(
            f"{type(module).__name__} has no method {name!r}. Its methods are {quoted(names) or 'none'}."
        )


def _not_a_module(module: object) -> TypeError:
    return TypeError(
        f"states are created for a statemesh.Module, got {describe(module)} of type {type(module).__name__}. "
        "Derive its class from sm.Module and create its states in `init_state(self, **kwargs)`."
    )
