"""`save`: a tree's values as files. `load`: files as a tree's values."""

import dataclasses
import difflib
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._base import _errors as errors
from .._base._checks import is_key, is_shaped
from .._base._errors import StructureError, error_listing
from .._base._specs import SpecPlacement, only
from .._base._trees import describe_leaf, is_packed, is_state, path_str, unpacked
from .._base._types import NUMBERS, Leaf, PyTree, Tree
from .._call._agreement import check_same_arrays, is_own
from .._call._arguments import inside_modules
from .._call._layout import check_concrete, onto, shardings
from .._call._mesh_and_specs import check_mesh, not_a_mesh, own_placements
from .._call._packed import Packed, packed_placements, repack, shapes_of, with_models
from .._jax._compat import concrete_context_mesh, tree_util
from .._state._state import State
from . import _files as files
from ._files import CheckpointError


def save(folder: str | os.PathLike[str], tree: PyTree) -> None:
    """Save the values of a tree: its states, other arrays, and Python numbers outside of Modules.

    With several processes, all of them call it, and each writes its own part.

    **Arguments:**

    - `folder`: where; it must not be there yet. It gets its name when all is written.
    - `tree`: any pytree. A `Packed` in it counts as its model. What is static is not saved.

    **Raises:** `CheckpointError` for a folder that is there already, and where writing fails;
    `StructureError` for arrays of which several processes have different ones.

    !!! example

        ```python
        >>> import os, tempfile, jax.numpy as jnp, statemesh as sm
        >>> from statemesh import checkpoint
        >>> folder = os.path.join(tempfile.mkdtemp(), "model")
        >>> checkpoint.save(folder, {"w": sm.ParamState(jnp.arange(3.0))})
        >>> checkpoint.load(folder, {"w": sm.ParamState(jnp.zeros(3))})["w"].value
        Array([0., 1., 2.], dtype=float32)

        ```
    """
    folder = files.folder_path("save", folder)
    if folder.exists():
        raise CheckpointError(
            f"save: {folder} is there already, and a checkpoint is never written over another. Give a new "
            "folder, or keep several steps with Checkpoints(folder)."
        )
    arrays, record = contents("save", tree)
    handler = ocp.CompositeCheckpointHandler(**files.handlers())
    with files.writing(str(folder)), ocp.Checkpointer(handler) as writer:
        writer.save(folder, args=files.to_save(arrays, record))


def contents(what: str, tree: PyTree) -> tuple[dict[str, Leaf], files.Record]:
    """The arrays of a tree as they are written, by path, and the record.

    The record has the dtype and the shape of each array, and the Python numbers.
    """
    values = _values(what, unpacked(tree), tree)
    arrays = {value.path: value.leaf for value in values if value.is_array}
    check_concrete(what, [*arrays.items()])
    record: files.Record = {"version": files.VERSION, "arrays": {}, "numbers": {}}
    for value in values:
        kind = value.kind
        if not value.is_array:
            record["numbers"][value.path] = {"type": kind.dtype, "value": repr(value.leaf)}
            continue
        described = {"dtype": kind.dtype, "shape": list(kind.shape)}
        if is_key(value.leaf):
            described["impl"] = str(jax.random.key_impl(value.leaf))
            # A key is written as the numbers that it consists of.
            arrays[value.path] = jax.random.key_data(value.leaf)
        if (name := files.folder_name(value.path)) != value.path:
            described["folder"] = name
        record["arrays"][value.path] = described
    arrays = {path: x if isinstance(x, jax.Array) else jnp.asarray(x) for path, x in arrays.items()}
    if jax.process_count() > 1:
        # An array that each process has for itself becomes one on the devices of all.
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        check_same_arrays(what, mesh, [*arrays.items()])
        target = NamedSharding(mesh, PartitionSpec())
        arrays = {path: onto(x, target) if is_own(x) else x for path, x in arrays.items()}
    # Orbax has no files for arrays without elements; their shapes say all there is.
    return {path: x for path, x in arrays.items() if x.size}, record


