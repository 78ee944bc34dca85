"""Over which axes a value may differ between instances, as it is learnt while one instance is traced.

JAX's types say so inside a checked `shard_map`, and the batching of a `vmap` says so for its lanes
(`FromTypes`). For the lanes of `pmap2` the program is traced and walked (`FromDataflow`). Where the author
turned the check off, it is walked too, but nothing is known and so nothing is refused.

Both classes have the same methods. Whatever runs inside an instance is run by `run`.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import jax

from .._axes._differing import Recorded, all_axes, check_unsummed, looking_for_left, settled
from .._axes._joined import AnyArray
from .._axes._mesh_and_lanes import (
    lanes_in_checked_map,
    meshes_and_lanes,
    same_in_lanes,
    varying_over,
)
from .._base._errors import StatemeshError
from .._base._types import NO_AXES, Axes, AxisName, Fun, Leaf, PyTree
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import tree_util
from .._jax._jaxprs import Links
from .._state._state import origins, with_origins
from ._origins import Traced, trace


# The axes over which arrays may differ, by the identity of the arrays. The arrays are kept with them: the
# `id` of one that is gone may be given to another.
_AxesOfArrays: TypeAlias = dict[int, tuple[AnyArray, Axes]]


def _by_identity(arrays: Sequence[AnyArray], axes: Sequence[Axes]) -> _AxesOfArrays:
    return {id(x): (x, over) for x, over in zip(arrays, axes, strict=True)}


class FromTypes:
    """Learnt from JAX: on a mesh from its types and from the program, in lanes from what a `vmap` batches.

    Neither types nor the program alone would do. Some of JAX's rules for types lose what varies, and types
    do not say that all shards have the same after an `all_gather`.

    **Arguments:**

    - `axis_names`: the axes that are asked about.
    """

    # A value that differs where one copy is kept is refused.
    is_known = True

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        self.axis_names = axis_names
        self.meshes = frozenset(meshes_and_lanes(axis_names)[0])
        self.recorded = Recorded()
        # What the program shows of arrays that were computed operation by operation.
        self.shown: _AxesOfArrays = {}

    def start(self, arrays: Sequence[Leaf], axes: Sequence[Axes]) -> None:
        """Begin with an instance's inputs, and the axes over which each is split. The types say it here."""

    def run(
        self,
        fun: Fun,
        operands: Sequence[PyTree],
        links: Links | None = None,
        counted: bool = False,
    ) -> PyTree:
        """What a function makes of trees.

        **Arguments:**

        - `links`: for the states among the operands, where it matters which of them the results continue.
        - `counted`: whether some state's policy depends on how many instances have the same value.
        """
        if lanes_in_checked_map(self.axis_names):
            return self._run_in_lanes(fun, operands, links, counted)
        is_asked = links is not None or bool(counted and self.meshes)
        if compat.under_jit():
            if not is_asked:
                return fun(*operands)
            traced = trace(fun, operands, None, links)
            return traced.skeleton.filled(jaxprs.run_jaxpr(traced.closed, traced.arguments))
        # With `jit=False` it runs operation by operation, for someone who debugs it. It is traced too only if
        # anyone asks for what its program shows.
        with looking_for_left() as left:
            result = fun(*operands)
        if not (is_asked or left):
            return result
        result, outputs, program = _with_program(fun, operands, result, None, links)
        if program is None:
            return result
        jaxpr = jaxprs.open_jaxpr(program.closed)
        typed = [compat.varying(x) for x in program.arguments]
        sizes = {name: jax.lax.axis_size(name) for name in self.meshes}
        check_unsummed(jaxpr, typed, sizes, unrecorded=jaxpr.eqns)
        if is_asked:
            self.shown.update(_by_identity(outputs, all_axes(jaxpr, typed)))
        return result

    def _run_in_lanes(
        self, fun: Fun, operands: Sequence[PyTree], links: Links | None, counted: bool
    ) -> PyTree:
        """Run it in the lanes of a `vmap` inside a checked `shard_map`.

        There our collectives give each lane a copy, and only the program shows that the copies are the same.
        What it shows to be so leaves the lanes as one value.
        """
        try:
            with _jit_enabled():
                program = trace(fun, operands, None, links)
        except Exception as error:
            # JAX cannot trace its own `axis_index` over lanes here. If the function fails for a reason of its
            # own, it fails again.
            result = fun(*operands)
            if counted:
                axis = self.axis_names[0]
                called = axis if isinstance(axis, str) else "rows"
                raise StatemeshError(
                    f"The lanes of a vmap ({axis!r}) inside a checked shard_map got a state with "
                    "reduce='sum' or a function, and what they run cannot be traced. So it is unknown which "
                    "written values are the same in all lanes, and count once. The reason is usually "
                    "jax.lax.axis_index over the lanes, or a branch on the value of an array. Write "
                    f"sm.axis_index({called!r}) instead of jax.lax.axis_index({called!r}), and jax.lax.cond "
                    "or jnp.where instead of the branch."
                ) from error
            return result
        outputs = jaxprs.run_jaxpr(program.closed, program.arguments)
        axes = all_axes(
            jaxprs.open_jaxpr(program.closed), varying_over(program.arguments, self.axis_names)
        )
        for name in self.axis_names:
            pairs = zip(outputs, axes, strict=True)
            outputs = [x if name in over else same_in_lanes(name, x) for x, over in pairs]
        return program.skeleton.filled(outputs)

    def of(self, values: Sequence[Leaf]) -> list[Axes]:
        """The axes over which each array may differ: all of them for an array of which nothing is known."""
        typed = varying_over(values, self.axis_names)
        pairs = zip(values, typed, strict=True)
        return [axes if axes >= self.meshes else axes | self._shown(x) for x, axes in pairs]

    def same_over(self, x: Leaf) -> Axes:
        """The axes over which an array is the same although its type says that it may differ."""
        return (compat.varying(x) & self.meshes) - self._shown(x)

    def typed_as_varying(self, x: Leaf, axes: Axes) -> Leaf:
        """`x` with a type that says that it may differ over these axes."""
        return compat.vary(x, [name for name in self.axis_names if name in axes & self.meshes])

    def _shown(self, x: Leaf) -> Axes:
        """The mesh axes over which the program shows that an array may differ.

        Those of its type, where there is no program.
        """
        if not self.meshes:
            return NO_AXES
        if compat.under_jit():
            return self.recorded.of(x) & self.meshes
        shown = self.shown.get(id(x))
        return (compat.varying(x) if shown is None else shown[1]) & self.meshes


