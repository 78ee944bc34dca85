"""Programs that are traced as outside of any mapped call, and run inside one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat as compat
from . import _jaxprs as jaxprs
from ._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from ._types import NO_AXES, Array, ArrayLike, PyTree


def traced_outside(fun: Callable[..., PyTree], *arrays: PyTree) -> ClosedJaxpr:
    """The jaxpr of `fun` as it is outside any mapped call, even if this is called inside one.

    JAX keeps what is mapped, and whether it checks types, for each thread.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    wide = bool(jax.config.jax_enable_x64)

    def trace() -> ClosedJaxpr:
        with jax.enable_x64(wide):
            traced: ClosedJaxpr = jax.make_jaxpr(fun)(*shapes)
        return traced

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trace).result()


def run_varying(closed: ClosedJaxpr, arrays: Sequence[Array]) -> list[Array]:
    """The results, inside a checked `shard_map`, of a program that was traced outside of any.

    Its equations do not say what varies. So every operand is typed as varying over all axes over which any of
    the arrays does.
    """
    over = NO_AXES.union(*map(compat.varying, arrays))

    def run(jaxpr: Jaxpr, consts: Sequence[ArrayLike], given: Sequence[Array]) -> list[Array]:
        known: dict[Operand, ArrayLike] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True)
        )

        def value(atom: Operand) -> Array:
            x = getattr(atom, "val", None) if jaxprs.is_literal(atom) else known[atom]
            return compat.vary(jnp.asarray(x, getattr(atom.aval, "dtype", None)), over)

        for eqn in jaxpr.eqns:
            operands = list(map(value, eqn.invars))
            match jaxprs.control_flow(eqn):
                case ("call", inner):
                    made = run(inner, _consts_of(eqn), operands)
                case _:
                    found = _in_place(eqn, operands)
                    made = list(found) if eqn.primitive.multiple_results else [found]
            known.update(zip(eqn.outvars, made, strict=True))
        return list(map(value, jaxpr.outvars))

    return run(jaxprs.open_jaxpr(closed), closed.consts, arrays)


def _in_place(eqn: Equation, operands: Sequence[Array]) -> Any:
    """What an equation makes. A sum over axes of arrays is written as one over mapped axes after a `vmap`."""
    reduce: dict[str, Callable[..., Array]] = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}
    if (of_numpy := reduce.get(eqn.primitive.name)) is None:
        return eqn.primitive.bind(*operands, **eqn.params)
    made = [of_numpy(x, axis=eqn.params["axes"]) for x in operands]
    return made if eqn.primitive.multiple_results else made[0]


def _consts_of(eqn: Equation) -> Sequence[ArrayLike]:
    """The constants that a called jaxpr is closed over."""
    called = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    consts = (getattr(jaxpr, "consts", None) for jaxpr in called)
    return next((found for found in consts if found is not None), ())
