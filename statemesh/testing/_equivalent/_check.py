"""What `assert_equivalent` compares with what."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax

from .. import _errors as errors
from .._emulate._emulate import emulate
from .._emulate._jaxprs import draws
from . import _report as report
from ._compare import Finding, Tolerance, as_arrays, compare, leaves_of, nudged, terms_of
from ._guess import guess
from ._mapped_call import MappedCall
from ._probe import Probe
from ._run import Call, carried, fed_back, gradient, in_a_row, moving


@dataclasses.dataclass(frozen=True)
class Reference:
    """What is right.

    **Attributes:**

    - `what`: what messages call it.
    - `call`: gives it.
    - `results`: after each of the calls in a row.
    - `nudged`: the same, of arguments that are off by rounding.
    """

    what: str
    call: Call
    results: list[Any]
    nudged: list[Any]


class Check:
    """A function, called in all ways that should give the same, and what was found.

    **Arguments:** those of `assert_equivalent`.
    """

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...],
        meshes: Sequence[MappedCall],
        unsharded: Callable[..., Any] | Literal[False] | None,
        steps: int,
        tolerance: float | None,
    ) -> None:
        self.name, self.args, self.meshes, self.steps = name, as_arrays(args), meshes, steps
        self.tolerance = Tolerance(terms_of(args), tolerance)
        self.failed: list[str] = []
        self.agreed: list[str] = []
        with self._noting(meshes[0].where):
            self.carry = carried(args, jax.block_until_ready(meshes[0].mapped(*self.args)))
        # Where results depend on the mesh, each has a reference of its own.
        self.portable = unsharded is not False
        self.references = [
            self._reference(one, unsharded) for one in meshes[: 1 if self.portable else None]
        ]
        self.references *= len(meshes) if self.portable else 1

    def _reference(
        self, one: MappedCall, unsharded: Callable[..., Any] | Literal[False] | None
    ) -> Reference:
        call: Call
        if unsharded is False:
            what, call = "what emulate gives", functools.partial(emulate, one.mapped)
        elif unsharded is None:
            what, call = "the function on one device", one.mapped.unsharded
        else:
            what, call = "the unsharded function", unsharded
        with self._noting(f"for {what}"):
            rows = [self._row(call, args) for args in (self.args, nudged(self.args))]
        return Reference(what, call, *rows)

    def _row(self, call: Call, args: tuple[Any, ...] | None = None) -> list[Any]:
        return in_a_row(call, self.args if args is None else args, self.steps, self.carry)

    @contextlib.contextmanager
    def _noting(self, where: str, *notes: str) -> Iterator[None]:
        """Say in an error of the function's own where it was called."""
        try:
            yield
        except Exception as error:
            for note in (errors.note_where(self.name, where), *notes):
                error.add_note(note)
            raise

    def calls(self) -> None:
        """Compare the calls on every mesh, and on the last the ways to make them."""
        for one, reference in zip(self.meshes, self.references, strict=True):
            with self._noting(one.where):
                results = self._row(one.mapped)
            self._compared(one.where, results, one, reference)
        if self.failed:
            return
        placed = one.mapped.place(*self.args)
        self._compared(f"inside jit {one.where}", self._row(one.jitted, placed), one, reference)
        if not self.portable:
            return
        replayed = self._row(functools.partial(emulate, one.mapped))
        self._compared(f"emulated {one.where}", replayed, one, reference)
        if self.carry and self.steps > 1:
            source, where = reference.call, "unsharded"
            if len(self.meshes) > 1:
                source, where = self.meshes[-2].mapped, self.meshes[-2].where
            moved = moving(source, one.mapped, self.args, self.steps, self.carry)
            self._compared(f"saved {where} and placed {one.where}", moved, one, reference)

    def _compared(
        self, where: str, results: list[Any], one: MappedCall, reference: Reference
    ) -> None:
        given = self.args
        rows = zip(results, reference.results, reference.nudged, strict=True)
        for step, (got, want, near) in enumerate(rows):
            found = self._wrong(given, got, want, near)
            if found:
                at = f"call {step + 1} of {self.steps}, " if self.steps > 1 else ""
                lines = _lines(found, self._probe(given, one, reference))
                self._fail(f"{where}, {at}", reference, lines)
                return
            given = fed_back(self.args, want, self.carry)
        self.agreed.append(where)

    def _wrong(self, given: tuple[Any, ...], got: Any, want: Any, near: Any) -> list[Finding]:
        # What the fed back leaves of the result were before the call.
        old = [leaf.value for leaf in leaves_of("", given[: self.carry])]
        count = len(leaves_of("", got))
        before = dict(zip(range(count - len(old), count), old, strict=True))
        return compare(f"{self.name}(...)", got, want, near, before, self.tolerance)

    def _probe(self, given: tuple[Any, ...], one: MappedCall, reference: Reference) -> Probe:
        def compared(args: tuple[Any, ...]) -> tuple[Any, Any, list[Finding]]:
            got, want = one.mapped(*args), reference.call(*args)
            near = reference.call(*nudged(args))
            return got, want, self._wrong(args, got, want, near)

        draws_in = lambda args: draws(eqx.filter_make_jaxpr(one.mapped)(*args)[0])
        return Probe(given, one.mapped.place, compared, draws_in)

    def gradients(self) -> None:
        """Compare the gradients on every mesh."""
        if self.failed or not any(map(eqx.is_inexact_array, jax.tree.leaves(self.args))):
            return
        for one, reference in zip(self.meshes, self.references, strict=True):
            where = f"the gradient {one.where}"
            got = one.gradient
            want = lambda *args, call=reference.call: gradient(call, args)

            def compared(args: tuple[Any, ...], got: Call = got, want: Call = want) -> Any:
                of = got(*args), want(*args), want(*nudged(args))
                return *of[:2], compare("args", *of, {}, self.tolerance)

            with self._noting(f"for {where}", errors.NOTE_GRADIENT):
                found = compared(self.args)[2]
            if found:
                probe = Probe(self.args, one.mapped.place, compared, lambda args: False)
                lines = _lines(found, probe)
                # Of values as simple as Hypothesis leaves them the results can be right by chance.
                other = self._probe(self.args, one, reference)
                if results := list(other.findings.values()):
                    lines += [report.WITH_OTHER_VALUES, *_lines(results, other)]
                self._fail(f"{where}, ", reference, lines)
            else:
                self.agreed.append(where)

    def _fail(self, where: str, reference: Reference, lines: list[str]) -> None:
        self.failed.append(report.failed_call(where, reference.what, lines))

    def conclude(self) -> None:
        if self.failed:
            raise report.not_equivalent(self.name, self.failed, self.agreed)


def _lines(found: list[Finding], probe: Probe) -> list[str]:
    return [_line(finding, guess(finding, probe)) for finding in found]


def _line(finding: Finding, said: str | None) -> str:
    got, want = finding.got.value, finding.want
    what = f"{finding.got.array.dtype}[{','.join(map(str, got.shape))}]"
    if not finding.same_shape:
        off = report.other_shape(got.shape, want.shape)
        return report.wrong_leaf(finding.got.path, what, off, said)
    at = finding.worst
    off = report.off_by(float(finding.apart[at]), at, got[at].item(), want[at].item())
    return report.wrong_leaf(finding.got.path, what, off + _where(finding), said)


def _where(finding: Finding) -> str:
    shards = finding.shards
    if not shards:
        return ""
    everywhere = len(shards) == len(finding.got.parts)
    return report.on_shards([] if everywhere else shards, finding.allowed)
