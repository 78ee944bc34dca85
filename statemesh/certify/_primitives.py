"""Which of JAX's primitives a program runs."""

from collections.abc import Iterator
from typing import Any

import jax
from jax import lax


def public() -> set[str]:
    """The names of the primitives that `jax.lax` shows."""
    named = [getattr(lax, name) for name in dir(lax) if name.endswith("_p")]
    return {primitive.name for primitive in named}


def names(jaxpr: Any) -> Iterator[str]:
    """The names of the primitives in a jaxpr, and in those that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        held = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program)
        for program in filter(_is_program, held):
            yield from names(getattr(program, "jaxpr", program))


def _is_program(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")
