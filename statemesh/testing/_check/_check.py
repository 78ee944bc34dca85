"""The comparisons that `assert_equivalent` makes."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import _errors as errors
from .._locate._lines import line_of
from .._program._jaxprs import Equation
from .._types import Numbers, PyTree
from . import _report as report
from . import _untested_words as words
from . import _values as values
from ._calls import Calls
from ._chain import Chain
from ._checked import Checked
from ._copies import copies_of
from ._judge import Judge
from ._leaves import Leaf
from ._mismatch import Mismatch
from ._place import located_in, results_on_mesh
from ._reference import chained
from ._subject import Subject
from ._through_files import saved as saved
from ._untested import Made


class Check:
    """A function, called in all ways that should give the same results, and the failures found so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.judge = Judge(subject.asked.tolerance, subject.left_out, subject.exact)
        self.failed: list[str] = []
        self.agreed: list[str] = []
        self.made: list[Made] = []
        # For each line with a loop that was stopped, in which calls it was first.
        self.unended: dict[str, str] = {}

    def run(self) -> None:
        """Compare calls on every mesh; on the last mesh in other ways; and with other values."""
        asked = self.subject.asked
        results: list[PyTree] = []
        last = None
        for one in asked.meshes:
            calls = Calls(self.subject, one, one.where, asked.args, self.subject.steps)
            before, results = results, self._compared(calls)
            last = calls
        # The other ways to call cost compiles, and would mostly fail in the same way.
        if last is None or self.failed:
            return
        if results:
            self._inside_jit(last)
            self._moved(last, before, results)
        for other in _OTHERS:
            given = other.make(asked.args, asked.keep)
            for one in asked.meshes:
                where, how = f"{one.where} {other.what}", (other.counts, other.on_devices)
                self._compared(Calls(self.subject, one, where, given, 1, *how))

    def _compared(self, calls: Calls) -> list[PyTree]:
        """Compare calls on a mesh. They are replayed first: on devices a program that is wrong may hang.

        **Returns:** the results on devices; empty if there are none or if the replay is off already.
        """
        if lines := self._other_form(calls):
            lines = [f"  - {line}." for line in lines]
            self._fail(calls, calls.where, 0, lines, located=False)
            return []
        for step in range(calls.steps):
            if self._is_unended(calls, step) or self._replay_fails(calls, step):
                return []
        found: list[PyTree] = []
        if self._is_unended_in_own_dtypes(calls):
            return []
        if calls.one.has_devices and calls.on_devices:
            with self.subject.noting(calls.one.where):
                mapped = calls.one.mapped
                found = chained(mapped, calls.args, calls.steps, self.subject.feed)
            if self._fails(calls, calls.where, found):
                return []
        self.agreed.append(calls.where)
        if calls.one is self.subject.asked.meshes[-1]:
            self.made += calls.made
        return found

    def _other_form(self, calls: Calls) -> list[str]:
        """Lines on what differs from the reference in structure, dtypes or static values."""
        subject, reference = self.subject, calls.reference
        with subject.noting(calls.one.where):
            form = subject.programs(calls.one).doubled.form(subject.types)
        with subject.noting(f"for {reference.what}"):
            return subject.other_form(form, reference.form(subject.types, calls.args))

    def _is_unended(self, calls: Calls, step: int) -> bool:
        """Whether a loop was stopped in a call."""
        return self._note_unended(
            calls, calls.mesh.exact[step].unended or calls.right.exact[step].unended
        )

    def _is_unended_in_own_dtypes(self, calls: Calls) -> bool:
        """Whether a loop would run for ever on devices, with values that are not the caller's."""
        if calls.args is self.subject.asked.args or not isinstance(calls.right, Chain):
            return False
        return calls.on_devices and self._note_unended(calls, calls.right.unended("own"))

    def _note_unended(self, calls: Calls, loops: Sequence[Equation]) -> bool:
        for loop in loops:
            self.unended.setdefault(str(line_of(loop) or "a library"), calls.where)
        return bool(loops)

    def _replay_fails(self, calls: Calls, step: int) -> bool:
        exact = calls.mesh.exact[step]
        if lines := self.subject.other_form(
            exact.results.types, calls.right.exact[step].results.types
        ):
            lines = [f"  - {line}." for line in lines]
            self._fail(calls, calls.where, step, lines, located=False)
            return True
        broken = calls.mesh.broken(step)
        if broken:
            self._fail(calls, calls.where, step, report.broken_promises(broken))
            return True
        leaves = self.subject.leaves(exact.results.types)
        if calls.reference.is_exact:
            found = self.judge.double(step, leaves, calls.mesh, calls.right, calls.place)
        else:
            got = exact.numbers
            found = self.judge.own(step, leaves, got, calls.mesh, calls.right, None, calls.place)
        return self._report(calls, calls.where, step, found)

    def _fails(self, calls: Calls, where: str, results: Sequence[PyTree], first: int = 0) -> bool:
        """Whether results of calls on devices, from call `first` on, are off."""
        for step, result in enumerate(results, first):
            leaves = self.subject.leaves(result)
            again = None
            if calls.reference.is_exact and self.subject.asked.unsharded is not False:
                again = partial(self._again, calls, step)
            if lines := self._unequal_copies(calls, step, leaves):
                self._fail(calls, where, step, [*lines, report.UNREDUCED])
                return True
            got = [leaf.value for leaf in leaves]
            found = self.judge.own(step, leaves, got, calls.mesh, calls.right, again)
            if self._report(calls, where, step, found):
                return True
        return False

    def _again(self, calls: Calls, step: int) -> list[Numbers]:
        """The numbers of a call of the reference in its own dtypes."""
        return [leaf.value for leaf in self.subject.leaves(calls.again[step])]

    def _unequal_copies(self, calls: Calls, step: int, leaves: Sequence[Leaf]) -> list[str]:
        """Lines on results of which devices hold copies that differ by more than rounding."""
        found = []
        for number, leaf in enumerate(leaves):
            copies = copies_of(leaf.path, leaf.array)
            if number in self.subject.left_out or copies is None or not copies.spread.any():
                continue
            allowed = self.judge.allowed(step, number, leaf, calls.mesh, calls.right)
            if worst := copies.worst(allowed):
                found.append(errors.unequal_copies_line(worst))
        return found

    def _inside_jit(self, calls: Calls) -> None:
        """Compare the calls inside `jax.jit`, and on devices the gradient."""
        programs, where = self.subject.programs(calls.one), f"inside jit {calls.one.where}"
        with self.subject.noting(where):
            args, kwargs = calls.args
            placed = calls.one.mapped.place(*args), kwargs
            found = chained(programs.jitted, placed, calls.steps, self.subject.feed)
        if not self._fails(calls, where, found):
            self.agreed.append(where)

    def _moved(self, calls: Calls, before: Sequence[PyTree], results: Sequence[PyTree]) -> None:
        """Compare calls with models that were saved halfway, loaded, and placed on this mesh."""
        asked, half = self.subject.asked, calls.steps // 2
        if not half or not self.subject.feed_back or asked.unsharded is False:
            return
        given, source = calls.args, asked.meshes[-2 if before else -1].where
        for result in (before or results)[:half]:
            given = self.subject.feed(given, result)
        where = f"saved {source} and placed {calls.one.where}"
        with self.subject.noting(where):
            loaded = saved(given)
            found = chained(calls.one.mapped, loaded, calls.steps - half, self.subject.feed)
        if not self._fails(calls, where, found, half):
            self.agreed.append(where)

    # What is reported

    def _report(self, calls: Calls, where: str, step: int, found: Sequence[Mismatch]) -> bool:
        found = [one for one in found if calls.counts is None or calls.counts(one)]
        if not found:
            return False
        # Where results are off, their gradient is off in consequence.
        count = self.subject.count
        shown = [one for one in found if one.number < count] or found
        lines = results_on_mesh(calls, shown)
        self._fail(calls, where, step, lines, of=len(shown), gradient=shown[0].number >= count)
        return True

    def _fail(
        self,
        calls: Calls,
        where: str,
        step: int,
        lines: Sequence[str],
        *,
        of: int = 1,
        gradient: bool = False,
        located: bool = True,
    ) -> None:
        at = f"{where}, call {step + 1} of {calls.steps}, " if calls.steps > 1 else f"{where}, "
        # The line is the same on every mesh.
        if self.failed:
            self.failed.append(report.fails_too(at, of))
            return
        place = located_in(calls, step, gradient=gradient) if located else []
        self.failed.append(report.failed_call(at, calls.reference.what, [*place, *lines]))

    def conclude(self) -> Checked:
        """What was checked.

        **Raises:** `AssertionError` for what failed.
        """
        subject, name = self.subject, self.subject.asked.name
        if self.failed:
            chained = subject.feed_back if subject.steps > 1 else None
            raise report.not_equivalent(name, self.failed, self.agreed, chained)
        programs = [subject.programs(one).doubled for one in subject.asked.meshes]
        own_dtype = set().union(*(one.own_dtype(subject.types) for one in programs))
        return Checked(
            agreed=tuple(self.agreed),
            fed_back=subject.feed_back.pairs,
            differentiated=tuple(subject.paths[subject.count :]),
            constant=subject.constant,
            unjudged=self.judge.unjudged,
            only_double=self.judge.only_double,
            untested=(
                *subject.untested(self.made),
                *map(words.unjudged, self.judge.never_judged),
                *(words.unended(line, where) for line, where in self.unended.items()),
            ),
            own_dtype=tuple(sorted(own_dtype)),
        )


@dataclasses.dataclass(frozen=True)
class _Others:
    """Other values for the arguments.

    **Attributes:**

    - `what`: what is said of them.
    - `make`: gives them, from the arguments and the paths that are kept.
    - `counts`: which mismatches are mistakes; `None` for all.
    - `on_devices`: whether the function is called on devices with them.
    """

    what: str
    make: Callable[..., Any]
    counts: Callable[[Mismatch], bool] | None = None
    on_devices: bool = True


_OTHERS = (
    _Others(report.GENERIC, values.generic),
    _Others(report.LARGE, values.large, lambda one: one.is_overflow),
    # What `jax.lax.pmax` makes of NaN differs between devices, and is no mistake of the function.
    _Others(report.NAN, values.one_nan, lambda one: one.is_number_on_one_device, on_devices=False),
)
