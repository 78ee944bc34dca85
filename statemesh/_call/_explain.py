"""The explanation of a function that makes mapped calls."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh

from .._base import _compat as compat
from .._base._arrays import is_shaped
from .._base._checks import check_function
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._paths import fun_name, path_str, positional_names
from .._base._types import AxisName, Fun, Leaf, PyTree
from .._explain._explanation import Explanation
from .._explain._records import LeafRow, ResultRow
from .._explain._traced_call import TracedCall, explanation_of
from ._explained import Rows
from ._mapping import StatefulMapping
from ._watch import Seen, watching


Row = TypeVar("Row", LeafRow, ResultRow)


@without_own_frames
def explain(fun: Fun, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Say what a call lays where, moves, reduces and holds. Nothing is run.

    **Arguments:**

    - `fun`: what `shard_map`, `pmap2` or `vmap2` returns, a function of `jax.jit`, a `Map`, or any function
        that calls mapped ones. What is not compiled itself is explained as `jax.jit` would compile it.
    - `args`, `kwargs`: the arguments of the call, or `jax.ShapeDtypeStruct`s in place of arrays.

    **Returns:** an `Explanation`.

    **Raises:** what the call would raise.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> def step(mean, x):
        ...     return x - mean.value, mean.set(x.mean())
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=(P("data"), P()))
        >>> explanation = sm.explain(step, sm.BatchState(0.0, reduce="mean"), jnp.arange(4.0))
        >>> for leaf in explanation.leaves:
        ...     print(leaf.path, leaf.enters, leaf.placed_by, leaf.leaves)
        mean P() default written, mean over 'data'
        x P('data') in_specs[1] not returned
        >>> for one in explanation.collectives:
        ...     print(one.operation, one.axes, one.cause)
        psum ('data',) the policy of mean

        ```
    """
    if isinstance(fun, StatefulMapping):
        return fun.explain(*args, **kwargs)
    check_function("explain", fun)
    # The arrays of a module that is called are arguments as well.
    owner, call = (fun, _call_module) if isinstance(fun, eqx.Module) else (None, fun)
    whole = (args, kwargs) if owner is None else ((owner, *args), kwargs)
    leaves, treedef = tree_util.tree_flatten(whole)
    at = [k for k, leaf in enumerate(leaves) if is_shaped(leaf)]
    arrays = [leaves[k] for k in at]

    def run(*flat_args: Leaf) -> Any:
        filled = list(leaves)
        for k, x in zip(at, flat_args, strict=True):
            filled[k] = x
        given, keywords = treedef.unflatten(filled)
        return [x for x in tree_util.tree_leaves(call(*given, **keywords)) if is_shaped(x)]

    run.__name__ = run.__qualname__ = fun_name(fun)
    with watching() as seen:
        compat.trace_marked(run, arrays, [compat.Watched()])
    # A function of `jax.jit` has a program of its own, which its next call finds compiled.
    own = owner is None and hasattr(fun, "trace") and hasattr(fun, "lower")
    jitted: Any = fun
    traced = jitted.trace(*args, **kwargs) if own else jax.jit(run).trace(*arrays)
    paths = _paths(fun, whole)
    return explanation_of(_traced_call(fun_name(fun), traced, seen, [paths[k] for k in at]))


def _call_module(module: Any, *args: PyTree, **kwargs: PyTree) -> Any:
    return module(*args, **kwargs)


def _paths(fun: Fun, whole: PyTree) -> list[str]:
    """That of each leaf of the arguments."""
    args, kwargs = whole
    names = [*positional_names(fun, len(args)), *sorted(kwargs)]
    if isinstance(fun, eqx.Module):
        names = ["self", *positional_names(fun, len(args) - 1), *sorted(kwargs)]
    values = [*args, *(kwargs[name] for name in sorted(kwargs))]
    return [
        path_str(keys, name)
        for name, value in zip(names, values, strict=True)
        for keys, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]


def _traced_call(
    name: str, traced: Any, seen: Sequence[Seen], arguments: Sequence[str]
) -> TracedCall:
    # JAX may trace the body of a loop several times. In one trace, each call is another one.
    leaves: dict[Any, dict[tuple[LeafRow, int], None]] = {}
    results: dict[Any, list[ResultRow]] = {}
    sizes: dict[AxisName, int] = {}
    meshes, calls = [], []
    for one in seen:
        rows = Rows(one.program, one.call, one.outputs, one.back)
        trace = id(compat.current_trace(one.call.leaves))
        leaves.setdefault(trace, {}).update(
            dict.fromkeys(zip(rows.leaves(), rows.identities(), strict=True))
        )
        results.setdefault(trace, []).extend(rows.results())
        sizes |= one.program.binding.sizes
        calls.append(rows.mapped())
        meshes.append(getattr(one.program.binding, "mesh", None))
    # While a program is recorded a mesh shows no devices, though one may be set that has them.
    abstract = any(isinstance(mesh, AbstractMesh) for mesh in meshes)
    return TracedCall(
        name=name,
        sizes=sizes,
        jaxpr=traced.jaxpr,
        compile=lambda: traced.lower().compile(),
        leaves=_most([row for row, _ in pairs] for pairs in leaves.values()),
        results=_most(results.values()),
        arguments=arguments,
        outputs=[],
        calls=calls,
        has_devices=not abstract or compat.concrete_context_mesh() is not None,
    )


def _most(traces: Iterable[Sequence[Row]]) -> list[Row]:
    """Each row as often as the trace has it that has it most often."""
    most: Counter[Row] = Counter()
    for rows in traces:
        most |= Counter(rows)
    return list(most.elements())
