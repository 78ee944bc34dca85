"""The traced program of a call, and the tree of its results."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

import statemesh as sm

from .._types import AnyLeaf, Fun, PyTree, PyTreeDef, tree_util
from ._jaxprs import Jaxpr
from ._one_device import type_of


# A part of the message of `pmap2` where there are fewer devices than lanes.
_TOO_MANY_LANES = re.compile(r": \d+ lanes? on \d+ devices?;")


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced call.

    **Attributes:**

    - `closed`: the program from the arrays of the arguments to those of the results.
    - `types`: the tree of the results, with the type of each array in its place.
    - `statics`: the leaves of the results that are no arrays.
    - `paths`: the path of each array of the results, as the user would type it.
    """

    closed: Jaxpr
    types: PyTree
    statics: PyTree
    paths: list[str]

    def results(self, arrays: Sequence[AnyLeaf]) -> PyTree:
        """The results with these arrays."""
        return eqx.combine(tree_util.tree_structure(self.types).unflatten(arrays), self.statics)

    @property
    def form(self) -> PyTree:
        """The results with types in the place of arrays."""
        return self.results(tree_util.tree_leaves(self.types))


def is_array_or_type(x: object) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def trace(mapped: Fun, treedef: PyTreeDef, leaves: Sequence[AnyLeaf]) -> Trace:
    """Trace a call.

    **Arguments:**

    - `treedef`, `leaves`: the tuple of the positional arguments and the dictionary of the others, flattened.
        Arrays are `jax.Array`s or their types.
    """
    name = getattr(mapped, "__name__", type(mapped).__name__)
    arrays, statics = eqx.partition(leaves, is_array_or_type)

    def of(fun: Fun) -> Any:
        def split(arrays: list[AnyLeaf]) -> tuple[PyTree, Fun]:
            args, kwargs = treedef.unflatten(eqx.combine(arrays, statics))
            result, rest = eqx.partition(fun(*args, **kwargs), is_array_or_type)
            # Equinox takes strings of NumPy for arrays. In a function they are hidden from it.
            return result, lambda: rest

        return eqx.filter_make_jaxpr(split)(jax.tree.map(type_of, arrays))

    try:
        closed, (types, _), (_, rest) = of(mapped)
    except sm.BatchAxisError as error:
        if not isinstance(mapped, sm.StatefulMapping) or not _TOO_MANY_LANES.search(str(error)):
            raise
        closed, (types, _), (_, rest) = of(mapped.unsharded)
    flat, _ = tree_util.tree_flatten_with_path(types)
    paths = [f"{name}(...){jax.tree_util.keystr(path)}" for path, _ in flat]
    return Trace(closed, types, rest(), paths)
