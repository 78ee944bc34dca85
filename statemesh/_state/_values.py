"""The values of states and their metadata: which are allowed, how new ones conform and shards' become one."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import _mesh_and_lanes as axes
from .._axes._joined import after_sum, before_sum, widened
from .._base import _errors as errors
from .._base._checks import is_array_or_number, is_key, is_masked
from .._base._errors import StatemeshError, StructureError, error_listing
from .._base._specs import is_spec
from .._base._trees import describe, is_state, path_str
from .._base._types import AxisName, KeyPath, Leaf, PyTree, PyTreeDef, Reduce, SpecTree
from .._jax._compat import tree_util


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Meta:
    """The static part of a State, kept in one object so that comparing two models is quick.

    The kind is a part of it: JAX takes two trees for equal whose nodes are dataclasses of different types.
    """

    kind: type
    name: str | None
    tag: frozenset[str]
    spec: SpecTree
    reduce: Reduce
    # `Links` recognize a State by its token. It does not count when two are compared.
    token: object = None
    _without_token: "Meta | None" = None

    @property
    def plain(self) -> "Meta":
        """The same without a token."""
        return self if self._without_token is None else self._without_token

    def with_token(self, token: object) -> "Meta":
        return Meta(self.kind, self.name, self.tag, self.spec, self.reduce, token, self.plain)

    def __reduce__(self) -> tuple[object, ...]:
        return Meta, (self.kind, self.name, self.tag, self.spec, self.reduce)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Meta)
            and self.kind is other.kind
            and self.name == other.name
            and self.tag == other.tag
            and self.spec == other.spec
            and self.reduce == other.reduce
        )

    def __hash__(self) -> int:
        # A spec may be a tree of specs, which need not be hashable; equal specs have equal leaves.
        specs = tuple(jax.tree_util.tree_leaves(self.spec, is_leaf=is_spec))
        return hash((self.kind, self.name, self.tag, specs, self.reduce))

    def __repr__(self) -> str:
        # JAX prints this where two structures differ.
        tag = sorted(self.tag)
        return f"name={self.name!r}, tag={tag}, spec={self.spec!r}, reduce={self.reduce!r}"


# The named policies, and the dtypes whose values each of them can merge.
REDUCTIONS: Mapping[str, tuple[Any, ...]] = {
    "mean": (np.inexact,),
    "max": (np.integer, np.floating),
    "min": (np.integer, np.floating),
    "sum": (np.number,),
}


def strong(x: Leaf) -> PyTree:
    """`x` as an array whose dtype does not give way in promotion."""
    if isinstance(x, jax.Array):
        # Arrays of keys have no attribute `weak_type`.
        weak = getattr(x, "weak_type", False)
        return jax.lax.convert_element_type(x, x.dtype) if weak else x
    return jnp.array(x, dtype=jnp.result_type(x))


def arrays(value: PyTree) -> PyTree:
    """`value` with its numbers made arrays, or an error that lists what cannot be one."""
    leaves, treedef = _array_leaves(value)
    return treedef.unflatten([_converted("State", path, leaf) for path, leaf in leaves])


def _array_leaves(value: PyTree) -> tuple[list[tuple[KeyPath, Leaf]], PyTreeDef]:
    """The leaves of a value with their paths, and its structure. All of them are arrays or numbers."""
    leaves, treedef = tree_util.tree_flatten_with_path(value, is_leaf=is_state)
    if masked := [(path_str(path, "value"), leaf) for path, leaf in leaves if is_masked(leaf)]:
        raise errors.masked("a State's value", masked)
    if bad := [(path, leaf) for path, leaf in leaves if not is_array_or_number(leaf)]:
        remedy = "Keep values that are not arrays in a field of the Module that holds the State."
        if any(is_state(leaf) for _, leaf in bad):
            remedy = (
                "A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep the "
                "two side by side in a Module."
            )
        raise error_listing(
            TypeError,
            "a State's value is a pytree of arrays, but",
            [f"{_value_path(path)} is {describe(x)} ({type(x).__name__})" for path, x in bad],
            remedy,
        )
    return leaves, treedef


def _converted(label: str, path: KeyPath, leaf: Leaf, old: PyTree = None) -> PyTree:
    """A leaf as an array: in the dtype of an old one that it fits, if it is a scalar or a weak array."""
    try:
        return strong(leaf) if old is None else _in_dtype_of(old, leaf)
    except OverflowError:
        dtype = jnp.result_type(int) if old is None else old.dtype
        limits: Any = np.iinfo if np.issubdtype(dtype, np.integer) else jnp.finfo
        info = limits(dtype)
        raise StructureError(
            f"{label}: {_value_path(path)} is {describe(leaf)}, which does not fit into {dtype} "
            f"({info.min} to {info.max}). Give the state a dtype that holds it, as in "
            "State(jnp.float32(0))."
        ) from None


def _in_dtype_of(old: PyTree, new: PyTree) -> PyTree:
    if isinstance(new, jax.Array):
        gives_way = getattr(new, "weak_type", False)
    else:
        gives_way = not isinstance(new, np.ndarray | np.generic)
    if is_key(old) or not gives_way:
        return strong(new)
    fits = jnp.result_type(old, new) == old.dtype
    if not fits and isinstance(new, int | float) and np.isfinite(new):
        fits = bool(np.asarray(new).astype(old.dtype) == new)
    return jnp.asarray(new, dtype=old.dtype) if fits else strong(new)


def conform(old_value: PyTree, value: PyTree, label: str) -> PyTree:
    """`value` in the dtypes of the old value, or an error that names what differs."""
    # The usual case, an array that needs no change, needs no trees.
    if (
        isinstance(old_value, jax.Array)
        and isinstance(value, jax.Array)
        and old_value.shape == value.shape
        and old_value.dtype == value.dtype
        and not getattr(value, "weak_type", False)
    ):
        return value
    old, old_def = tree_util.tree_flatten_with_path(old_value)
    new, new_def = _array_leaves(value)
    if old_def != new_def:
        raise StructureError(
            f"{label}: the new value has a different tree structure.\n"
            f"  old: {old_def}\n"
            f"  new: {new_def}\n"
            "To change the structure on purpose, use `state.replace(value=...)`."
        )
    both = zip(old, new, strict=True)
    pairs = [(path, a, _converted(label, path, b, a)) for (path, a), (_, b) in both]
    if differ := [
        f"{_value_path(path)}: was {describe(a)}, is {describe(b)}"
        for path, a, b in pairs
        if a.shape != b.shape or a.dtype != b.dtype
    ]:
        raise error_listing(
            StructureError,
            f"{label}: the new value has a different shape or dtype",
            differ,
            "Cast or reshape it; to change it on purpose, use `state.replace(value=...)`.",
        )
    return old_def.unflatten([after for _, _, after in pairs])


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """The value of a state that instances wrote, to be merged by a named policy.

    **Attributes:**

    - `value`: what an instance wrote.
    - `before`: the value that came in; `None` if there was none.
    - `how`: the policy.
    - `over`: for each leaf of `value` the axes over which it is merged.
    - `label`: what messages call the state.
    """

    value: PyTree
    before: PyTree
    how: str
    over: Sequence[tuple[AxisName, ...]]
    label: str

    def olds(self, leaves: Sequence[Leaf], treedef: PyTreeDef) -> Sequence[PyTree]:
        """The leaves to which a sum adds the instances' increments."""
        if self.how != "sum":
            return [None] * len(leaves)
        if self.before is None:
            # Not `zeros_like`: zeros made of a value would vary over the axes over which it varies.
            return [jnp.zeros(x.shape, x.dtype) for x in leaves]
        olds: list[PyTree]
        olds, structure = tree_util.tree_flatten(self.before)
        if structure != treedef:
            raise StructureError(
                f"{self.label}: reduce='sum' adds the shards' increments to the old value, but the new value "
                "has a different tree structure.\n"
                f"  old: {structure}\n"
                f"  new: {treedef}\n"
                "Keep the structure, or merge with a function: reduce=lambda old, new, axis_names: "
                "jax.lax.psum(new, axis_names)."
            )
        return olds


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One leaf of a `Write`."""

    how: str
    new: PyTree
    old: PyTree
    over: tuple[AxisName, ...]

    def before(self, count: int) -> PyTree:
        """What is reduced, of a leaf that is merged from `count` instances."""
        new = axes.all_varying(self.new, self.over)
        match self.how:
            case "mean":
                return before_sum(new, count)
            case "sum":
                return widened(new) - widened(self.old)
            case _:
                return new

    def after(self, result: PyTree, count: int) -> PyTree:
        """The merged leaf, from what was reduced."""
        match self.how:
            case "mean":
                return after_sum(result, self.new.dtype, count)
            case "sum":
                return (widened(self.old) + result).astype(self.old.dtype)
            case _:
                return result


# A mean is a sum that is divided. So both may travel together.
_REDUCED_BY: Mapping[str, Callable[..., list[PyTree]]] = {
    **dict.fromkeys(("mean", "sum"), axes.psum),
    "max": axes.pmax,
    "min": axes.pmin,
}


@jax.named_scope(axes.MERGING)
def reduced(writes: Sequence[Write]) -> list[PyTree]:
    """The instances' values, merged: those that go over the same axes by the same reduction together."""
    treedefs: list[PyTreeDef] = []
    parts: list[_Part] = []
    for write in writes:
        leaves, treedef = tree_util.tree_flatten(write.value)
        olds = write.olds(leaves, treedef)
        columns = zip(leaves, olds, write.over, strict=True)
        parts += [_Part(write.how, *column) for column in columns]
        treedefs.append(treedef)
    merged: list[PyTree] = [part.new for part in parts]
    groups: dict[tuple[Callable[..., list[PyTree]], tuple[AxisName, ...]], list[int]] = {}
    for k, part in enumerate(parts):
        if part.over:
            groups.setdefault((_REDUCED_BY[part.how], part.over), []).append(k)
    for (reduction, over), at in groups.items():
        count = math.prod(map(jax.lax.axis_size, over))
        done = reduction([parts[k].before(count) for k in at], over)
        for k, x in zip(at, done, strict=True):
            merged[k] = parts[k].after(x, count)
    left = iter(merged)
    return [treedef.unflatten(itertools.islice(left, treedef.num_leaves)) for treedef in treedefs]


