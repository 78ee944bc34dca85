"""How a State is printed: by `repr`, Equinox, rich and treescope."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np

from .._base import _compat as compat
from .._base._arrays import is_key
from .._base._nodes import StateNode
from .._base._paths import describe_leaf
from .._base._types import Leaf, PyTree


class Shown(StateNode):
    """Prints a State as what makes it.

    Scalars with their value, arrays by dtype and shape: the numbers in small ones are shown by
    `equinox.tree_pformat(short_arrays=False)`.
    """

    __slots__ = ()

    def _fields(self) -> dict[str, PyTree]:
        """The metadata to show: all that is not at its default."""
        found = {name: getattr(self, name) for name in ("name", "spec", "reduce")}
        found["tag"] = sorted(getattr(self, "tag", ())) or None
        return {name: value for name, value in found.items() if value is not None}

    def __repr__(self) -> str:
        return eqx.tree_pformat(self)

    def _one_line(self) -> str:
        return eqx.tree_pformat(self, width=1_000_000)

    def __pdoc__(self, **options: Leaf) -> PyTree:
        # Imported here, because only what prints by this package calls this method.
        import wadler_lindig as wl

        outer = options.get("custom")
        value = getattr(self, "value", None)
        if options.get("short_arrays", True):
            inner = options | {"custom": functools.partial(_short, wl.TextDoc, outer)}
            docs = [wl.pdoc(value, **inner)]
        else:
            docs = [wl.pdoc(value, **options)]
        for name, field in self._fields().items():
            text = getattr(field, "__name__", None) or repr(field)
            docs.append(wl.TextDoc(f"{name}={text}"))
        return wl.bracketed(
            wl.TextDoc(f"{type(self).__name__}("),
            docs,
            wl.comma,
            wl.TextDoc(")"),
            options["indent"],
        )

    def __rich_repr__(self) -> PyTree:
        yield getattr(self, "value", None)
        yield from self._fields().items()

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., object]
    ) -> PyTree:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"value": getattr(self, "value", None), **self._fields()},
            path=path,
            subtree_renderer=subtree_renderer,
        )


def _short(
    text: Callable[[str], object], outer: Callable[..., object] | None, leaf: Leaf
) -> PyTree:
    if getattr(leaf, "dtype", None) is None or getattr(leaf, "shape", None) is None:
        return None if outer is None else outer(leaf)
    return text(f"{leaf.dtype}({leaf.item()})" if _is_known(leaf) else describe_leaf(leaf))


def _is_known(leaf: Leaf) -> bool:
    """Whether it is one number that can be read now."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape == ()
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape == ()
        and not compat.is_tracer(leaf)
        and not is_key(leaf)
        and not leaf.is_deleted()
        and (leaf.is_fully_addressable or leaf.is_fully_replicated)
    )
