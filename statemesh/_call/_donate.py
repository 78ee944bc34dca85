"""Donation: which inputs a program may overwrite."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base import _compat as compat
from .._base._types import Leaf, PyTree
from .._resolve._buffers import Spared
from .._resolve._lanes import OtherShapes
from .._write_back import WriteBack
from ._program import Program


class DonatingProgram:
    """A program compiled so that it may overwrite inputs.

    Which inputs those are is known only after tracing: what was forwarded or only read is never given
    up. JAX remembers the trace, so that compiling with donation does not trace again.
    """

    def __init__(self, program: Program, how: Any) -> None:
        self.program = program
        self.how = how
        self._compiled: dict[Any, tuple[Any, Spared]] = {}
        # The program of the last call is tried first.
        self._last: tuple[Any, Spared] = (_refuse, Spared((), ()))

    def __call__(self, *arrays: Leaf) -> tuple[list[Leaf], WriteBack]:
        compiled, spared = self._last
        try:
            outputs: tuple[list[Leaf], WriteBack] = compiled(*spared(arrays))
        except OtherShapes:
            if compat.jit_disabled():
                return self.program(*arrays)
            compiled, spared = self._last = self._for(arrays)
            outputs = compiled(*spared(arrays))
        spared.keep(outputs[0])
        return outputs

    def trace(self, *arrays: Leaf) -> jax.stages.Traced:
        compiled, _ = self._for(arrays)
        traced: jax.stages.Traced = compiled.trace(*arrays)
        return traced

    def lower(self, *arrays: Leaf) -> jax.stages.Lowered:
        compiled, _ = self._for(arrays)
        lowered: jax.stages.Lowered = compiled.lower(*arrays)
        return lowered

    def _for(self, arrays: Sequence[Leaf]) -> tuple[Any, Spared]:
        key = _shapes(arrays)
        if key not in self._compiled:
            one = _OfShapes(self.program, key)
            traced = jax.jit(one).trace(*arrays)
            donated = self._given_up(arrays, *traced.out_info)
            spared = spared_by(self.program, arrays, donated)
            self._compiled[key] = (jax.jit(one, donate_argnums=donated), spared)
        return self._compiled[key]

    def _given_up(
        self, arrays: Sequence[Leaf], outputs: Sequence[Leaf], back: WriteBack
    ) -> tuple[int, ...]:
        kept = back.forwarded
        wanted = [k for k in self.program.given_up(self.how, back) if k not in kept]
        # A buffer can become only an output of its own size. JAX would warn of any other.
        room = Counter(
            (x.shape, x.dtype, where.spec)
            for x, where in zip(outputs, back.placements, strict=True)
        )
        inputs = self.program.layout.inputs
        given: list[int] = []
        for k in wanted:
            if not hasattr(arrays[k], "shape"):
                continue
            like = (arrays[k].shape, arrays[k].dtype, inputs[k].placement.spec)
            if room[like] > 0:
                room[like] -= 1
                given.append(k)
        return tuple(given)


class _OfShapes:
    """A program that is traced for these shapes only.

    What is donated depends on shapes. To compare them at every call would cost as much as the rest of it;
    but `jax.jit` traces anew where they differ.
    """

    def __init__(self, program: Program, shapes: tuple[Any, ...]) -> None:
        self.program = program
        self.shapes = shapes
        self.__name__ = self.__qualname__ = program.__name__

    def __call__(self, *flat_args: Leaf) -> tuple[list[Leaf], WriteBack]:
        if _shapes(flat_args) != self.shapes:
            raise OtherShapes
        return self.program(*flat_args)


def _refuse(*arrays: Leaf) -> Any:
    raise OtherShapes


def _shapes(arrays: Sequence[Leaf]) -> tuple[PyTree, ...]:
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)


def spared_by(program: Program, arrays: Sequence[Leaf], donated: Sequence[int]) -> Spared:
    """The guard that keeps inputs like these from being given up twice."""
    sizes = [program.layout.part_size(k, x) for k, x in enumerate(arrays)]
    return Spared(donated, sizes)
