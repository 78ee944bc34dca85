"""The comparisons that `assert_equivalent` makes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._locate import _locate
from .._locate._locate import located_or_why
from .._locate._located import Located
from .._program import _other_values as values
from .._program._choices import Choice
from .._program._doubled import Doubled, Wide, narrowed, widened
from .._program._jaxprs import Equation
from .._program._lines import line_of
from .._program._literals import lost_literals
from .._program._numbers import FEW_RUNS, Rounding, numbers
from .._program._trace import on_one_device
from .._types import Args, Numbers, PyTree
from . import _report as report
from ._bitwise import labels_of_equal_bits
from ._first_wrong import first_wrong
from ._form import form_differences
from ._jitted import JittedOnMesh
from ._judge import Judge, Mismatch, excused, unequal_copies
from ._programs import Chain, FunctionOnMesh, Programs, Selection, chained, results_of
from ._progress import progress
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
    - `lost`: the numbers of which the dtypes of the program leave 0, 1 or -1, in words: 0.9999 is 1 in
        bfloat16.
    - `untaken`: the sides of conditions and limits in the user's lines that no call has taken, in words.
    - `overflows`: the results that overflow in float16 on a mesh only, where the data is near the largest
        number of float16, in words. Each is a `RangeWarning` too.

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
    lost: tuple[str, ...]
    untaken: tuple[str, ...]
    overflows: tuple[str, ...]


# So many thresholds of the program are tried, with values of their size and of this part of it.
MOST_THRESHOLDS, SMALL = 3, 0.01

# Says of a mismatch whether it is a mistake.
Counts: TypeAlias = Callable[[Mismatch], bool]


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls in a row on a mesh, replayed, and those that they are compared with.

    **Attributes:**

    - `label`: on what mesh, and with what values, in words.
    - `args`, `steps`: the arguments of the first call, and the number of calls.
    - `counts`, `counts_on_devices`: which mismatches are mistakes, in the replay and on devices; `None` for
        all.
    - `on_devices`: whether they are made on devices too.
    - `extreme`: whether the values are so large that what agrees may be a limit, such as a saturated sigmoid,
        or not finite.
    """

    subject: Subject
    on_mesh: FunctionOnMesh
    label: str
    args: Args
    steps: int
    counts: Counts | None = None
    counts_on_devices: Counts | None = None
    on_devices: bool = True
    extreme: bool = False

    @property
    def place(self) -> str:
        """The mesh, if results that agree there are tested; else an empty string."""
        return self.on_mesh.label if not self.extreme and self.on_mesh.mesh.size > 1 else ""

    @cached_property
    def reference(self) -> Programs:
        return self.subject.reference(self.on_mesh)

    @cached_property
    def mesh(self) -> Chain:
        """The calls on the mesh in double precision."""
        programs, args = self.subject.programs(self.on_mesh), widened(self.args)
        if programs is self.reference:
            return self.right
        with self.subject.noting(self.on_mesh.label):
            return Chain(programs, args, self.subject.feed, self.steps, self.reference)

    @cached_property
    def right(self) -> Chain:
        """The calls of the reference."""
        with self.subject.noting(f"for {self.reference.what}"):
            return Chain(self.reference, widened(self.args), self.subject.feed, self.steps)

    def raises_alone(self) -> bool:
        """Whether the reference raises an error: in double precision, with noise, or in its own dtypes."""
        reference, feed = self.reference, self.subject.feed
        try:
            # A new chain runs all anew: what has raised once may not raise again.
            Chain(reference, widened(self.args), feed, self.steps).moved("own", FEW_RUNS)
            call = reference.on_one_device if reference.is_traced else reference.call
            chained(call, self.args, self.steps, feed)
        except Exception:  # Whatever the user's function raises, or a library in it.
            return True
        return False

    def again(self, step: int) -> list[Numbers]:
        """The numbers of a call of the reference in its own dtypes."""
        results = chained(self.reference.on_one_device, self.args, step + 1, self.subject.feed)
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
    - `line`: the line that is, if nothing else is found.
    - `of_range`: whether nothing but the range of a dtype is at fault.
    """

    step: int
    what: str
    lines: Sequence[str]
    count: int = 1
    gradient: bool = False
    has_line: bool = True
    line: str = ""
    of_range: bool = False


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
        self.overflows: list[str] = []
        # What the first line of the report says of the first failure.
        self.headline = ""
        self.agreed: list[str] = []
        # The arguments and the results of the calls on the last mesh, in double precision.
        self.calls_made: CallsMade = []
        # For each line with a loop that was stopped, in which calls it was first.
        self.unended: dict[str, str] = {}
        # For the calls with values of ours for which the function raises an error by itself, that error.
        self.raised: dict[str, str] = {}

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
            if subject.bitwise:
                with progress(f"{subject.name}: bits"):
                    self.agreed += labels_of_equal_bits(subject)
            if subject.selected or not subject.is_jitted:
                self._inside_jit(calls)
            self._moved(calls, before, results)
        self._with_other_values()

    def _with_other_values(self) -> None:
        """Compare calls with generic values, with what follows these, with large ones, and with NaN."""
        subject = self.subject
        usual = self._with("generic values", values.generic(subject.args, subject.keep))
        for calls in usual:
            self._compared(calls)
        for calls in usual:
            if calls.label not in self.raised:
                self._later(calls)
        self._near_thresholds()
        # What a narrow dtype makes of large values is mostly rounding.
        large = values.large(subject.args, subject.keep)
        for calls in self._with("large values", large, counts_on_devices=_overflows, extreme=True):
            self._compared(calls)
        if subject.is_jitted:
            # NaN runs in double precision only, where the program would be compared with itself.
            return
        with_nan = values.one_nan(subject.args, subject.keep, subject.call.split)
        if with_nan is None:
            return
        # What devices make of NaN in `jax.lax.pmax` differs, and is no mistake of the function.
        extreme = self._with("one NaN", with_nan, on_devices=False, extreme=True)
        for calls, without in zip(extreme, usual, strict=True):
            if without.label in self.raised:
                continue
            counts = functools.partial(_is_of_nan, without)
            self._compared(dataclasses.replace(calls, counts=counts))

    def _later(self, calls: Calls) -> None:
        """Compare what follows a call with generic values: with another batch, and counters further on."""
        subject, args, is_fed = self.subject, calls.args, self.subject.in_a_row > 1
        if is_fed:
            args = subject.feed(args, values.as_arrays(narrowed(calls.right.exact[0].results)))
        counters = subject.call.counters & values.free(args, subject.keep)
        fed_back = dict(subject.feed_back.numbers)
        limits = subject.call.counted_to if counters else []
        every = values.counts(limits) if counters else values.COUNTS[:1] if is_fed else ()
        for count in every:
            if self.failed:
                return
            new = values.later(args, subject.keep, fed_back, counters, count)
            what = f"counters at {count}" if counters else "the next batch"
            label = f"{calls.label} and {what}"
            on_devices = subject.is_jitted
            self._compared(dataclasses.replace(calls, label=label, args=new, on_devices=on_devices))

    def _near_thresholds(self) -> None:
        """Compare calls with values at which what was not chosen so far may be chosen."""
        subject = self.subject
        limits = {x for program in self._replayed() for x in program.thresholds}
        tried = sorted(limits)[:MOST_THRESHOLDS]
        # A norm of small numbers may still be above its threshold.
        for size in dict.fromkeys(size for x in tried for size in (x, x * SMALL)):
            if self.failed or not self._untaken():
                return
            new = values.within(subject.args, subject.keep, 2 * size)
            label, on_devices = f"values up to {2 * size:.4g}", subject.is_jitted
            for calls in self._with(label, new, on_devices=on_devices):
                self._compared(calls)

    def _replayed(self) -> list[Doubled]:
        """The programs that were replayed, on each mesh and on one device."""
        subject = self.subject
        both = [
            f(on_mesh) for on_mesh in subject.meshes for f in (subject.programs, subject.reference)
        ]
        return [programs.of(subject.types) for programs in both if programs.is_traced]

    def _untaken(self) -> dict[str, Choice]:
        """The sides of choices that no call has taken, neither on a mesh nor on one device, in words."""
        choices, taken = {}, set()
        for program in self._replayed():
            for (choice, side), was_taken in program.sides.items():
                words = report.untaken(line_of(choice.eqn), choice.unseen[side])
                choices[words] = choice
                taken.update([words] if was_taken else [])
        return {words: choice for words, choice in choices.items() if words not in taken}

    def _with(self, what: str, args: Args, **options: Any) -> list[Calls]:
        """A call on each mesh with other values."""
        return [
            Calls(self.subject, on_mesh, f"{on_mesh.label} with {what}", args, 1, **options)
            for on_mesh in self.subject.meshes
        ]

    @contextlib.contextmanager
    def _recording(self, calls: Calls, label: str) -> Iterator[None]:
        """Note that the calls which are compared inside agree, or how they fail."""
        number, count = self.subject.meshes.index(calls.on_mesh) + 1, len(self.subject.meshes)
        of_mesh = f"mesh {number} of {count}"
        try:
            with progress(f"{self.subject.name}: comparing {label} ({of_mesh})"):
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
            with progress(f"{self.subject.name}: looking for the line that goes wrong {label}"):
                place, line = (
                    located_in(calls, off.step, gradient=gradient) if off.has_line else ([], "")
                )
                line = line or off.line
            if off.of_range:
                self.overflows.append(report.overflow(off.what, label, line))
                return
            in_call = which if self.subject.is_jitted else ""
            self.headline = f"{f', see {line}' if line else ''}: {off.what} {label}{in_call}"
            head = f"{call}, compared with {calls.reference.what}:"
            self.failed.append("\n".join([head, *place, *off.lines]))
        except Exception as error:
            # A solver raises an error of its own where it does not converge. That says nothing of the mesh.
            if calls.args is self.subject.args or not calls.raises_alone():
                raise
            self.raised[label] = report.of_error(error)

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
                placed = calls.on_mesh.placed(calls.args)
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
            line = line_of(broken[0].eqn) if self.subject.is_jitted else None
            raise _Off(step, copies, report.broken_promises(broken), line=str(line or ""))
        leaves = self.subject.leaves(call.results.types, call.numbers)
        # A function of NumPy computes in its own dtypes only.
        rounding: Rounding = "double" if calls.reference.is_traced else "own"
        chains = calls.mesh, calls.right
        off = self.judge.compare(rounding, step, leaves, chains, calls.place)
        self._raise_if_off(calls, step, off, calls.counts)

    def _compare_devices(self, calls: Calls, results: Sequence[PyTree], first: int = 0) -> None:
        """Compare results of calls on devices, from call `first` on."""
        chains = calls.mesh, calls.right
        for step, result in enumerate(results, first):
            leaves = self.subject.leaves(result)
            compared = [leaf for leaf in leaves if leaf.number not in self.subject.left_out]
            copies = [unequal_copies(leaf, step, chains) for leaf in compared]
            if lines := [line for line in copies if line]:
                if not self.subject.is_jitted:
                    what = "copies on several devices differ"
                    raise _Off(step, what, [*lines, report.UNREDUCED])
                differs = next(x for x, line in zip(compared, copies, strict=True) if line)
                what = f"copies of {differs.path} on several devices differ"
                gradient = differs.number >= self.subject.count
                raise _Off(step, what, [*lines, report.LOST], gradient=gradient)
            off = self.judge.compare("own", step, leaves, chains)
            if calls.reference.is_traced and self.subject.unsharded is not False:
                off = excused(off, functools.partial(calls.again, step))
            self._raise_if_off(calls, step, off, calls.counts_on_devices)

    def _raise_if_off(
        self, calls: Calls, step: int, off: Sequence[Mismatch], counts: Counts | None
    ) -> None:
        off = [mismatch for mismatch in off if counts is None or counts(mismatch)]
        if not off:
            return
        # Where results are off, their gradient is off in consequence.
        count = self.subject.count
        shown = [mismatch for mismatch in off if mismatch.leaf.number < count] or off
        shown = _with_arrays_of_mesh(calls, shown)
        what, lines = report.headline(shown), report.results(shown)
        if self.subject.is_jitted:
            what += report.layout(shown[0])
        gradient = shown[0].leaf.number >= count
        # Data near the largest float16 is the check's, not the caller's: sums of shards have no room there.
        of_range = counts is _overflows and self.subject.call.uses(jnp.float16)
        raise _Off(step, what, lines, count=len(shown), gradient=gradient, of_range=of_range)

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
            if lost := self._lost():
                parts.append(
                    "\n".join(["What dtypes leave of numbers:", *(f"  - {x}" for x in lost)])
                )
            raise AssertionError("\n\n".join(parts))
        calls = [subject.programs(on_mesh).of(subject.types) for on_mesh in subject.meshes]
        untaken = self._untaken()
        branches = [words for words, choice in untaken.items() if choice.is_branch]
        first_raised = {error: label for label, error in reversed(self.raised.items())}
        return Checked(
            agreed=tuple(self.agreed),
            fed_back=subject.feed_back.pairs,
            differentiated=tuple(subject.paths[subject.count :]),
            constant=tuple(subject.paths[k] for k in subject.constant),
            unjudged=self.judge.unclear["double"],
            only_double=self.judge.unclear["own"],
            untested=(
                *untested(subject, self.calls_made),
                *map(report.unjudged, self.judge.never_judged),
                *(report.unended(line, label) for line, label in self.unended.items()),
                *(report.raised(error, label) for error, label in first_raised.items()),
                *(f"{words}, so that it is not tested." for words in branches),
            ),
            own_dtype=tuple(sorted(set().union(*(call.own_dtype for call in calls)))),
            lost=self._lost(),
            untaken=tuple(untaken),
            overflows=tuple(self.overflows),
        )

    def _lost(self) -> tuple[str, ...]:
        """The numbers of which the dtypes of the program leave 0 or 1, with their lines."""
        found: list[tuple[Equation, str]] = []
        for program in self._replayed():
            found += lost_literals(program.trace.closed, program.trace.exact)
        words = (f"{text}, at {line_of(eqn) or 'a library'}" for eqn, text in found)
        return tuple(dict.fromkeys(words))


def _overflows(mismatch: Mismatch) -> bool:
    """Whether a number is infinite or NaN that is finite in the reference."""
    finite = ~np.isfinite(mismatch.leaf.value) & np.isfinite(mismatch.want)
    return bool((finite & (mismatch.deviation > 0)).any())


def _is_of_nan(without: Calls, mismatch: Mismatch) -> bool:
    """Whether NaN goes other ways on the mesh than on one device.

    **Arguments:**

    - `without`: the same call without the NaN. A number on the mesh that is the same without it may be NaN on
        one device: there a product with zero hands it on, where a shard had no such product to take.
    """
    number = mismatch.leaf.number
    # The derivative of a maximum is none where NaN is among the numbers: there it is NaN or not by chance.
    is_gradient = number >= without.subject.count
    others = mismatch.leaf.value if is_gradient else without.right.exact[0].numbers[number]
    return mismatch.differs_from(others)


# Where a failing call goes wrong


def _with_arrays_of_mesh(calls: Calls, off: Sequence[Mismatch]) -> list[Mismatch]:
    """The mismatches, the largest first, with the arrays as they lie on the mesh."""
    shown = sorted(off, key=lambda mismatch: -mismatch.size)
    if not calls.on_mesh.has_devices or calls.subject.is_jitted:
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
    if isinstance(calls.on_mesh, JittedOnMesh):
        selected = subject.selected if gradient else Selection()
        return _first_on_devices(calls.on_mesh, calls.mesh.exact[step].args, selected)
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
            kept=subject.keep,
        )
        if place is not None:
            lines = [f"  {line}" for line in str(place).splitlines()]
            line = place.line if isinstance(place, Located) else ""
            return ["  With generic values:", *lines] if generic else lines, line
    return [], ""


def _first_on_devices(
    on_mesh: JittedOnMesh, args: Wide, selected: Selection
) -> tuple[list[str], str]:
    """`first_wrong` for a report, which must not end in an error of its own."""
    try:
        return first_wrong(on_mesh, args, selected)
    except (
        Exception
    ) as error:  # A bug of ours, or the compiler refuses the program with more results.
        if _locate.RAISE_FAILURES:
            raise
        text = " ".join(str(error).split())
        return [
            f"  No line is named, because looking for it failed: {type(error).__name__}: {text}"
        ], ""


def _is_simple(x: PyTree) -> bool:
    """Whether most numbers of an array outside of States are equal."""
    if not eqx.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating) or x.size < 2:
        return False
    return bool(2 * len(np.unique(np.asarray(x, np.float64))) < x.size)
