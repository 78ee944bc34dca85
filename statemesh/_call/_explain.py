"""`explain`: what a call lays where, moves, reduces and holds.

The account of a call is made in four steps:

1. The call is traced and not run. A mapping traces it as the call itself would. Any other function is traced
   once more, with a mark in the program at each mapped call, which tells where these stand.
2. For each mapped call, `CallRecord` has a row for each leaf of its arguments and for each new array.
3. `_explain/_traced.py` finds the collectives in the traced program, and why each of them is there.
4. `_explain/_compiled.py` finds them again in the compiled program, and reads what that holds in memory.

`_explain/_explanation.py` has the result, and shows it.
"""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._base._checks import check_function, is_shaped
from .._base._errors import axes_argument, spec_str
from .._base._specs import PerShard, Placement
from .._base._trees import fun_name, has_packed, is_state, path_str
from .._base._types import AxisName, Fun, Leaf, PyTree
from .._explain._compiled import explanation_of
from .._explain._explanation import NO_AXIS, OWN_SPEC, Explanation, LeafRow, ResultRow
from .._explain._traced import Mapped, marked, sites_of
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._jax._frames import without_own_frames
from .._state._state import states_of
from ._arguments import Call, Unit
from ._call import Pipeline, watching
from ._layout import dtype_of
from ._packed import Packing
from ._program import Program
from ._write_back import Output, WriteBack


