"""Step 2 at every call: a program's inputs laid out as it takes them, and trees laid out before a call."""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import is_, methodcaller
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._trees import is_packed, is_state, is_state_or_packed, path_str
from .._base._types import NUMBERS, AnyMesh, AxisName, Leaf, PyTree, SpecTree, StateSpecs
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._jax._frames import without_own_frames
from .._state._values import strong
from ._agreement import (
    Passed,
    Traced,
    check_alike,
    check_placements,
    check_same_arrays,
    static_passed,
    traced_alike,
)
from ._mesh import check_mesh, check_specs, manual_names
from ._placement import (
    MADE,
    Input,
    apart,
    check_concrete,
    check_shapes,
    copied,
    deleted,
    is_laid_out,
    is_own,
    lies_right,
    memory,
    onto,
    traced_onto,
)
from ._specs import (
    UNDECLARED,
    OfStates,
    SpecPlacement,
    broadcast_specs,
    check_state_specs,
    choose_specs,
    own_placements,
    placement,
    specs_of_states,
)


_is_deleted = methodcaller("is_deleted")


def _as_wide_as_now(x: Leaf) -> Any:
    """An array of the host in the dtype that it has for JAX, with x64 on or off.

    Of several that it is to lay out at once JAX remembers the objects, but not which of the two it was.
    """
    if isinstance(x, jax.Array) or x.dtype.itemsize < 8 or x.dtype.kind not in "fiuc":
        return x
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return x if dtype == x.dtype else np.asarray(x, dtype)


