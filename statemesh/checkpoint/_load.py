"""`load`: files as a tree's values."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .._base import errors as base_errors
from .._base._compat import tree_util
from .._base._nodes import is_packed
from .._base._types import Leaf, PyTree
from .._packed._pack import pack
from .._packed._packed import shapes_of, with_models
from .._resolve._placement import onto
from . import _errors as errors
from . import _files as files
from ._layout import mesh_for, shardings, shards
from ._leaves import Value, values
from ._match import match


_NUMBERS: dict[str, Any] = {"bool": "True".__eq__, "int": int, "float": float, "complex": complex}


def load(
    folder: str | os.PathLike[str],
    like: PyTree,
    mesh: Mesh | None = None,
    *,
    rename: Mapping[str, str | None] | None = None,
    missing: str = "error",
) -> PyTree:
    """Load what `save` saved, on any mesh.

    Structure, static leaves and placements come from `like`, the values from the files. A state lies by its
    own spec on the mesh. An array without one lies as that of `like` does, or is replicated.

    **Arguments:**

    - `folder`: that given to `save`.
    - `like`: the tree as it is made, or its shapes, as from `equinox.filter_eval_shape`.
    - `mesh`: left out, that of the context, else that of the arrays of `like`. Where there is none, every
        array lies on the devices that the one of `like` lies on, or on one device.
    - `rename`: `{old: new}`, paths as they were saved and as they are in `like`. A path stands for all below
        it, too. `None` as the new one leaves a saved value out.
    - `missing`: `'error'`, or `'keep'`: what was not saved stays as it is in `like`.

    **Returns:** the tree. A state with a `PerShard` placement has a value for each shard of this mesh, by
    `State.reshard`.

    **Raises:** `CheckpointError` for a folder that is no whole checkpoint, for altered files, and for a newer
    version of the format; `StructureError` listing all that is missing, left over, or of another shape or
    dtype, and states with values of another number of shards and no policy; `SpecError` for specs that do not
    fit the mesh.
    """
    folder = pathlib.Path(folder).absolute()
    if missing not in ("error", "keep"):
        raise base_errors.invalid_argument("load", "missing", missing)
    record = files.read_record(folder)
    model = with_models(like, shapes_of)
    found = values(model)
    names = match(folder, record, found, rename or {}, missing)
    mesh = mesh_for(mesh, like)
    kept = [value for value in found if value.path not in names and value.is_array]
    if bare := [value.path for value in kept if isinstance(value.leaf, jax.ShapeDtypeStruct)]:
        raise errors.kept_without_value(bare)
    held = [value for value in found if value.path in names and value.is_array]
    targets = dict(zip((v.path for v in held + kept), shardings(held + kept, mesh), strict=True))
    files.check_files(folder)
    loaded = _arrays(folder, record, held, names, targets, mesh)
    leaves = tree_util.tree_leaves(model)
    for value in found:
        if value.path not in names and value.is_array:
            leaves[value.position] = _laid(value.leaf, targets[value.path])
        elif value.is_array:
            leaves[value.position] = loaded[value.path]
        elif value.path in names:
            number = record["numbers"][names[value.path]]
            leaves[value.position] = _NUMBERS[number["type"]](number["value"])
    tree = tree_util.tree_structure(model).unflatten(leaves)
    return _packed_as(like, tree, mesh)


def _arrays(
    folder: pathlib.Path,
    record: files.Record,
    held: list[Value],
    names: Mapping[str, str],
    targets: Mapping[str, Any],
    mesh: Mesh | None,
) -> dict[str, Any]:
    """The loaded arrays by path."""
    saved = {value.path: record["arrays"][names[value.path]] for value in held}
    # A value for each of another number of shards is computed on the host.
    counts = {value.path: shards(value, mesh) for value in held if value.per_shard}
    other = {path for path, count in counts.items() if saved[path]["shape"][0] != count}
    asked = {
        names[path]: None if path in other else targets[path]
        for path, one in saved.items()
        if 0 not in one["shape"]
    }
    read = files.read_arrays(folder, asked)
    made: dict[str, Any] = {}
    refused = []
    for value in held:
        path, one = value.path, saved[value.path]
        if 0 in one["shape"]:
            shape = (counts[path], *one["shape"][1:]) if path in other else one["shape"]
            made[path] = _laid(np.zeros(shape, one["dtype"]), targets[path])
            continue
        x = _as_key(read[names[path]], one)
        if path in other and value.state is not None:
            x = value.state.reshard(x, counts[path])
            if x is NotImplemented:
                kind = type(value.state).__name__
                how = value.state.reduce
                refused.append((path, kind, one["shape"][0], counts[path], how))
                continue
            x = _laid(x, targets[path])
        made[path] = x
    if refused:
        raise errors.no_way_to_reshard(refused)
    return made


def _laid(x: Leaf, target: Sharding) -> jax.Array:
    return onto(x, target) if isinstance(target, NamedSharding) else jax.device_put(x, target)


def _as_key(x: Leaf, one: Mapping[str, Any]) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(x), impl=one["impl"]) if "impl" in one else x


def _packed_as(like: PyTree, tree: PyTree, mesh: Any) -> Any:
    """The tree with what `like` has packed packed again."""
    nodes, structure = tree_util.tree_flatten(like, is_leaf=is_packed)
    if not any(map(is_packed, nodes)):
        return tree
    # The buffers of a packed model lie on a mesh always.
    pairs = zip(nodes, structure.flatten_up_to(tree), strict=True)
    made = [pack(loaded, mesh) if is_packed(node) else loaded for node, loaded in pairs]
    return structure.unflatten(made)
