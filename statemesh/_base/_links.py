"""Links in a traced program from each new value of a state to the old value that it continues.

A State remembers where it came from until JAX takes it apart: `jit`, `scan`, `cond` and `jax.tree.map` build
another State of its arrays. So while a function is traced, an equation that changes nothing ties each new
value of a state to the old one, and the way back can be read off the program. A State that `jax.tree.map`
rebuilds is recognised by a token in its static part. A token counts only in the trace in which it was made:
what comes out of a `jit` carries the tokens of the state with which the `jit` was first traced.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from . import _compat as compat
from . import _jaxprs as jaxprs
from ._compat import tree_util


# The user called `set` or `replace`, which says for certain what the new value continues.
WRITTEN = "continues, as written"
# JAX rebuilt the State, as in `jax.tree.map`. The program may show that its arrays continue another state.
REBUILT = "continues, as rebuilt"


class Links:
    """The links that are made in one trace.

    **Arguments:**

    - `followed`: the kinds and metadata of the states that are linked.
    """

    def __init__(self, followed: frozenset[Hashable]) -> None:
        self.followed = followed
        # For each token the trace in which it was made, and the arrays of the State.
        self._made: dict[object, tuple[Any, Sequence[Any]]] = {}

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within this context every new State is linked to the one that it continues."""
        mark = _active.set(self)
        try:
            yield
        finally:
            _active.reset(mark)
            # JAX's caches keep tokens alive for longer than the trace, which holds much memory.
            self._made.clear()

    def written(self, value: Any, old: Any) -> tuple[Any, object]:
        """A value that continues `old`, and its token."""
        return self._linked(_WRITTEN, value, tree_util.tree_leaves(old), None)

    def rebuilt(self, value: Any, token: object) -> tuple[Any, object]:
        """The value of a State that JAX has rebuilt, and the State's new token."""
        trace, old = self._made.get(token, (None, ()))
        if trace is not compat.current_trace(()):
            old = ()
        return self._linked(_REBUILT, value, old, token)

    def _linked(
        self, continues: Callable[[Any, Any], Any], value: Any, old: Sequence[Any], token: object
    ) -> tuple[Any, object]:
        leaves, treedef = tree_util.tree_flatten(value)
        if not leaves or not all(isinstance(x, jax.Array) for x in leaves):
            # JAX also rebuilds nodes around placeholders, and a State may have no arrays at all.
            return value, token
        if old and any(x is not y for x, y in zip(leaves, old, strict=False)):
            before = [*old, *[old[0]] * len(leaves)]
            leaves = [continues(x, y) for x, y in zip(leaves, before, strict=False)]
            value = treedef.unflatten(leaves)
        token = object()
        self._made[token] = compat.current_trace(()), leaves
        return value, token


_active: ContextVar[Links | None] = ContextVar("links", default=None)
active = _active.get


def _link(name: str) -> Callable[[Any, Any], Any]:
    # It has a derivative of its own, so that no transformation drops the operand that it does not use.
    @jax.custom_jvp
    def continues(new: Any, old: Any) -> Any:
        return checkpoint_name(new, name)

    @continues.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return continues(*primals), tangents[0]

    linked: Callable[[Any, Any], Any] = continues
    return linked


_WRITTEN = _link(WRITTEN)
_REBUILT = _link(REBUILT)


def link_made(eqn: Any) -> str | None:
    """`WRITTEN` or `REBUILT` for an equation that links its first operand to its second, else `None`."""
    if not jaxprs.with_own_derivative(eqn) or len(eqn.invars) != 2:
        return None
    names = [jaxprs.name_given(e) for jaxpr in jaxprs.jaxprs_of(eqn) for e in jaxpr.eqns]
    return next((name for name in names if name in (WRITTEN, REBUILT)), None)
