"""Which leaves of a model are differentiated, and trees of values that belong to them."""

from collections.abc import Sequence

from .._arguments import inside_modules
from .._base import errors
from .._base._arrays import is_array, is_inexact
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._paths import path_str
from .._base._types import Filter, KeyPath, Leaf, PyTree, PyTreeDef
from .._model._filters import to_predicate
from .._model._kinds import ParamState
from .._model._origin import origins, with_origins
from .._packed._packed import members, shapes_of, with_models


def trainable(model: PyTree, wrt: Filter = None) -> PyTree:
    """The part of a model that `value_and_grad` differentiates, in the structure of its `grads`.

    It is what an optimizer is initialised with. Its states keep their kinds and specs, and so do those in
    the optimizer's slots: they lie where the parameters lie. Of a `Packed` it is a `Packed`.

    **Arguments:**

    - `model`: any pytree.
    - `wrt`: as for `value_and_grad`.

    **Returns:** the model with `None` in place of everything else.

    **Raises:** `StructureError` where there is nothing to differentiate, or where `wrt` picks what cannot be.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> sm.trainable({"w": sm.ParamState(jnp.ones(3)), "steps": sm.State(0)})
        {'steps': None, 'w': ParamState(float32[3])}

        ```
    """
    parts = Parts("trainable", model, wrt, "model")
    return parts.tree(parts.params)


class Parts:
    """A model's leaves, and which of them are differentiated."""

    def __init__(self, what: str, model: PyTree, wrt: Filter, root: str) -> None:
        self.leaves, self.treedef = tree_util.tree_flatten(model)
        self.marks = origins(model)
        # Filters see the packed states, but the buffers that hold them are differentiated.
        shown, hits = _picked(what, with_models(model, shapes_of), wrt, root)
        units, self.unit_def = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        # For each unit (a State, or an array outside of any) its structure and the leaves to differentiate.
        self.units: list[tuple[PyTreeDef, list[int | None]]] = []
        self.paths: list[str] = []
        torn: list[tuple[list[str], ...]] = []
        start = 0
        for (path, unit), made_of in zip(units, members(model), strict=True):
            own, treedef = tree_util.tree_flatten(unit)
            chosen: list[int | None] = [None] * len(own)
            if any(hits[k] for k in made_of):
                chosen = [start + k if _is_differentiable(x) else None for k, x in enumerate(own)]
            self.units.append((treedef, chosen))
            some = [k for k in chosen if k is not None]
            if some and not all(hits[k] for k in made_of):
                apart = ([shown[k][0] for k in made_of if hits[k] is hit] for hit in (True, False))
                torn.append(tuple(apart))
            name = shown[made_of[0]][0] if len(made_of) == 1 else path_str(path, root)
            self.paths += [name] * len(some)
            start += len(own)
        if torn:
            raise errors.picks_part_of_buffer(what, wrt, torn)
        self.positions = [k for _, chosen in self.units for k in chosen if k is not None]
        if not self.positions:
            there = [(path, unit) for path, unit in shown if _is_shown(unit)]
            raise errors.nothing_to_differentiate(what, wrt, there)
        self.params = [self.leaves[k] for k in self.positions]

    def model(self, params: Sequence[Leaf]) -> PyTree:
        """The model with other arrays in place of those that are differentiated."""
        leaves = list(self.leaves)
        for k, x in zip(self.positions, params, strict=True):
            leaves[k] = x
        return with_origins(self.treedef.unflatten(leaves), self.marks)

    def tree(self, values: Sequence[Leaf]) -> PyTree:
        """The model's tree with `values` in place of what is differentiated, and `None` elsewhere."""
        left = iter(values)
        units = []
        for treedef, chosen in self.units:
            here = [None if k is None else next(left) for k in chosen]
            some = any(k is not None for k in chosen)
            units.append(treedef.unflatten(here) if some else None)
        return self.unit_def.unflatten(units)


def _picked(
    what: str, model: PyTree, wrt: Filter, root: str
) -> tuple[list[tuple[str, PyTree]], list[bool]]:
    """The units of a model with their paths, and for each whether it is differentiated."""
    hit = _is_trained if wrt is None else to_predicate(wrt, model)
    units, hits = [], []
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    for (path, unit), inside in zip(flat, inside_modules(model), strict=True):
        offered = _is_shown(unit) or (_is_number(unit) and not inside)
        units.append((path_str(path, root), unit))
        hits.append(bool(offered and hit(path, unit)))
    impossible = [
        unit
        for unit, picked in zip(units, hits, strict=True)
        if picked and not any(map(_is_differentiable, tree_util.tree_leaves(unit[1])))
    ]
    if impossible and wrt is not None:
        raise errors.cannot_differentiate(what, impossible)
    return units, hits


def _is_trained(path: KeyPath, unit: PyTree) -> bool:
    return isinstance(unit, ParamState) or (not is_state(unit) and _is_differentiable(unit))


def _is_number(x: Leaf) -> bool:
    """Whether `x` is a Python number that can be differentiated: a mapped call makes an array of it."""
    return type(x) in (float, complex)


def _is_differentiable(x: Leaf) -> bool:
    return _is_number(x) or is_inexact(x)


def _is_shown(unit: PyTree) -> bool:
    return is_state(unit) or is_array(unit)
