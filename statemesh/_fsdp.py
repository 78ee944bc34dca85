"""Parameters that are split over mesh axes: `fsdp`, `gather`, `scatter`, and the norm of all their parts."""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._axes._joined import LARGE, end_to_end, is_narrow
from ._axes._mesh_and_lanes import bound_names, gradients_around, meshes_and_lanes
from ._axes._ordered import Sums
from ._base._checks import is_inexact, required_names
from ._base._errors import (
    SpecError,
    StatemeshError,
    StructureError,
    axes_argument,
    error_listing,
    first_paths,
    mesh_str,
    quoted,
    spec_str,
    typed_str,
)
from ._base._specs import PerShard, entry_of, is_spec, mentioned, written_axes
from ._base._trees import describe, has_packed, is_state, path_str, unpacked
from ._base._types import (
    NO_AXES,
    AnyMesh,
    Array,
    Axes,
    AxisName,
    KeyPath,
    Leaf,
    PyTree,
    SeveralAxes,
    SpecTree,
    Tree,
    Value,
)
from ._call._mesh_and_specs import broadcast_specs, check_mesh
from ._jax import _compat as compat
from ._jax._compat import tree_util
from ._jax._frames import without_own_frames
from ._state._state import ParamState, State, set_origin


class SplitArray(ParamState[Value]):
    """A parameter of a layer whose parameters are plain arrays, until `gather` makes it an array again."""

    __slots__ = ()

    def _no_array(self, what: str) -> TypeError:
        return TypeError(
            f"{what} was applied to a parameter of which each shard holds a part. Make the layer's "
            "parameters whole before you call it: `layer = sm.gather(layer, axis_name)`, with the axis that "
            "fsdp was given."
        )


def is_plain_parameter(unit: PyTree) -> bool:
    """Whether `unit` is an array of floats outside of any State, which `value_and_grad` differentiates."""
    return not is_state(unit) and is_inexact(unit)


def specs_of(state: State, path: str) -> list[SpecTree]:
    """The spec of each array of a state's value."""
    return broadcast_specs(state.spec, state.value, f"the spec of {path}", f"{path}.value")


def axes_of(spec: SpecTree, ndim: int) -> list[tuple[AxisName, ...]]:
    """The mesh axes that split each axis of an array.

    A spec may have entries for leading axes that a loop or a `vmap` around has taken away.
    """
    entries = list(written_axes(spec)) if isinstance(spec, PartitionSpec) else []
    entries = entries[max(len(entries) - ndim, 0) :]
    return entries + [()] * (ndim - len(entries))


