"""States on their way into a microbatch, and those that it returned."""

import dataclasses
from collections.abc import Sequence

import jax

from .._axes._mesh_and_lanes import MICROBATCHES
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._paths import path_str, positional_names
from .._base._types import Array, Fun, KeyPath, Leaf, PyTree, PyTreeDef
from .._leave._origins import Entered, find_origins, has_same_leaves, leaves_of
from .._leave._policies import checked_state
from .._model._origin import mark_origin
from .._model._state import State


_NAMES = (MICROBATCHES,)


@dataclasses.dataclass(frozen=True)
class _Own:
    """A state as a microbatch sees it, where its kind says that it enters as another one.

    **Attributes:**

    - `leaves`: its leaves, without those that each microbatch has for itself.
    - `at`: where these stand among its leaves, and among all such arrays.
    """

    leaves: list[Leaf]
    treedef: PyTreeDef
    at: dict[int, int]

    def of(self, parts: Sequence[Leaf]) -> State:
        leaves = [parts[self.at[i]] if i in self.at else x for i, x in enumerate(self.leaves)]
        state: State = self.treedef.unflatten(leaves)
        return state


@dataclasses.dataclass(frozen=True)
class Continued:
    """What is known of the states in a model that a microbatch returned.

    **Attributes:**

    - `written`: for each state whether it was written.
    - `olds`: for each state the one that it continues, as it came in; `None` for one made inside.
    - `paths`: of the states and of the leaves outside of them.
    """

    written: list[bool]
    olds: list[State | None]
    paths: list[str]


class Entering:
    """The states of the model and of the keyword arguments on their way into a microbatch.

    **Attributes:**

    - `parts`: the arrays that each microbatch has for itself, of all of them along a new first axis.
    """

    def __init__(self, fun: Fun, model: PyTree, kwargs: dict[str, PyTree], count: int) -> None:
        self.root = positional_names(fun, 1)[0]
        self.kwargs = kwargs
        self.olds: list[tuple[str, KeyPath, State]] = [
            (path_str(keys, name), keys, node)
            for name, tree in [(self.root, model), *kwargs.items()]
            for keys, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
            if is_state(node)
        ]
        self.parts: list[Array] = []
        self.own = [self._entered(state, count) for _, _, state in self.olds]
        self.entered: list[Entered] = []

    def _entered(self, old: State, count: int) -> _Own | None:
        if type(old).enter is State.enter:
            return None
        shared = set(map(id, leaves_of(old)))
        found: list[_Own] = []

        def enter() -> list[Array]:
            state = checked_state(old._made(_NAMES), old, "enter")
            leaves, treedef = tree_util.tree_flatten(state)
            new = [
                i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and id(x) not in shared
            ]
            own = [leaves[i] for i in new]
            for i in new:
                leaves[i] = None
            at = {i: len(self.parts) + k for k, i in enumerate(new)}
            found[:] = [_Own(leaves, treedef, at)]
            return own

        run = jax.vmap(enter, axis_name=MICROBATCHES, axis_size=count)
        self.parts += run()
        return found[0]

    def seen(self, model: PyTree, parts: Sequence[Leaf]) -> tuple[PyTree, dict[str, PyTree]]:
        """The model and the keyword arguments as the function sees them."""
        entered: list[Entered] = []

        def one(node: PyTree) -> PyTree:
            if not is_state(node):
                return node
            path, keys, old = self.olds[len(entered)]
            own, mark = self.own[len(entered)], object()
            new = mark_origin(node if own is None else own.of(parts), mark)
            entered.append(Entered(mark, path, keys, old, new, (), ()))
            return new

        both = [
            jax.tree.map(one, tree, is_leaf=is_state) for tree in (model, *self.kwargs.values())
        ]
        self.entered = entered
        return both[0], dict(zip(self.kwargs, both[1:], strict=True))

    def continued(self, name: str, model: PyTree) -> tuple[PyTree, Continued]:
        """The model that was returned, with states that were not written as they came in."""
        flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        returned = [(keys, node) for keys, node in flat if is_state(node)]
        sources = iter(find_origins(name, returned, self.entered, False))
        units: list[PyTree] = []
        found = Continued([], [], [])
        for keys, node in flat:
            found.paths.append(path_str(keys, self.root))
            if is_state(node):
                source = next(sources)
                written = source is None or not has_same_leaves(node, source.seen)
                found.written.append(written)
                found.olds.append(None if source is None else source.old)
                if source is not None and not written:
                    node = source.old._with_value(source.old.value, node._meta)
            units.append(node)
        # They hold tracers.
        self.entered = []
        return treedef.unflatten(units), found

    def left(self, tree: PyTree) -> PyTree:
        """Auxiliary values, with states as they are outside of any microbatch."""

        def one(node: PyTree) -> PyTree:
            own_way = is_state(node) and type(node).enter is not State.enter
            return node.leave(None, ()) if own_way else node

        return jax.tree.map(one, tree, is_leaf=is_state)
