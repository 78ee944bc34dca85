"""What is checked: a function, what it is compared with, what is fed back and what is differentiated."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import hypothesis
import jax
from jax.sharding import PartitionSpec

from .. import _errors as errors
from .._program._doubled import widened
from .._program._noise import is_inexact
from .._program._trace import is_array_or_type
from .._types import Fun, PyTree, tree_util
from . import _report as report
from ._environment import environment, held_by
from ._feedback import FeedBack, LeafSpec, Named, find, leaf_specs
from ._form import form_differences
from ._judge import Args, Leaf, Plain, Traced, is_number_or_type, leaves_of
from ._programs import (
    OnMesh,
    Programs,
    Selection,
    Unsharded,
    differentiable,
    gradient_paths,
    learns,
    results_of,
    selection,
    unsharded_programs,
)
from ._untested import Made, left_out, never_finite, untested


Reference: TypeAlias = Traced | Plain

# The number of calls in a row, where something is fed back.
DEFAULT_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the caller of `assert_equivalent` asked for, under the names of its arguments."""

    name: str
    args: Args
    meshes: Sequence[OnMesh]
    unsharded: Fun | Literal[False] | None
    steps: int | None
    gradients: bool | None
    tolerance: float | None
    fed_back: Named | None
    leave_out: Any
    keep: Collection[str]