@without_own_frames
def fsdp(
    model: Tree,
    mesh: AnyMesh,
    axis_name: SeveralAxes,
    *,
    min_size: int = 1024,
    first_axis: int = 0,
) -> Tree:
    """The model with its parameters split over a data axis (fully sharded data parallelism).

    Each device holds `1/n` of the parameters, and so of their gradients and of an optimizer's slots.
    `gather` makes them whole where they are used.

    Of each array the largest axis is split whose length the size of the mesh axis divides and which is not
    split already; of equal ones the first. An array without such an axis stays whole. What its spec says of
    other mesh axes, as for tensor parallelism, holds on.

    **Arguments:**

    - `model`: any pytree. Its parameters are what `value_and_grad` differentiates by default: every
        `ParamState`, and every array of floats outside any State.
    - `mesh`: the mesh of the calls.
    - `axis_name`: the mesh axis over which the rows of a batch are split, or a tuple of several, major to
        minor. Several split one axis of a parameter together. `None` leaves all arrays whole, where the rest
        of the program stays as it is.
    - `min_size`: arrays with fewer elements stay whole.
    - `first_axis`: the first axis that may be split: 1 for layers that are stacked for a scan.

    **Returns:** the model with a spec, of one entry for each axis, in each `ParamState`. A parameter outside
    any State is held by a `ParamState` of its own, until `gather` makes it an array again. Parameters that
    have been through `fsdp` stay as they are, so that a part of the model may go first, with options of its
    own. No array is moved: `place` or a mapped call does it.

    **Raises:** `SpecError` for an axis that the mesh does not have; `StructureError` where the model has no
    parameters or is packed; `TypeError` or `ValueError` for an argument that is none.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = {"w": sm.ParamState(jnp.ones((32, 64))), "b": sm.ParamState(jnp.ones(64))}
        >>> model = sm.fsdp(model, mesh, "data")
        >>> model["w"].spec, model["b"].spec
        (P(None, 'data'), P(None,))

        ```

    Source: the third stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    check_mesh("fsdp", mesh)
    axis_names = () if axis_name is None else required_names("fsdp", axis_name)
    if unknown := [name for name in axis_names if name not in mesh.shape]:
        raise SpecError(
            f"fsdp: no axis is called {quoted(unknown)}; the axes of {mesh_str(mesh)} are "
            f"{quoted(mesh.axis_names)}."
        )
    for what, number in (("min_size", min_size), ("first_axis", first_axis)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            kind = ValueError if type(number) is int else TypeError
            raise kind(f"fsdp: {what} must be 0 or a larger int, got {typed_str(number)}.")
    if has_packed(model):
        raise StructureError(
            "fsdp: the arrays of a Packed lie in buffers already. Write "
            "`sm.pack(sm.fsdp(packed.unpack(), mesh, axis_name), mesh)`."
        )
    size = math.prod(mesh.shape[name] for name in axis_names)
    flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    has_parameters = False

    def split(spec: SpecTree, x: Leaf) -> SpecTree:
        if isinstance(spec, PerShard):
            return spec
        axes = axes_of(spec, x.ndim)
        # A spec that names no mesh axis, with an entry for every axis, says that the array is to stay whole.
        decided = spec is not None and x.ndim > 0 and len(spec) == x.ndim and not any(axes)
        if decided or any(name in names for names in axes for name in axis_names):
            return spec
        position = None
        if math.prod(x.shape) >= min_size:
            free = [k for k in range(first_axis, x.ndim) if not axes[k] and not x.shape[k] % size]
            position = max(free, key=lambda k: x.shape[k], default=None)
        if position is not None:
            axes[position] += axis_names
        return PartitionSpec(*map(entry_of, axes))

    units = []
    for keys, unit in flat:
        if is_plain_parameter(unit):
            # A shape becomes the shape of a State.
            is_shape = isinstance(unit, jax.ShapeDtypeStruct)
            unit = jax.eval_shape(SplitArray, unit) if is_shape else SplitArray(unit)
        if isinstance(unit, ParamState):
            has_parameters = True
            leaves, structure = tree_util.tree_flatten(unit.value)
            pairs = zip(specs_of(unit, path_str(keys, "model")), leaves, strict=True)
            unit = unit.replace(spec=structure.unflatten([split(*pair) for pair in pairs]))
        units.append(unit)
    if not has_parameters:
        raise StructureError(
            "fsdp: the model has no parameters: no ParamState, and no array of floats outside States."
        )
    return treedef.unflatten(units)


@without_own_frames
def gather(tree: Tree, axis_name: SeveralAxes) -> Tree:
    """The tree with the parameters whole that `fsdp` split over mesh axes.

    It stands inside a mapped call: for the whole model, or in each layer for its own parameters, also inside
    `jax.checkpoint` and loops. One collective gathers all small arrays of one dtype that are split over the
    same mesh axes. An array that is 128 KiB or more when it is whole goes alone, without a second copy of it.

    In the loss of a `value_and_grad` that names the axis, the transpose of each is one reduce-scatter: each
    shard gets the sum of its part. Gradients of float16 and bfloat16 are summed in float32 there. Anywhere
    else the whole parameters are the same on all shards, in type too: a `value_and_grad` of them gives whole
    gradients, reduced over all shards, or with `split_as` this shard's parts of these.

    **Arguments:**

    - `tree`: a model that has been through `fsdp`, or a layer of it. Every `ParamState` whose spec names one
        of the mesh axes is gathered, who ever wrote the spec.
    - `axis_name`: the mesh axis, or a tuple of several in any order.

    **Returns:** the tree with the same structure, except that parameters which were outside any State are
    arrays again, and that the specs of what was gathered no longer name the axes. Outside any mapped call
    all values are those that were given.

    **Raises:** `StructureError` for parameters that are whole already; `StatemeshError` for an axis name that
    is not bound inside a mapped call, or that is of lanes.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> def loss_fn(model, x):
        ...     whole = sm.gather(model, "data")
        ...     return ((x @ whole["w"]) ** 2).mean(), model
        >>> step = sm.grad(loss_fn, axis_name="data")
        >>> model = sm.fsdp({"w": jnp.ones((32, 64))}, mesh, "data")
        >>> grads, model = sm.shard_map(step, mesh, (None, P("data")), P())(model, jnp.ones((8, 32)))
        >>> grads["w"].spec, grads["w"].value.shape
        (P(None, 'data'), (32, 64))

        ```

    Source: the third stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    axis_names = required_names("gather", axis_name)
    bound = bound_names("gather", axis_name)
    _refuse_lanes("gather", axis_names, _of_lanes(bound))
    flat, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    named = [(path_str(keys, "tree"), unit) for keys, unit in flat]
    if bound:
        _check(named, bound)
    summed = NO_AXES.union(*(names for names, _ in gradients_around.get()))
    steps: dict[tuple[int, int], list[Step]] = {}
    values: dict[int, list[Leaf]] = {}
    for number, (path, unit) in enumerate(named):
        if isinstance(unit, ParamState):
            values[number] = tree_util.tree_leaves(unit.value)
            specs = specs_of(unit, path)
            for k, (x, spec) in enumerate(zip(values[number], specs, strict=True)):
                steps[number, k] = list(_steps_of(x, spec, bound, summed))
    while steps := {place: left for place, left in steps.items() if left}:
        parts = [(values[number][k], left.pop(0)) for (number, k), left in steps.items()]
        for (number, k), whole in zip(steps, _joined(parts, summed), strict=True):
            values[number][k] = whole
    units = [
        _rebuilt(unit, values[number], axis_names) if number in values else unit
        for number, (_, unit) in enumerate(named)
    ]
    return treedef.unflatten(units)


@without_own_frames
def scatter(whole: PyTree, model: Tree) -> Tree:
    """A gathered model with all of its parameters as they were before `gather`.

    It is for models whose layers write states: what the layers return has whole parameters, and what the
    loss returns must have the parts. Parameters that `fsdp` left whole come back too, so that a model may be
    cast to another dtype before `gather`. Nothing is computed or sent.

    **Arguments:**

    - `whole`: what `gather` made of `model`, with any other states written.
    - `model`: the model before, of the same structure.

    **Returns:** `whole`, in which every `ParamState` and every array of floats outside any State is that of
    `model`.

    **Raises:** `StructureError` where the trees have other structures.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = sm.fsdp({"w": jnp.ones((32, 64)), "steps": sm.State(0)}, mesh, "data")
        >>> whole = sm.gather(model, "data")
        >>> whole = {**whole, "steps": whole["steps"].set(1)}
        >>> model = sm.scatter(whole, model)
        >>> model["w"].spec, model["steps"]
        (P(None, 'data'), State(int32(1)))

        ```
    """
    new, treedef = tree_util.tree_flatten_with_path(whole, is_leaf=is_state)
    old, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    if items := _other_structure(old, "the model before", new, "the gathered model"):
        raise error_listing(
            StructureError,
            "scatter: the two models have different structures",
            items,
            "Pass the model that was given to gather, and what its layers made of the gathered one.",
        )
    pairs = zip(new, old, strict=True)
    return treedef.unflatten(
        [y if isinstance(y, ParamState) or is_plain_parameter(y) else x for (_, x), (_, y) in pairs]
    )


_Flat: TypeAlias = Sequence[tuple[KeyPath, PyTree]]


def _other_structure(
    first: _Flat, first_name: str, second: _Flat, second_name: str, root: str = "model"
) -> list[str]:
    """What messages say of the paths of two flat models that are not the same."""
    paths, others = ([path_str(keys, root) for keys, _ in flat] for flat in (first, second))
    if paths == others:
        return []
    items = []
    if missing := [path for path in paths if path not in others]:
        items.append(f"only {first_name} has {first_paths(missing)}")
    if extra := [path for path in others if path not in paths]:
        items.append(f"only {second_name} has {first_paths(extra)}")
    return items or ["their leaves are in another order"]


@without_own_frames
def global_norm(tree: PyTree) -> Array:
    """The Euclidean norm of all numbers of a tree, with the parts that other shards hold.

    It is for gradients, of which `optax.clip_by_global_norm` would see this shard's parts only. The spec of a
    state says over which mesh axes its value is split. The squares of parts are summed over these axes, by
    one collective for all states that are split over the same ones. What is whole on every shard counts once.

    **Arguments:**

    - `tree`: any pytree, such as the gradients of a model. Arrays of floats count, in States and outside.

    **Returns:** a float32, or a float64 where the tree has one. Outside any mapped call arrays are whole.

    **Raises:** `StatemeshError` where an array differs between shards, by its type, over a mesh axis that no
    spec names: it is a part of an array in no State, or a gradient that was not reduced.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("model",))
        >>> grads = {"w": sm.ParamState(jnp.ones((8, 2)), spec=P("model")), "b": sm.ParamState(jnp.ones(9))}
        >>> norm = sm.shard_map(sm.global_norm, mesh, in_specs=None, out_specs=P())(grads)
        >>> assert norm == 5
        >>> clipped = jax.tree.map(lambda g: g * jnp.minimum(1, 2.5 / norm), grads)

        ```
    """
    flat, _ = tree_util.tree_flatten_with_path(unpacked(tree), is_leaf=is_state)
    bound = compat.bound_axis_names()
    lanes = _of_lanes(bound)
    in_order = tuple(name for name in meshes_and_lanes(bound)[0] if name not in lanes)
    meshes = frozenset(in_order)
    # Over these axes the type of an array says whether its shards differ.
    typed = compat.varying(jax.lax.axis_index(in_order)) if meshes else NO_AXES
    squares: dict[Axes, Array] = {}
    unsaid: list[str] = []
    for keys, unit in flat:
        path, leaves = path_str(keys, "tree"), tree_util.tree_leaves(unit)
        specs = specs_of(unit, path) if is_state(unit) else [None] * len(leaves)
        for x, spec in zip(leaves, specs, strict=True):
            if not is_inexact(x):
                continue
            names = _split_over(spec) & meshes
            differs = compat.varying(x) & typed
            if left := differs - names:
                unsaid.append(f"{path}: {describe(x)} differs over {quoted([*left])}")
            wide = jnp.abs(jnp.asarray(x)).astype(jnp.promote_types(x.real.dtype, jnp.float32))
            over = names - (typed - differs)
            squares[over] = squares.get(over, 0) + jnp.square(wide).sum()
    if unsaid:
        raise error_listing(
            StatemeshError,
            "global_norm: these arrays differ between shards, and no spec says that they are parts",
            unsaid,
            "Reduce gradients first, as `sm.value_and_grad(loss_fn, axis_name=...)` does. Hold what is split "
            "in a `ParamState` with its spec.",
        )
    named = [tuple(name for name in in_order if name in over) for over in squares]
    pairs = zip(squares.values(), named, strict=True)
    totals = [jax.lax.psum(x, names) if names else x for x, names in pairs]
    return jnp.sqrt(sum(totals, jnp.float32(0)))


def _split_over(spec: SpecTree) -> Axes:
    if isinstance(spec, PerShard):
        return frozenset(spec.axis_names)
    return mentioned(spec) if isinstance(spec, PartitionSpec) else NO_AXES


def _refuse_lanes(what: str, names: Iterable[AxisName], lanes: Axes) -> None:
    for name in names:
        if name in lanes:
            raise StatemeshError(
                f"{what}: {name!r} is an axis of lanes, and specs split parameters over mesh axes only. "
                f"Call the function by `sm.shard_map` on a mesh with an axis {name!r}."
            )


def _of_lanes(bound: Sequence[AxisName]) -> Axes:
    """The axes of lanes among these. Those of `pmap2` are on a mesh."""
    marks = [mark for mark in compat.axes_from_dataflow() if mark.lanes]
    on_a_mesh = frozenset(name for mark in marks for name in mark.axis_names)
    return on_a_mesh.union(meshes_and_lanes(bound)[1])


class Step(NamedTuple):
    """A collective that an array needs.

    **Attributes:**

    - `axis`: the axis of the array.
    - `names`: the mesh axes to gather or to split along it.
    - `split_over`: all mesh axes that split the array.
    - `is_large`: whether the array goes alone.
    """

    axis: int
    names: tuple[AxisName, ...]
    split_over: Axes
    is_large: bool


def _steps_of(x: Leaf, spec: SpecTree, bound: Sequence[AxisName], summed: Axes) -> Iterator[Step]:
    """How an array becomes whole over the mesh axes `bound`, the most minor ones first.

    One collective gathers over axes of which all are in `summed`, or none.
    """
    for axis, names in enumerate(axes_of(spec, jnp.ndim(x))):
        named = [name for name in reversed(names) if name in bound]
        for _, together in itertools.groupby(named, key=summed.__contains__):
            yield Step(axis, tuple(together)[::-1], mentioned(spec), _is_large(x, mentioned(spec)))


def steps_like(what: str, model: PyTree, split_as: PyTree, root: str) -> list[list[Step]]:
    """For each leaf of a model how a shard takes its part, by the specs of a model that `fsdp` has split.

    Mesh axes by which the model's own specs split it already are left out.

    **Arguments:**

    - `root`: what messages call the model.
    """
    if has_packed((model, split_as)):
        raise StructureError(
            f"{what}: split_as splits parameters by their own specs, but a Packed has them in buffers. Pass "
            "the model itself: `packed.unpack()`."
        )
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    flat_split, _ = tree_util.tree_flatten_with_path(split_as, is_leaf=is_state)
    items = _other_structure(flat, "the model", flat_split, "split_as", root)
    bound = compat.bound_axis_names()
    meshes = frozenset(meshes_and_lanes(bound)[0]) - _of_lanes(bound)
    steps: list[list[Step]] = []
    unsplit, inner, odd = [], [], []
    for (keys, unit), (_, split) in zip(flat, flat_split, strict=False):
        path = path_str(keys, root)
        leaves = tree_util.tree_leaves(unit)
        ranks = [
            [len(getattr(x, "shape", ())) for x in tree_util.tree_leaves(tree)]
            for tree in (unit, split)
        ]
        if not items and ranks[0] != ranks[1]:
            items.append(f"{path}: {describe(unit)} in the model, {describe(split)} in split_as")
        if items:
            break
        if is_plain_parameter(split) or (isinstance(split, ParamState) and split.spec is None):
            unsplit.append(f"{path}: {describe(split)}, without a spec")
        if not isinstance(split, ParamState):
            steps += [[] for _ in leaves]
            continue
        specs = specs_of(split, path)
        own_specs = specs_of(unit, path) if is_state(unit) else [None] * len(leaves)
        for x, spec, own_spec in zip(leaves, specs, own_specs, strict=True):
            split_already = _split_over(own_spec)
            _refuse_lanes(what, _split_over(spec), frozenset(bound) - meshes)
            steps.append([])
            for axis, entry in enumerate(axes_of(spec, jnp.ndim(x))):
                if names := tuple(name for name in entry if name in meshes - split_already):
                    if entry[-len(names) :] != names:
                        inner.append(f"{path}: {spec_str(spec)}")
                    if x.shape[axis] % math.prod(map(jax.lax.axis_size, names)):
                        odd.append(f"{path}: {describe(x)} by {spec_str(spec)}")
                    steps[-1].append(
                        Step(axis, names, mentioned(spec), _is_large(x, split_already))
                    )
    if items:
        raise error_listing(
            StructureError,
            f"{what}: split_as has another structure than the model",
            items,
            "Pass what `fsdp` made of this model: `split_as=sm.fsdp(model, mesh, axis_name)`.",
        )
    if unsplit:
        raise error_listing(
            StructureError,
            f"{what}: no spec says how these parameters of split_as are split",
            unsplit,
            "Pass a model that has been through `sm.fsdp(model, mesh, axis_name)`.",
        )
    if inner:
        raise error_listing(
            StatemeshError,
            f"{what}: other mesh axes split the parts of these parameters of split_as further",
            inner,
            "Name the axes that only split_as has last in the entry, or in an entry of their own.",
        )
    if odd:
        raise error_listing(
            StatemeshError,
            f"{what}: the mesh does not divide these parameters of the model as split_as says",
            odd,
            "Let `fsdp` split the model for the mesh of this call.",
        )
    return steps


def own_parts(arrays: Sequence[Leaf], steps: Sequence[Sequence[Step]]) -> list[Leaf]:
    """This shard's part of arrays that are whole on every shard."""
    parts = list(arrays)
    for k, of_array in enumerate(steps):
        for axis, names, *_ in of_array:
            size = parts[k].shape[axis] // math.prod(map(jax.lax.axis_size, names))
            start = jax.lax.axis_index(names) * size
            parts[k] = jax.lax.dynamic_slice_in_dim(parts[k], start, size, axis)
    return parts


def scattered(arrays: Sequence[Leaf], steps: Sequence[Sequence[Step]], sums: Sums) -> list[Leaf]:
    """This shard's part of the sums of arrays over shards: large ones alone, others together.

    **Arguments:**

    - `sums`: how arrays are summed.
    """
    parts = list(arrays)
    for turn in range(max(map(len, steps), default=0)):
        groups: dict[Hashable, list[int]] = {}
        for k, of_array in enumerate(steps):
            if turn < len(of_array):
                axis, names, _, is_large = of_array[turn]
                x = parts[k]
                if is_large:
                    parts[k] = sums.along(x, names, axis)
                else:
                    groups.setdefault((names, x.dtype, compat.varying(x)), []).append(k)
        for members in groups.values():
            names = steps[members[0]][turn].names
            count = math.prod(map(jax.lax.axis_size, names))
            fronts = [jnp.moveaxis(parts[k], steps[k][turn].axis, 0) for k in members]
            # A row for each shard.
            sizes = [front.size // count for front in fronts]
            pairs = zip(fronts, sizes, strict=True)
            rows = jnp.concatenate([x.reshape(count, size) for x, size in pairs], axis=1)
            pieces = jax.lax.split(sums.of_rows(rows, names), sizes)
            for k, front, piece in zip(members, fronts, pieces, strict=True):
                part = piece.reshape(front.shape[0] // count, *front.shape[1:])
                parts[k] = jnp.moveaxis(part, 0, steps[k][turn].axis)
    return parts


def _is_large(part: Leaf, split_over: Axes) -> bool:
    """Whether an array goes alone, given this shard's part of it.

    The whole array decides it, so that a program is the same on every mesh.
    """
    over = split_over.intersection(compat.bound_axis_names())
    return part.size * part.dtype.itemsize * math.prod(map(jax.lax.axis_size, over)) >= LARGE


def _check(named: Sequence[tuple[str, PyTree]], names: tuple[AxisName, ...]) -> None:
    """Refuse parameters that are whole, and those that are split in a way that `gather` cannot join."""
    whole, inner, same = [], [], []
    name = axes_argument(names)
    typed = compat.varying(jax.lax.axis_index(names))
    for path, unit in named:
        if is_plain_parameter(unit) or (isinstance(unit, ParamState) and unit.spec is None):
            whole.append(f"{path}: {describe(unit)}, without a spec")
        if not isinstance(unit, ParamState):
            continue
        leaves = tree_util.tree_leaves(unit.value)
        for x, spec in zip(leaves, specs_of(unit, path), strict=True):
            for entry in axes_of(spec, jnp.ndim(x)):
                split = [name for name in entry if name in names]
                if split and entry[-len(split) :] != tuple(split):
                    inner.append(f"{path}: {spec_str(spec)}")
                if typed.intersection(split) - compat.varying(x):
                    same.append(f"{path}: {spec_str(spec)}")
    if whole:
        raise error_listing(
            StructureError,
            f"gather over {name!r}: these parameters are whole already",
            whole,
            f"Let `model = sm.fsdp(model, mesh, {name!r})` split the model before the mapped call, and "
            "gather each parameter once.",
        )
    if inner:
        raise error_listing(
            StatemeshError,
            f"gather over {name!r}: other mesh axes split the parts of these parameters further",
            inner,
            f"Name {quoted(names)} last in its entry, or in an entry of its own.",
        )
    if same:
        raise error_listing(
            StatemeshError,
            f"gather over {name!r}: each shard already has the whole of these parameters, although their "
            "specs split them",
            same,
            "Leave them out of state_in_specs, so that they enter the call by their own specs.",
        )


def _joined(parts: Sequence[tuple[Leaf, Step]], summed: Axes) -> list[Array]:
    """The arrays after one step each: large ones alone, others joined by dtype and mesh axes."""
    groups: dict[object, list[int]] = {}
    whole: list[Array] = [x for x, _ in parts]
    for k, (x, step) in enumerate(parts):
        if step.is_large:
            whole[k] = _of_all(x, step.names, summed, step.axis, tiled=True)
            continue
        key = step.names, jnp.dtype(x.dtype), step.split_over, compat.varying(x)
        groups.setdefault(key, []).append(k)
    for members in groups.values():
        names = parts[members[0]][1].names
        fronts = [jnp.moveaxis(parts[k][0], parts[k][1].axis, 0) for k in members]
        rows = _of_all(end_to_end(fronts), names, summed, 0, tiled=False)
        pieces = jax.lax.split(rows, [front.size for front in fronts], axis=1)
        for k, front, piece in zip(members, fronts, pieces, strict=True):
            whole[k] = jnp.moveaxis(piece.reshape(-1, *front.shape[1:]), 0, parts[k][1].axis)
    return whole


def _of_all(part: Array, names: tuple[AxisName, ...], summed: Axes, axis: int, tiled: bool) -> Any:
    """The parts of all shards, joined along an axis or stacked along a new one."""
    how: Any = {"axis_name": names, "tiled": tiled}
    if compat.varying(part).issuperset(names) and summed.isdisjoint(names):
        # No `value_and_grad` around sums the parts of the gradient. One further in takes a parameter whose
        # type varies for the shard's own, and would leave its gradient as it is.
        return jax.lax.all_gather(part, axis=axis, to="invarying", **how)
    if not is_narrow(part.dtype):
        return jax.lax.all_gather(part, axis=axis, **how)

    @jax.custom_vjp
    def narrow(x: Array) -> Any:
        return jax.lax.all_gather(x, axis=axis, **how)

    def summed_wide(_: None, whole: Array) -> tuple[Array]:
        # This shard's part of the sum over shards, taken in float32.
        part = jax.lax.psum_scatter(whole.astype(jnp.float32), scatter_dimension=axis, **how)
        return (part.astype(whole.dtype),)

    narrow.defvjp(lambda x: (narrow(x), None), summed_wide)
    return narrow(part)


def _rebuilt(state: ParamState, leaves: Sequence[Leaf], names: Sequence[AxisName]) -> PyTree:
    value = tree_util.tree_structure(state.value).unflatten(leaves)
    if isinstance(state, SplitArray):
        return value

    def without(spec: SpecTree) -> SpecTree:
        """The spec without the axes; `None` where it names them and no other."""
        if not isinstance(spec, PartitionSpec) or mentioned(spec).isdisjoint(names):
            return spec
        left = [tuple(name for name in axis if name not in names) for axis in written_axes(spec)]
        return PartitionSpec(*map(entry_of, left)) if any(left) else None

    specs, structure = tree_util.tree_flatten(state.spec, is_leaf=is_spec)
    left = list(map(without, specs))
    if left == specs:
        return state
    spec = structure.unflatten(left) if any(spec is not None for spec in left) else None
    whole = state.replace(value=value, spec=spec)
    # It continues no argument: returned, it would be laid out as a part by the spec of the parts.
    set_origin(whole, None)
    return whole
