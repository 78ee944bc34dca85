"""`emulate`: a mapped call on one device."""

import weakref
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from .. import _errors as errors
from .._recent import Recent
from .._static_keys import static_key
from .._types import AnyLeaf, Fun, PyTree, PyTreeDef, tree_util
from ._one_device import NO_MESH, as_array
from ._trace import trace
from ._traced_program import TracedProgram


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
        leaves = [as_array(x) if _is_traced(x) else x for x in leaves]
    key = _signature(treedef, leaves)
    cache = _cache_of(mapped)
    new: Callable[[], _TracedCall] = lambda: _TracedCall(mapped, treedef, leaves)
    traced = new() if key is None else cache.get(key, new)
    if traced.program.holds_tracers:
        cache.forget(key)
    return traced([x for x in leaves if _is_jax_array(x)])


def _is_traced(x: object) -> bool:
    """Whether an argument is traced: NumPy arrays of strings or objects are static."""
    return isinstance(x, jax.Array) or (
        isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USOMm"
    )


def _is_jax_array(x: object) -> bool:
    return isinstance(x, jax.Array)


# The traced calls of each function, for as long as the function lives.
_caches: weakref.WeakKeyDictionary[Fun, Recent["_TracedCall"]]
_caches = weakref.WeakKeyDictionary()


def _cache_of(mapped: Fun) -> Recent["_TracedCall"]:
    try:
        return _caches.setdefault(mapped, Recent())
    except TypeError:  # The function has no hash, or cannot be referred to weakly.
        return Recent()


def _signature(treedef: PyTreeDef, leaves: Sequence[AnyLeaf]) -> Hashable | None:
    """All that the traced program depends on except the function; `None` where that cannot be known."""
    keys = tuple(_type_key(x) if _is_jax_array(x) else static_key(x) for x in leaves)
    if None in keys:
        return None
    wide = jax.dtypes.canonicalize_dtype("float64") == "float64"
    return treedef, keys, wide, jax.sharding.get_abstract_mesh()


def _type_key(x: jax.Array) -> Hashable:
    return "array", x.shape, x.dtype, getattr(x, "weak_type", False)


class _TracedCall:
    """A call with one signature, traced."""

    def __init__(self, mapped: Fun, treedef: PyTreeDef, leaves: Sequence[AnyLeaf]) -> None:
        name = getattr(mapped, "__name__", type(mapped).__name__)
        self.trace = trace(mapped, treedef, leaves)
        self.program = TracedProgram(name, self.trace.closed, self.trace.paths)

    def __call__(self, arrays: Sequence[jax.Array]) -> PyTree:
        return self.trace.results(self.program(arrays))
