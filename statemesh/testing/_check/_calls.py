"""Calls in a row on a mesh, and the calls that they are compared with."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

from .._program._doubled import widened
from .._types import PyTree
from ._chain import Chain
from ._gradients import results_of
from ._mismatch import Mismatch
from ._programs import OnMesh
from ._reference import Args, RightCalls, Traced
from ._subject import Reference, Subject
from ._untested import Made


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
