"""Further calls that narrow the cause down: with generic values, and with the same values on every shard."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._emulate._jaxprs import draws
from .._emulate._promises import Broken
from .._types import AnyLeaf, Numbers
from ._calls import Calls
from ._judge import Judge
from ._leaves import Leaf
from ._mismatch import Mismatch
from ._values import generic


@dataclasses.dataclass
class Probe:
    """What a failing call gives for other arguments. Nothing is called before it is needed.

    **Attributes:**

    - `calls`: the calls one of which fails.
    - `judge`: compares results.
    - `step`: the number of the failing call.
    """

    calls: Calls
    judge: Judge
    step: int

    def on_mesh(self, one: Mismatch) -> Mismatch:
        """The mismatch with an array that lies on the mesh, so that shards can be named."""
        return self._on_mesh(one, self.calls, self.step)

    def _on_mesh(self, one: Mismatch, calls: Calls, step: int) -> Mismatch:
        leaf = self._placed[one.number] if one.number < len(self._placed) else one.leaf
        before = calls.subject.before(calls.mesh.exact[step].given.values).get(one.number)
        sizes = dict(calls.one.mesh.shape)
        return dataclasses.replace(one, leaf=leaf, before=before, sizes=sizes)

    @cached_property
    def _placed(self) -> list[Leaf]:
        """The results as they lie on the mesh; empty where it has no devices."""
        calls = self.calls
        if not calls.one.has_devices:
            return []
        args, kwargs = calls.args
        return calls.subject.leaves(calls.one.mapped(*args, **kwargs))

    @cached_property
    def _generic(self) -> Calls:
        asked = self.calls.subject.asked
        return dataclasses.replace(self.calls, args=generic(self.calls.args, asked.keep), steps=1)

    @cached_property
    def mismatches(self) -> dict[int, Mismatch]:
        """The mismatches for generic arguments, by number of the leaf."""
        found = _result_or_none(lambda: self._compared(self._generic))
        return {one.number: self._on_mesh(one, self._generic, 0) for one in found or ()}

    @cached_property
    def broken(self) -> list[Broken]:
        """The promises that do not hold for generic arguments."""
        found: list[Broken] = _result_or_none(lambda: self._generic.mesh.broken(0)) or []
        return found

    def _compared(self, calls: Calls) -> list[Mismatch]:
        leaves = calls.subject.leaves(calls.mesh.exact[0].results.types)
        return self.judge.double(0, leaves, calls.mesh, calls.right)

    @cached_property
    def uniform_results(self) -> tuple[list[Numbers], list[Numbers]] | None:
        """The leaves of both results where every shard gets the part of the first shard."""

        def called() -> tuple[list[Numbers], list[Numbers]]:
            args, kwargs = self._generic.args
            placed = self.calls.one.mapped.place(*args)
            given = tuple(jax.tree.map(_first_part_everywhere, placed)), kwargs
            calls = dataclasses.replace(self._generic, args=given)
            return calls.mesh.exact[0].numbers, calls.right.exact[0].numbers

        found: tuple[list[Numbers], list[Numbers]] | None = _result_or_none(called)
        return found

    @cached_property
    def draws(self) -> bool:
        """Whether the function draws random numbers."""
        args, kwargs = self.calls.args
        mapped = self.calls.one.mapped
        return bool(
            _result_or_none(lambda: draws(eqx.filter_make_jaxpr(mapped)(*args, **kwargs)[0]))
        )


def _result_or_none(call: Callable[[], Any]) -> Any:
    """The result of a call; `None` where it fails, since a guess must not raise an error of its own."""
    try:
        return call()
    except Exception:
        return None


def _first_part_everywhere(x: AnyLeaf) -> AnyLeaf:
    """The array with the part of the first shard in the place of every part."""
    if not eqx.is_array(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    parts = Leaf("", x).parts
    if not parts:
        return x
    value = np.asarray(x)
    first = value[parts[0][1]]
    repeats = [n // max(k, 1) for n, k in zip(value.shape, first.shape, strict=True)]
    return jnp.asarray(np.tile(first, repeats))
