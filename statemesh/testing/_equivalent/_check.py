"""The comparisons that `assert_equivalent` makes."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax

from .. import _errors as errors
from .._emulate._emulate import emulate
from .._emulate._jaxprs import draws
from .._types import Fun, PyTree
from . import _report as report
from ._compare import (
    Mismatch,
    Tolerance,
    as_arrays,
    compare,
    leaves_of,
    longest_reduction,
    perturbed,
)
from ._guess import guess
from ._mapped_call import MappedCall
from ._probe import Probe
from ._run import Call, calls_with_a_move, carried, chained_calls, fed_back, gradient


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right results.

    **Attributes:**

    - `what`: the name of the reference in messages.
    - `call`: the function that gives the results.
    - `results`: the results of each of the calls.
    - `perturbed`: the results for arguments that are off by rounding.
    """

    what: str
    call: Call
    results: list[PyTree]
    perturbed: list[PyTree]


class Check:
    """A function, called in all ways that should give the same results, and the failures found so far.

    **Arguments:** those of `assert_equivalent`.
    """

    def __init__(
        self,
        name: str,
        args: tuple[PyTree, ...],
        meshes: Sequence[MappedCall],
        unsharded: Fun | Literal[False] | None,
        steps: int,
        tolerance: float | None,
    ) -> None:
        self.name, self.args, self.meshes, self.steps = name, as_arrays(args), meshes, steps
        self.tolerance = Tolerance(longest_reduction(args), tolerance)
        self.failed: list[str] = []
        self.agreed: list[str] = []
        with self._noting_where(meshes[0].where):
            self.carry = carried(args, jax.block_until_ready(meshes[0].mapped(*self.args)))
        # Where results depend on the mesh, each mesh has a reference of its own.
        self.portable = unsharded is not False
        self.references = [
            self._reference(one, unsharded) for one in meshes[: 1 if self.portable else None]
        ]
        self.references *= len(meshes) if self.portable else 1

    def _reference(self, one: MappedCall, unsharded: Fun | Literal[False] | None) -> Reference:
        call: Call
        if unsharded is False:
            what, call = "what emulate gives", functools.partial(emulate, one.mapped)
        elif unsharded is None:
            what, call = "the function on one device", one.mapped.unsharded
        else:
            what, call = "the unsharded function", unsharded
        with self._noting_where(f"for {what}"):
            rows = [self._results(call, args) for args in (self.args, perturbed(self.args))]
        return Reference(what, call, *rows)

    def _results(self, call: Call, args: tuple[PyTree, ...] | None = None) -> list[PyTree]:
        return chained_calls(call, self.args if args is None else args, self.steps, self.carry)

    @contextlib.contextmanager
    def _noting_where(self, where: str, *notes: str) -> Iterator[None]:
        """Add a note to an error of the function that says where the function was called."""
        try:
            yield
        except Exception as error:
            for note in (errors.note_where(self.name, where), *notes):
                error.add_note(note)
            raise

    def calls(self) -> None:
        """Compare the calls on every mesh; on the last mesh, the other ways to call."""
        for one, reference in zip(self.meshes, self.references, strict=True):
            with self._noting_where(one.where):
                results = self._results(one.mapped)
            self._compared(one.where, results, one, reference)
        # The other ways to call cost compiles, and would mostly fail in the same way.
        if self.failed:
            return
        placed = one.mapped.place(*self.args)
        self._compared(f"inside jit {one.where}", self._results(one.jitted, placed), one, reference)
        if not self.portable:
            return
        replayed = self._results(functools.partial(emulate, one.mapped))
        self._compared(f"emulated {one.where}", replayed, one, reference)
        if self.carry and self.steps > 1:
            source, where = reference.call, "unsharded"
            if len(self.meshes) > 1:
                source, where = self.meshes[-2].mapped, self.meshes[-2].where
            moved = calls_with_a_move(source, one.mapped, self.args, self.steps, self.carry)
            self._compared(f"saved {where} and placed {one.where}", moved, one, reference)

    def _compared(
        self, where: str, results: list[PyTree], one: MappedCall, reference: Reference
    ) -> None:
        given = self.args
        rows = zip(results, reference.results, reference.perturbed, strict=True)
        for step, (got, want, near) in enumerate(rows):
            found = self._mismatches(given, got, want, near)
            if found:
                at = f"call {step + 1} of {self.steps}, " if self.steps > 1 else ""
                lines = _lines(found, self._probe(given, one, reference))
                self._fail(f"{where}, {at}", reference, lines)
                return
            given = fed_back(self.args, want, self.carry)
        self.agreed.append(where)

    def _mismatches(
        self, given: tuple[PyTree, ...], got: PyTree, want: PyTree, near: PyTree
    ) -> list[Mismatch]:
        # The values of the leaves that are fed back, as they were before the call.
        old = [leaf.value for leaf in leaves_of("", given[: self.carry])]
        count = len(leaves_of("", got))
        before = dict(zip(range(count - len(old), count), old, strict=True))
        return compare(f"{self.name}(...)", got, want, near, before, self.tolerance)

    def _probe(self, given: tuple[PyTree, ...], one: MappedCall, reference: Reference) -> Probe:
        def compared(args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree, list[Mismatch]]:
            got, want = one.mapped(*args), reference.call(*args)
            near = reference.call(*perturbed(args))
            return got, want, self._mismatches(args, got, want, near)

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

            def compared(args: tuple[PyTree, ...], got: Call = got, want: Call = want) -> Any:
                of = got(*args), want(*args), want(*perturbed(args))
                return *of[:2], compare("args", *of, {}, self.tolerance)

            with self._noting_where(f"for {where}", errors.NOTE_GRADIENT):
                found = compared(self.args)[2]
            if found:
                probe = Probe(self.args, one.mapped.place, compared, lambda args: False)
                lines = _lines(found, probe)
                # For the simple values that Hypothesis shrinks to, the results can be right by chance.
                other = self._probe(self.args, one, reference)
                if results := list(other.mismatches.values()):
                    lines += [report.WITH_OTHER_VALUES, *_lines(results, other)]
                self._fail(f"{where}, ", reference, lines)
            else:
                self.agreed.append(where)

    def _fail(self, where: str, reference: Reference, lines: list[str]) -> None:
        self.failed.append(report.failed_call(where, reference.what, lines))

    def conclude(self) -> None:
        if self.failed:
            raise report.not_equivalent(self.name, self.failed, self.agreed)


def _lines(found: list[Mismatch], probe: Probe) -> list[str]:
    return [_line(mismatch, guess(mismatch, probe)) for mismatch in found]


def _line(mismatch: Mismatch, cause: str | None) -> str:
    got, want = mismatch.got.value, mismatch.want
    what = f"{mismatch.got.array.dtype}[{','.join(map(str, got.shape))}]"
    if not mismatch.same_shape:
        off = report.other_shape(got.shape, want.shape)
        return report.leaf_report(mismatch.got.path, what, off, cause)
    at = mismatch.worst
    off = report.off_by(float(mismatch.deviation[at]), at, got[at].item(), want[at].item())
    return report.leaf_report(mismatch.got.path, what, off + _where(mismatch), cause)


def _where(mismatch: Mismatch) -> str:
    shards = mismatch.shards
    if not shards:
        return ""
    everywhere = len(shards) == len(mismatch.got.parts)
    return report.on_shards([] if everywhere else shards, mismatch.tolerance)
