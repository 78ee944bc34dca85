"""A traced program that runs on one device, and has a gradient."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import Partial

from .. import _errors as errors
from .._types import Fun
from ._collectives import nested_collectives
from ._control_flow import Differences
from ._jaxprs import Jaxpr, as_function, is_identity, is_literal
from ._replay import Replay


# A function that puts an array somewhere else.
Placing: TypeAlias = Callable[[jax.Array], jax.Array]


class TracedProgram:
    """A traced program, replayed on one device. Its gradient is a program that is replayed too.

    **Arguments:**

    - `name`: the name of the program in messages.
    - `closed`: the program.
    - `paths`: the names of its results in messages.
    """

    def __init__(self, name: str, closed: Jaxpr, paths: Sequence[str]) -> None:
        self.name = name
        self.closed = closed
        self.paths = paths
        self.holds_tracers = any(isinstance(x, jax.core.Tracer) for x in closed.consts)
        self.context = jax.sharding.get_abstract_mesh()
        self.replay = Replay(name, closed.jaxpr)
        self.compiled = jax.jit(self.replay)
        self.gradients: dict[tuple[bool, ...], Fun] = {}
        # A result that is an input is returned as the very array that came in.
        inputs = {var: i for i, var in enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])}
        for eqn in closed.jaxpr.eqns:
            if is_identity(eqn):
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                inputs.update({b: inputs[a] for a, b in pairs if not is_literal(a) and a in inputs})
        outvars = closed.jaxpr.outvars
        self.forwarded = [None if is_literal(v) else inputs.get(v) for v in outvars]

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        given = [*map(as_array, self.closed.consts), *arrays]
        # Otherwise a mesh that the caller has set would become a part of the types of new arrays.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            made: list[jax.Array] = self._differentiable()(*given)
        pairs = zip(made, self.forwarded, strict=True)
        return [x if source is None else given[source] for x, source in pairs]

    def _differentiable(self) -> Callable[..., list[jax.Array]]:
        # The gradient of the traced program is replayed. The gradient of the replay would be another one: on
        # devices collectives have transposes of their own, such as that of an unchecked `psum`.
        # Each gradient goes to where the array lies that it belongs to.
        returns: list[Placing | None] = []

        @jax.custom_vjp
        def run(*arrays: Any) -> list[jax.Array]:
            made, differences = self.compiled(*map(_on_one_device, arrays))
            self._check(differences)
            results: list[jax.Array] = made
            return results

        def forward(*primals: Any) -> tuple[list[jax.Array], Any]:
            returns[:] = [_placing_like(primal.value) for primal in primals]
            arrays = [_on_one_device(as_array(primal.value)) for primal in primals]
            wanted = tuple(primal.perturbed for primal in primals)
            return run(*arrays), Partial(self._gradient(wanted), *arrays)

        def backward(pull: Any, cotangents: Any) -> Any:
            found = zip(pull(cotangents), returns, strict=True)
            return tuple(x if x is None or place is None else place(x) for x, place in found)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _check(self, differences: Differences) -> None:
        # Under a transformation of the user's the values are not known.
        if any(isinstance(x, jax.core.Tracer) for x in differences):
            return
        amounts, where = map(np.asarray, differences)
        if not amounts.any():
            return
        found = [
            (promise, float(amount), (int(at[0]), int(at[1])))
            for promise, amount, at in zip(self.replay.promises, amounts, where, strict=True)
            if amount
        ]
        uneven = [
            (
                promise.eqn.primitive.name,
                sorted({one.primitive.name for one in nested_collectives(promise.eqn)}),
                promise.unequal("", amount, at),
            )
            for promise, amount, at in found
            if promise.spec is None
        ]
        if uneven:
            raise errors.uneven(self.name, uneven)
        paths = dict(zip(map(id, self.closed.jaxpr.outvars), self.paths, strict=False))
        unequal = []
        for promise, amount, at in found:
            inside = f"result {promise.index} of a shard_map"
            path = paths.get(id(promise.eqn.outvars[promise.index]), inside)
            unequal.append(promise.unequal(path, amount, at))
        raise errors.unequal(self.name, unequal)

    def _gradient(self, wanted: tuple[bool, ...]) -> Fun:
        """The function from inputs and cotangents of results to the cotangents of the wanted inputs."""
        if wanted in self.gradients:
            return self.gradients[wanted]
        avals = self.closed.out_avals
        at = [i for i, hit in enumerate(wanted) if hit]
        floats = [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        whole = as_function(self.closed)
        programs: list[TracedProgram] = []

        def pull(*flat: Any) -> list[jax.Array]:
            def of_wanted(*xs: Any) -> list[jax.Array]:
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
                # Traced in the context of the program, whose equations may use its mesh.
                with jax.sharding.use_abstract_mesh(self.context):
                    closed = jax.make_jaxpr(pull)(*map(type_of, flat))
                programs.append(TracedProgram(f"the gradient of {self.name}", closed, ()))
            found = dict(zip(at, programs[0](flat), strict=True))
            return tuple(found.get(i) for i in range(len(wanted)))

        self.gradients[wanted] = gradient
        return gradient


NO_MESH = AbstractMesh((), ())


def type_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The type without a sharding, which on Explicit axes is a part of it."""
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _filled(cotangent: Any, aval: Any) -> jax.Array:
    known = not isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return cotangent if known else jnp.zeros(aval.shape, aval.dtype)


def _on_one_device(x: Any) -> Any:
    """The array, laid out so that it can meet any other array in one operation."""
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


def _is_typed(x: object) -> bool:
    """Whether the type of a traced value has a sharding over Explicit mesh axes."""
    if not isinstance(x, jax.core.Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def _placing_like(x: Any) -> Placing | None:
    """The function that puts a cotangent where its primal `x` lies; `None` where it may lie anywhere."""
    if _is_typed(x):
        return lambda ct: jax.sharding.reshard(ct, jax.typeof(x).sharding)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return None
    return lambda ct: jax.device_put(ct, x.sharding)
