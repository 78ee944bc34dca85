"""What must agree in two results besides the numbers: structure, dtypes, static values."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

import statemesh as sm

from .. import _errors as errors
from .._caches import environment, equal_values
from .._program._numbers import has_shape, is_key, is_numeric
from .._types import AnyLeaf, PyTree, PyTreeDef, tree_util


def form_differences(name: str, got: PyTree, want: PyTree, *, dtypes: bool = True) -> list[str]:
    """The differences between two results in anything but their shapes and their numbers.

    **Arguments:**

    - `name`: what paths begin with, such as `step(...)`.
    - `got`, `want`: two results; arrays may be `jax.Array`s, NumPy's or `ShapeDtypeStruct`s.
    - `dtypes`: whether dtypes and weak types are compared. Where they are not, a Python number may stand for
        an array. The kinds of keys are always compared.

    **Returns:** a line for each difference, in the order of the tree.
    """
    return list(_differences(name, got, want, dtypes))


def _differences(path: str, got: PyTree, want: PyTree, dtypes: bool) -> Iterator[str]:
    kids, structure = _one_level(got)
    other_kids, other_structure = _one_level(want)
    if _is_leaf(kids, structure) and _is_leaf(other_kids, other_structure):
        yield from _leaf_differences(path, got, want, dtypes)
    elif type(got) is not type(want):
        yield f"{path}: {_described(got)}, should be {_described(want)}"
    elif isinstance(got, dict) and isinstance(want, dict) and set(got) != set(want):
        yield f"{path}: a dict that {_other_keys(got, want)}, unlike what it should be"
    elif len(kids) != len(other_kids):
        yield f"{path}: {_described(got)}, should be {_described(want)}"
    else:
        if not equal_values(structure, other_structure):
            yield from _metadata_differences(path, got, want)
        for (key, kid), (_, other) in zip(kids, other_kids, strict=True):
            yield from _differences(path + jax.tree_util.keystr(key), kid, other, dtypes)


def _one_level(tree: PyTree) -> tuple[list[tuple[Any, PyTree]], PyTreeDef]:
    """The children of a node with their keys, and the node without them."""
    return tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _is_leaf(kids: list[tuple[Any, PyTree]], structure: PyTreeDef) -> bool:
    # `None` has a structure of one node, too, but no leaf.
    return bool(kids) and bool(tree_util.treedef_is_leaf(structure))


def _other_keys(got: dict[Any, PyTree], want: dict[Any, PyTree]) -> str:
    added = [repr(key) for key in got if key not in want]
    missing = [repr(key) for key in want if key not in got]
    return " and ".join(
        f"{verb} the {'key' if len(keys) == 1 else 'keys'} {', '.join(keys)}"
        for verb, keys in (("has", added), ("lacks", missing))
        if keys
    )


def _leaf_differences(path: str, got: AnyLeaf, want: AnyLeaf, dtypes: bool) -> Iterator[str]:
    if not (_is_array(got, dtypes) and _is_array(want, dtypes)):
        if not same_value(got, want):
            yield f"{path}: {errors.array_str(got)}, should be {errors.array_str(want)}"
        return
    if is_key(got) and is_key(want):
        if got.dtype != want.dtype:
            yield f"{path}: random keys of dtype {got.dtype}, should be of {want.dtype}"
    elif is_key(got) or is_key(want):
        yield f"{path}: {errors.array_str(got)}, should be {errors.array_str(want)}"
    elif dtypes:
        if got.dtype != want.dtype:
            yield f"{path}: of dtype {got.dtype}, should be of {want.dtype}"
        weak = getattr(got, "weak_type", None), getattr(want, "weak_type", None)
        # NumPy's arrays know no weak types.
        if None not in weak and weak[0] != weak[1]:
            kinds = "of a strong type", "of a weak type (a Python number's)"
            yield f"{path}: {kinds[bool(weak[0])]}, should be {kinds[bool(weak[1])]}"


def _is_array(x: AnyLeaf, dtypes: bool) -> bool:
    return is_numeric(x) and (has_shape(x) or not dtypes)


def _metadata_differences(path: str, got: PyTree, want: PyTree) -> Iterator[str]:
    """The static fields in which two nodes of one class differ."""
    fields = dataclasses.fields(got) if dataclasses.is_dataclass(got) else ()
    names = [field.name for field in fields if field.metadata.get("static")]
    if sm.is_state(got):
        names = ["name", "tag", "spec", "reduce"]
    for name in names:
        mine, other = getattr(got, name, None), getattr(want, name, None)
        if not same_value(mine, other):
            yield f"{path}.{name}: {errors.array_str(mine)}, should be {errors.array_str(other)}"
    if not names:
        yield f"{path}: {_described(got)} whose static data differ from what they should be"


def _described(x: PyTree) -> str:
    """What a node is."""
    if x is None:
        return "None"
    kids, structure = _one_level(x)
    if _is_leaf(kids, structure):
        return errors.array_str(x)
    kind = type(x).__name__
    return f"a {kind} of {len(kids)}" if isinstance(x, tuple | list | dict) else f"a {kind}"


def same_value(a: Any, b: Any) -> bool:
    """Whether two static values of one type are equal, or hold the same.

    So are functions that are made anew by every call, if they have the same code and what they close over is
    the same.
    """
    if a is b or type(a) is not type(b):
        return a is b
    if equal_values(a, b):
        return True
    key = environment(a)
    return key is not None and key == environment(b)