class Subject:
    """A function, prepared to be checked.

    **Attributes:**

    - `form`: the results with types in the place of arrays.
    - `feed_back`: what of the results the next call gets.
    - `steps`: the number of calls in a row.
    - `left_out`: the numbers of the arrays of the results that are not compared.
    - `selected`: what is differentiated.
    - `paths`, `count`: the paths of the results and of the gradient; how many of them are results.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.types = widened(asked.args).types
        self._plain = self._plain_function()
        first = asked.meshes[0]
        with self.noting(first.where):
            self._forward = first.programs(Selection()).doubled
            self.form = form = self._forward.form(self.types)
        self.feed_back = self._feed_back(first, form)
        self.steps = asked.steps or (DEFAULT_STEPS if self.feed_back else 1)
        numbers = self._array_numbers()
        self._without = left_out(asked.name, form, asked.leave_out)
        self.left_out = {numbers[k] for k in self._without if k in numbers}
        self.selected = self._selection(form)
        results = [leaf.path for leaf in leaves_of(f"{asked.name}(...)", form)]
        self.count = len(results)
        self.paths = results + gradient_paths(self.types, self.selected)
        self._references: dict[int, Reference] = {}

    def _feed_back(self, one: OnMesh, form: PyTree) -> FeedBack:
        args, kwargs = self.types
        ins: list[LeafSpec] | None = None
        outs: list[LeafSpec] | None = None
        if one.specs is not None:
            # Keyword arguments are replicated.
            by_keyword = [PartitionSpec()] * len(tree_util.tree_leaves(kwargs))
            ins = [*leaf_specs(one.specs[0], args), *by_keyword]
            outs = leaf_specs(one.specs[1], form)
        name, named = self.asked.name, self.asked.fed_back
        return find(args, kwargs, form, named, name=name, in_specs=ins, out_specs=outs)

    def _plain_function(self) -> Plain | None:
        """The unsharded function that was given, if JAX cannot trace it."""
        given = self.asked.unsharded
        if given is None or given is False:
            return None
        try:
            self._unsharded(given, Selection()).doubled.form(self.types)
        except Exception:  # A function of NumPy refuses what JAX traces with in many ways.
            return Plain(given)
        return None

    def _unsharded(self, given: Fun, chosen: Selection) -> Unsharded:
        return unsharded_programs(given, environment(given, *held_by(self.asked.args)), chosen)

    def _selection(self, form: PyTree) -> Selection:
        asked = self.asked
        if asked.gradients is False or self._plain is not None:
            return Selection()
        if asked.gradients is None and learns(self.types, self._is_written):
            return Selection()
        chosen = selection(self.types, form)
        first = asked.meshes[0]
        with self.noting(f"for the gradient {first.where}", errors.NOTE_GRADIENT):
            traced = lambda some: first.programs(some).doubled.form(self.types)
            return differentiable(chosen, traced) if chosen else Selection()

    def _is_written(self, argument: int) -> bool:
        """Whether a call gives a new value for a leaf of the arguments, by its number."""
        result = dict(self.feed_back.numbers).get(argument)
        return result is not None and not self._forward.is_untouched(self.types, argument, result)

    @property
    def constant(self) -> tuple[str, ...]:
        """The paths of the results that have no derivative."""
        flat, _ = tree_util.tree_flatten_with_path(self.form)
        keys = (flat[k][0] for k in self.selected.constant)
        return tuple(f"{self.asked.name}(...){jax.tree_util.keystr(key)}" for key in keys)

    def reference(self, one: OnMesh) -> Reference:
        """What the calls on a mesh are compared with."""
        given = self.asked.unsharded
        # Where results depend on the mesh, each mesh has a reference of its own.
        key = id(one) if given is False else 0
        if key not in self._references:
            self._references[key] = self._reference(one)
        return self._references[key]

    def _reference(self, one: OnMesh) -> Reference:
        given = self.asked.unsharded
        if self._plain is not None:
            return self._plain
        if given is False:
            programs = self.programs(one)
            return Traced(report.EMULATED, programs.doubled, programs.jitted)
        if given is None:
            what, found = report.ONE_DEVICE, self.programs(self.asked.meshes[0]).unsharded
        else:
            what, found = report.UNSHARDED, self._unsharded(given, self.selected)
        return Traced(what, found.doubled, found.compiled)

    def programs(self, one: OnMesh) -> Programs:
        """The programs on a mesh that give the results and the gradient."""
        return one.programs(self.selected)

    def feed(self, args: Args, results: PyTree) -> Args:
        """The arguments of the next call."""
        return self.feed_back.apply(*args, results_of(results))

    def leaves(self, results: PyTree) -> list[Leaf]:
        """The arrays of the results, and of the gradient if it is there, with their paths."""
        found = zip(leaves_of("", results), self.paths, strict=False)
        return [dataclasses.replace(leaf, path=path) for leaf, path in found]

    def untested(self, calls: Sequence[Made]) -> list[str]:
        """What the calls have not tested, in words."""
        # The other examples of a property have other meshes.
        one_of_many = hypothesis.currently_in_test_context()
        sizes = [] if one_of_many else [dict(one.mesh.shape) for one in self.asked.meshes]
        drawn = self._forward.drawn(self.types)
        leaves = [self.leaves(result) for _, result in calls]
        return [
            *untested(calls, self.feed_back, sizes, drawn, self.asked.steps, self._without),
            *never_finite(leaves, self.left_out),
        ]

    @property
    def exact(self) -> set[int]:
        """The numbers of the arrays of the results that are computed without floats."""
        given = [x for x in tree_util.tree_leaves(self.types) if is_array_or_type(x)]
        at, floats = self._array_numbers(), [is_inexact(x.dtype) for x in given]
        leaves = [k for k, x in enumerate(tree_util.tree_leaves(self.form)) if is_array_or_type(x)]
        sources = self._forward.sources(self.types)
        pairs = zip(leaves, sources, strict=True)
        return {at[k] for k, of in pairs if not any(floats[source] for source in of)}

    def _array_numbers(self) -> dict[int, int]:
        """For each leaf of the results that is an array, its number among the arrays."""
        leaves = tree_util.tree_leaves(self.form)
        found = [k for k, x in enumerate(leaves) if is_number_or_type(x)]
        return {leaf: number for number, leaf in enumerate(found)}

    def other_form(self, results: PyTree, right: PyTree) -> list[str]:
        """What differs from the reference in structure, dtypes or static values."""
        name, dtypes = f"{self.asked.name}(...)", self._plain is None
        return form_differences(name, results_of(results), results_of(right), dtypes=dtypes)

    @contextlib.contextmanager
    def noting(self, where: str, *notes: str) -> Iterator[None]:
        """Add a note to an error of the function that says where the function was called."""
        try:
            yield
        except Exception as error:
            for note in (errors.note_where(self.asked.name, where), *notes):
                error.add_note(note)
            raise
