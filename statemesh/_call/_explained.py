"""What a call lays where: a record for each leaf of its arguments, and for each new array of its result."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from .._base._errors import axes_argument, spec_str
from .._base._specs import PerShard, Placement
from .._base._trees import is_state, path_str
from .._base._types import AxisName, Leaf
from .._explain._compiled import TracedCall, explanation_of
from .._explain._explanation import NO_AXIS, OWN_SPEC, Explanation, LeafRow, ResultRow
from .._explain._traced import Mapped
from .._jax._compat import tree_util
from ._arguments import Call, Unit
from ._call import Inspected, Pipeline
from ._packing import Packing
from ._program import Program
from ._write_back import Output, WriteBack


def explain_call(pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """The explanation of one call of a mapping."""
    inspected = pipeline.inspect(args, kwargs)
    return explanation_of(traced_call(inspected))


def traced_call(inspected: Inspected) -> TracedCall:
    """What is known of a call before it is compiled."""
    entry, traced = inspected.entry, inspected.traced
    program = entry.program
    outputs, back = traced.out_info
    moved = [program.positions[k] for k in inspected.moved]
    rows = Rows(program, inspected.call, outputs, back, moved)
    mesh = getattr(program.binding, "mesh", None)
    donated = [k for k, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    return TracedCall(
        name=program.declared.name,
        sizes=dict(program.binding.sizes),
        jaxpr=traced.jaxpr,
        compile=functools.partial(_compiled, inspected) if program.declared.jit else None,
        leaves=rows.leaves(),
        results=rows.results(),
        arguments=[one.path for one in program.layout.inputs],
        outputs=rows.output_paths(),
        calls=[rows.mapped()],
        has_devices=not isinstance(mesh, AbstractMesh),
        donates_in_vain=program.declared.donate != "none" and not donated,
        changing_statics=_changing_statics(inspected),
    )


def _compiled(inspected: Inspected) -> Any:
    with inspected.around():
        return inspected.traced.lower().compile()


class Rows:
    """The records of one call.

    **Arguments:**

    - `program`, `call`: the call.
    - `outputs`, `back`: what the program makes, and how the result is put together.
    - `moved`: the positions of the leaves that the call lays out anew before it runs.
    """

    def __init__(
        self,
        program: Program,
        call: Call,
        outputs: Sequence[Leaf],
        back: WriteBack,
        moved: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.name = self.program.declared.name
        self.packing = Packing(call)
        self.inputs = {x.position: x for x in program.run.inputs}
        self.outputs = outputs
        self.back = back
        self.moved = frozenset(moved)
        self.sizes: Mapping[AxisName, int] = self.program.binding.sizes
        self.by_axis = self.program.declared.rules.what == "in_axes"
        self.merged = {path: (policy, axes) for path, policy, axes in back.merged}
        forwarded = back.forwarded
        self.forwarded = {self.program.positions[k] for k in forwarded}
        self.outputs_of = self._outputs_of_states()

    def _outputs_of_states(self) -> dict[str, list[int | None]]:
        """For each written state by its path the output that each of its leaves is, if it is one."""
        paths: dict[int, list[str]] = {}
        for index, path in self.back.written:
            paths.setdefault(index, []).append(path)
        found: dict[str, list[int | None]] = {}
        for node in tree_util.tree_leaves(self.back.result, is_leaf=is_state):
            if is_state(node):
                sources = tree_util.tree_leaves(node)
                made = [s.index if isinstance(s, Output) else None for s in sources]
                for path in {path for k in made if k is not None for path in paths.get(k, ())}:
                    found.setdefault(path, made)
        # Of what is packed, one output holds many states.
        for index, path in self.back.written:
            found.setdefault(path, [index])
        return found

    def written_paths(self) -> list[str]:
        """For each output the path of the written state that it belongs to; empty for others."""
        found: dict[int, str] = {}
        for index, path in self.back.written:
            found.setdefault(index, path)
        return [found.get(k, "") for k in range(len(self.back.placements))]

    def mapped(self) -> Mapped:
        """The call, and for each output the paths of the states that a policy merges into it."""
        found: list[list[str]] = [[] for _ in self.back.placements]
        for index, path in self.back.written:
            if path in self.merged:
                found[index].append(path)
        return Mapped(self.name, tuple(map(tuple, found)))

    def output_paths(self) -> list[str]:
        flat = jax.tree_util.tree_flatten_with_path(self.back.result)[0]
        paths = {
            s.index: path_str(k, f"{self.name}(...)") for k, s in flat if isinstance(s, Output)
        }
        written = self.written_paths()
        return [written[k] or paths.get(k, "") for k in range(len(written))]

    def leaves(self) -> list[LeafRow]:
        """A record for each array and number of the arguments."""
        return [self._leaf(*at) for at in self._placed()]

    def sources(self) -> list[int]:
        """For each of these records the position of its array, or of the buffer that the array is in."""
        return [self.packing.positions[position] for _, _, position in self._placed()]

    def _placed(self) -> Iterator[tuple[Unit, int, int]]:
        for unit in self.packing.call.flat_units():
            for k, position in enumerate(unit.positions):
                if position in self.inputs:
                    yield unit, k, position

    def _leaf(self, unit: Unit, k: int, position: int) -> LeafRow:
        leaf = self.packing.call.leaves[position]
        placement = self.inputs[position].placement
        shape, dtype = np.shape(leaf), _dtype(leaf)
        shard_shape = self.shard_shape(shape, placement)
        held = _bytes(shard_shape, dtype)
        source = self.packing.positions[position]
        hosted = isinstance(leaf, np.ndarray | np.generic)
        kind = "NumPy array" if hosted else "array" if unit.shaped else "number"
        return LeafRow(
            path=_leaf_path(unit, k),
            kind=kind if unit.kind is None else unit.kind.__name__,
            dtype=str(dtype),
            shape=shape,
            shard_shape=shard_shape,
            enters=self.spelt(placement),
            split=tuple(placement.axes) if self.sizes else (),
            placed_by=self.inputs[position].placed_by,
            leaves=self._leaving(unit, k, source, placement),
            bytes=held,
            moved=held if source in self.moved else 0,
            call=self.name,
            whole=self._whole(position, shape, placement),
        )

    def _whole(self, position: int, shape: Sequence[int], placement: Placement) -> str:
        """Why a state stays whole whose own spec has an entry for each axis and names no mesh axis."""
        spec = placement.written
        if placement.axis_names or not shape or not isinstance(spec, PartitionSpec):
            return ""
        if len(spec) != len(shape) or self.inputs[position].placed_by != OWN_SPEC:
            return ""
        odd = [name for name in self.splitting if all(n % self.sizes[name] for n in shape)]
        sizes = " or ".join(f"{name}={self.sizes[name]}" for name in odd)
        return f"{NO_AXIS} {sizes}" if odd else "kept whole"

    @functools.cached_property
    def splitting(self) -> list[AxisName]:
        """The mesh axis over which most states are split by their own specs, or several such axes.

        It is the one of `fsdp`. Tensor parallelism splits only some of them.
        """
        own = [x.placement for x in self.inputs.values() if x.placed_by == OWN_SPEC]
        found = Counter(name for placement in own for name in placement.axis_names)
        return [name for name in self.sizes if found[name] == max(found.values(), default=-1)]

    def _leaving(self, unit: Unit, k: int, source: int, entered: Placement) -> str:
        made = self.outputs_of.get(unit.path, []) if unit.kind is not None else []
        index = made[k] if k < len(made) else made[0] if len(made) == 1 else None
        if index is None:
            return "untouched" if source in self.forwarded else "not returned"
        placement = self.back.placements[index]
        text = "written"
        if placement != entered and source not in self._packed:
            text += f" to {self.spelt(placement)}"
        # A key goes on by itself: nothing is merged.
        if unit.path in self.merged and self.inputs[unit.positions[k]].placed_by != "its kind":
            policy, axes = self.merged[unit.path]
            text += f", {policy} over {axes_argument(axes)!r}"
        return text

    @property
    def _packed(self) -> set[int]:
        return {at.position for at in self.packing.origins if at.group is not None}

    def results(self) -> list[ResultRow]:
        """A record for each array of the result that is no written leaf of the arguments."""
        states = {unit.path for unit in self.packing.call.states()}
        written = self.written_paths()
        flat = jax.tree_util.tree_flatten_with_path(self.back.result, is_leaf=is_state)[0]
        rows = []
        for keys, node in flat:
            path = path_str(keys, f"{self.name}(...)")
            for source in tree_util.tree_leaves(node):
                if isinstance(source, Output) and written[source.index] not in states:
                    kind = type(node).__name__ if is_state(node) else "array"
                    rows.append(self._result(path, kind, source.index))
        return rows

    def _result(self, path: str, kind: str, index: int) -> ResultRow:
        made, placement = self.outputs[index], self.back.placements[index]
        shard_shape = self.shard_shape(made.shape, placement)
        return ResultRow(
            path=path,
            kind=kind,
            dtype=str(made.dtype),
            shape=tuple(made.shape),
            shard_shape=shard_shape,
            leaves=self.spelt(placement),
            bytes=_bytes(shard_shape, made.dtype),
            call=self.name,
        )

    def shard_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """The shape of the part that a device holds."""
        parts = [math.prod(self.sizes.get(name, 1) for name in names) for names in placement.axes]
        parts += [1] * (len(shape) - len(parts))
        return tuple(size // n for size, n in zip(shape, parts, strict=True))

    def spelt(self, placement: Placement) -> str:
        """A placement as the user would type it."""
        if self.by_axis:
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


def _dtype(leaf: Leaf) -> Any:
    """The dtype that a leaf has on a device."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _changing_statics(inspected: Inspected) -> list[str]:
    """The paths of static leaves and fields that make calls compile anew: they cannot be hashed, or more than
    one program was compiled for their values already."""
    program = inspected.entry.program
    if program.unhashable:
        return [path for path, _ in program.unhashable]
    own, paths = program.statics.tokens or [], program.call.paths()
    theirs = [tokens for rival in inspected.rivals if (tokens := rival.program.statics.tokens)]
    return [
        paths[position]
        for k, position in enumerate(program.statics.positions)
        if any(len(tokens) == len(own) and tokens[k] != own[k] for tokens in theirs)
    ]
