"""A traced program that runs on one device, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import Partial

from . import _errors as errors
from ._replay import Replay, as_function, collectives_in, is_identity


class Program:
    """A traced program, replayed on one device; it has a gradient, which is replayed too.

    **Arguments:**

    - `name`: what messages call it.
    - `closed`: the program.
    - `paths`: what messages call its results.
    """

    def __init__(self, name: str, closed: Any, paths: Sequence[str]) -> None:
        self.name = name
        self.closed = closed
        self.paths = paths
        self.holds_tracers = any(isinstance(x, jax.core.Tracer) for x in closed.consts)
        self.context = jax.sharding.get_abstract_mesh()
        self.replay = Replay(name, closed.jaxpr)
        self.compiled = jax.jit(self.replay)
        self.gradients: dict[tuple[bool, ...], Callable[..., Any]] = {}
        # The results that are inputs as they came in: these are returned themselves.
        inputs = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
        for eqn in closed.jaxpr.eqns:
            if is_identity(eqn):
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                inputs.update(
                    {b: inputs[a] for a, b in pairs if not hasattr(a, "val") and a in inputs}
                )
        outvars = closed.jaxpr.outvars
        self.forwarded = [None if hasattr(v, "val") else inputs.get(v) for v in outvars]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        given = [*map(as_array, self.closed.consts), *arrays]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            made: list[Any] = self._differentiable()(*given)
        pairs = zip(made, self.forwarded, strict=True)
        return [x if source is None else given[source] for x, source in pairs]

    def _differentiable(self) -> Callable[..., list[Any]]:
        # Where the arrays lie that are differentiated: their gradients go there.
        homes: list[Any] = []

        @jax.custom_vjp
        def run(*arrays: Any) -> list[Any]:
            made, gaps = self.compiled(*map(_on_one_device, arrays))
            self._check(gaps)
            results: list[Any] = made
            return results

        def forward(*primals: Any) -> tuple[list[Any], Any]:
            homes[:] = [_home(primal.value) for primal in primals]
            arrays = [_on_one_device(as_array(primal.value)) for primal in primals]
            wanted = tuple(primal.perturbed for primal in primals)
            return run(*arrays), Partial(self._gradient(wanted), *arrays)

        def backward(pull: Any, cotangents: Any) -> Any:
            found = zip(pull(cotangents), homes, strict=True)
            return tuple(x if x is None or home is None else home(x) for x, home in found)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _check(self, gaps: Any) -> None:
        if any(isinstance(x, jax.core.Tracer) for x in gaps):
            return
        amounts, where = map(np.asarray, gaps)
        if not amounts.any():
            return
        paths = dict(zip(map(id, self.closed.jaxpr.outvars), self.paths, strict=False))
        found = [
            (promise, float(amount), (int(at[0]), int(at[1])))
            for promise, amount, at in zip(self.replay.promises, amounts, where, strict=True)
            if amount
        ]
        uneven = [
            (
                promise.eqn.primitive.name,
                collectives_in(promise.eqn),
                promise.broken("", amount, at),
            )
            for promise, amount, at in found
            if promise.spec is None
        ]
        if uneven:
            raise errors.uneven(self.name, uneven)
        broken = [
            promise.broken(
                paths.get(
                    id(promise.eqn.outvars[promise.index]), f"result {promise.index} of a shard_map"
                ),
                amount,
                at,
            )
            for promise, amount, at in found
        ]
        raise errors.unequal(self.name, broken)

    def _gradient(self, wanted: tuple[bool, ...]) -> Callable[..., Any]:
        """A function of the inputs and the results' cotangents that gives the cotangents of inputs."""
        if wanted in self.gradients:
            return self.gradients[wanted]
        avals = self.closed.out_avals
        at = [i for i, hit in enumerate(wanted) if hit]
        floats = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        whole = as_function(self.closed)
        programs: list[Program] = []

        def pull(*flat: Any) -> list[Any]:
            def of_wanted(*xs: Any) -> list[Any]:
                filled = list(flat[: len(wanted)])
                for i, x in zip(at, xs, strict=True):
                    filled[i] = x
                made = whole(*filled)
                return [made[k] for k in floats]

            _, vjp = jax.vjp(of_wanted, *[flat[i] for i in at])
            return list(vjp(list(flat[len(wanted) :])))

        def gradient(*args: Any) -> tuple[Any, ...]:
            *arrays, cotangents = args
            flat = [*arrays, *(_filled(cotangents[k], avals[k]) for k in floats)]
            if not programs:
                with jax.sharding.use_abstract_mesh(self.context):
                    closed = jax.make_jaxpr(pull)(*map(type_of, flat))
                programs.append(Program(f"the gradient of {self.name}", closed, ()))
            found = dict(zip(at, programs[0](flat), strict=True))
            return tuple(found.get(i) for i in range(len(wanted)))

        self.gradients[wanted] = gradient
        return gradient


NO_MESH = AbstractMesh((), ())


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    # Without a layout: on Explicit axes that is a part of the type.
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _filled(cotangent: Any, aval: Any) -> Any:
    known = not isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return cotangent if known else jnp.zeros(aval.shape, aval.dtype)


def _on_one_device(x: Any) -> Any:
    """An array where it can meet any other."""
    if _is_typed(x):
        mesh = jax.typeof(x).sharding.mesh
        auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        return jax.sharding.reshard(x, NamedSharding(auto, PartitionSpec()))
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def _is_typed(x: Any) -> bool:
    """Whether a traced value's type says how it lies on Explicit mesh axes."""
    if not isinstance(x, jax.core.Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def _home(x: Any) -> Callable[[Any], Any] | None:
    """How a cotangent gets to where its primal lies; `None` where it may be anywhere."""
    if _is_typed(x):
        return lambda ct: jax.sharding.reshard(ct, jax.typeof(x).sharding)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return None
    return lambda ct: jax.device_put(ct, x.sharding)