def resharded(value: Leaf, how: str, count: int) -> np.ndarray:
    """The values of shards, reduced to `count` values; one of each is on the first axis."""
    old = np.asarray(value)
    if how in ("max", "min"):
        merged = old.max(axis=0) if how == "max" else old.min(axis=0)
    elif jnp.issubdtype(old.dtype, np.integer):
        merged = old.sum(axis=0, dtype=old.dtype)
    else:
        wide = np.complex128 if jnp.issubdtype(old.dtype, np.complexfloating) else np.float64
        total = old.astype(wide).sum(axis=0)
        merged = (total / len(old) if how == "mean" else total).astype(old.dtype)
    new = np.zeros((count, *old.shape[1:]), old.dtype)
    new[: 1 if how == "sum" else count] = merged
    return new


def check_reducible(value: PyTree, how: Reduce) -> None:
    """Refuse a named policy that has no meaning for a dtype."""
    if not isinstance(how, str):
        return
    for leaf in jax.tree_util.tree_leaves(value):
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in REDUCTIONS[how]):
            fun = "a function `(old, new, axis_names) -> value`"
            remedy = {
                "mean": f"Use reduce='sum', 'max' or 'min' for integers, or {fun}.",
                "sum": f"Use an integer with reduce='max' or 'min' instead, or {fun}.",
            }.get(how, f"Use {fun}.")
            raise StatemeshError(
                f"reduce={how!r} cannot merge values of dtype {leaf.dtype}. {remedy}"
            )


def _value_path(path: KeyPath) -> str:
    return "value" + path_str(path, " ")[1:]
