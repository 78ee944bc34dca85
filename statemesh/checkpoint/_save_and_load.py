"""`save`: a tree's values as files. `load`: files as a tree's values."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._base import _errors as base_errors
from .._base._trees import is_packed, unpacked
from .._base._types import Leaf, PyTree
from .._call._agreement import array_passed, check_alike
from .._call._mesh import check_mesh
from .._call._packed import Packed, packed_placements, repack, shapes_of, with_models
from .._call._placement import check_concrete, is_own, onto
from .._jax._compat import tree_util
from . import _errors as errors
from . import _files as files
from ._values import Value, match, mesh_for, shardings, shards, values


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
        raise errors.exists(folder)
    arrays, record = contents("save", tree)
    handler = ocp.CompositeCheckpointHandler(**files.handlers())
    try:
        with ocp.Checkpointer(handler) as writer:
            writer.save(folder, args=files.to_save(arrays, record))
    except (OSError, ValueError) as reason:
        raise errors.not_written(str(folder), reason) from reason


def contents(what: str, tree: PyTree) -> tuple[dict[str, Leaf], files.Record]:
    """The arrays of a tree as they are written, by path, and the record.

    The record has the dtype and the shape of each array, and the Python numbers.
    """
    found = values(what, unpacked(tree), packed_placements(tree))
    held = [value for value in found if value.is_array]
    check_concrete(what, [value.path for value in held], [value.leaf for value in held])
    leaves = [_saved(value.leaf) for value in held]
    if jax.process_count() > 1:
        leaves = _of_all_processes(what, held, leaves)
    described = {}
    for value in held:
        form = value.form
        described[value.path] = {"dtype": form.dtype, "shape": list(form.shape)}
        if form.dtype.startswith("key<"):
            described[value.path]["impl"] = str(jax.random.key_impl(value.leaf))
        if (name := files.folder_name(value.path)) != value.path:
            described[value.path]["folder"] = name
    numbers = {
        value.path: {"type": type(value.leaf).__name__, "value": repr(value.leaf)}
        for value in found
        if not value.is_array
    }
    record = {"version": files.VERSION, "arrays": described, "numbers": numbers}
    # Orbax has no files for arrays without elements; their shapes say all there is.
    pairs = zip(held, leaves, strict=True)
    return {value.path: leaf for value, leaf in pairs if leaf.size}, record


def _saved(leaf: Leaf) -> Leaf:
    """An array as it is written: a key as the numbers that it consists of."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _of_all_processes(what: str, held: list[Value], leaves: list[Leaf]) -> list[Leaf]:
    """The arrays. One that each process has for itself becomes one on the devices of all."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    own = [is_own(leaf) for leaf in leaves]
    triples = zip(held, leaves, own, strict=True)
    check_alike(what, mesh, [array_passed(value.path, x) for value, x, is_one in triples if is_one])
    target = NamedSharding(mesh, PartitionSpec())
    return [onto(x, target) if is_one else x for x, is_one in zip(leaves, own, strict=True)]


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
        raise base_errors.unknown_choice("missing", missing, choices)
    if not isinstance(rename, Mapping | None):
        raise errors.bad_rename(rename)
    if not isinstance(mesh, Mesh | None):
        raise base_errors.not_a_mesh(mesh)
    record = files.read_record(folder)
    # The values of a packed model are taken out of its buffers only where they may be kept.
    keeps = missing == "keep" and not any(map(_is_shape, tree_util.tree_leaves(like)))
    model = unpacked(like) if keeps else with_models(like, shapes_of)
    found = values("load", model, packed_placements(like))
    names = match(folder, record, found, rename or {}, missing)
    mesh = mesh_for(mesh, like)
    kept = [value for value in found if value.path not in names and value.is_array]
    if bare := [value.path for value in kept if _is_shape(value.leaf)]:
        raise errors.kept_without_value(bare)
    held = [value for value in found if value.path in names and value.is_array]
    targets = dict(zip((v.path for v in held + kept), shardings(held + kept, mesh), strict=True))
    files.check_files(folder, record)
    loaded = _arrays(folder, record, held, names, targets, mesh)
    leaves = tree_util.tree_leaves(model)
    for value in found:
        if value.path not in names and value.is_array:
            leaves[value.position] = _laid(value.leaf, targets[value.path])
        elif value.is_array:
            leaves[value.position] = loaded[value.path]
        elif value.path in names:
            number = record["numbers"][names[value.path]]
            leaves[value.position] = files.NUMBERS[number["type"]](number["value"])
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
    """The loaded arrays by path, those to be packed as NumPy's."""
    saved = {value.path: record["arrays"][names[value.path]] for value in held}
    # A value for each of another number of shards is computed on the host.
    counts = {value.path: shards(value, mesh) for value in held if value.per_shard}
    other = {path for path, count in counts.items() if saved[path]["shape"][0] != count}
    on_host = other | {value.path for value in held if value.packed}
    asked = {
        names[path]: None if path in on_host else targets[path]
        for path, one in saved.items()
        if not files.is_empty(one)
    }
    read = files.read_arrays(folder, record, asked)
    made: dict[str, Any] = {}
    refused = []
    for value in held:
        path, one = value.path, saved[value.path]
        if files.is_empty(one):
            shape = (counts[path], *one["shape"][1:]) if path in other else one["shape"]
            x = _empty(shape, one)
            made[path] = x if value.packed else _laid(x, targets[path])
            continue
        x = read[names[path]]
        if path in other and value.state is not None:
            x = value.state.reshard(x, counts[path])
            if x is NotImplemented:
                kind = type(value.state).__name__
                how = value.state.reduce
                refused.append((path, kind, one["shape"][0], counts[path], how))
                continue
            x = x if value.packed else _laid(x, targets[path])
        made[path] = x
    if refused:
        raise errors.no_way_to_reshard(refused)
    return made


def _is_shape(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _laid(x: Leaf, target: Sharding) -> jax.Array:
    return onto(x, target) if isinstance(target, NamedSharding) else jax.device_put(x, target)


def _empty(shape: Sequence[int], one: Mapping[str, Any]) -> Any:
    if "impl" not in one:
        return np.zeros(shape, one["dtype"])
    key = jax.random.key_data(jax.random.key(0, impl=one["impl"]))
    no_keys = jnp.zeros((*shape, *key.shape), key.dtype)
    return jax.random.wrap_key_data(no_keys, impl=one["impl"])


def _packed_as(like: PyTree, tree: PyTree, mesh: Any) -> Any:
    """The tree with what `like` has packed packed again."""
    nodes, structure = tree_util.tree_flatten(like, is_leaf=is_packed)
    if not any(map(is_packed, nodes)):
        return tree
    # The buffers of a packed model lie on a mesh always.
    check_mesh("load", mesh)
    pairs = zip(nodes, structure.flatten_up_to(tree), strict=True)
    made = [repack(node, new, mesh) if isinstance(node, Packed) else new for node, new in pairs]
    return structure.unflatten(made)
