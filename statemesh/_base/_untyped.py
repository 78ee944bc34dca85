"""Functions traced where nothing checks what varies, put in where something does.

Inside a checked `shard_map` JAX types what varies over the mesh, and cannot type a collective over the lanes
of a `vmap`. A jaxpr that was traced elsewhere is not typed again when a call of `jit` puts it in; only
its results need their types.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat as compat
from . import _jaxprs as jaxprs
from ._types import NO_AXES, Axes, AxisName


class MeshCollective(Exception):
    """What was to be traced without types uses mesh axes, whose collectives mean something else then."""

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        super().__init__(axis_names)
        self.axis_names = axis_names


# The lanes of which a collective that fails here makes the function be traced again, where nothing is typed.
_retraced: ContextVar[frozenset[AxisName]] = ContextVar("_retraced", default=frozenset())


@contextlib.contextmanager
def retracing(name: AxisName) -> Iterator[None]:
    """While it is open, whoever opened it traces again what fails in a collective over these lanes."""
    before = _retraced.set(_retraced.get() | {name})
    try:
        yield
    finally:
        _retraced.reset(before)


def left_to_retrace(axis_names: Sequence[AxisName]) -> bool:
    """Whether JAX's collective over these axes may fail here, because it will be traced where it runs."""
    return _retraced.get().issuperset(axis_names)


def run_untyped(fun: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """A list of arrays as `fun` makes it of arrays, traced where nothing checks what varies.

    Its results are taken to vary over whatever its arguments, and the traced values that it closes over,
    vary over. It has a gradient, which is traced there too, and no derivative forwards.

    **Raises:** `MeshCollective` where `fun` uses mesh axes.
    """
    args = [jnp.asarray(x) for x in args]
    closed = _traced_untyped(fun, args)
    taken = compat.manual_axes(jax.sharding.get_abstract_mesh())
    if used := taken & jaxprs.names_used(closed.jaxpr):
        raise MeshCollective(tuple(used))
    # What it closes over becomes an argument, so that gradients reach it.
    count = len(closed.consts)
    args = [*map(jnp.asarray, closed.consts), *args]
    axes = NO_AXES.union(*map(compat.varying, args))

    def whole(*args: Any) -> list[Any]:
        opened = compat.core.ClosedJaxpr(closed.jaxpr, args[:count])
        made: list[Any] = compat.core.jaxpr_as_fun(opened)(*args[count:])
        return made

    @jax.custom_vjp
    def run(*args: Any) -> list[Any]:
        return _bound_untyped(whole, args, axes)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        return run(*args), args

    def backward(args: Any, cotangents: Any) -> tuple[Any, ...]:
        at = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def pulled(*flat: Any) -> list[Any]:
            def of_inexact(*inexact: Any) -> Any:
                filled = list(flat[: len(args)])
                for k, x in zip(at, inexact, strict=True):
                    filled[k] = x
                return whole(*filled)

            _, pull = jax.vjp(of_inexact, *[flat[k] for k in at])
            return list(pull(list(flat[len(args) :])))

        # `None` is the gradient of what has none: integers and keys.
        found = dict(zip(at, _bound_untyped(pulled, [*args, *cotangents], axes), strict=True))
        return tuple(found.get(k) for k in range(len(args)))

    run.defvjp(forward, backward)
    return run(*[compat.vary(x, axes) for x in args])


def _bound_untyped(fun: Callable[..., Any], args: Sequence[Any], axes: Axes) -> list[Any]:
    """A call of `jit` as it was traced elsewhere: what it does inside is not typed again here."""
    closed = _traced_untyped(jax.jit(fun), args)
    (call,) = closed.jaxpr.eqns
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, args, strict=True))
    given = [x.val if jaxprs.is_literal(x) else known[x] for x in call.invars]
    made = call.primitive.bind(*[compat.vary(x, axes) for x in given], **call.params)
    known |= dict(zip(call.outvars, made, strict=True))
    return [
        compat.vary(x.val if jaxprs.is_literal(x) else known[x], axes) for x in closed.jaxpr.outvars
    ]


def _traced_untyped(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The jaxpr of `fun`, traced in a thread of its own, which knows mesh axes by their sizes alone."""
    taken = compat.manual_axes(jax.sharding.get_abstract_mesh())
    sizes = [(name, jax.lax.axis_size(name)) for name in taken]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    x64 = jax.dtypes.canonicalize_dtype("float64") == "float64"
    found: list[Any] = []

    def trace() -> None:
        try:
            with jax.enable_x64(x64):
                found.append(jax.make_jaxpr(fun, axis_env=sizes)(*types))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
