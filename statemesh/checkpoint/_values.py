"""The values of a tree by path: what a checkpoint holds, which value each leaf gets, and where it goes."""

import dataclasses
import difflib
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._base._checks import is_shaped
from .._base._specs import only
from .._base._trees import describe_leaf, is_state, path_str
from .._base._types import NUMBERS, Leaf, PyTree
from .._call._arguments import inside_modules
from .._call._mesh import check_specs, manual_names
from .._call._placement import check_shapes
from .._call._specs import SpecPlacement, own_placements
from .._jax._compat import concrete_context_mesh, tree_util
from .._state._state import State
from . import _errors as errors
from ._files import Record


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
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
    def form(self) -> "Form":
        if not self.is_array:
            return Form(type(self.leaf).__name__, ())
        dtype = self.leaf.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return Form(str(dtype), tuple(np.shape(self.leaf)), self.is_array)


@dataclasses.dataclass(frozen=True)
class Form:
    """The dtype and shape of an array, or the type of a number."""

    dtype: str
    shape: tuple[int, ...]
    is_array: bool = False

    def __str__(self) -> str:
        return describe_leaf(self) if self.is_array else self.dtype


def values(
    call: str, tree: PyTree, packed: Sequence[Sequence[SpecPlacement] | None]
) -> list[Value]:
    """The arrays and numbers of a tree in order. Numbers in a Module are static, and no values.

    **Arguments:**

    - `call`: the name of the call, for its error.
    - `tree`: without any `Packed` in it.
    - `packed`: for each of its units the placements of its arrays in a `Packed`; `None` if it is in none.

    **Raises:** `StructureError` for different values with one path.
    """
    found: list[Value] = []
    position = 0
    flat = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
    for (keys, node), in_module, placed in zip(flat, inside_modules(tree), packed, strict=True):
        path = path_str(keys) or "value"
        if not is_state(node):
            if is_shaped(node) or (type(node) in NUMBERS and not in_module):
                found.append(Value(path, position, node))
            position += 1
            continue
        inner = tree_util.tree_flatten_with_path(node.value)[0]
        wheres: Sequence[SpecPlacement | None] = [None] * len(inner)
        if placed is not None:
            wheres = placed
        elif node.spec is not None:
            wheres = own_placements(node, node.spec, path)
        for k, ((keys, leaf), placement) in enumerate(zip(inner, wheres, strict=True)):
            one = Value(
                path_str(keys, path), position + k, leaf, node, placement, placed is not None
            )
            found.append(one)
        position += len(tree_util.tree_leaves(node))
    forms: dict[str, list[Form]] = {}
    for value in found:
        forms.setdefault(value.path, []).append(value.form)
    if several := [pair for pair in forms.items() if len(pair[1]) > 1]:
        raise errors.one_path(call, several)
    return found


def mesh_for(given: Mesh | None, like: PyTree) -> Mesh | None:
    """The mesh given, or that of the context, or that on which arrays of `like` lie."""
    if given is not None:
        return given
    context = concrete_context_mesh()
    if context is not None:
        return context
    named = [here for here in map(_sharding_of, jax.tree.leaves(like)) if here is not None]
    meshes = [here.mesh for here in named if isinstance(here, NamedSharding)]
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def shardings(found: Sequence[Value], mesh: Mesh | None) -> list[Sharding]:
    """The sharding of each array.

    **Raises:** `SpecError` for specs that do not fit the mesh or the arrays.
    """
    if mesh is None:
        single = SingleDeviceSharding(jax.local_devices()[0])
        return [_sharding_of(value.leaf) or single for value in found]
    wheres = [_placement(value, mesh) for value in found]
    named = [
        (f"the spec of {value.path}", placement.spec)
        for value, placement in zip(found, wheres, strict=True)
    ]
    check_specs(named, mesh, manual_names(mesh, ()))
    # The first axis of a value for each shard becomes what the mesh needs.
    fixed = [pair for pair in zip(found, wheres, strict=True) if not pair[0].per_shard]
    paths, leaves = [value.path for value, _ in fixed], [value.leaf for value, _ in fixed]
    check_shapes(paths, leaves, [placement for _, placement in fixed], mesh, "load")
    return [NamedSharding(mesh, placement.spec) for placement in wheres]


