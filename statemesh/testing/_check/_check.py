"""The comparisons that `assert_equivalent` makes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._locate._lines import line_of
from .._locate._locate import located_or_why
from .._locate._located import Located
from .._program._doubled import narrowed, widened
from .._program._jaxprs import Equation
from .._program._numbers import Rounding, numbers
from .._program._trace import on_one_device
from .._types import Args, Numbers, PyTree
from . import _other_values as values
from . import _report as report
from ._form import form_differences
from ._judge import Judge, Mismatch, excused, unequal_copies
from ._programs import Chain, FunctionOnMesh, Programs, chained, results_of
from ._progress import told
from ._subject import Subject
from ._untested import CallsMade, untested


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `assert_equivalent` compared, and what it could not judge.

    **Attributes:**

    - `agreed`: the calls that agree, in words.
    - `fed_back`: what the next call got: pairs of a path in the arguments and a path in the results.
    - `differentiated`: the paths by which the gradient was compared; empty if it was not.
    - `constant`: the paths of the results that have no derivative.
    - `unjudged`: for each path how many of its numbers were not judged: rounding alone may change them by
        more than a few per cent, or they jump where the function is discontinuous.
    - `only_double`: for each path how many of its numbers were judged in double precision only, because
        rounding in the dtypes of the program may change them by more than a few per cent.
    - `untested`: what was not tested at all, in words. Each is an `UntestedWarning` too.
    - `own_dtype`: the operations that could not run in double precision. In what they compute, mistakes as
        small as rounding were not seen.

    !!! example

        ```python
        >>> import jax.numpy as jnp, numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import assert_equivalent
        >>> checked = assert_equivalent(
        ...     jnp.sin, (np.arange(4.0),), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x")
        ... )
        >>> checked.differentiated
        ('the gradient by args[0]',)

        ```
    """

    agreed: tuple[str, ...]
    fed_back: tuple[tuple[str, str], ...]
    differentiated: tuple[str, ...]
    constant: tuple[str, ...]
    unjudged: dict[str, int]
    only_double: dict[str, int]
    untested: tuple[str, ...]
    own_dtype: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls in a row on a mesh, replayed, and those that they are compared with.

    **Attributes:**

    - `label`: on what mesh, and with what values, in words.
    - `args`, `steps`: the arguments of the first call, and the number of calls.
    - `counts`: which mismatches are mistakes; `None` for all.
    - `on_devices`: whether they are made on devices too.
    """

    subject: Subject
    on_mesh: FunctionOnMesh
    label: str
    args: Args
    steps: int
    counts: Callable[[Mismatch], bool] | None = None
    on_devices: bool = True

    @property
    def place(self) -> str:
        """The mesh, if it has several devices and every mismatch is a mistake; else an empty string."""
        return self.on_mesh.label if self.counts is None and self.on_mesh.mesh.size > 1 else ""

    @cached_property
    def reference(self) -> Programs:
        return self.subject.reference(self.on_mesh)

    @cached_property
    def mesh(self) -> Chain:
        """The calls on the mesh in double precision."""
        programs, args = self.subject.programs(self.on_mesh), widened(self.args)
        with self.subject.noting(self.on_mesh.label):
            return Chain(programs, args, self.subject.feed, self.steps, self.reference)

    @cached_property
    def right(self) -> Chain:
        """The calls of the reference."""
        with self.subject.noting(f"for {self.reference.what}"):
            return Chain(self.reference, widened(self.args), self.subject.feed, self.steps)

    def again(self, step: int) -> list[Numbers]:
        """The numbers of a call of the reference in its own dtypes."""
        results = chained(self.reference.jitted, self.args, step + 1, self.subject.feed)
        return list(map(numbers, jax.tree.leaves(results[step])))


@dataclasses.dataclass(eq=False)
class _Off(Exception):
    """What ends a comparison: a call gives other results than it should.

    **Attributes:**

    - `step`: the number of the call.
    - `what`: what is off, in a few words.
    - `lines`: what is off, in lines of the report.
    - `count`: how many results are off.
    - `gradient`: whether only the gradient is.
    - `has_line`: whether a line of the program can be at fault.
    """

    step: int
    what: str
    lines: Sequence[str]
    count: int = 1
    gradient: bool = False
    has_line: bool = True


@dataclasses.dataclass(eq=False)
class _Unended(Exception):
    """What ends a comparison: loops were stopped."""

    loops: Sequence[Equation]


class Check:
    """A function, called in all ways that should give the same results, and the failures found so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.judge = Judge(subject.tolerance, subject.left_out, subject.call.exact)
        self.failed: list[str] = []
        # What the first line of the report says of the first failure.
        self.headline = ""
        self.agreed: list[str] = []
        # The arguments and the results of the calls on the last mesh, in double precision.
        self.calls_made: CallsMade = []
        # For each line with a loop that was stopped, in which calls it was first.
        self.unended: dict[str, str] = {}

    def run(self) -> None:
        """Compare calls on every mesh; on the last mesh in other ways; and with other values."""
        subject = self.subject
        results: list[PyTree] = []
        for on_mesh in subject.meshes:
            calls = Calls(subject, on_mesh, on_mesh.label, subject.args, subject.in_a_row)
            before, results = results, self._compared(calls)
        # The other ways to call cost compiles, and would mostly fail in the same way.
        if self.failed:
            return
        if results:
            self._inside_jit(calls)
            self._moved(calls, before, results)
        for what, make, counts, on_devices in _OTHER_VALUES:
            args = make(subject.args, subject.keep)
            for on_mesh in subject.meshes:
                label = f"{on_mesh.label} {what}"
                self._compared(Calls(subject, on_mesh, label, args, 1, counts, on_devices))

    @contextlib.contextmanager
    def _recording(self, calls: Calls, label: str) -> Iterator[None]:
        """Note that the calls which are compared inside agree, or how they fail."""
        number, count = self.subject.meshes.index(calls.on_mesh) + 1, len(self.subject.meshes)
        of_mesh = f"mesh {number} of {count}"
        try:
            with told(f"{self.subject.name}: comparing {label} ({of_mesh})"):
                yield
            self.agreed.append(label)
        except _Unended as stopped:
            for loop in stopped.loops:
                self.unended.setdefault(str(line_of(loop) or "a library"), label)
        except _Off as off:
            which = f", call {off.step + 1} of {calls.steps}" if calls.steps > 1 else ""
            call = f"{label[0].upper()}{label[1:]}{which}"
            # The line is the same on every mesh.
            if self.failed:
                results = "1 result is" if off.count == 1 else f"{off.count} results are"
                self.failed.append(f"{call}, {results} off too.")
                return
            gradient = off.gradient
            with told(f"{self.subject.name}: looking for the line that goes wrong {label}"):
                found = located_in(calls, off.step, gradient=gradient) if off.has_line else ([], "")
            place, line = found
            self.headline = f"{f', see {line}' if line else ''}: {off.what} {label}"
            head = f"{call}, compared with {calls.reference.what}:"
            self.failed.append("\n".join([head, *place, *off.lines]))

    def _compared(self, calls: Calls) -> list[PyTree]:
        """Compare calls on a mesh. They are replayed first: on devices a program that is wrong may hang.

        **Returns:** the results on devices; empty if there are none or if the replay is off already.
        """
        subject, on_mesh = self.subject, calls.on_mesh
        results: list[PyTree] = []
        with self._recording(calls, calls.label):
            with subject.noting(on_mesh.label):
                form = subject.programs(on_mesh).of(subject.types).trace.form
            with subject.noting(f"for {calls.reference.what}"):
                right = calls.reference.form(subject.types, calls.args)
            self._compare_forms(calls, 0, form, right)
            for step in range(calls.steps):
                self._compare_replays(calls, step)
            # With values that are not the caller's a loop might run for ever on devices.
            others = calls.args is not subject.args and calls.on_devices
            if others and (loops := calls.right.unended("own")):
                raise _Unended(loops)
            if on_mesh.has_devices and calls.on_devices:
                with subject.noting(on_mesh.label):
                    on_devices = chained(on_mesh.mapped, calls.args, calls.steps, subject.feed)
                self._compare_devices(calls, on_devices)
                results = on_devices
            if on_mesh is subject.meshes[-1]:
                self.calls_made += [
                    (call.args.values, results_of(call.results.values)) for call in calls.mesh.exact
                ]
        return results

    def _inside_jit(self, calls: Calls) -> None:
        """Compare the calls inside `jax.jit`, and on devices the gradient."""
        label = f"inside jit {calls.on_mesh.label}"
        with self._recording(calls, label):
            with self.subject.noting(label):
                placed = calls.on_mesh.mapped.place(*calls.args[0]), calls.args[1]
                jitted = self.subject.programs(calls.on_mesh).jitted
                results = chained(jitted, placed, calls.steps, self.subject.feed)
            self._compare_devices(calls, results)

    def _moved(self, calls: Calls, before: Sequence[PyTree], results: Sequence[PyTree]) -> None:
        """Compare calls with models that were saved halfway, loaded, and placed on this mesh."""
        subject, half = self.subject, calls.steps // 2
        if not half or not subject.feed_back or subject.unsharded is False:
            return
        args, source = calls.args, subject.meshes[-2 if before else -1].label
        for result in (before or results)[:half]:
            args = subject.feed(args, result)
        label = f"saved {source} and placed {calls.on_mesh.label}"
        with self._recording(calls, label):
            with subject.noting(label):
                # As what a file holds: on no mesh.
                loaded = jax.tree.map(on_one_device, args)
                results = chained(calls.on_mesh.mapped, loaded, calls.steps - half, subject.feed)
            self._compare_devices(calls, results, half)

    def _compare_forms(self, calls: Calls, step: int, got: PyTree, want: PyTree) -> None:
        """Compare structures, dtypes and static values."""
        name, dtypes = f"{self.subject.name}(...)", calls.reference.is_traced
        if lines := form_differences(name, results_of(got), results_of(want), dtypes=dtypes):
            raise _Off(step, lines[0], [f"  - {line}." for line in lines], has_line=False)

    def _compare_replays(self, calls: Calls, step: int) -> None:
        """Compare a call on the mesh with the reference, both in double precision."""
        call, right = calls.mesh.exact[step], calls.right.exact[step]
        if loops := call.unended or right.unended:
            raise _Unended(loops)
        self._compare_forms(calls, step, call.results.types, right.results.types)
        if broken := calls.mesh.broken(step):
            copies = "copies that should be the same differ"
            raise _Off(step, copies, report.broken_promises(broken))
        leaves = self.subject.leaves(call.results.types, call.numbers)
        # A function of NumPy computes in its own dtypes only.
        rounding: Rounding = "double" if calls.reference.is_traced else "own"
        chains = calls.mesh, calls.right
        off = self.judge.compare(rounding, step, leaves, chains, calls.place)
        self._raise_if_off(calls, step, off)

    def _compare_devices(self, calls: Calls, results: Sequence[PyTree], first: int = 0) -> None:
        """Compare results of calls on devices, from call `first` on."""
        chains = calls.mesh, calls.right
        for step, result in enumerate(results, first):
            leaves = self.subject.leaves(result)
            compared = [leaf for leaf in leaves if leaf.number not in self.subject.left_out]
            copies = [unequal_copies(leaf, step, chains) for leaf in compared]
            if lines := [line for line in copies if line]:
                what = "copies on several devices differ"
                raise _Off(step, what, [*lines, report.UNREDUCED])
            off = self.judge.compare("own", step, leaves, chains)
            if calls.reference.is_traced and self.subject.unsharded is not False:
                off = excused(off, functools.partial(calls.again, step))
            self._raise_if_off(calls, step, off)

    def _raise_if_off(self, calls: Calls, step: int, off: Sequence[Mismatch]) -> None:
        off = [mismatch for mismatch in off if calls.counts is None or calls.counts(mismatch)]
        if not off:
            return
        # Where results are off, their gradient is off in consequence.
        count = self.subject.count
        shown = [mismatch for mismatch in off if mismatch.leaf.number < count] or off
        shown = _with_arrays_of_mesh(calls, shown)
        what, lines = report.headline(shown), report.results(shown)
        gradient = shown[0].leaf.number >= count
        raise _Off(step, what, lines, count=len(shown), gradient=gradient)

    def conclude(self) -> Checked:
        """What was checked.

        **Raises:** `AssertionError` for what failed.
        """
        subject = self.subject
        if self.failed:
            parts = [f"{subject.name}: the calls do not agree{self.headline}.", *self.failed]
            if self.agreed:
                parts.append(f"It agrees {', '.join(self.agreed)}.")
            if subject.in_a_row > 1 and subject.feed_back:
                parts.append(f"From call to call {subject.feed_back.describe()}.")
            raise AssertionError("\n\n".join(parts))
        calls = [subject.programs(on_mesh).of(subject.types) for on_mesh in subject.meshes]
        return Checked(
            agreed=tuple(self.agreed),
            fed_back=subject.feed_back.pairs,
            differentiated=tuple(subject.paths[subject.count :]),
            constant=tuple(subject.paths[k] for k in subject.selected.constant),
            unjudged=self.judge.unclear["double"],
            only_double=self.judge.unclear["own"],
            untested=(
                *untested(subject, self.calls_made),
                *map(report.unjudged, self.judge.never_judged),
                *(report.unended(line, label) for line, label in self.unended.items()),
            ),
            own_dtype=tuple(sorted(set().union(*(call.own_dtype for call in calls)))),
        )