class MeshLayout:
    """Where the inputs of one program lie on a mesh.

    On the devices of several processes every one of them passes the same arrays. Those that a process has for
    itself are compared with the others' when they are moved.

    **Arguments:**

    - `fun_name`: for messages.
    - `mesh`: the mesh.
    - `axis_names`: the mesh axes that the call maps over.
    - `inputs`: the inputs.
    - `donating`: whether some inputs are given up. What had to be moved then shares no memory with what it
        was moved from: its owner would lose it.
    """

    def __init__(
        self,
        fun_name: str,
        mesh: Mesh | AbstractMesh,
        axis_names: Sequence[AxisName],
        inputs: Sequence[Input],
        donating: bool,
    ) -> None:
        self.fun_name = fun_name
        self.mesh = mesh
        # The mesh on which other processes have devices, if they do.
        self.shared = mesh if isinstance(mesh, Mesh) and mesh.is_multi_process else None
        self.axis_names = frozenset(axis_names)
        self.inputs = inputs
        self.donating = donating
        kinds = [leaf.kind for leaf in inputs]
        # NumPy arrays have no sharding to compare; Python numbers need none; references stay where they are.
        self.hosted = [k for k, t in enumerate(kinds) if issubclass(t, np.ndarray | np.generic)]
        others = {*self.hosted, *(k for k, t in enumerate(kinds) if t in (*NUMBERS, jax.Ref))}
        self.on_device = [k for k in range(len(kinds)) if k not in others]
        # The memory of a NumPy array belongs to its owner, who may write to it.
        self.fresh = frozenset({*self.hosted, *(k for k, t in enumerate(kinds) if t in NUMBERS)})
        self.strong_at = [k for k in self.on_device if inputs[k].strong]
        self.only_arrays = len(self.on_device) == len(inputs)
        self.targets: list[Leaf] = [None] * len(inputs)
        for k in [*self.hosted, *self.on_device]:
            self.targets[k] = NamedSharding(mesh, inputs[k].placement.spec)
        # The sharding objects that were found right before: what comes out of the program and is fed
        # back carries the very same ones, so that a comparison of identities is enough.
        self.seen = list(self.targets)

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse arrays that do not fit their specs."""
        what = f"shard_map applied to the function {self.fun_name!r}"
        named = [(leaf.path, x) for leaf, x in zip(self.inputs, arrays, strict=True)]
        check_shapes(what, named, [leaf.placement for leaf in self.inputs], self.mesh)

    def agree(self, arrays: Sequence[Leaf], passed: Callable[[], list[Passed]]) -> None:
        """Refuse, before the first call, what other processes pass differently.

        `passed`: gives what is no input.
        """
        if self.shared is not None:
            check_alike(self.fun_name, self.shared, [*passed(), *self._passed_alike(arrays)])
            check_placements(self.fun_name, self.shared, self.inputs)

    def _passed_alike(self, arrays: Sequence[Leaf]) -> list[Passed]:
        """The inputs that are compared before the first call, and not when they are moved: numbers."""
        numbers = sorted(self.fresh.difference(self.hosted))
        return [static_passed(self.inputs[k].path, arrays[k]) for k in numbers]

    def traced_alike(self, trace: Callable[[], Traced]) -> Traced:
        """What `trace` returns, if every process has traced the same program."""
        return trace() if self.shared is None else traced_alike(self.fun_name, self.shared, trace)

    def concrete(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        """Concrete arrays as the program takes them, and as they come back when not written.

        The two differ for an array that has the same layout on another mesh: it comes back as it is, but the
        program, compiled for one mesh, gets it on that one.
        """
        if self.only_arrays:
            here = [x.sharding for x in arrays]
            if (
                here == self.seen
                and not self._weak(arrays)
                and (compat.REFUSES_DELETED or not any(map(_is_deleted, arrays)))
            ):
                self.seen = here
                return arrays, arrays
        return self._moved(arrays)

    def check_alive(self, arrays: Sequence[Leaf]) -> None:
        """Refuse arrays whose buffers were given up."""
        if gone := [k for k in self.on_device if arrays[k].is_deleted()]:
            raise deleted(self.fun_name, [self.inputs[k].path for k in gone])

    def _weak(self, arrays: Sequence[Leaf]) -> list[int]:
        """The weakly typed inputs that enter strong, so that no program depends on where others lie."""
        # Arrays of keys have no attribute `weak_type`.
        return [k for k in self.strong_at if getattr(arrays[k], "weak_type", False)]

    def _moved(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        self.check_alive(arrays)
        if self.shared is not None:
            arrays = self._as_one_array(self.shared, arrays)
        ready, shown = list(arrays), list(arrays)
        for k in self._weak(arrays):
            ready[k] = shown[k] = strong(arrays[k])
        unseen = [k for k in self.on_device if ready[k].sharding is not self.seen[k]]
        # What the host has is to be moved in any case.
        misplaced = [k for k in self.hosted if not isinstance(arrays[k], jax.Array)]
        if misplaced or not all(
            is_laid_out(ready[k], self.targets[k], self.axis_names) for k in unseen
        ):
            # First of all, because JAX compares the layouts only of arrays that fit them.
            self.check(arrays)
        # What only needs another type: Explicit types also name axes of one device.
        renamed: set[int] = set()
        # What comes back as it is.
        kept: set[int] = set()
        for k in unseen:
            x, is_right = ready[k], self._lies_right(ready[k], k)
            if is_right and self._is_on_mesh(x):
                self.seen[k] = x.sharding
                continue
            misplaced.append(k)
            if self._is_on_mesh(x) and x.sharding.is_equivalent_to(self.targets[k], x.ndim):
                renamed.add(k)
            if is_right or k in renamed:
                kept.add(k)
        if not misplaced:
            same = all(map(is_, ready, arrays))
            return (arrays, arrays) if same else (ready, shown)
        targets = [self.targets[k] for k in misplaced]
        sources = [_as_wide_as_now(ready[k]) for k in misplaced]
        for i, (k, target) in enumerate(zip(misplaced, targets, strict=True)):
            # The owner of a NumPy array may write to it while the program still reads it.
            if k in self.hosted or (self.donating and k not in renamed):
                sources[i] = apart(sources[i], target)
        moved = jax.device_put(sources, targets)
        for k, x in zip(misplaced, moved, strict=True):
            ready[k] = x
            if k not in kept:
                shown[k] = x
        if self.donating:
            new = [k for k in misplaced if k not in renamed]
            self._spare([arrays[k] for k in new if k not in self.hosted], ready, misplaced)
            MADE.add([ready[k] for k in new])
        return ready, shown

    def _as_one_array(self, mesh: Mesh, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """The inputs, where one array on the mesh stands for those that each process has for itself."""
        at = [k for k in sorted([*self.hosted, *self.on_device]) if is_own(arrays[k])]
        if not at:
            return arrays
        check_same_arrays(self.fun_name, mesh, [(self.inputs[k].path, arrays[k]) for k in at])
        self.check(arrays)
        arrays = list(arrays)
        for k in at:
            x, target = arrays[k], self.targets[k]
            if self.inputs[k].strong and k not in self.hosted:
                x = strong(x)
            arrays[k] = onto(apart(x, target) if self.donating else x, target)
        return arrays

    def to_move(self, arrays: Sequence[Leaf]) -> list[int]:
        """The inputs that a call lays out anew before it runs; of mere shapes nothing is known."""
        if isinstance(self.mesh, AbstractMesh):
            return []
        hosted = [k for k in self.hosted if isinstance(arrays[k], np.ndarray | np.generic)]
        here = [(k, arrays[k]) for k in self.on_device if isinstance(arrays[k], jax.Array)]
        return hosted + [
            k for k, x in here if not (compat.is_tracer(x) or self._keeps_memory(x, k))
        ]

    def _keeps_memory(self, x: jax.Array, k: int) -> bool:
        """Whether the program gets `x` in the memory where it is, by whatever name."""
        same = x.sharding is self.seen[k] or x.sharding.is_equivalent_to(self.targets[k], x.ndim)
        if not self._is_on_mesh(x):
            return same and not self.donating
        return same or self._lies_right(x, k)

    def _lies_right(self, x: jax.Array, k: int) -> bool:
        return lies_right(x, self.targets[k], self.axis_names)

    def _is_on_mesh(self, x: jax.Array) -> bool:
        return isinstance(x.sharding, NamedSharding) and bool(x.sharding.mesh == self.mesh)

    def _spare(self, originals: Sequence[Leaf], ready: list[Leaf], moved: Iterable[int]) -> None:
        """Copy what was not moved but shares memory with an original that was, lest that be given up."""
        sizes = {math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in originals}
        # To look at the memory of any other would wait for what is being computed.
        others = set(self.on_device).difference(moved)
        alike = [k for k in others if self.part_size(k, ready[k]) in sizes]
        spared = frozenset().union(*map(memory, originals)) if alike else frozenset()
        for k in alike:
            if not memory(ready[k]).isdisjoint(spared):
                ready[k] = copied(ready[k])

    def part_size(self, k: int, x: Leaf) -> int:
        """The bytes of an input that a device holds; 0 of what is no array."""
        target = self.targets[k]
        if target is None:
            return 0
        return math.prod(target.shard_shape(np.shape(x))) * x.dtype.itemsize

    def returned(
        self, arrays: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        """What comes back as it went in, in memory of its own where it had to be moved.

        An array outside a State had to be where its sharding is not that of its placement, whatever it is
        called.
        """
        results = list(shown)
        for k in forwarded:
            x, target = arrays[k], self.targets[k]
            if target is None or compat.is_tracer(shown[k]):
                continue
            if shown[k] is not x:
                if isinstance(x, jax.Array) and not self.donating:
                    source = apart(x, target)
                    results[k] = shown[k] if source is x else self._put(source, k)
            elif not (self.inputs[k].stateful or is_laid_out(x, target, self.axis_names)):
                results[k] = self._put(apart(x, target), k)
        return results

    def _put(self, x: Leaf, k: int) -> jax.Array:
        return onto(strong(x) if self.inputs[k].strong else x, self.targets[k])

    def traced(self, arrays: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        """Inputs some of which are traced: tracers are never put anywhere, concrete arrays are,
        except into a jaxpr, where they are constants that the compiler places."""
        targets = zip(self.inputs, arrays, self.targets, strict=True)
        local = [(leaf.path, x) for leaf, x, t in targets if t is not None and is_own(x)]
        if local and self.shared is not None and not recorded:
            check_same_arrays(self.fun_name, self.shared, local)
        weak = frozenset(self._weak(arrays))
        return [
            x if t is None else self._traced(strong(x) if k in weak else x, t, recorded)
            for k, (x, t) in enumerate(zip(arrays, self.targets, strict=True))
        ]

    def _traced(self, x: Leaf, target: NamedSharding, recorded: bool) -> Any:
        if self.shared is not None and not recorded and is_own(x):
            return onto(x, target)
        if compat.is_tracer(x) and not recorded:
            x = compat.onto_devices(x, target.mesh)
        if compat.is_tracer(x) or recorded:
            return traced_onto(x, target, self.axis_names)
        if isinstance(x, jax.Array) and lies_right(x, target, self.axis_names):
            return x
        return onto(x if isinstance(x, jax.Array) else apart(x, target), target)

    def abstract(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Shapes and dtypes on the mesh, to lower the program with."""
        self.check(arrays)
        abstract = list(arrays)
        for k, (x, target) in enumerate(zip(arrays, self.targets, strict=True)):
            if target is not None:
                of_numpy = isinstance(x, np.ndarray | np.generic)
                dtype = jax.dtypes.canonicalize_dtype(x.dtype) if of_numpy else x.dtype
                abstract[k] = jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=target)
        return abstract