def shards(value: Value, mesh: Mesh | None) -> int:
    """How many entries the first axis has of a value for each shard."""
    if mesh is None or value.placement is None:
        return int(value.leaf.shape[0])
    return math.prod(mesh.shape[name] for name in value.placement.axes[0])


def _placement(value: Value, mesh: Mesh) -> SpecPlacement:
    """That of the state's own spec; else as the array of `like` lies, on the axes that this mesh has."""
    if value.placement is not None:
        return value.placement
    here = _sharding_of(value.leaf)
    if not isinstance(here, NamedSharding):
        return SpecPlacement(PartitionSpec())
    return SpecPlacement(only(here.spec, frozenset(mesh.axis_names)))


def _sharding_of(leaf: Leaf) -> Sharding | None:
    here = getattr(leaf, "sharding", None)
    return here if isinstance(here, Sharding) else None


Renames = Mapping[str, str | None]


def saved_forms(record: Record) -> dict[str, Form]:
    """The form of each saved value, by the name under which it was saved."""
    arrays, numbers = record["arrays"], record["numbers"]
    forms = {name: Form(one["dtype"], tuple(one["shape"]), True) for name, one in arrays.items()}
    return forms | {name: Form(one["type"], ()) for name, one in numbers.items()}


def match(
    folder: pathlib.Path, record: Record, found: Sequence[Value], rename: Renames, missing: str
) -> dict[str, str]:
    """The name under which each value of `like` was saved, by path. What was not saved is left out.

    **Raises:** `StructureError` listing everything that does not fit.
    """
    forms = saved_forms(record)
    names, bad = _renamed(forms, rename)
    wanted = {value.path: value for value in found}
    absent = [path for path in wanted if path not in names]
    left = [path for path in names if path not in wanted]
    mends = []
    if missing == "error" and absent:
        bad += [f"missing: {p}: {wanted[p].form} is in `like`, and was not saved" for p in absent]
        mends.append("missing='keep' keeps what `like` has for values that were not saved.")
    if left:
        bad += [f"left over: {p}: {forms[names[p]]} was saved, and is not in `like`" for p in left]
        mends.append("rename={'path': None} leaves a saved value out.")
    bad += [
        f"{path}: saved as {forms[names[path]]}, but `like` has {value.form}"
        for path, value in wanted.items()
        if path in names and not _fits(forms[names[path]], value)
    ]
    if bad:
        # An inserted layer moves the later ones: what was saved fits the next path.
        moved = [p for p in wanted if p in names and not _fits(forms[names[p]], wanted[p])]
        likely = _likely(
            {names[p]: forms[names[p]] for p in left + moved}, [wanted[p] for p in absent + moved]
        )
        raise errors.does_not_fit(folder, bad, likely, mends)
    return {path: names[path] for path in wanted if path in names}


def _renamed(forms: Mapping[str, Form], rename: Renames) -> tuple[dict[str, str], list[str]]:
    """The saved names by their new paths, and what is wrong with `rename`."""
    names: dict[str, str] = {}
    bad: list[str] = []
    used = set()
    for name in forms:
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
    return names, bad


def _is_below(name: str, old: str) -> bool:
    return name == old or name.startswith((f"{old}.", f"{old}["))


def _fits(form: Form, value: Value) -> bool:
    if not (form.is_array and value.is_array):
        return form.is_array == value.is_array
    skipped = 1 if value.per_shard else 0
    mine = value.form
    return (
        form.dtype == mine.dtype
        and len(form.shape) == len(mine.shape)
        and form.shape[skipped:] == mine.shape[skipped:]
    )


def _likely(left: Mapping[str, Form], absent: Sequence[Value]) -> dict[str, str]:
    """For each saved name that is left over, the most similar missing path of the same form."""
    likely: dict[str, str] = {}
    free = list(absent)
    for name, form in left.items():
        alike: list[Any] = [value.path for value in free if _fits(form, value)]
        if best := difflib.get_close_matches(name, alike, n=1, cutoff=0.5):
            likely[name] = best[0]
            free = [value for value in free if value.path != best[0]]
    return likely
