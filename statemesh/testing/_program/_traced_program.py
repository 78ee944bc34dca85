"""A traced program that runs on one device, and has a gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from .. import _errors as errors
from .._types import Fun
from ._control_flow import Differences
from ._jaxprs import Jaxpr, as_function, is_identity, is_literal
from ._one_device import NO_MESH, Placing, as_array, on_one_device, placing_like, type_of
from ._promises import broken
from ._replay import Replay


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
            made, differences = self.compiled(*map(on_one_device, arrays))
            self._check(differences)
            return made

        def forward(*primals: Any) -> tuple[list[jax.Array], Any]:
            returns[:] = [placing_like(primal.value) for primal in primals]
            arrays = [on_one_device(as_array(primal.value)) for primal in primals]
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
        found = broken(self.replay.promises, differences, self.closed.jaxpr.outvars, self.paths)
        if uneven := [(x.control, x.collectives, x.unequal) for x in found if x.control]:
            raise errors.uneven(self.name, uneven)
        if found:
            raise errors.unequal(self.name, [x.unequal for x in found])

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


def _filled(cotangent: Any, aval: Any) -> jax.Array:
    known = not isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return cotangent if known else jnp.zeros(aval.shape, aval.dtype)
