"""The values of states and their metadata: which are allowed, how new ones conform and shards' become one."""

import dataclasses
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
from .._base._types import AxisName, Dtype, KeyPath, Leaf, PyTree, PyTreeDef, Reduce, SpecTree
from .._jax._compat import tree_util


class Meta:
    """The static part of a State, kept in one object so that comparing two models is quick.

    The kind is a part of it: JAX takes two trees for equal whose nodes are dataclasses of different types.
    """

    __slots__ = ("_plain", "kind", "name", "reduce", "spec", "tag", "token")

    kind: type
    name: str | None
    tag: frozenset[str]
    spec: SpecTree
    reduce: Reduce
    # `Links` recognize a State by its token. It does not count when two are compared.
    token: object
    _plain: "Meta | None"

    def __init__(
        self,
        kind: type,
        name: str | None,
        tag: frozenset[str],
        spec: SpecTree,
        reduce: Reduce,
    ) -> None:
        self.kind = kind
        self.name, self.tag, self.spec, self.reduce = name, tag, spec, reduce
        self.token, self._plain = None, None

    @property
    def plain(self) -> "Meta":
        """The same without a token."""
        return self if self._plain is None else self._plain

    def with_token(self, token: object) -> "Meta":
        new = Meta(self.kind, self.name, self.tag, self.spec, self.reduce)
        new.token, new._plain = token, self.plain
        return new

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


REDUCTIONS = ("mean", "max", "min", "sum")


def strong(x: Leaf) -> PyTree:
    """`x` as an array whose dtype does not give way in promotion."""
    if isinstance(x, jax.Array):
        # Arrays of keys have no attribute `weak_type`.
        weak = getattr(x, "weak_type", False)
        return jax.lax.convert_element_type(x, x.dtype) if weak else x
    return jnp.array(x, dtype=jnp.result_type(x))


def arrays(value: PyTree) -> PyTree:
    """`value` with its numbers made arrays, or an error that lists what cannot be one."""
    leaves, treedef = tree_util.tree_flatten_with_path(value, is_leaf=is_state)
    _refuse_masked(leaves)
    if bad := [(path, leaf) for path, leaf in leaves if not is_array_or_number(leaf)]:
        raise _bad_state_value(bad)
    return tree_util.tree_unflatten(treedef, [_made(leaf, path) for path, leaf in leaves])


def _refuse_masked(leaves: Sequence[tuple[KeyPath, Leaf]]) -> None:
    if bad := [(path_str(path, "value"), x) for path, x in leaves if is_masked(x)]:
        raise errors.masked("a State's value", bad)


def _made(leaf: Leaf, path: KeyPath) -> PyTree:
    try:
        return strong(leaf)
    except OverflowError:
        raise _number_too_large("State", path, leaf, jnp.result_type(int)) from None


def conform(old_value: PyTree, value: PyTree, label: str) -> PyTree:
    """`value` in the dtypes of the old value, or an error that names what differs."""
    if _is_alike(old_value, value):
        return value
    old, old_def = tree_util.tree_flatten_with_path(old_value)
    new, new_def = tree_util.tree_flatten_with_path(value, is_leaf=is_state)
    _refuse_masked(new)
    if bad := [(path, leaf) for path, leaf in new if not is_array_or_number(leaf)]:
        raise _bad_state_value(bad)
    if old_def != new_def:
        raise StructureError(
            f"{label}: the new value has a different tree structure.\n"
            f"  old: {old_def}\n"
            f"  new: {new_def}\n"
            "To change the structure on purpose, use `state.replace(value=...)`."
        )
    both = zip(old, new, strict=True)
    pairs = [(path, a, _conformed(label, path, a, b)) for (path, a), (_, b) in both]
    if differ := [p for p in pairs if p[1].shape != p[2].shape or p[1].dtype != p[2].dtype]:
        raise _set_differs(label, differ)
    return tree_util.tree_unflatten(old_def, [after for _, _, after in pairs])


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

    def parts(self) -> tuple[list["_Part"], PyTreeDef]:
        """The leaves, each with what its merging depends on."""
        leaves, treedef = tree_util.tree_flatten(self.value)
        olds = self._olds(leaves, treedef) if self.how == "sum" else [None] * len(leaves)
        triples = zip(leaves, olds, self.over, strict=True)
        return [_Part(self.how, new, old, over) for new, old, over in triples], treedef

    def _olds(self, leaves: Sequence[Leaf], treedef: PyTreeDef) -> list[PyTree]:
        """The leaves to which a sum adds the instances' increments."""
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

    def after(self, made: PyTree, count: int) -> PyTree:
        """The merged leaf, from what was reduced."""
        match self.how:
            case "mean":
                return after_sum(made, self.new.dtype, count)
            case "sum":
                return (widened(self.old) + made).astype(self.old.dtype)
            case _:
                return made


# A mean is a sum that is divided. So both may travel together.
_REDUCED_BY: Mapping[str, Callable[..., list[PyTree]]] = {
    **dict.fromkeys(("mean", "sum"), axes.psum),
    "max": axes.pmax,
    "min": axes.pmin,
}


