"""Key paths, spelled as the user would type them."""

import functools
import inspect
from collections.abc import Callable

import equinox as eqx
import jax

from ._nodes import StateNode
from ._types import KeyPath, Leaf, PyTree


def path_str(path: KeyPath, root: str = "") -> str:
    """`root` followed by `path`; without a root the leading dot goes."""
    return (root + jax.tree_util.keystr(path)).removeprefix(".")


def positional_names(fun: Callable[..., PyTree], count: int) -> list[str]:
    """The names that `fun` gives its first `count` positional arguments."""
    names: list[str] = []
    rest = "args"
    offset = 0
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for parameter in parameters:
        if parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameter.name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = parameter.name
            offset = len(names)
            break
    extra = [f"{rest}[{i - offset}]" for i in range(len(names), count)]
    return (names + extra)[:count]


def fun_name(fun: PyTree) -> str:
    """The name of a function, for messages and compiled programs."""
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def describe(value: PyTree) -> str:
    """A value as messages show it: arrays by dtype and shape, all else by `repr`.

    It does not read arrays, so that it never waits for one to be computed.
    """
    leaves, treedef = jax.tree_util.tree_flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef) and leaves:
        return describe_leaf(leaves[0])
    shown = jax.tree_util.tree_unflatten(treedef, [_Bare(describe_leaf(x)) for x in leaves])
    return shown._one_line() if isinstance(shown, StateNode) else repr(shown)


class _Bare:
    """A string that prints without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def describe_leaf(leaf: Leaf) -> str:
    """`float32[2,3]` for an array, `repr` for the rest."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        text = repr(leaf)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"{dtype}[{','.join(map(str, shape))}]"