def load(
    folder: str | os.PathLike[str],
    like: Tree,
    mesh: Mesh | None = None,
    *,
    rename: Mapping[str, str | None] | None = None,
    missing: str = "error",
) -> Tree:
    """Load what `save` saved, on any mesh.

    Structure, static leaves and placements come from `like`, the values from the files. A state lies by its
    own spec on the mesh. An array without one lies as that of `like` does, or is replicated.

    **Arguments:**

    - `folder`: that given to `save`.
    - `like`: the tree as it is made, or its shapes, as from `equinox.filter_eval_shape`.
    - `mesh`: left out, the mesh of the context, or else that on which arrays of `like` lie. If there is none,
        each array lies where that of `like` does, or on one device.
    - `rename`: `{old: new}`: the path of a saved value, and its path in `like`. A path stands for all below
        it, too. With `None` as the new path a saved value is left out.
    - `missing`: `'error'`, or `'keep'`: what was not saved stays as it is in `like`.

    **Returns:** the tree. A state with a `PerShard` placement has a value for each shard of this mesh. If
    another number of shards was saved, `State.reshard` makes them.

    **Raises:** `CheckpointError` for a folder that is no whole checkpoint, for altered files, and for a newer
    version of the format; `StructureError` listing all that is missing, left over, or of another shape or
    dtype; `StructureError` for states with a value for each shard if their number changes and `reduce` does
    not say how; `SpecError` for specs that do not fit the mesh.

    !!! example

        ```python
        >>> import os, tempfile, jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh import checkpoint
        >>> folder = os.path.join(tempfile.mkdtemp(), "model")
        >>> checkpoint.save(folder, {"w": sm.ParamState(jnp.arange(8.0))})
        >>> like = {"weight": sm.ParamState(jnp.zeros(8), spec=P("data"))}
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> loaded = checkpoint.load(folder, like, mesh, rename={"['w']": "['weight']"})
        >>> loaded["weight"].value.sharding.spec
        P('data',)

        ```
    """
    folder = files.folder_path("load", folder)
    if missing not in (choices := ("error", "keep")):
        raise errors.unknown_choice("missing", missing, choices)
    if not isinstance(rename, Mapping | None):
        raise TypeError(
            f"load: rename is {rename!r} of type {type(rename).__name__}, but must be a dictionary of paths, "
            "as in rename={\"['w']\": \"['weight']\"}."
        )
    if not isinstance(mesh, Mesh | None):
        raise not_a_mesh(mesh)
    record = files.read_record(folder)
    # The values of a packed model are taken out of its buffers only where they may be kept.
    keeps = missing == "keep" and not any(map(_is_shape, tree_util.tree_leaves(like)))
    model = unpacked(like) if keeps else with_models(like, shapes_of)
    values = _values("load", model, like)
    names = _saved_names(folder, record, values, rename or {}, missing)
    mesh = _mesh_for(mesh, like)
    arrays = [value for value in values if value.is_array]
    kept = [value for value in arrays if value.path not in names]
    if bare := [value.path for value in kept if _is_shape(value.leaf)]:
        raise error_listing(
            StructureError,
            "load: missing='keep' keeps the values of `like`, which has only shapes for",
            bare,
            "Give the model itself as `like`.",
        )
    targets = _targets(arrays, mesh)
    files.check_files(folder, record)
    loaded = _loaded(folder, record, arrays, names, targets, mesh)
    leaves = tree_util.tree_leaves(model)
    for value in values:
        path = value.path
        if not value.is_array and path in names:
            leaves[value.position] = files.number_of(record["numbers"][names[path]])
        elif value.is_array:
            leaf = loaded.get(path, value.leaf)
            to_pack = value.packed and path in loaded
            leaves[value.position] = leaf if to_pack else _laid(leaf, targets[path])
    tree = tree_util.tree_structure(model).unflatten(leaves)
    nodes, structure = tree_util.tree_flatten(like, is_leaf=is_packed)
    if not any(map(is_packed, nodes)):
        return tree
    # The buffers of a packed model lie on a mesh always.
    check_mesh("load", mesh)
    pairs = zip(nodes, structure.flatten_up_to(tree), strict=True)
    return structure.unflatten(
        [repack(node, new, mesh) if isinstance(node, Packed) else new for node, new in pairs]
    )


def _loaded(
    folder: pathlib.Path,
    record: files.Record,
    arrays: Sequence["_Value"],
    names: Mapping[str, str],
    targets: Mapping[str, Sharding],
    mesh: Mesh | None,
) -> dict[str, Any]:
    """The loaded arrays by path. Those that still have to be packed or laid out are on the host."""
    values = [value for value in arrays if value.path in names]
    saved = {value.path: record["arrays"][names[value.path]] for value in values}
    # Where the mesh has another number of shards than was saved, their values are computed on the host.
    counts = {value.path: value.shards(mesh) for value in values if value.per_shard}
    counts = {path: n for path, n in counts.items() if n != saved[path]["shape"][0]}
    asked = {
        names[value.path]: None if value.packed or value.path in counts else targets[value.path]
        for value in values
        if not files.is_empty(saved[value.path])
    }
    read = files.read_arrays(folder, record, asked)
    loaded: dict[str, Any] = {}
    refused = []
    for value in values:
        path, shape = value.path, saved[value.path]["shape"]
        if files.is_empty(saved[path]):
            loaded[path] = _empty((counts.get(path, shape[0]), *shape[1:]), saved[path])
            continue
        x = read[names[path]]
        if path in counts and value.state is not None:
            x = value.state.reshard(x, counts[path])
            if x is NotImplemented:
                how = value.state.reduce
                refused.append(
                    f"{path}: {type(value.state).__name__} with "
                    f"reduce={getattr(how, '__name__', repr(how))}, saved for {shape[0]} shards, but the "
                    f"mesh has {counts[path]}"
                )
        loaded[path] = x
    if refused:
        raise error_listing(
            StructureError,
            "load: these states have a value for each shard. The mesh has another number of shards, and "
            "`reduce` does not say what becomes of the values",
            refused,
            "Declare reduce='mean', 'sum', 'max' or 'min' in `like`, override `reshard` in a kind of your "
            "own, or load on a mesh of the same size.",
        )
    return loaded


