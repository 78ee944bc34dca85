"""Right types where a rule of JAX's loses over which mesh axes a value varies.

The rules of some primitives type a result as the same on all shards although it is made of what varies. Where
JAX differentiates what comes after, it then leaves out sums over shards. While a function is traced with such
primitives typed right, each of their calls casts what goes in and what comes out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from .._base._errors import StatemeshError, axes_argument
from .._base._types import NO_AXES, Array, Axes
from . import _compat as compat
from . import _jaxprs as jaxprs
from ._dataflow import arguments_returned


Primitives = frozenset[Any]

_NONE: Primitives = frozenset()
_active: ContextVar[Primitives] = ContextVar("_active", default=_NONE)
# The primitives whose calls ask what is active.
_asking: set[Any] = set()
# The primitive of casts, once it asks too.
_casting: list[Any] = []


active = _active.get


@contextmanager
def typing_right(primitives: Primitives) -> Iterator[None]:
    """A context in which calls of these primitives, and of no others, are typed right.

    Every jaxpr in it has to be traced anew, by `compat.TypedRight`: JAX keeps those of inner functions.
    """
    for primitive in primitives - _asking:
        _asking.add(primitive)
        primitive.bind = _asking_first(primitive)
    if primitives and not _casting:
        _casting.append(cast := jaxprs.primitive_of_cast())
        cast.bind = _unless_cast(cast)
    token = _active.set(primitives)
    try:
        yield
    finally:
        _active.reset(token)


def names() -> frozenset[str]:
    """The names of the primitives that are typed right here."""
    return frozenset(primitive.name for primitive in active())


def _bind_of(primitive: Any) -> Callable[..., Any]:
    """How JAX binds a primitive, which is looked up at each call: a lift may have put another one there."""

    def bind(*operands: Any, **params: Any) -> Any:
        return type(primitive).bind(primitive, *operands, **params)

    return bind


def _asking_first(primitive: Any) -> Callable[..., Any]:
    bind = _bind_of(primitive)

    def typed(*operands: Any, **params: Any) -> Any:
        axes = _varying_into(primitive.name, operands, params) if primitive in active() else NO_AXES
        if not axes:
            return bind(*operands, **params)
        same: set[int] = set()
        match primitive.name:
            case "cond":
                # Its branches are traced already, for operands of these types.
                branches = list(map(jaxprs.open_jaxpr, params["branches"]))
                read = map(any, zip(*map(jaxprs.inputs_read, branches), strict=True))
                entering = [
                    _without_derivative(x, axes) if is_read else x
                    for x, is_read in zip(operands[1:], read, strict=True)
                ]
                operands = (operands[0], *entering)
                returned = list(map(arguments_returned, branches))
                pairs = enumerate(zip(*returned, strict=True))
                same = {k for k, each in pairs if each[0] is not None and len({*each}) == 1}
            case "while":
                # JAX has no derivative in reverse mode, and in forward mode nothing is summed.
                body = jaxprs.open_jaxpr(params["body_jaxpr"])
                consts = params["body_nconsts"]
                carried = enumerate(arguments_returned(body))
                same = {k for k, argument in carried if argument == consts + k}
            case _:
                operands = tuple(_vary(x, axes) for x in operands)
        results = bind(*operands, **params)
        if not primitive.multiple_results:
            return _vary(results, axes)
        return [y if k in same else _vary(y, axes) for k, y in enumerate(results)]

    return typed


def _unless_cast(cast: Any) -> Callable[..., Any]:
    """Where JAX differentiates a jaxpr it runs it again: what is cast in it may vary already."""
    bind = _bind_of(cast)

    def idempotent(x: Any, *, axes: Any, **params: Any) -> Any:
        if active():
            held = compat.varying_type(jax.typeof(x))
            axes = type(axes)(axis for axis in axes if axis not in held)
        return bind(x, axes=axes, **params) if axes else x

    return idempotent


def _varying_into(name: str, operands: Sequence[Any], params: dict[str, Any]) -> Axes:
    """The axes over which all results of a call vary, of those that its types may lose."""
    match name:
        case "cond":
            deciding = operands[:1]
        case "while":
            return compat.varying_type(jaxprs.open_jaxpr(params["cond_jaxpr"]).outvars[0].aval)
        case "sort":
            deciding = operands[: params["num_keys"]]
        case _:
            if jaxprs.hides_function(name, params):
                return NO_AXES
            deciding = operands
    return NO_AXES.union(*(compat.varying_type(jax.typeof(x)) for x in deciding))


def _vary(x: Any, axes: Axes) -> Any:
    kind = jax.typeof(x)
    # A reference, or a token, has no such type.
    if not isinstance(kind, jax.core.ShapedArray):
        return x
    return compat.vary(x, sorted(axes, key=str))


def _without_derivative(x: Any, axes: Axes) -> Any:
    """What enters the branches of a `cond` whose predicate varies over these axes.

    Where it is differentiated and its type says that it is the same, JAX would not sum its gradient.
    """
    left = axes - compat.varying_type(jax.typeof(x))
    if not left or not jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact):
        return x
    names = sorted(left, key=str)

    def refused() -> StatemeshError:
        axis = axes_argument(names)
        return StatemeshError(
            f"The predicate of a jax.lax.cond or switch differs between shards over {axis!r}, and arrays "
            "that enter its branches are the same there. JAX does not type its result as one that differs, "
            "so the gradients of these arrays would lack the sum over shards. Write "
            f"`w = jax.lax.pcast(w, {axis!r}, to='varying')` before the cond, for each array of floats that "
            "its branches use and return; or `jnp.where` instead of the cond."
        )

    return refusing_derivative(x, refused)


def refusing_derivative(x: Array, error: Callable[[], Exception]) -> Array:
    """`x`; whoever differentiates it, here or around, gets what `error` returns."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error()

    result: Array = same(x)
    return result
