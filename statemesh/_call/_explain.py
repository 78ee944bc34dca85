"""The explanation of a function that makes mapped calls."""

from collections.abc import Hashable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh

from .._base._checks import check_function, is_shaped
from .._base._trees import fun_name, path_str, positional_names
from .._base._types import AxisName, Fun, Leaf, PyTree
from .._explain._compiled import TracedCall, explanation_of
from .._explain._explanation import Explanation, LeafRow, ResultRow
from .._explain._traced import Mapped, marked, sites_of
from .._jax import _compat as compat
from .._jax._compat import ClosedJaxpr, tree_util
from .._jax._frames import without_own_frames
from ._arguments import Call
from ._call import watching
from ._explained import Rows
from ._mapping import StatefulMapping
from ._program import Program
from ._write_back import WriteBack


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
    seen = _Seen()
    # The marks of calls hold the keys that the calls have used up already.
    with watching(seen.look), jax.debug_key_reuse(False):
        seen.count(compat.trace_marked(run, arrays, [compat.Watched()]))
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


class _Seen:
    """The records of the mapped calls that are traced. They hold no tracers."""

    def __init__(self) -> None:
        # For each call its records: each leaf with the number of its input, and its array if it is no tracer.
        self._leaves: list[list[tuple[LeafRow, int, Leaf | None]]] = []
        self._results: list[list[ResultRow]] = []
        self.leaves: list[LeafRow] = []
        self.results: list[ResultRow] = []
        self.sizes: dict[AxisName, int] = {}
        self.meshes: list[object] = []
        self.calls: list[Mapped] = []

    def look(
        self, program: Program, call: Call, outputs: list[Leaf], back: WriteBack
    ) -> list[Leaf]:
        """Note a call, and mark it in the program."""
        rows = Rows(program, call, outputs, back)
        inputs = program.arrays(call.leaves)
        numbers = {position: k for k, position in enumerate(program.positions)}
        known = [None if compat.is_tracer(x) else x for x in inputs]
        pairs = zip(rows.leaves(), map(numbers.__getitem__, rows.sources()), strict=True)
        self._leaves.append([(row, k, known[k]) for row, k in pairs])
        self._results.append(rows.results())
        self.sizes |= program.binding.sizes
        self.calls.append(rows.mapped())
        self.meshes.append(getattr(program.binding, "mesh", None))
        return marked(len(self._leaves) - 1, outputs, inputs)

    def count(self, program: ClosedJaxpr) -> None:
        """Note the arrays of every place where a call stands: one that several get counts once."""
        leaves: dict[tuple[LeafRow, Hashable], None] = {}
        for number, inputs in sites_of(program):
            for row, k, known in self._leaves[number]:
                leaves[row, inputs[k] if known is None else id(known)] = None
            self.results += self._results[number]
        self.leaves += [row for row, _ in leaves]


def _traced_call(name: str, traced: Any, seen: _Seen, arguments: Sequence[str]) -> TracedCall:
    # While a program is recorded a mesh shows no devices, though one may be set that has them.
    abstract = any(isinstance(mesh, AbstractMesh) for mesh in seen.meshes)
    return TracedCall(
        name=name,
        sizes=seen.sizes,
        jaxpr=traced.jaxpr,
        compile=lambda: traced.lower().compile(),
        leaves=seen.leaves,
        results=seen.results,
        arguments=arguments,
        outputs=[],
        calls=seen.calls,
        has_devices=not abstract or compat.concrete_context_mesh() is not None,
    )
