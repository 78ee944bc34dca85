"""`emulate`: what a mapped call means, on one device."""

import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

import statemesh as sm

from ._program import NO_MESH, Program, as_array, type_of
from ._tokens import token


def emulate(mapped: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a mapped function without the devices of its mesh: all of its shards on one device.

    The program that the call traces is replayed with all shards' values in one array, each equation by what
    it means: collectives, casts between varying and not, branches and loops that go their own way on each
    shard, with `check_vma` on and off. So it says what devices compute, for meshes of any size, an
    `jax.sharding.AbstractMesh` among them, which needs no devices. Where a result is promised to be the
    same along a mesh axis because its out spec leaves the axis out, that is checked, by value, whatever
    `check_vma` is.

    **Arguments:**

    - `mapped`: what `shard_map`, `pmap2` or `vmap2` return, or any function that calls such ones: a training
        step, or `jax.grad` of one. It is traced and compiled once for each signature of its arguments, of
        which the values of Python numbers are a part.
    - `args`, `kwargs`: the arguments of the call; arrays may lie anywhere.

    **Returns:** what the call returns: the same tree, shapes and dtypes, states written back by their
    policies, what was not written as it came in. New arrays are on one device.

    **Raises:** `StatemeshError` for results that are promised to be the same on several shards and differ
    by more than rounding, each by its path, with the difference; and for what cannot be replayed, by the
    name of the primitive. What the call itself raises comes through unchanged.

    `jax.grad`, `jax.vjp` and their like go through it: the gradient is that of the program, replayed in turn.
    For derivatives forwards emulate what computes them: `emulate(lambda x, t: jax.jvp(mapped, (x,), (t,)), x,
    t)`. Inside a `jax.jit` or `jax.vmap` of yours nothing is known of the values that would have to be the
    same; there they are not checked.

    `pmap2` with more lanes than devices is replayed as `vmap2` runs it.

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
    leaves, treedef = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if _is_array(x)]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        arrays = [as_array(leaves[i]) for i in at]
    key = _signature(treedef, leaves, at, arrays)
    kept = _kept_for(mapped)
    traced = None if key is None else kept.get(key)
    if traced is None:
        traced = _Traced(mapped, treedef, leaves, at, arrays)
        if not (key is None or traced.program.holds_tracers):
            kept[key] = traced
    return traced(arrays)


def _is_array(x: Any) -> bool:
    """NumPy has strings and objects too, which are static."""
    return isinstance(x, jax.Array) or (
        isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USOMm"
    )


# What was traced, for as long as there is the function that it was traced from.
_kept: Any = weakref.WeakKeyDictionary()


def _kept_for(mapped: Callable[..., Any]) -> dict[Any, "_Traced"]:
    try:
        found: dict[Any, _Traced] = _kept.setdefault(mapped, {})
    except TypeError:  # It cannot be hashed, or not be referred to weakly.
        return {}
    return found


def _signature(
    treedef: Any, leaves: Sequence[Any], at: Sequence[int], arrays: Sequence[Any]
) -> Hashable | None:
    """What the traced program depends on, beside the function; `None` where that cannot be known."""
    chosen = frozenset(at)
    statics = tuple(token(x) for i, x in enumerate(leaves) if i not in chosen)
    if None in statics:
        return None
    types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in arrays)
    wide = jax.dtypes.canonicalize_dtype("float64") == "float64"
    return treedef, tuple(at), statics, types, wide, jax.sharding.get_abstract_mesh()


# What `pmap2` says where there are fewer devices than lanes.
_TOO_MANY_LANES = re.compile(r": \d+ lanes? on \d+ devices?;")


class _Traced:
    """A call with one signature, traced."""

    def __init__(
        self,
        mapped: Callable[..., Any],
        treedef: Any,
        leaves: Sequence[Any],
        at: Sequence[int],
        arrays: Sequence[Any],
    ) -> None:
        self.statics = [None if i in at else x for i, x in enumerate(leaves)]
        self.results: tuple[Any, list[Any], list[str]] = (None, [], [])
        self.name = getattr(mapped, "__name__", type(mapped).__name__)

        def flat(fun: Callable[..., Any]) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                filled = list(self.statics)
                for i, x in zip(at, arrays, strict=True):
                    filled[i] = x
                args, kwargs = treedef.unflatten(filled)
                return self._taken_apart(fun(*args, **kwargs))

            return run

        types = [type_of(x) for x in arrays]
        try:
            closed = jax.make_jaxpr(flat(mapped))(*types)
        except sm.BatchAxisError as error:
            if not isinstance(mapped, sm.StatefulMapping) or not _TOO_MANY_LANES.search(str(error)):
                raise
            closed = jax.make_jaxpr(flat(mapped.unsharded))(*types)
        self.program = Program(self.name, closed, self.results[2])

    def _taken_apart(self, result: Any) -> list[Any]:
        flat, treedef = jax.tree_util.tree_flatten_with_path(result)
        arrays = [(path, x) for path, x in flat if isinstance(x, jax.Array)]
        rest = [None if isinstance(x, jax.Array) else (x,) for _, x in flat]
        root = f"{self.name}(...)"
        self.results = treedef, rest, [root + jax.tree_util.keystr(path) for path, _ in arrays]
        return [x for _, x in arrays]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        treedef, rest, _ = self.results
        made = iter(self.program(arrays))
        return treedef.unflatten([next(made) if x is None else x[0] for x in rest])