class FromDataflow:
    """Learnt from the program: each function is traced to a jaxpr first, which is walked and then run.

    So a gradient that is taken inside is that of the one lane, as under `vmap`. Where JAX types what varies,
    it sums the gradient of what all lanes share over them.

    **Arguments:**

    - `axis_names`: the axes that are asked about: lanes, or a mesh whose check the author turned off.
    - `is_known`: whether a value that differs where one copy is kept is refused. Without the check it is not,
        and the program is walked only because gradients inside depend on it.
    """

    def __init__(self, axis_names: tuple[AxisName, ...], is_known: bool) -> None:
        self.is_known = is_known
        self.mark = compat.FollowedAxes(axis_names, lanes=is_known)
        self.axes = frozenset(axis_names)
        self.known: _AxesOfArrays = {}

    def start(self, arrays: Sequence[Leaf], axes: Sequence[Axes]) -> None:
        self.known.update(_by_identity(arrays, axes))

    def run(
        self,
        fun: Fun,
        operands: Sequence[PyTree],
        links: Links | None = None,
        counted: bool = False,
    ) -> PyTree:
        if not compat.under_jit():
            try:
                result = fun(*operands)
                if not self.is_known and links is None and not counted:
                    # Nobody asks for what the program shows.
                    return result
                result, outputs, shown = _with_program(fun, operands, result, self.mark, links)
                axes = [self.axes] * len(outputs) if shown is None else self._of_results(shown)
                self.known.update(_by_identity(outputs, axes))
                return result
            except StatemeshError:
                # `value_and_grad` needs the program, which a call has but for `jax.disable_jit()`.
                if not compat.jit_disabled():
                    raise
        with _jit_enabled():
            program = trace(fun, operands, self.mark, links)
            closed = settled(program.closed, self._known(program.arguments, NO_AXES), self.axes)
        outputs = jaxprs.run_jaxpr(closed, program.arguments)
        axes = self._of_results(dataclasses.replace(program, closed=closed))
        self.known.update(_by_identity(outputs, axes))
        return program.skeleton.filled(outputs)

    def of(self, values: Sequence[Leaf]) -> list[Axes]:
        return self._known(values, NO_AXES if self.is_known else self.axes)

    def same_over(self, x: Leaf) -> Axes:
        return NO_AXES

    def typed_as_varying(self, x: Leaf, axes: Axes) -> Leaf:
        return x

    def _known(self, values: Sequence[Leaf], unknown: Axes) -> list[Axes]:
        return [self.known.get(id(x), (x, unknown))[1] for x in values]

    def _of_results(self, program: Traced) -> list[Axes]:
        return all_axes(jaxprs.open_jaxpr(program.closed), self._known(program.arguments, NO_AXES))


VaryingAxes: TypeAlias = FromTypes | FromDataflow


def _jit_enabled() -> AbstractContextManager[Any]:
    """Under `jax.disable_jit()` a program would lack the calls that are looked for in it."""
    return jax.disable_jit(False) if compat.jit_disabled() else nullcontext()


def _with_program(
    fun: Fun,
    operands: Sequence[PyTree],
    result: PyTree,
    mark: compat.FollowedAxes | None,
    links: Links | None,
) -> tuple[PyTree, list[AnyArray], Traced | None]:
    """Trace a function that has run operation by operation, for what its program shows.

    **Returns:** the result with its states marked as the program shows, the arrays in it, and the program;
    `None` where there is none.
    """
    outputs = [x for x in tree_util.tree_leaves(result) if isinstance(x, jax.Array)]
    try:
        with _jit_enabled():
            program = trace(fun, operands, mark, links)
    except compat.NEEDS_VALUES:
        # It branches on the values of its arguments.
        return result, outputs, None
    marks = origins(result)
    if len(marks) == len(program.skeleton.marks):
        # What forgot where it came from is marked as the program shows.
        pairs = zip(marks, program.skeleton.marks, strict=True)
        result = with_origins(result, [new if old is None else old for old, new in pairs])
    return result, outputs, program if len(outputs) == len(program.closed.out_avals) else None
