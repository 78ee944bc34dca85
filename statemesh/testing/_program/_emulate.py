"""`emulate`: a mapped call on one device."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

import statemesh as sm

from ..._jax._frames import without_own_frames
from .. import _errors as errors
from .._caches import Recent
from .._types import Fun, PyTree, tree_util
from ._jaxprs import Jaxpr, as_function, forwarded
from ._numbers import is_numpy
from ._replay import Differences, Replay
from ._trace import (
    NO_MESH,
    Placing,
    Trace,
    as_array,
    leaf_key,
    name_of,
    on_one_device,
    placing_like,
    trace,
    type_of,
)


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
        self.replay = Replay(name, closed.jaxpr, most_rounds=None)
        self.compiled = jax.jit(self.replay)
        self.gradients: Recent[Fun] = Recent()
        # A result that is an input is returned as the very array that came in.
        self.forwarded = forwarded(closed.jaxpr)

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        inputs = [*map(as_array, self.closed.consts), *arrays]
        # Otherwise a mesh that the caller has set would become a part of the types of new arrays.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            results: list[jax.Array] = self._differentiable()(*inputs)
        pairs = zip(results, self.forwarded, strict=True)
        return [x if source is None else inputs[source] for x, source in pairs]

    def _differentiable(self) -> Callable[..., list[jax.Array]]:
        # The gradient of the traced program is replayed. The gradient of the replay would be another one: on
        # devices collectives have transposes of their own, such as that of an unchecked `psum`.
        # Each gradient goes to where the array lies that it belongs to.
        returns: list[Placing | None] = []

        @jax.custom_vjp
        def run(*arrays: Any) -> list[jax.Array]:
            results, differences = self.compiled(*map(on_one_device, arrays))
            self._check(differences)
            return results

        def forward(*primals: Any) -> tuple[list[jax.Array], Any]:
            returns[:] = [placing_like(primal.value) for primal in primals]
            arrays = [on_one_device(as_array(primal.value)) for primal in primals]
            wanted = tuple(primal.perturbed for primal in primals)
            return run(*arrays), Partial(
                self.gradients.get(wanted, lambda: self._gradient(wanted)), *arrays
            )

        def backward(pull: Any, cotangents: Any) -> Any:
            pairs = zip(pull(cotangents), returns, strict=True)
            return tuple(x if x is None or place is None else place(x) for x, place in pairs)

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def _check(self, differences: Differences) -> None:
        # Under a transformation of the user's the values are not known.
        if any(isinstance(x, jax.core.Tracer) for x in differences):
            return
        broken = self.replay.broken(differences, self.paths).values()
        if uneven := "\n".join(promise.text for promise in broken if promise.is_predicate):
            raise sm.StatemeshError(
                f"{self.name}: on devices some shards would wait in collectives for others that never come:\n"
                f"{uneven}\nMove the collectives out, or make the predicate the same on all shards "
                "(jax.lax.pmax)."
            )
        if unequal := "\n".join(promise.text for promise in broken):
            raise sm.StatemeshError(
                f"{self.name}: results that are promised to be the same on several shards "
                f"differ:\n{unequal}\nReduce them over these axes inside (jax.lax.psum, pmean), let a "
                "state's `reduce` do it, or name the axes in the out specs."
            )

    def _gradient(self, wanted: tuple[bool, ...]) -> Fun:
        """The function from inputs and cotangents of results to the cotangents of the wanted inputs."""
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
                results = whole(*filled)
                return [results[k] for k in floats]

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
            by_input = dict(zip(at, programs[0](flat), strict=True))
            return tuple(by_input.get(i) for i in range(len(wanted)))

        return gradient


def _filled(cotangent: Any, aval: Any) -> jax.Array:
    known = not isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return cotangent if known else jnp.zeros(aval.shape, aval.dtype)


@without_own_frames
def emulate(mapped: Fun, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Call a mapped function with all of its shards on one device.

    `emulate` traces the call and replays the program with the values of all shards in one array: collectives,
    casts, branches and loops in which each shard goes its own way, with `check_vma` on and off. The results
    are those of the devices, for a mesh of any size. The mesh may be a `jax.sharding.AbstractMesh`, which has
    no devices. An out spec that leaves a mesh axis out promises that the result is the same along that axis:
    `emulate` compares the values, whatever `check_vma` is.

    **Arguments:**

    - `mapped`: the result of `shard_map`, `pmap2` or `vmap2`, or any function that calls one: a training
        step, or `jax.grad` of one. It is traced and compiled once for each signature of its arguments. The
        values of Python numbers are a part of the signature.
    - `args`, `kwargs`: the arguments of the call. Arrays may lie anywhere.

    **Returns:** the result of the call: the same tree, shapes and dtypes. States are written back by their
    policies, and leaves that were not written are those that came in. New arrays are on one device.

    **Raises:** `StatemeshError` that lists all results that are promised to be the same on several shards
    and differ by more than rounding; `StatemeshError` that names a primitive that cannot be replayed. Errors
    of the call itself come through unchanged.

    `jax.grad` and `jax.vjp` of an emulated call replay the gradient of the program. For forward derivatives,
    emulate the function that computes them:
    `emulate(lambda x, t: jax.jvp(mapped, (x,), (t,)), x, t)`. Inside your own `jax.jit` or `jax.vmap` the
    values are not known, and promises are not checked.

    A `pmap2` with more lanes than devices is replayed as `vmap2` runs it.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import emulate
        >>> mesh = AbstractMesh((64, 4), ("data", "model"))
        >>> def step(total, x):
        ...     share = x / jax.lax.psum(x.sum(), ("data", "model"))
        ...     return share, total.set(total.value + x.sum())
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data", "model")),
        ...                     out_specs=(P("data", "model"), P()))
        >>> share, total = emulate(step, sm.State(0.0, reduce="sum"), jnp.ones((128, 8)))
        >>> share.shape, float(share.sum()), float(total.value)
        ((128, 8), 1.0, 1024.0)

        ```
    """
    if not callable(mapped):
        raise errors.bad_keyword("emulate", "mapped", mapped, "a function that JAX can trace")
    leaves, treedef = tree_util.tree_flatten((args, kwargs))
    with jax.sharding.use_abstract_mesh(NO_MESH):
        leaves = [jnp.asarray(x) if is_numpy(x) else x for x in leaves]
    wide = jax.dtypes.canonicalize_dtype("float64") == "float64"
    # All that the traced program depends on except the function.
    key = treedef, tuple(map(leaf_key, leaves)), wide, jax.sharding.get_abstract_mesh()
    cache = _cache_of(mapped)

    def new() -> tuple[Trace, TracedProgram]:
        traced = trace(mapped, treedef, leaves)
        return traced, TracedProgram(name_of(mapped), traced.closed, traced.paths)

    traced, program = cache.get(key, new)
    if program.holds_tracers:
        cache.forget(key)
    return traced.results(program([x for x in leaves if isinstance(x, jax.Array)]))


# The traced calls of each function, for as long as the function lives.
_caches: weakref.WeakKeyDictionary[Fun, Recent[tuple[Trace, TracedProgram]]]
_caches = weakref.WeakKeyDictionary()


def _cache_of(mapped: Fun) -> Recent[tuple[Trace, TracedProgram]]:
    try:
        return _caches.setdefault(mapped, Recent())
    except TypeError:  # The function has no hash, or cannot be referred to weakly.
        return Recent()
