"""Model trees made from templates, and the plainest possible walk over them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import statemesh as sm

from .programs import Branch


class Pair(sm.Module):
    """Two parts, and a static field."""

    left: Any
    right: Any
    label: str = sm.field(static=True, default="pair")


class Layer(sm.Module):
    """A list of parts, and a leaf that is a function."""

    parts: list[Any]
    activation: Callable[[Any], Any] = jnp.tanh


class Setting(sm.Module):
    """A Python number that is a static leaf."""

    gain: float


FORMS = ("list", "tuple", "dict", "pair", "layer")
KINDS: dict[str, type[sm.State]] = {
    kind.__name__: kind
    for kind in (
        sm.State,
        sm.ShortTermState,
        sm.HiddenState,
        sm.NonBatchState,
        sm.LongTermState,
        sm.ParamState,
        sm.BatchState,
    )
}


def grow(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree that a template describes, with `leaf` of each number at its place."""
    if isinstance(template, int):
        return leaf(template)
    if not isinstance(template, Branch):
        return template
    children = [grow(child, leaf) for child in template.children]
    match template.form:
        case "list":
            return children
        case "tuple":
            return tuple(children)
        case "dict":
            # Put in backwards: a dictionary's own order is not the order of its leaves.
            return {"abcd"[i]: children[i] for i in reversed(range(len(children)))}
        case "pair":
            return Pair(children[0] if children else None, children[1:])
        case _:
            return Layer(children)


PathStep: TypeAlias = str | int
Path: TypeAlias = tuple[tuple[str, PathStep], ...]


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, a State being one leaf; without a tree library."""
    if tree is None:
        return
    if isinstance(tree, dict):
        children = [(("key", key), tree[key]) for key in sorted(tree)]
    elif isinstance(tree, list | tuple):
        children = [(("index", i), child) for i, child in enumerate(tree)]
    elif isinstance(tree, sm.Module):
        names = [f.name for f in dataclasses.fields(tree) if not f.metadata.get("static")]
        children = [(("attribute", name), getattr(tree, name)) for name in names]
    else:
        yield path, tree
        return
    for step, child in children:
        yield from walk(child, (*path, step))


def typed(path: Path) -> str:
    """A path as one would type it after the name of the tree."""
    text = "".join(f".{step}" if kind == "attribute" else f"[{step!r}]" for kind, step in path)
    return text.removeprefix(".")


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal structure and statics, and the very same leaves."""
    if structure(a) != structure(b):
        return False
    return all(x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def structure(tree: Any) -> Any:
    """The structure, as a type that a checker knows: it cannot find the stubs of JAX's own."""
    return jax.tree.structure(tree)
