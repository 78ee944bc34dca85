"""What is checked: a function, what it is compared with, what is fed back and what is differentiated."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import jax

import statemesh as sm

from .._caches import environment, held_by
from .._program._doubled import widened
from .._program._numbers import numbers
from .._program._paths import owners, path_of
from .._types import Args, Fun, Numbers, PyTree, tree_util
from ._feedback import Named, find, left_out
from ._judge import ResultLeaf
from ._programs import (
    FunctionOnMesh,
    Programs,
    Selection,
    differentiable,
    inexact_leaves,
    kept,
    results_of,
)


UNSHARDED = "the unsharded function"
# The number of calls in a row, where something is fed back.
DEFAULT_STEPS = 3


@dataclasses.dataclass
class Subject:
    """A function, prepared to be checked.

    **Arguments:** what the caller of `assert_equivalent` asked for, under the names of its arguments.

    **Attributes:**

    - `call`: the first call on the first mesh, traced.
    - `form`: its results with types in the place of arrays.
    - `feed_back`: what of the results the next call gets.
    - `in_a_row`: the number of calls in a row.
    - `left_out`: the numbers of the leaves of the results that are not compared.
    - `selected`: what is differentiated.
    - `constant`: the numbers of the leaves of the results that have no derivative.
    - `paths`, `count`: the paths of the leaves of the results and of the gradient; how many are results.
    """

    name: str
    args: Args
    meshes: Sequence[FunctionOnMesh]
    unsharded: Fun | Literal[False] | None
    steps: int | None
    gradients: bool | None
    tolerance: float | None
    fed_back: Named | None
    leave_out: Any
    keep: Collection[str]
    bitwise: bool
    is_jitted: bool

    def __post_init__(self) -> None:
        self.types = widened(self.args).types
        first = self.meshes[0]
        self._reference = self._function_as_reference(Selection())
        if self._reference and callable(self.unsharded) and not self._is_traced(self._reference):
            self._reference = Programs(UNSHARDED, self.unsharded, Selection(), is_traced=False)
        with self.noting(first.label):
            self.call = first.programs(Selection()).of(self.types)
            self.form = self.call.trace.form
        self.feed_back = find(self.types, self.form, self.fed_back, self.name, first.specs)
        self.in_a_row = self.steps or (DEFAULT_STEPS if self.feed_back else 1)
        self.left_out = left_out(self.name, self.form, self.leave_out)
        selected = self._selection(first)
        self.constant = selected.constant
        self.selected = selected or Selection()
        if self.selected:
            self._reference = self._function_as_reference(self.selected)
        by, results = (
            [keys for keys, _ in tree_util.tree_flatten_with_path(tree)[0]]
            for tree in (self.types, self.form)
        )
        self.count = len(results)
        self.paths = [
            *(f"{self.name}(...){jax.tree_util.keystr(keys)}" for keys in results),
            *(f"the gradient by {path_of(by[k])}" for k in self.selected.by),
        ]

    def _is_traced(self, reference: Programs) -> bool:
        try:
            reference.form(self.types, self.args)
        except Exception:  # A function of NumPy refuses what JAX traces with in many ways.
            return False
        return True

    def _function_as_reference(self, selected: Selection) -> Programs | None:
        """The unsharded function that was given, if one was."""
        if not callable(self.unsharded):
            return None
        key = environment(self.unsharded, *held_by(self.args))
        return kept(key, Programs, UNSHARDED, self.unsharded, selected)

    def _selection(self, first: FunctionOnMesh) -> Selection:
        if self.gradients is False or (self._reference and not self._reference.is_traced):
            return Selection()
        if self.gradients is None and self._learns():
            return Selection()
        chosen = Selection(inexact_leaves(self.form), inexact_leaves(self.types))
        note = "Give gradients=False where a function has none."
        with self.noting(f"for the gradient {first.label}", note):
            traced = lambda some: first.programs(some).of(self.types)
            return differentiable(chosen, traced, bool(self.gradients)) if chosen else Selection()

    def _learns(self) -> bool:
        """Whether a call changes parameters: a training step, whose derivative nobody takes."""
        states, forwarded = owners(self.types, sm.is_state), self.call.forwarded
        fed_back = self.feed_back.numbers
        written = [number for number, result in fed_back if forwarded.get(result) != number]
        return any(isinstance(states[number], sm.ParamState) for number in written)

    def reference(self, on_mesh: FunctionOnMesh) -> Programs:
        """What the calls on a mesh are compared with."""
        if self._reference is not None:
            return self._reference
        if self.unsharded is None:
            return self.meshes[0].programs(self.selected, unsharded=True)
        return self.programs(on_mesh)

    def programs(self, on_mesh: FunctionOnMesh) -> Programs:
        """The programs on a mesh that give the results and the gradient."""
        return on_mesh.programs(self.selected)

    def feed(self, args: Args, results: PyTree) -> Args:
        """The arguments of the next call."""
        return self.feed_back.apply(args, results_of(results))

    def leaves(self, results: PyTree, values: Sequence[Numbers] | None = None) -> list[ResultLeaf]:
        """The leaves of the results, and of the gradient if it is there.

        **Arguments:**

        - `values`: their numbers, where the results have types in the place of arrays.
        """
        arrays = jax.tree.leaves(results)
        of_arrays = list(map(numbers, arrays)) if values is None else values
        return list(map(ResultLeaf, range(len(arrays)), self.paths, arrays, of_arrays))

    @contextlib.contextmanager
    def noting(self, label: str, *notes: str) -> Iterator[None]:
        """Add a note to an error of the function that says where the function was called."""
        try:
            yield
        except Exception as error:
            for note in (f"While assert_equivalent called `{self.name}` {label}.", *notes):
                error.add_note(note)
            raise