def placed_states(
    tree: PyTree, root: str, state_specs: StateSpecs
) -> list[tuple[str, PyTree, list[SpecPlacement] | None]]:
    """The units of a tree: the path of each, and for a State the placements of its arrays.

    A State lies by the spec that `state_specs` has for it, else by its own.
    """
    check_state_specs(state_specs, "state_specs")
    declared = iter(choose_specs(state_specs, [(root, tree)], "state_specs"))
    units: list[tuple[str, PyTree, list[SpecPlacement] | None]] = []
    for keys, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
        path, placements = path_str(keys, root), None
        if is_state(node):
            spec = next(declared)
            placements = own_placements(node, node.spec if spec is UNDECLARED else spec, path)
        units.append((path, node, placements))
    return units


def shardings(
    what: str,
    named: Sequence[tuple[str, Leaf]],
    placements: Sequence[SpecPlacement],
    mesh: AnyMesh,
) -> list[NamedSharding]:
    """The sharding on a mesh of each array of a tree.

    **Arguments:**

    - `what`: what lays them out, for errors.
    - `named`: the arrays, each with its path.

    **Raises:** `SpecError` for placements that do not fit the mesh or the arrays.
    """
    pairs = zip(named, placements, strict=True)
    specs = [(f"the spec of {path}", placement.spec) for (path, _), placement in pairs]
    check_specs(specs, mesh, manual_names(mesh, ()))
    check_shapes(what, named, placements, mesh)
    return [NamedSharding(mesh, placement.spec) for placement in placements]