def _is_shape(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _laid(x: Leaf, target: Sharding) -> jax.Array:
    return onto(x, target) if isinstance(target, NamedSharding) else jax.device_put(x, target)


def _empty(shape: Sequence[int], saved: Mapping[str, Any]) -> Any:
    if "impl" not in saved:
        return np.zeros(shape, saved["dtype"])
    key = jax.random.key_data(jax.random.key(0, impl=saved["impl"]))
    no_keys = jnp.zeros((*shape, *key.shape), key.dtype)
    return jax.random.wrap_key_data(no_keys, impl=saved["impl"])


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """An array of a tree, or a Python number outside of any Module.

    **Attributes:**

    - `path`: as the user would type it after the tree's name. That of a State stands for its value.
    - `position`: that among the leaves of the tree.
    - `state`: for an array in a State, this State.
    - `placement`: that of such an array, if the State has a spec or is packed.
    - `packed`: whether it goes into a buffer of a packed model.
    """

    path: str
    position: int
    leaf: Leaf
    state: State | None = None
    placement: SpecPlacement | None = None
    packed: bool = False

    @property
    def is_array(self) -> bool:
        return is_shaped(self.leaf)

    @property
    def per_shard(self) -> bool:
        """Whether the first axis has an entry for each shard."""
        return self.placement is not None and self.placement.axis is not None

    @property
    def kind(self) -> "_Kind":
        if not self.is_array:
            return _Kind(type(self.leaf).__name__, ())
        dtype = self.leaf.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return _Kind(str(dtype), tuple(np.shape(self.leaf)), self.is_array)

    def shards(self, mesh: Mesh | None) -> int:
        """How many entries the first axis has of a value for each shard."""
        if mesh is None or self.placement is None:
            return int(self.leaf.shape[0])
        names = self.placement.axes[0]
        return math.prod(mesh.shape[name] for name in names if name in mesh.shape)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The dtype and shape of an array, or the type of a number."""

    dtype: str
    shape: tuple[int, ...]
    is_array: bool = False

    def __str__(self) -> str:
        return describe_leaf(self) if self.is_array else self.dtype


def _values(call: str, model: PyTree, tree: PyTree) -> list[_Value]:
    """The arrays and numbers of a tree in order. Numbers in a Module are static, and no values.

    **Arguments:**

    - `call`: the name of the call, for its error.
    - `model`: the tree, with each `Packed` replaced by its model.

    **Raises:** `StructureError` for different values with one path.
    """
    values: list[_Value] = []
    position = 0
    flat = tree_util.tree_flatten_with_path(model, is_leaf=is_state)[0]
    units = zip(flat, inside_modules(model), packed_placements(tree), strict=True)
    for (keys, node), in_module, packed in units:
        path = path_str(keys) or "value"
        if not is_state(node):
            if is_shaped(node) or (type(node) in NUMBERS and not in_module):
                values.append(_Value(path, position, node))
            position += 1
            continue
        inner = tree_util.tree_flatten_with_path(node.value)[0]
        placements: Sequence[SpecPlacement | None] = packed or [None] * len(inner)
        if packed is None and node.spec is not None:
            placements = own_placements(node, node.spec, path)
        for (keys, x), placement in zip(inner, placements, strict=True):
            to_pack = packed is not None
            values.append(_Value(path_str(keys, path), position, x, node, placement, to_pack))
            position += 1
    kinds: dict[str, list[_Kind]] = {}
    for value in values:
        kinds.setdefault(value.path, []).append(value.kind)
    if several := [pair for pair in kinds.items() if len(pair[1]) > 1]:
        raise error_listing(
            StructureError,
            f"{call}: values are saved by their paths, and these paths have several",
            [f"{path}: {' and '.join(map(str, kinds))}" for path, kinds in several],
            "Give the keys different reprs, or the fields different names.",
        )
    return values


def _mesh_for(mesh: Mesh | None, like: PyTree) -> Any:
    """The mesh given, or that of the context, or that on which arrays of `like` lie; or `None`."""
    mesh = mesh or concrete_context_mesh()
    of_arrays = [getattr(_sharding_of(x), "mesh", None) for x in tree_util.tree_leaves(like)]
    return mesh or next((mesh for mesh in of_arrays if isinstance(mesh, Mesh)), None)


def _targets(arrays: Sequence[_Value], mesh: Mesh | None) -> dict[str, Sharding]:
    """The sharding of each array by its path.

    **Raises:** `SpecError` for specs that do not fit the mesh or the arrays.
    """
    if mesh is None:
        single = SingleDeviceSharding(jax.local_devices()[0])
        return {value.path: _sharding_of(value.leaf) or single for value in arrays}
    placements, named = [], []
    for value in arrays:
        here = _sharding_of(value.leaf)
        leaf, placement = value.leaf, value.placement
        if placement is None:
            # As the array of `like` lies, on the axes that this mesh has.
            spec = here.spec if isinstance(here, NamedSharding) else PartitionSpec()
            placement = SpecPlacement(only(spec, frozenset(mesh.axis_names)))
        elif value.per_shard:
            # The first axis becomes what the mesh needs.
            leaf = jax.ShapeDtypeStruct((value.shards(mesh), *leaf.shape[1:]), leaf.dtype)
        placements.append(placement)
        named.append((value.path, leaf))
    targets = shardings("load", named, placements, mesh)
    return {path: target for (path, _), target in zip(named, targets, strict=True)}


def _sharding_of(leaf: Leaf) -> Sharding | None:
    here = getattr(leaf, "sharding", None)
    return here if isinstance(here, Sharding) else None


def _saved_names(
    folder: pathlib.Path,
    record: files.Record,
    values: Sequence[_Value],
    rename: Mapping[str, str | None],
    missing: str,
) -> dict[str, str]:
    """The name under which each value of `like` was saved, by path. What was not saved is left out.

    **Raises:** `StructureError` listing everything that does not fit.
    """
    arrays, numbers = record["arrays"], record["numbers"]
    kinds = {name: _Kind(x["dtype"], tuple(x["shape"]), True) for name, x in arrays.items()}
    kinds |= {name: _Kind(number["type"], ()) for name, number in numbers.items()}
    names: dict[str, str] = {}
    bad: list[str] = []
    used = set()
    for name in kinds:
        old = max((o for o in rename if _is_below(name, o)), key=len, default=None)
        path: str | None = name
        if old is not None:
            used.add(old)
            new = rename[old]
            path = None if new is None else new + name[len(old) :]
        if path is None:
            continue
        if path in names:
            bad.append(f"rename: {names[path]} and {name} would both be {path}")
        names[path] = name
    bad += [f"rename: {old!r} was not saved" for old in rename if old not in used]
    wanted = {value.path: value for value in values}
    absent = [path for path in wanted if path not in names]
    left = [path for path in names if path not in wanted]
    # An inserted layer moves the later ones: what was saved fits the next path.
    moved = [p for p in wanted if p in names and not _fits(kinds[names[p]], wanted[p])]
    advice = []
    if missing == "error" and absent:
        bad += [f"missing: {p}: {wanted[p].kind} is in `like`, and was not saved" for p in absent]
        advice.append("missing='keep' keeps what `like` has for values that were not saved.")
    if left:
        bad += [f"left over: {p}: {kinds[names[p]]} was saved, and is not in `like`" for p in left]
        advice.append("rename={'path': None} leaves a saved value out.")
    bad += [f"{p}: saved as {kinds[names[p]]}, but `like` has {wanted[p].kind}" for p in moved]
    if not bad:
        return {path: names[path] for path in wanted if path in names}
    # For each saved name that is left over, the most similar missing path of the same kind.
    likely: dict[str, str] = {}
    free = [wanted[path] for path in absent + moved]
    for name in [names[path] for path in left + moved]:
        alike = [value.path for value in free if _fits(kinds[name], value)]
        if best := difflib.get_close_matches(name, alike, n=1, cutoff=0.5):
            likely[name] = best[0]
            free = [value for value in free if value.path != best[0]]
    if likely:
        advice.insert(0, f"Probably renamed: rename={likely!r}.")
    raise error_listing(
        StructureError, f"load: what {folder} holds is not what `like` has", bad, "\n".join(advice)
    )


def _is_below(name: str, old: str) -> bool:
    return name == old or name.startswith((f"{old}.", f"{old}["))


def _fits(kind: _Kind, value: _Value) -> bool:
    if not (kind.is_array and value.is_array):
        return kind.is_array == value.is_array
    skipped = 1 if value.per_shard else 0
    mine = value.kind
    return (
        kind.dtype == mine.dtype
        and len(kind.shape) == len(mine.shape)
        and kind.shape[skipped:] == mine.shape[skipped:]
    )
