"""The stages of a mapped call before it runs: lowered, and compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._types import PyTree, PyTreeDef
from ._donate import spared_by
from ._program import Program


class Stage:
    """A call before it runs, described by its own arguments and result.

    All else is that of the `jax.stages.Lowered` or `Compiled` in `program`.

    **Attributes:**

    - `program`: what was lowered: a function of the arguments' arrays. What comes back as it went in is no
        output of it.
    - `in_tree`: the structure of `(args, kwargs)`.
    """

    def __init__(
        self,
        program: Any,
        call: Program,
        treedef: PyTreeDef,
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> None:
        # `complete` adds to the positional arguments what the mapping binds, such as a method's object.
        self.program = program
        self._complete = complete
        self.in_tree = treedef
        self._call = call
        # The owner of a static leaf may change it before it is compared.
        self._texts = call.statics.texts

    @property
    def args_info(self) -> Any:
        """The arguments, as `(args, kwargs)`, with a `jax.stages.ArgInfo` for each array."""
        call, inputs = self._call, tree_util.tree_leaves(self.program.args_info)
        inputs = list(map(explicit.unless_explicit, inputs))
        leaves = dict(zip(call.statics.positions, call.statics.values, strict=True))
        leaves |= dict(zip(call.positions, inputs, strict=True))
        return self.in_tree.unflatten([leaves[position] for position in range(len(leaves))])

    @property
    def out_info(self) -> Any:
        """The result, with a `jax.ShapeDtypeStruct` for each array."""
        outputs, back = self.program.out_info
        inputs = tree_util.tree_leaves(self.program.args_info)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        return back.filled(outputs, shapes, self._call.statics.changing_values)

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_util.tree_structure(self.out_info)

    def __getattr__(self, name: str) -> Any:
        if name == "program":  # Not there yet: while it is copied.
            raise AttributeError(name)
        return getattr(self.program, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._call.declared.name}>"


class Lowered(Stage):
    """A call, lowered."""

    def compile(self, *args: PyTree, **kwargs: PyTree) -> "Compiled":
        """Compile it.

        **Arguments:**

        - `args`, `kwargs`: those of `jax.stages.Lowered.compile`.

        **Returns:** a function of the call's arguments.
        """
        compiled = self.program.compile(*args, **kwargs)
        return Compiled(compiled, self._call, self.in_tree, self._complete)


class Compiled(Stage):
    """A call, compiled for arguments like these: called as the function is."""

    def __init__(
        self,
        program: Any,
        call: Program,
        treedef: PyTreeDef,
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> None:
        super().__init__(program, call, treedef, complete)
        inputs = tree_util.tree_leaves(program.args_info)
        donated = [k for k, info in enumerate(inputs) if info.donated]
        self._spared = spared_by(call, inputs, donated)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        call, layout = self._call, self._call.layout
        leaves, treedef = tree_util.tree_flatten((self._complete(args), kwargs))
        if treedef != self.in_tree:
            raise errors.other_structure(call.declared.name, self.in_tree, treedef)
        if call.unhashable:
            raise errors.compiled_for_unhashable(call.declared.name, call.unhashable)
        statics = call.statics
        if differ := statics.other_in(leaves):
            pairs = [(self._texts[position], leaves[position]) for position in differ]
            raise errors.other_statics(call.declared.name, pairs)
        given = [
            x if isinstance(x, jax.Array) or k in layout.fresh else jnp.asarray(x)
            for k, x in enumerate(call.arrays(leaves))
        ]
        ready, shown = layout.concrete(given)
        outputs, back = self.program(*self._spared(ready))
        self._spared.keep(outputs)
        if call.binding.outside is not None:
            outputs = call.binding.outside(outputs, back.placements)
        shown = layout.returned(given, shown, back.forwarded)
        return back.filled(outputs, shown, statics.changing_of(leaves))
