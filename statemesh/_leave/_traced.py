"""A function of trees, traced to a jaxpr so that its program can be walked before it runs."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import jax
from jax import Array

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base._compat import ClosedJaxpr, tree_util
from .._base._links import Links
from .._base._nodes import is_state
from .._base._types import Leaf, PyTree, PyTreeDef
from .._model._origin import Unknown, origin, origins, states_of, with_origins
from .._model._state import State
from ._continued import continued


# It takes the place of an array among the leaves of a result: JAX takes a tracer that is kept for a leak.
_ARRAY = object()


@dataclasses.dataclass(frozen=True)
class Traced:
    """The program of a function of trees.

    **Attributes:**

    - `closed`: its jaxpr, from the arrays among the leaves of the operands to those among the leaves of the
        result.
    - `given`: the arrays among the leaves of the operands.
    - `leaves`: the leaves of the result, with a placeholder for each array.
    - `treedef`: the structure of the result.
    - `marks`: for each state in the result a mark of the state that it continues.
    """

    closed: ClosedJaxpr
    given: list[Array]
    leaves: list[Leaf]
    treedef: PyTreeDef
    marks: list[object]

    def result(self, made: Sequence[Array]) -> PyTree:
        """The function's result, from the arrays that its program has made."""
        outputs = iter(made)
        leaves = [next(outputs) if x is _ARRAY else x for x in self.leaves]
        return with_origins(self.treedef.unflatten(leaves), self.marks)

    def remembered(self, result: PyTree) -> PyTree:
        """The result of another run of the function, its states marked with what they continue."""
        found = origins(result)
        if len(found) != len(self.marks):
            return result
        pairs = zip(found, self.marks, strict=True)
        return with_origins(result, [new if old is None else old for old, new in pairs])


def trace(
    fun: Callable[..., PyTree],
    operands: Sequence[PyTree],
    mark: compat.FollowedAxes | None,
    links: Links | None,
) -> Traced:
    """Trace a function.

    **Arguments:**

    - `mark`: names the axes along which the program will be walked; `None` for none.
    - `links`: for the states that the function is given, where it matters which of them its results continue.
    """
    flat, treedef = tree_util.tree_flatten(operands)
    arrays_at = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    given = [flat[i] for i in arrays_at]
    marks = origins(operands)
    results: list[
        tuple[list[Leaf], PyTreeDef, list[object], list[bool | None], list[tuple[bool, int]]]
    ] = []

    def traced(*arrays: Array) -> list[Array]:
        inside = list(flat)
        for i, x in zip(arrays_at, arrays, strict=True):
            inside[i] = x
        with nullcontext() if links is None else links.made():
            result = fun(*with_origins(treedef.unflatten(inside), marks))
        leaves, structure = tree_util.tree_flatten(result)
        rebuilt = [_rebuilt(node, links) for node in states_of(result)]
        shown = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
        results[:] = [(shown, structure, origins(result), rebuilt, _arrays_of(result))]
        return [x for x in leaves if isinstance(x, jax.Array)]

    bound: list[compat.FollowedAxes | compat.FollowedStates] = [] if mark is None else [mark]
    if links is not None:
        bound.append(compat.FollowedStates())
    closed = compat.trace_marked(traced, given, bound)
    ((leaves, structure, found, rebuilt, nodes),) = results
    program = Traced(closed, given, leaves, structure, found)
    if links is None or None not in found:
        return program
    return dataclasses.replace(program, marks=_recovered(program, operands, rebuilt, nodes))


def _rebuilt(state: State, links: Links | None) -> bool | None:
    """Whether JAX, not the user, has made this State; `None` for one without links."""
    if links is None or (type(state), state._meta) not in links.followed:
        return None
    return state._meta.token is not None


def _arrays_of(tree: PyTree) -> list[tuple[bool, int]]:
    """For each State, and each leaf outside of States: whether it is a State, and how many arrays it has."""
    return [
        (is_state(node), sum(isinstance(x, jax.Array) for x in tree_util.tree_leaves(node)))
        for node in tree_util.tree_leaves(tree, is_leaf=is_state)
    ]


def _recovered(
    program: Traced,
    operands: Sequence[PyTree],
    rebuilt: Sequence[bool | None],
    nodes: Sequence[tuple[bool, int]],
) -> list[object]:
    """The marks of the result's states. That of a State that JAX made is read off the program's links."""
    marks_at: list[object] = []
    for node in tree_util.tree_leaves(operands, is_leaf=is_state):
        arrays = [x for x in tree_util.tree_leaves(node) if isinstance(x, jax.Array)]
        marks_at += [origin(node) if is_state(node) else None] * len(arrays)
    sources = iter(continued(jaxprs.open_jaxpr(program.closed)))
    marks = iter(zip(program.marks, rebuilt, strict=True))
    found: list[object] = []
    for stateful, number in nodes:
        of = frozenset[int]().union(*(next(sources) for _ in range(number)))
        if not stateful:
            continue
        mark, by_jax = next(marks)
        if mark is None and by_jax is not None:
            several = dict.fromkeys(marks_at[i] for i in sorted(of) if marks_at[i] is not None)
            if len(several) == 1:
                (mark,) = several
            elif several or by_jax:
                mark = Unknown(tuple(several))
        found.append(mark)
    return found