@without_own_frames
def place(
    tree: PyTree, mesh: AnyMesh, specs: SpecTree = None, *, state_specs: StateSpecs = None
) -> Any:
    """Put a tree onto a mesh the way a mapped call wants it.

    **Arguments:**

    - `tree`: any pytree. The buffers of a `Packed` in it lie right already, and stay.
    - `mesh`: the mesh.
    - `specs`: a spec, or a prefix tree of specs, for the arrays outside States; left out, they are
        replicated.
    - `state_specs`: where the States go: one spec, or `{filter: spec}`. A state that it does not
        mention goes by its own `spec`, else it is replicated.

    **Returns:** the tree, its arrays on the mesh. Arrays that already lie right are not touched, and
    leaves that are not arrays stay as they are. What is moved shares no memory with what it was moved
    from, so that one may be donated without the other.

    **Raises:** `SpecError` for specs that do not fit the tree, its arrays or the mesh, and for a mesh without
    devices; `TypeError` for arrays that are traced: there a mapped call lays its arguments out itself.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> model = sm.place({"w": sm.ParamState(np.ones(4))}, mesh, state_specs=P("x"))
        >>> model["w"].value.sharding.spec == P("x")
        True

        ```
    """
    check_mesh("place", mesh)
    if isinstance(mesh, AbstractMesh):
        expected = "a jax.sharding.Mesh, which has devices to put arrays on"
        raise errors.invalid_argument("place", "mesh", mesh, expected)
    names = manual_names(mesh, ())
    check_specs([("specs", specs)], mesh, names)
    nodes = tree_util.tree_leaves(tree, is_leaf=is_state_or_packed)
    packed = {id(buffer) for node in nodes if is_packed(node) for buffer in node.buffers}
    leaves: list[Leaf] = []
    named: list[tuple[str, Leaf]] = []
    positions: list[int] = []
    placements: list[SpecPlacement] = []
    of_states = OfStates()
    units = placed_states(tree, "tree", state_specs)
    for (path, node, of_state), spec in zip(
        units, broadcast_specs(specs, tree, "specs", "tree"), strict=True
    ):
        arrays = tree_util.tree_leaves(node)
        if of_state is not None:
            of_states.state("specs", spec, path, node, of_state)
        elif is_shaped(node):
            of_states.array("specs", spec)
            of_state = [] if id(node) in packed else [placement(spec)]
        placed = of_state or []
        placements += placed
        positions += range(len(leaves), len(leaves) + len(placed))
        leaves += arrays
        named += [(path, x) for x in arrays[: len(placed)]]
    if bad := of_states.bad():
        raise specs_of_states("place", "specs", "state_specs", bad)
    targets = shardings("place", named, placements, mesh)
    check_concrete("place", named)
    check_same_arrays("place", mesh, named)
    for i, (_, x), target in zip(positions, named, targets, strict=True):
        if not isinstance(x, jax.Array):
            leaves[i] = onto(apart(x, target), target)
            continue
        leaves[i] = strong(x)
        if not is_laid_out(x, target, frozenset(names)):
            same = x.sharding.is_equivalent_to(target, x.ndim)
            leaves[i] = onto(leaves[i] if same else apart(leaves[i], target), target)
    return tree_util.tree_structure(tree).unflatten(leaves)
