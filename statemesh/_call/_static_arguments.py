"""Arguments that are constants of the program."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .._base import errors
from .._base._checks import check_function
from .._base._paths import fun_name, positional_names
from .._base._tokens import token
from .._base._types import Fun, Leaf, PyTree


@jax.tree_util.register_static
class _Box:
    """A value as a node without leaves: part of the arguments' structure, compared by value."""

    __slots__ = ("token", "value")

    def __init__(self, value: Leaf) -> None:
        self.value = value
        self.token = token(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __repr__(self) -> str:
        return repr(self.value)


class Boxes:
    """Puts static arguments into boxes, and opens them for the function.

    **Arguments:**

    - `fun`: the function.
    - `static`: positions of the static arguments.
    """

    def __init__(self, fun: Fun, static: Sequence[int]) -> None:
        self.fun = fun
        self.static = static
        check_function("pmap2", fun)

        def opened(*args: PyTree, **kwargs: PyTree) -> Any:
            return fun(*self.open(args), **kwargs)

        self.opened: Fun = functools.update_wrapper(opened, fun)

    def __call__(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """The arguments, the static ones in boxes."""
        if bad := [i for i in self.static if not -len(args) <= i < len(args)]:
            raise errors.bad_argnums("static_broadcasted_argnums", bad, len(args))
        boxed = list(args)
        for i in self.static:
            try:
                hash(args[i])
            except TypeError:
                path = positional_names(self.fun, len(args))[i]
                raise errors.unhashable_static(fun_name(self.fun), path, args[i]) from None
            boxed[i] = _Box(args[i])
        return tuple(boxed)

    def open(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """The arguments as they were."""
        return tuple(x.value if isinstance(x, _Box) else x for x in args)
