"""The arithmetic of a replay: in the program's own dtypes, or with all floats in double precision."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf
from ._jaxprs import Equation, nested_equations


# Parameters that say where a value lies on a mesh.
_LAYOUTS = ("sharding", "out_sharding")
# Parameters that give the dtype of a result.
_DTYPES = ("dtype", "new_dtype", "preferred_element_type")

# Operations of a caller's own code, or on the bits of numbers: they need the dtype of the program.
_OWN_DTYPE = (
    *("pure_callback", "io_callback", "ffi_call", "debug_callback", "bitcast_convert_type"),
    *("nextafter", "pallas_call", "call_hi_primitive"),
)

_MARKS = ("", "-add", "-sub", "-mul", "-min", "-max")
_SCATTERS: Mapping[str, Callable[..., Any]] = {
    f"scatter{mark}": getattr(jax.lax, f"scatter{mark.replace('-', '_')}")
    for mark in (*_MARKS, *(mark.replace("-", "_") for mark in _MARKS))
}


@runtime_checkable
class Arithmetic(Protocol):
    """How a replay computes."""

    def value(self, x: AnyLeaf) -> AnyLeaf:
        """An input or a constant of the program, as the replay holds it."""

    def literal(self, x: AnyLeaf, dtype: Any) -> AnyLeaf:
        """A literal of the program and its dtype, as the replay holds it."""

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        """The results, on one shard, of an equation that is no collective and runs no other equations."""

    def reduced(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        run: Callable[..., list[AnyLeaf]],
        shards: int = 1,
    ) -> list[AnyLeaf]:
        """The results of an equation that `run` computes. A collective is over so many shards."""


class OwnDtypes:
    """The arithmetic of the program as it is."""

    def value(self, x: AnyLeaf) -> AnyLeaf:
        return x

    def literal(self, x: AnyLeaf, dtype: Any) -> AnyLeaf:
        return np.asarray(x, dtype)

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        return _results(eqn, _parameters(eqn), xs)

    def reduced(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        run: Callable[..., list[AnyLeaf]],
        shards: int = 1,
    ) -> list[AnyLeaf]:
        del eqn, shards
        return run(*xs)


class Promoted(OwnDtypes):
    """Floats in double precision, in which rounding hides nothing.

    An operation that cannot run in double precision runs in its own dtype.

    **Attributes:**

    - `own_dtype`: the operations on floats that run in their own dtype, by their names.
    """

    def __init__(self) -> None:
        self.own_dtype: set[str] = set()

    def value(self, x: AnyLeaf) -> AnyLeaf:
        wide = promoted(x.dtype)
        return x if wide == x.dtype else jnp.asarray(x, wide)

    def literal(self, x: AnyLeaf, dtype: Any) -> AnyLeaf:
        return self.value(np.asarray(x, dtype))

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        name = eqn.primitive.name
        if name == "reduce_precision":
            return list(xs)
        if name == "convert_element_type" and is_inexact(eqn.params["new_dtype"]):
            return [jnp.asarray(xs[0], promoted(eqn.params["new_dtype"]))]
        scatters = name in _SCATTERS
        if not self.keeps_dtype(eqn):
            try:
                made = _scattered(eqn, xs) if scatters else _results(eqn, _wide(eqn), xs)
                return self._typed(eqn, made)
            except NotImplementedError:  # It has no rule for `vmap`, in whatever dtype.
                raise
            except Exception:  # To a dtype that it does not know, a primitive may say anything.
                pass
        pairs = zip(xs, eqn.invars, strict=True)
        narrow = [jnp.asarray(x, dtype_of(v)) if is_inexact(x.dtype) else x for x, v in pairs]
        # Random bits become floats in this way, exactly.
        if any(is_inexact(x.dtype) for x in xs):
            self.own_dtype.add(name)
        return self._typed(eqn, _results(eqn, _parameters(eqn), narrow))

    def keeps_dtype(self, eqn: Equation) -> bool:
        """Whether an equation is never run in double precision."""
        name = eqn.primitive.name
        return name in _OWN_DTYPE or (name not in _SCATTERS and any(nested_equations(eqn)))

    def _typed(self, eqn: Equation, made: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        wanted: list[Any] = [promoted(dtype_of(v)) for v in eqn.outvars]
        pairs = zip(made, wanted, strict=True)
        return [x if x.dtype == wide else jnp.asarray(x, wide) for x, wide in pairs]


def dtype_of(var: Any) -> Any:
    """The dtype of a variable of a program."""
    return var.aval.dtype


def is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def promoted(dtype: Any) -> Any:
    """The dtype that stands for a dtype in double precision."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _scattered(eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
    # The equation holds the update as a jaxpr of its own dtype, so it is made anew.
    params = eqn.params
    return [
        _SCATTERS[eqn.primitive.name](
            *xs,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )
    ]


def _results(eqn: Equation, params: Mapping[str, Any], xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
    if "_prim" in params:
        # What newer versions of JAX expand only when they compile, such as `custom_root`. In double precision
        # the numbers in it would get other dtypes than those that it was traced with.
        wide = any(dtype_of(v).itemsize == 8 for v in (*eqn.invars, *eqn.outvars))
        with jax.enable_x64(wide):
            expand, treedef = params["_prim"].expand, params["_prim"].in_tree
            return list(jax.tree.leaves(expand(*jax.tree.unflatten(treedef, xs))))
    made = eqn.primitive.bind(*xs, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _parameters(eqn: Equation) -> dict[str, Any]:
    # On one device a layout on a mesh means nothing.
    return {key: None if key in _LAYOUTS else value for key, value in eqn.params.items()}


def _wide(eqn: Equation) -> dict[str, Any]:
    params = _parameters(eqn)
    for key in _DTYPES:
        if params.get(key) is not None:
            params[key] = promoted(params[key])
    if "precision" in params:
        params["precision"] = None
    return params