def reduced(writes: Sequence[Write]) -> list[PyTree]:
    """The instances' values, merged: those that go over the same axes by the same reduction together."""
    made = [write.parts() for write in writes]
    parts = [part for own, _ in made for part in own]
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
    leaves = iter(merged)
    return [treedef.unflatten([next(leaves) for _ in own]) for own, treedef in made]


def resharded(value: Leaf, how: str, count: int) -> np.ndarray:
    """The values of shards, reduced to `count` values; one of each is on the first axis."""
    old = np.asarray(value)
    if how in ("max", "min"):
        one = old.max(axis=0) if how == "max" else old.min(axis=0)
    elif jnp.issubdtype(old.dtype, np.integer):
        one = old.sum(axis=0, dtype=old.dtype)
    else:
        wide = np.complex128 if jnp.issubdtype(old.dtype, np.complexfloating) else np.float64
        total = old.astype(wide).sum(axis=0)
        one = (total / len(old) if how == "mean" else total).astype(old.dtype)
    new = np.zeros((count, *old.shape[1:]), old.dtype)
    new[: 1 if how == "sum" else count] = one
    return new


def check_reducible(value: PyTree, how: Reduce) -> None:
    """Refuse a named policy that has no meaning for a dtype."""
    for leaf in jax.tree_util.tree_leaves(value):
        if isinstance(how, str):
            _check_dtype(leaf.dtype, how)


def _check_dtype(dtype: Dtype, how: str) -> None:
    allowed: tuple[Leaf, ...]
    match how:
        case "mean":
            allowed = (np.inexact,)
        case "sum":
            allowed = (np.number,)
        case _:
            allowed = (np.integer, np.floating)
    if not any(jnp.issubdtype(dtype, kind) for kind in allowed):
        raise _cannot_reduce(how, dtype)


def _is_alike(old: PyTree, new: PyTree) -> bool:
    """Whether both are arrays and the new one needs no change. It is the usual case, and needs no trees."""
    return (
        isinstance(old, jax.Array)
        and isinstance(new, jax.Array)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and not getattr(new, "weak_type", False)
    )


def _conformed(label: str, path: KeyPath, before: PyTree, after: PyTree) -> PyTree:
    try:
        return _in_dtype_of(before, after)
    except OverflowError:
        raise _number_too_large(label, path, after, before.dtype) from None


def _in_dtype_of(before: PyTree, after: PyTree) -> PyTree:
    """`after` in the dtype of `before` where it is a scalar or a weak array that fits it."""
    if is_key(before) or not _gives_way(after):
        return strong(after)
    fits = jnp.result_type(before, after) == before.dtype
    if not fits and isinstance(after, int | float) and np.isfinite(after):
        fits = bool(np.asarray(after).astype(before.dtype) == after)
    return jnp.asarray(after, dtype=before.dtype) if fits else strong(after)


def _gives_way(leaf: Leaf) -> bool:
    if isinstance(leaf, jax.Array):
        return bool(getattr(leaf, "weak_type", False))
    return not isinstance(leaf, np.ndarray | np.generic)


def _value_path(path: KeyPath) -> str:
    return "value" + path_str(path, " ")[1:]


def _bad_state_value(bad: Sequence[tuple[KeyPath, object]]) -> TypeError:
    items = [
        f"{_value_path(path)} is {describe(leaf)} ({type(leaf).__name__})" for path, leaf in bad
    ]
    mend = "Keep values that are not arrays in a field of the Module that holds the State."
    if any(is_state(leaf) for _, leaf in bad):
        mend = (
            "A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep the two "
            "side by side in a Module."
        )
    return error_listing(TypeError, "a State's value is a pytree of arrays, but", items, mend)


def _cannot_reduce(how: str, dtype: object) -> StatemeshError:
    other = "a function `(old, new, axis_names) -> value`"
    mend = {
        "mean": f"Use reduce='sum', 'max' or 'min' for integers, or {other}.",
        "sum": f"Use an integer with reduce='max' or 'min' instead, or {other}.",
    }.get(how, f"Use {other}.")
    return StatemeshError(f"reduce={how!r} cannot merge values of dtype {dtype}. {mend}")


def _set_differs(label: str, differ: Sequence[tuple[KeyPath, object, object]]) -> StructureError:
    items = [
        f"{_value_path(path)}: was {describe(old)}, is {describe(new)}" for path, old, new in differ
    ]
    mend = "Cast or reshape it; to change it on purpose, use `state.replace(value=...)`."
    return error_listing(
        StructureError, f"{label}: the new value has a different shape or dtype", items, mend
    )


def _number_too_large(label: str, path: KeyPath, value: object, dtype: Any) -> StructureError:
    finfo: Any = jax.numpy.finfo
    info: Any = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else finfo(dtype)
    return StructureError(
        f"{label}: {_value_path(path)} is {describe(value)}, which does not fit into {dtype} "
        f"({info.min} to {info.max}). Give the state a dtype that holds it, as in State(jnp.float32(0))."
    )