# Other values for the arguments: what is said of them, what makes them, which mismatches with them are
# mistakes (`None` for all), and whether the function is called on devices with them.
_OTHER_VALUES: tuple[
    tuple[str, Callable[..., Args], Callable[[Mismatch], bool] | None, bool], ...
] = (
    ("with generic values", values.generic, None, True),
    ("with large values", values.large, lambda mismatch: mismatch.is_overflow, True),
    # What `jax.lax.pmax` makes of NaN differs between devices, and is no mistake of the function.
    ("with one NaN", values.one_nan, lambda mismatch: mismatch.is_number_on_one_device, False),
)


# Where a failing call goes wrong


def _with_arrays_of_mesh(calls: Calls, off: Sequence[Mismatch]) -> list[Mismatch]:
    """The mismatches, the largest first, with the arrays as they lie on the mesh."""
    shown = sorted(off, key=lambda mismatch: -mismatch.size)
    if not calls.on_mesh.has_devices:
        return shown
    args, kwargs = calls.args
    arrays = dict(enumerate(jax.tree.leaves(calls.on_mesh.mapped(*args, **kwargs))))
    leaves = [x.leaf for x in shown]
    on_mesh = [dataclasses.replace(x, array=arrays.get(x.number, x.array)) for x in leaves]
    return [dataclasses.replace(x, leaf=leaf) for x, leaf in zip(shown, on_mesh, strict=True)]


