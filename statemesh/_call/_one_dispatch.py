"""The quickest way to run a program once more: one dispatch of JAX's, with the call's own arguments."""

import math
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


class Refused(Exception):
    """A call is not like an earlier one, and nothing was done."""


class LikeBefore:
    """An argument without leaves. With it JAX refuses a call that is not like an earlier one.

    `jax.jit` flattens the arguments of every call, to compare them with those of earlier calls. If they
    differ, it flattens them again before it does anything else, and we raise `Refused` then. No other error
    can be mistaken for it, and there is no setting that a signal handler could run under.
    """

    __slots__ = ("times",)

    def __init__(self, times: float = 1) -> None:
        self.times = times

    def flatten(self) -> tuple[tuple[()], None]:
        if not self.times:
            raise Refused
        self.times -= 1
        return (), None


# In the place of a `LikeBefore`, with which it shares programs: the call may be unlike all others.
_ANY = LikeBefore(math.inf)
jax.tree_util.register_pytree_node(LikeBefore, LikeBefore.flatten, lambda *_: _ANY)


class OneDispatch:
    """A program compiled to take the arguments of a call as they are, as trees.

    `jax.jit` flattens them, compares their structure, shapes, dtypes, and placements with those of earlier
    calls, and runs what it compiled, all in C++. Given a `LikeBefore` it does nothing else.

    **Arguments:**

    - `program`: one that `fits`.
    - `treedef`: the structure of `(args, kwargs)`.
    """

    def __init__(self, program: Program, treedef: PyTreeDef) -> None:
        def of_trees(args: PyTree, kwargs: PyTree, call: LikeBefore) -> Result:
            if call is not _ANY:
                # Under `jax.disable_jit` JAX compares nothing, and calls the function itself.
                raise Refused
            return program(*tree_util.tree_leaves((args, kwargs)))

        of_trees.__name__ = of_trees.__qualname__ = program.__name__
        self.jitted: Any = jax.jit(of_trees)
        self.check_alive = program.layout.check_alive
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
            and program.binding.outside is None
            and not program.statics.positions
            and not program.unhashable
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
            result = self.jitted(args, kwargs, _ANY)
            return result
        # To rebuild a model takes longer than to look at its leaves, and most often only the data moved.
        new, start = [], 0
        for tree, structure in zip((*args, kwargs), self._structures, strict=True):
            stop = start + structure.num_leaves
            own = ready[start:stop]
            stays = all(map(is_, own, given[start:stop]))
            new.append(tree if stays else structure.unflatten(own))
            start = stop
        result = self.jitted(tuple(new[:-1]), new[-1], _ANY)
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
        if compat.jit_disabled():
            return None
        if refused is self:
            self._chances -= 1
        if self._calls_back is None:
            # A callback of the user's, which may run on the calling thread, may trace functions of its own.
            equations = jaxprs.equations(self.jitted.trace(args, kwargs, _ANY).jaxpr)
            self._calls_back = any(map(jaxprs.calls_back, equations))
        return self if self._chances > 0 and not self._calls_back else None

    def trace(self, *arrays: Leaf) -> jax.stages.Traced:
        """The program of these inputs, which the call that follows finds."""
        traced: jax.stages.Traced = self.jitted.trace(*self._treedef.unflatten(arrays), _ANY)
        return traced
