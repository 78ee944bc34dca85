"""`save`: a tree's values as files."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base._nodes import unpacked
from .._base._types import Leaf, PyTree
from .._packed._repack import packed_placements
from .._resolve._agreement import array_passed, check_alike
from .._resolve._placement import check_concrete, is_own, onto
from . import _errors as errors
from . import _files as files
from ._leaves import Value, values


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