def located_in(calls: Calls, step: int, *, gradient: bool) -> tuple[list[str], str]:
    """Lines on the place in the program, and the file and number of its line; none where it cannot be found.

    Simple values, such as those that Hypothesis shrinks to, hide the place: many lines compute the same from
    zeros. Then other values are tried first.
    """
    subject = calls.subject
    if subject.unsharded is False or not calls.reference.is_traced:
        return [], ""
    reference = subject.unsharded or subject.meshes[0].mapped.unsharded
    args_of_call = narrowed(calls.mesh.exact[step].args)
    tried = [(args_of_call, False)]
    if step == 0 and any(map(_is_simple, jax.tree.leaves(args_of_call, is_leaf=sm.is_state))):
        tried.insert(0, (values.generic(args_of_call, subject.keep), True))
    for args, generic in tried:
        place = located_or_why(
            calls.on_mesh.mapped,
            reference,
            *args,
            results=generic or not gradient,
            gradient=gradient,
        )
        if place is not None:
            lines = [f"  {line}" for line in str(place).splitlines()]
            line = place.line if isinstance(place, Located) else ""
            return ["  With generic values:", *lines] if generic else lines, line
    return [], ""


def _is_simple(x: PyTree) -> bool:
    """Whether most numbers of an array outside of States are equal."""
    if not eqx.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating) or x.size < 2:
        return False
    return bool(2 * len(np.unique(np.asarray(x, np.float64))) < x.size)