@without_own_frames
def explain(fun: Fun, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Say what a call lays where, moves, reduces and holds. Nothing is run.

    **Arguments:**

    - `fun`: what `shard_map`, `pmap2` or `vmap2` returns, a function of `jax.jit`, a `Map`, or any function
        that calls mapped ones. What is not compiled itself is explained as `jax.jit` would compile it.
    - `args`, `kwargs`: the arguments of the call, or `jax.ShapeDtypeStruct`s in place of arrays.

    **Returns:** an `Explanation`.

    **Raises:** what the call would raise.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> def step(mean, x):
        ...     return x - mean.value, mean.set(x.mean())
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=(P("data"), P()))
        >>> explanation = sm.explain(step, sm.BatchState(0.0, reduce="mean"), jnp.arange(4.0))
        >>> for leaf in explanation.leaves:
        ...     print(leaf.path, leaf.enters, leaf.placed_by, leaf.leaves)
        mean P() default written, mean over 'data'
        x P('data') in_specs[1] not returned
        >>> for exchange in explanation.collectives:
        ...     print(exchange.operation, exchange.axes, exchange.cause)
        psum ('data',) the policy of mean

        ```
    """
    if isinstance(getattr(fun, "_pipeline", None), Pipeline):
        mapped: Any = fun
        explanation: Explanation = mapped.explain(*args, **kwargs)
        return explanation
    check_function("explain", fun)
    # The arrays of a module that is called are arguments as well.
    owner = (fun,) if isinstance(fun, eqx.Module) else ()
    call: Fun = type(fun).__call__ if owner else fun
    leaves, treedef = tree_util.tree_flatten(((*owner, *args), kwargs))
    positions = [k for k, leaf in enumerate(leaves) if is_shaped(leaf)]
    arrays = [leaves[k] for k in positions]

    def run(*arrays: Leaf) -> Any:
        filled = list(leaves)
        for k, x in zip(positions, arrays, strict=True):
            filled[k] = x
        args, kwargs = treedef.unflatten(filled)
        return [x for x in tree_util.tree_leaves(call(*args, **kwargs)) if is_shaped(x)]

    run.__name__ = run.__qualname__ = fun_name(fun)
    records: list[tuple[CallRecord, list[Leaf | None]]] = []

    def look(program: Program, call: Call, outputs: list[Leaf], back: WriteBack) -> list[Leaf]:
        inputs = program.arrays(call.leaves)
        # A tracer must not outlive its trace.
        known = [None if compat.is_tracer(x) else x for x in inputs]
        records.append((CallRecord(program, call, outputs, back), known))
        return marked(len(records) - 1, outputs, inputs)

    # The marks of calls hold the keys that the calls have used up already.
    with watching(look), jax.debug_key_reuse(False):
        program = compat.trace_marked(run, arrays, [compat.Watched()])
    # An array that several calls get counts once.
    rows: dict[tuple[LeafRow, Hashable], None] = {}
    results: list[ResultRow] = []
    for number, operands in sites_of(program):
        record, known = records[number]
        for row, k in record.leaves:
            rows[row, operands[k] if known[k] is None else id(known[k])] = None
        results += record.results
    # A function of `jax.jit` has a program of its own, which its next call finds compiled.
    jitted: Any = fun
    is_jitted = not owner and hasattr(fun, "trace") and hasattr(fun, "lower")
    traced = jitted.trace(*args, **kwargs) if is_jitted else jax.jit(run).trace(*arrays)
    # While a program is recorded a mesh shows no devices, though one may be set that has them.
    abstract = any(isinstance(record.mesh, AbstractMesh) for record, _ in records)
    has_devices = not abstract or compat.concrete_context_mesh() is not None
    arguments = (Call(call, owner, {}), Call(fun, args, kwargs))
    paths = [path for part in arguments for path in part.paths().values()]
    return explanation_of(
        name=fun_name(fun),
        sizes={name: size for record, _ in records for name, size in record.sizes.items()},
        leaves=[row for row, _ in rows],
        results=results,
        jaxpr=traced.jaxpr,
        compiled=traced.lower().compile() if has_devices else None,
        arguments=[paths[k] for k in positions],
        outputs=[],
        calls=[record.mapped for record, _ in records],
    )


def explain_call(pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """The explanation of one call of a mapping."""
    call, program, rivals, traced, compiled = pipeline.inspect(args, kwargs)
    declared, layout = program.declared, program.layout
    moved = [program.positions[k] for k in layout.to_move(program.arrays(call.leaves))]
    outputs, back = traced.out_info
    record = CallRecord(program, call, outputs, back, moved)
    donated = any(info.donated for info in jax.tree.leaves(traced.args_info))
    return explanation_of(
        name=declared.name,
        sizes=record.sizes,
        leaves=[row for row, _ in record.leaves],
        results=record.results,
        jaxpr=traced.jaxpr,
        compiled=compiled,
        arguments=[x.path for x in layout.inputs],
        outputs=record.outputs,
        calls=[record.mapped],
        donates_in_vain=declared.donate != "none" and not donated,
        changing_statics=_changing_statics(program, rivals),
    )


def _changing_statics(program: Program, rivals: Sequence[Program]) -> list[str]:
    """The paths of static leaves and fields that make calls compile anew: they cannot be hashed, or more than
    one program was compiled for their values already."""
    if program.unhashable:
        return [path for path, _ in program.unhashable]
    tokens, paths = program.statics.tokens or [], program.call.paths()
    others = [rival.statics.tokens or [] for rival in rivals]
    return [
        paths[position]
        for k, position in enumerate(program.statics.positions)
        if any(len(other) == len(tokens) and other[k] != tokens[k] for other in others)
    ]


class CallRecord:
    """What is known of a mapped call once it is traced. It holds no arrays.

    **Arguments:**

    - `program`, `call`: the call.
    - `outputs`, `back`: what the program makes, and how the result is put together.
    - `moved`: the positions of the leaves that the call lays out anew before it runs.

    **Attributes:**

    - `mesh`: the mesh that it runs on, if it runs on one; `sizes` are those of its axes.
    - `leaves`: a row for each array and number of the arguments, and the number of the program's input that
        it is, or is packed into.
    - `results`: a row for each array of the result that is no written leaf of the arguments.
    - `outputs`: the path of each of the program's outputs.
    - `mapped`: what a policy merges into the outputs.
    """

    def __init__(
        self,
        program: Program,
        call: Call,
        outputs: Sequence[Leaf],
        back: WriteBack,
        moved: Sequence[int] = (),
    ) -> None:
        self.name = program.declared.name
        self.mesh = program.layout.mesh
        self.sizes = dict(program.layout.sizes)
        self._program, self._back, self._moved = program, back, frozenset(moved)
        packing = Packing(call) if has_packed((call.args, call.kwargs)) else None
        # For each leaf of the unpacked arguments the leaf of the arguments that it is, or is in.
        origins = [] if packing is None else packing.origins
        sources = [at.position for at in origins] or range(len(call.leaves))
        call = call if packing is None else packing.unpacked(call)
        self._inputs = {x.position: x for x in program.instance.inputs}
        self._packed = {at.position for at in origins if at.group is not None}
        self._forwarded = {program.positions[number] for number in back.forwarded}
        self._merged = {path: (policy, axes) for path, policy, axes in back.merged}
        # For each output the paths of the written states that it belongs to. One buffer holds many.
        self._states: list[list[str]] = [[] for _ in back.placements]
        for index, path in back.written:
            self._states[index].append(path)
        # For each leaf of a written state, by the state's path and its number in it, the output that it is.
        self._output_of: dict[tuple[str, int | None], int] = {}
        for node in states_of(back.result):
            for k, source in enumerate(tree_util.tree_leaves(node)):
                if isinstance(source, Output):
                    for path in self._states[source.index]:
                        self._output_of.setdefault((path, k), source.index)
        for index, path in back.written:
            self._output_of.setdefault((path, None), index)
        numbers = {position: k for k, position in enumerate(program.positions)}
        self.leaves = [
            (
                self._leaf(unit, k, call.leaves[position], sources[position]),
                numbers[sources[position]],
            )
            for unit in call.flat_units()
            for k, position in enumerate(unit.positions)
            if position in self._inputs
        ]
        self.results = self._results({unit.path for unit in call.states()}, outputs)
        flat = jax.tree_util.tree_flatten_with_path(back.result)[0]
        paths = {
            s.index: path_str(keys, f"{self.name}(...)")
            for keys, s in flat
            if isinstance(s, Output)
        }
        self.outputs = [
            states[0] if states else paths.get(k, "") for k, states in enumerate(self._states)
        ]
        merged = [tuple(path for path in states if path in self._merged) for states in self._states]
        self.mapped = Mapped(self.name, tuple(merged))

    def _leaf(self, unit: Unit, k: int, leaf: Leaf, source: int) -> LeafRow:
        """The row of one leaf of a unit.

        **Arguments:**

        - `k`: its number in the unit.
        - `source`: the position of the leaf of the arguments that it is, or is packed into.
        """
        position = unit.positions[k]
        placement = self._inputs[position].placement
        shape, dtype = np.shape(leaf), dtype_of(leaf)
        shard_shape, held = self._part(shape, dtype, placement)
        hosted = isinstance(leaf, np.ndarray | np.generic)
        kind = "NumPy array" if hosted else "array" if unit.shaped else "number"
        return LeafRow(
            path=_leaf_path(unit, k),
            kind=kind if unit.kind is None else unit.kind.__name__,
            dtype=str(dtype),
            shape=shape,
            shard_shape=shard_shape,
            enters=self._spelt(placement),
            split=tuple(placement.axes) if self.sizes else (),
            placed_by=self._inputs[position].placed_by,
            leaves=self._leaving(unit, k, source, placement),
            bytes=held,
            moved=held if source in self._moved else 0,
            call=self.name,
            whole=self._whole(position, shape, placement),
        )

    def _whole(self, position: int, shape: Sequence[int], placement: Placement) -> str:
        """Why a state stays whole whose own spec has an entry for each axis and names no mesh axis."""
        spec = placement.written
        if placement.axis_names or not shape or not isinstance(spec, PartitionSpec):
            return ""
        if len(spec) != len(shape) or self._inputs[position].placed_by != OWN_SPEC:
            return ""
        odd = [name for name in self._splitting if all(n % self.sizes[name] for n in shape)]
        sizes = " or ".join(f"{name}={self.sizes[name]}" for name in odd)
        return f"{NO_AXIS} {sizes}" if odd else "kept whole"

    @functools.cached_property
    def _splitting(self) -> list[AxisName]:
        """The mesh axis over which most states are split by their own specs, or several such axes.

        It is the one of `fsdp`. Tensor parallelism splits only some of them.
        """
        count = Counter(
            name
            for x in self._inputs.values()
            if x.placed_by == OWN_SPEC
            for name in x.placement.axis_names
        )
        return [name for name in self.sizes if count[name] == max(count.values(), default=-1)]

    def _leaving(self, unit: Unit, k: int, source: int, entered: Placement) -> str:
        is_packed = source in self._packed
        index = self._output_of.get((unit.path, k)) if unit.kind is not None else None
        if index is None and is_packed:
            index = self._output_of.get((unit.path, None))
        if index is None:
            return "untouched" if source in self._forwarded else "not returned"
        placement = self._back.placements[index]
        text = "written"
        if placement != entered and not is_packed:
            text += f" to {self._spelt(placement)}"
        # A key goes on by itself: nothing is merged.
        by_kind = self._inputs[unit.positions[k]].placed_by == "its kind"
        if unit.path in self._merged and not by_kind:
            policy, axes = self._merged[unit.path]
            text += f", {policy} over {axes_argument(axes)!r}"
        return text

    def _results(self, arguments: set[str], outputs: Sequence[Leaf]) -> list[ResultRow]:
        """The rows of the result. `arguments`: the paths of the states that were passed."""
        rows = []
        for keys, node in jax.tree_util.tree_flatten_with_path(self._back.result, is_state)[0]:
            for source in tree_util.tree_leaves(node):
                if not isinstance(source, Output):
                    continue
                if arguments.intersection(self._states[source.index][:1]):
                    continue
                x, placement = outputs[source.index], self._back.placements[source.index]
                shard_shape, held = self._part(x.shape, x.dtype, placement)
                rows.append(
                    ResultRow(
                        path=path_str(keys, f"{self.name}(...)"),
                        kind=type(node).__name__ if is_state(node) else "array",
                        dtype=str(x.dtype),
                        shape=tuple(x.shape),
                        shard_shape=shard_shape,
                        leaves=self._spelt(placement),
                        bytes=held,
                        call=self.name,
                    )
                )
        return rows

    def _part(
        self, shape: tuple[int, ...], dtype: Any, placement: Placement
    ) -> tuple[tuple[int, ...], int]:
        """The shape and the bytes of the part of an array that a device holds."""
        if self.mesh is not None:
            shape = NamedSharding(self.mesh, placement.spec).shard_shape(shape)
        return shape, math.prod(shape) * dtype.itemsize

    def _spelt(self, placement: Placement) -> str:
        """A placement as the user would type it."""
        if self._program.declared.rules.what == "in_axes":
            return "all lanes" if placement.axis is None else f"axis {placement.axis}"
        if placement.axis is not None:
            return repr(PerShard(*placement.axes[0]))
        return spec_str(placement.spec)


def _leaf_path(unit: Unit, k: int) -> str:
    if len(unit.positions) == 1:
        return unit.path
    marked = unit.treedef.unflatten(range(len(unit.positions)))
    keys, _ = jax.tree_util.tree_flatten_with_path(marked)[0][k]
    return path_str(keys, unit.path)
