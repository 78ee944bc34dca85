"""A function that is mapped already, and one that is not."""

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

from jax.sharding import AbstractMesh, Mesh

import statemesh as sm

from .. import _errors as errors
from .._types import Fun


AnyMesh: TypeAlias = Mesh | AbstractMesh


def is_mapped(fun: Fun) -> TypeGuard[sm.StatefulMapping]:
    """Whether a function is what `shard_map`, `pmap2` or `vmap2` returned."""
    return isinstance(fun, sm.StatefulMapping)


def remapped(fun: sm.StatefulMapping, mesh: AnyMesh) -> sm.StatefulMapping:
    """A function that is mapped already, with its own specs on another mesh.

    **Raises:** `StatemeshError` for what `pmap2` and `vmap2` return, which have no mesh of named axes.
    """
    return fun.on_mesh(mesh)


def check_specs(fun: Fun, given: Mapping[str, Any]) -> None:
    """Refuse specs beside a function that has its own, and a function without any.

    **Arguments:**

    - `given`: the arguments that are part of a mapping, by name; `None` or `...` for one that is not given.

    **Raises:** `TypeError` that names them.
    """
    if is_mapped(fun):
        if several := [name for name, value in given.items() if value not in (None, ...)]:
            raise errors.specs_given_twice(getattr(fun, "__name__", "fun"), several)
    elif missing := [name for name in ("in_specs", "out_specs") if given.get(name, ...) is ...]:
        raise errors.specs_missing(getattr(fun, "__name__", type(fun).__name__), missing)
