"""The quickest way to run a program once more: one dispatch of JAX's, with the call's own arguments."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import jax

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base._compat import tree_util
from .._base._types import NUMBERS, Leaf, PyTree, PyTreeDef
from .._write_back import WriteBack
from ._program import Program


Result = tuple[list[Leaf], WriteBack]

# So often the same call may be refused before we stop asking. JAX forgets programs when it is told to, and
# when it has very many of them.
_REFUSALS = 3


class OneDispatch:
    """A program compiled to take the arguments of a call as they are, as trees.

    `jax.jit` flattens them, compares their structure, shapes, dtypes, and placements with those of earlier
    calls, and runs what it compiled, all in C++. Under `jax.no_tracing` it does nothing else: it refuses,
    before anything runs, whatever is not like an earlier call.

    **Arguments:**

    - `program`: one that `fits`.
    - `treedef`: the structure of `(args, kwargs)`.
    """

    def __init__(self, program: Program, treedef: PyTreeDef) -> None:
        def of_trees(args: PyTree, kwargs: PyTree) -> Result:
            return program(*tree_util.tree_leaves((args, kwargs)))

        of_trees.__name__ = of_trees.__qualname__ = program.__name__
        self.jitted: Any = jax.jit(of_trees)
        self._treedef = treedef
        args, kwargs = treedef.children()
        self._structures = [*args.children(), kwargs]
        self._chances = _REFUSALS
        self._calls_back: bool | None = None

    @staticmethod
    def fits(program: Program) -> bool:
        """Whether a program can be called like this: all leaves are arrays of JAX or Python's numbers."""
        kinds = [one.kind for one in program.layout.inputs]
        return (
            compat.REFUSES_DELETED
            and None not in (compat.get_no_tracing, compat.set_no_tracing)
            and program.binding.outside is None
            and not program.statics.positions
            and all(issubclass(kind, jax.Array) or kind in NUMBERS for kind in kinds)
        )

    def __call__(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        given: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run the program, and compile it if need be.

        **Arguments:**

        - `given`: the leaves of `(args, kwargs)`.
        - `ready`: the same, laid out.
        """
        result: Result
        if ready is given:
            result = self.jitted(args, kwargs)
            return result
        # To rebuild a model takes longer than to look at its leaves, and most often only the data moved.
        new, start = [], 0
        for tree, structure in zip((*args, kwargs), self._structures, strict=True):
            stop = start + structure.num_leaves
            own = ready[start:stop]
            stays = all(map(is_, own, given[start:stop]))
            new.append(tree if stays else structure.unflatten(own))
            start = stop
        result = self.jitted(tuple(new[:-1]), new[-1])
        return result

    def again(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        refused: "OneDispatch | None",
    ) -> "OneDispatch | None":
        """What to try at the next call, after one in which nothing had to be moved.

        **Arguments:**

        - `args`, `kwargs`: of that call.
        - `refused`: what was tried at it, and was refused.
        """
        if refused is self:
            self._chances -= 1
        if self._calls_back is None:
            # A callback of the user's, which may run on the calling thread, may trace functions of its own.
            equations = jaxprs.equations(self.jitted.trace(args, kwargs).jaxpr)
            self._calls_back = any(map(jaxprs.calls_back, equations))
        return self if self._chances > 0 and not self._calls_back else None

    def trace(self, *arrays: Leaf) -> jax.stages.Traced:
        """The program of these inputs, which the call that follows finds."""
        traced: jax.stages.Traced = self.jitted.trace(*self._treedef.unflatten(arrays))
        return traced
