"""The comparisons that `assert_equivalent` makes."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .. import _errors as errors
from .._locate._lines import line_of
from .._locate._locate import located, located_in_gradient
from .._program._doubled import narrowed, widened
from .._program._jaxprs import Equation
from .._types import Fun, Numbers, PyTree
from . import _report as report
from . import _values as values
from ._judge import Args, Chain, Judge, Leaf, Mismatch, RightCalls, Traced, chained, copies_of
from ._programs import OnMesh, results_of
from ._subject import Reference, Subject
from ._untested import Made
from ._values import generic
from ._values import saved as saved


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls in a row on a mesh, replayed, and those that they are compared with.

    **Attributes:**

    - `where`: on what mesh, and with what values, in words.
    - `args`, `steps`: the arguments of the first call, and the number of calls.
    - `counts`: which mismatches are mistakes; `None` for all.
    - `on_devices`: whether they are made on devices too.
    """

    subject: Subject
    one: OnMesh
    where: str
    args: Args
    steps: int
    counts: Callable[[Mismatch], bool] | None = None
    on_devices: bool = True

    @property
    def place(self) -> str:
        """The mesh, if it has several devices and every mismatch is a mistake; else an empty string."""
        return self.one.where if self.counts is None and self.one.mesh.size > 1 else ""

    @cached_property
    def reference(self) -> Reference:
        return self.subject.reference(self.one)

    @cached_property
    def mesh(self) -> Chain:
        """The calls on the mesh in double precision."""
        reference = self.reference
        with self.subject.noting(self.one.where):
            return Chain(
                self.subject.programs(self.one).doubled,
                widened(self.args),
                self.subject.feed,
                self.steps,
                noisy=False,
                compared_with=reference.doubled if isinstance(reference, Traced) else None,
            )

    @cached_property
    def right(self) -> RightCalls:
        """The calls of the reference."""
        with self.subject.noting(f"for {self.reference.what}"):
            return self.reference.calls(self.args, self.steps, self.subject.feed)

    @cached_property
    def again(self) -> list[PyTree]:
        """The calls of the reference in its own dtypes."""
        return self.reference.again(self.args, self.steps, self.subject.feed)

    @property
    def made(self) -> list[Made]:
        """The arguments and the results of each call on the mesh."""
        steps = self.mesh.exact
        return [(step.given.values, results_of(step.results.values)) for step in steps]


def results_on_mesh(calls: Calls, found: Sequence[Mismatch]) -> list[str]:
    """Lines on the results that are off, with the shards that hold them."""
    shown = sorted(found, key=lambda one: -one.size)
    if calls.one.has_devices:
        args, kwargs = calls.args
        leaves = calls.subject.leaves(calls.one.mapped(*args, **kwargs))
        shown = [
            dataclasses.replace(one, leaf=leaves[one.number]) if one.number < len(leaves) else one
            for one in shown
        ]
    return report.results(shown)


def located_in(calls: Calls, step: int, *, gradient: bool) -> list[str]:
    """Lines on the place in the program; none where it cannot be found.

    Simple values, such as those that Hypothesis shrinks to, hide the place: many lines compute the same from
    zeros. Then other values are tried first.
    """
    reference = _reference(calls)
    if reference is None:
        return []
    given = narrowed(calls.mesh.exact[step].given)
    tried = [(given, False)]
    if step == 0 and _is_simple(given):
        tried.insert(0, (generic(given, calls.subject.asked.keep), True))
    for args, other in tried:
        find = located_in_gradient if gradient and not other else located
        try:
            found = find(calls.one.mapped, reference, *args)
        except Exception:  # A report must not end in an error of its own.
            continue
        if found is not None:
            return report.located(found, generic=other)
    return []


def _reference(calls: Calls) -> Fun | None:
    """The function whose program is compared, if there is one."""
    given = calls.subject.asked.unsharded
    if given is False or not calls.reference.is_exact:
        return None
    return calls.subject.asked.meshes[0].mapped.unsharded if given is None else given


def _is_simple(args: Args) -> bool:
    """Whether most numbers of some array outside of States are equal."""
    is_state: Callable[[object], bool] = lambda x: isinstance(x, sm.State)
    return any(map(_repeats, jax.tree.leaves(args, is_leaf=is_state)))


def _repeats(x: PyTree) -> bool:
    if not eqx.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating) or x.size < 2:
        return False
    return bool(2 * len(np.unique(np.asarray(x, np.float64))) < x.size)


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
                *map(report.unjudged, self.judge.never_judged),
                *(report.unended(line, where) for line, where in self.unended.items()),
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
