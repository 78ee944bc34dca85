"""Modules whose states are created already distributed over lanes."""

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax

from ._base import errors
from ._base._checks import check_text
from ._base._compat import tree_util
from ._base._frames import without_own_frames
from ._base._nodes import is_state, unpacked
from ._base._paths import path_str
from ._base._types import (
    UNNAMED,
    UNNAMED_DEVICES,
    AxisName,
    Filter,
    Fun,
    KeyPath,
    Keywords,
    LaneName,
    PyTree,
    Size,
    Text,
)
from ._call._pmap2 import pmap2
from ._call._vmap2 import vmap2
from ._model._filters import Perhaps, first_matches
from ._model._kinds import NonBatchState
from ._model._module import Module
from ._model._origin import NEW, mark_origin, origin
from ._model._state import State
from ._resolve._lanes import Pairs, as_pairs, choose_axes


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
    (matched,) = first_matches([filter], [("after", after)], "filter")
    chosen = {path for path, hit in zip(_by_path(after), matched, strict=True) if hit is not None}
    made = _created(before, after)
    return {path_str(path): state for path, state in made.items() if path in chosen}


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
        >>> counter, made = sm.vmap2_new_states(Counter(), {}, axis_size=3)
        >>> counter.count.value.shape, list(made)
        ((3,), [0])

        ```
    """
    after, axes = create(
        "vmap", module, init_kwargs, state_tag, axis_size, state_out_axes, axis_name
    )
    return after, _by_axis(after, axes)


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
        >>> counter, made = sm.pmap2_new_states(Counter(), {})
        >>> counter.count.value.shape == (jax.device_count(),)
        True

        ```
    """
    after, axes = create(
        "pmap", module, init_kwargs, state_tag, axis_size, state_out_axes, axis_name
    )
    return after, _by_axis(after, axes)


def create(
    behavior: str,
    module: M,
    init_kwargs: Keywords,
    state_tag: Text,
    axis_size: Size | None,
    state_out_axes: PyTree,
    axis_name: LaneName | None,
    what: str = "state_out_axes",
) -> tuple[M, dict[KeyPath, int | None]]:
    """The module with its states made over lanes, and the lane axis of each new state by path.

    **Arguments:**

    - `behavior`: `'vmap'` or `'pmap'`.
    - `what`: the name that messages give to `state_out_axes`.
    """
    if not isinstance(module, Module):
        raise errors.not_a_module(module)
    if behavior == "vmap" and axis_size is None:
        raise errors.new_states_need_size()
    by = f"{behavior}2_new_states"
    if not (isinstance(init_kwargs, dict) and all(isinstance(name, str) for name in init_kwargs)):
        raise errors.invalid_argument(by, "init_kwargs", init_kwargs)
    check_text(by, "state_tag", state_tag)
    transform, unnamed = TRANSFORMS[behavior]
    creation = _Creation(
        state_tag, state_out_axes, what, unnamed if axis_name is None else axis_name
    )

    def init(module: Module, init_kwargs: dict[str, PyTree]) -> Module:
        return creation.init(module, init_kwargs)

    init.__name__ = init.__qualname__ = f"{type(module).__name__}.init_all_states"
    mapped = transform(
        init,
        in_axes=None,
        out_axes=None,
        axis_name=creation.axis_name,
        axis_size=axis_size,
        state_out_axes=creation.pairs,
    )
    after: M = mapped(module, init_kwargs)
    return after, creation.axes


def _by_axis(module: Module, axes: dict[KeyPath, int | None]) -> dict[int | None, list[State]]:
    found = _by_path(module)
    listed: dict[int | None, list[State]] = {}
    for path, axis in axes.items():
        listed.setdefault(axis, []).append(found[path])
    return listed


class _Creation:
    """One initialisation over lanes, and the lane axis of each state that it creates."""

    def __init__(
        self, tag: str | None, state_out_axes: PyTree, what: str, axis_name: AxisName
    ) -> None:
        self.tag = tag
        self.what = what
        self.axis_name = axis_name
        given = as_pairs(state_out_axes, what)
        self.declared = Pairs([(Perhaps(NonBatchState), None), *given, (..., 0)])
        # Filled while the initialisation is traced, which is before the filters below are asked.
        self.axes: dict[KeyPath, int | None] = {}
        axes = dict.fromkeys(axis for _, axis in self.declared)
        self.pairs = Pairs([(Perhaps(partial(self._is_on, axis)), axis) for axis in axes])

    def init(self, module: Module, init_kwargs: dict[str, PyTree]) -> Module:
        after = module.init_all_states(**init_kwargs)
        news = _created(module, after)
        axes = choose_axes(self.declared, [("module", after)], self.what)
        self.axes = {
            path: axis for path, axis in zip(_by_path(after), axes, strict=True) if path in news
        }

        def made(path: KeyPath, node: PyTree) -> PyTree:
            if path not in news:
                return node
            # A random stream is made alike in all lanes. Here each lane gets a stream of its own.
            own = node._made((self.axis_name,))
            if origin(node) is None:
                own = mark_origin(own, NEW)
            return own if self.tag is None else own.replace(tag=own.tag | {self.tag})

        new: Module = jax.tree_util.tree_map_with_path(made, after, is_leaf=is_state)
        return new

    def _is_on(self, axis: int | None, path: KeyPath, state: State) -> bool:
        return path in self.axes and self.axes[path] == axis


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
