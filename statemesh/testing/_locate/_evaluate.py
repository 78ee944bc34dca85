"""The values of a graph on all shards. All of this runs inside `jax.enable_x64`.

NumPy runs the operations that it has, and the replay the others. This is a second interpreter beside
`_program/_replay.py`, for speed: a replay is compiled as a whole and called often, while `locate` runs single
nodes, once or a few times each. JAX would compile each of them for each shape, which takes far longer than to
run it. A test runs nodes of all planted models both ways and expects the same numbers.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._jaxprs import names_of
from .._program._noise import Promoted
from .._program._numbers import promoted
from .._program._replay import MOST_ROUNDS, Frame, Replay
from .._program._stacked import Axes, Scope, Stacked, names_of_spec
from .._types import AnyLeaf, Numbers
from ._graph import Constant, Graph, Node, Operand


# What is compiled here runs a few times.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# JAX would compile these in each eager run.
_COMPILED = ("scan", "while", "cond", "random_bits", "random_split", "random_fold_in", "sort")
_MOST_COMPILED = 256

# By the numbers of a graph's values.
Values = dict[int, Stacked]


class Evaluator(Replay):
    """What runs the nodes of a graph.

    **Arguments:**

    - `graph`: the graph.
    - `wide`: whether floats are in double precision; else in their own dtypes.
    """

    most_rounds = MOST_ROUNDS

    def __init__(self, graph: Graph, wide: bool) -> None:
        super().__init__("locate", graph.jaxpr)
        self.graph, self.wide = graph, wide
        if wide:
            self.arithmetic = Promoted()
        self._compiled = functools.lru_cache(_MOST_COMPILED)(self._compile)

    def operand(self, x: Operand, known: Mapping[int, Stacked]) -> Stacked:
        return in_numpy(self.arithmetic.value(x.value)) if isinstance(x, Constant) else known[x]

    def run_node(self, node: Node, known: Values) -> None:
        """Add the results of a node to what is known."""
        results = self.results(node, [self.operand(x, known) for x in node.operands])
        known.update(zip(node.results, results, strict=True))

    def results(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of a node."""
        by_numpy = results_by_numpy(node, values, self.wide)
        return self.results_by_jax(node, values) if by_numpy is None else by_numpy

    def results_by_jax(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        if node.kind == "split":
            assert node.spec is not None
            return [node.scope.split(values[0], node.spec)]
        if node.kind == "join":
            return [_joined(values[0], node)]
        if node.name in _COMPILED:
            results = self._compiled(node, tuple(value.axes for value in values))(values)
        else:
            frame = Frame(node.scope, self.no_differences)
            results = self._equation(node.eqn, list(values), frame)
        return [in_numpy(value.x, value.axes) for value in results]

    def _compile(
        self, node: Node, stacks: Sequence[Axes]
    ) -> Callable[[Sequence[Stacked]], list[Stacked]]:
        axes: list[Axes] = []

        def run(*xs: Any) -> list[AnyLeaf]:
            values = [Stacked(x, names) for x, names in zip(xs, stacks, strict=True)]
            results = self._equation(node.eqn, values, Frame(node.scope, self.no_differences))
            axes[:] = [value.axes for value in results]
            return [value.x for value in results]

        # In narrow dtypes the rounding must be that of a program that is compiled as usual.
        fast = _COMPILE_FAST if self.wide and jax.default_backend() == "cpu" else None
        jitted = jax.jit(run, compiler_options=fast)

        def compiled(values: Sequence[Stacked]) -> list[Stacked]:
            xs = jitted(*[value.x for value in values])
            return [Stacked(x, names) for x, names in zip(xs, axes, strict=True)]

        return compiled


def _joined(value: Stacked, node: Node) -> Stacked:
    assert node.spec is not None
    kept = {*names_of_spec(node.spec), *node.around.sizes}
    # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
    first = tuple(slice(None) if name in kept else 0 for name in value.axes)
    axes = tuple(name for name in value.axes if name in kept)
    return node.scope.joined(Stacked(value.x[first], axes), node.spec)


def in_numpy(x: AnyLeaf, axes: Axes = ()) -> Stacked:
    """A value as NumPy's array, unless it is an array of keys."""
    return Stacked(x if is_key(x) else np.asarray(x), axes)


def as_numbers(x: AnyLeaf) -> Numbers:
    """The numbers of an array; for keys, those of their data."""
    numbers = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    # What is compared is not rounded, and NumPy cannot compute with bfloat16.
    return numbers.astype(np.float64) if jnp.issubdtype(numbers.dtype, jnp.floating) else numbers


def on_all_shards(value: Stacked, scope: Scope) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    return scope.spread(Stacked(as_numbers(value.x), value.axes), scope.sizes).x


def is_key(x: AnyLeaf) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def last_reads(graph: Graph) -> Mapping[int, int]:
    """For each value the number of the last node that reads it."""
    last: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        last |= dict.fromkeys(node.inputs, i)
    results = [x for x in graph.results if isinstance(x, int)]
    return last | dict.fromkeys(results, len(graph.nodes))


# By NumPy

# From the node, the number of mesh axes in front of each operand, and the operands.
_Rule: TypeAlias = Callable[..., Any]


def results_by_numpy(node: Node, values: Sequence[Stacked], wide: bool) -> list[Stacked] | None:
    """The results of a node by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `wide`: whether floats are in double precision.
    """
    if node.kind != "run" or not all(_is_number(value.x.dtype) for value in values):
        return None
    # Without a dtype it may be a token or a reference.
    dtype = getattr(node.eqn.outvars[0].aval, "dtype", np.dtype(object))
    dtype = promoted(dtype) if wide else dtype
    axes = node.scope.union(values)
    with np.errstate(all="ignore"):
        if node.name in _EXCHANGES:
            return _exchanged(node, values)
        xs = [_aligned(value, axes) for value in values]
        rule = _rule(node, xs, dtype) if _is_number(dtype) else None
        if rule is None:
            return None
        result = np.asarray(rule(node, len(axes), *xs)).astype(dtype, copy=False)
    return [Stacked(result, axes)]


def _is_number(dtype: Any) -> bool:
    # The kind of bfloat16 and of other narrow dtypes, with which NumPy cannot compute, is V.
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype.kind in "biuf"


def _aligned(value: Stacked, axes: Axes) -> Numbers:
    """The array with axes of size one where it has no copy for each shard."""
    lead = iter(value.x.shape)
    sizes = [next(lead) if name in value.axes else 1 for name in axes]
    return value.x.reshape((*sizes, *value.shape))


def _rule(node: Node, xs: Sequence[Numbers], dtype: Any) -> _Rule | None:
    """The rule that does with these operands what XLA does."""
    name, floats = node.name, all(x.dtype.kind == "f" for x in xs)
    if name in _OF_FLOATS:
        return _OF_FLOATS[name] if floats else None
    if name == "convert_element_type" and floats and dtype.kind != "f":
        # XLA and NumPy make other integers of numbers that are too large.
        return None
    if name == "dot_general" and any(x.dtype != dtype for x in xs):
        return None
    if name == "select_n" and len(xs) != 3:
        return None
    # Of no numbers NumPy has no largest.
    return _RULES.get(name) if all(x.size for x in xs) else None


def _each(compute: Callable[..., Any]) -> _Rule:
    """The rule of an operation on each number."""

    def rule(node: Node, count: int, *xs: Numbers) -> Numbers:
        # A number meets an array.
        rank = max(x.ndim for x in xs)
        return compute(
            *[x.reshape((*x.shape[:count], *(1,) * (rank - x.ndim), *x.shape[count:])) for x in xs]
        )

    return rule


def _over_axes(reduce: Callable[..., Any]) -> _Rule:
    """The rule of a reduction."""

    def rule(node: Node, count: int, x: Numbers) -> Numbers:
        return reduce(x, axis=tuple(count + d for d in node.eqn.params["axes"]))

    return rule


def _position(find: Callable[..., Any]) -> _Rule:
    def rule(node: Node, count: int, x: Numbers) -> Numbers:
        (axis,) = node.eqn.params["axes"]
        return find(x, axis=count + axis)

    return rule


def _cumsum(node: Node, count: int, x: Numbers) -> Numbers:
    axis = count + node.eqn.params["axis"]
    if not node.eqn.params["reverse"]:
        return np.cumsum(x, axis)
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def _integer_pow(node: Node, count: int, x: Numbers) -> Numbers:
    y = node.eqn.params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _shape(node: Node) -> tuple[int, ...]:
    """The shape of the result on one shard."""
    aval: Any = node.eqn.outvars[0].aval
    return tuple(map(operator.index, aval.shape))


def _reshape(node: Node, count: int, x: Numbers) -> Numbers:
    return x.reshape((*x.shape[:count], *_shape(node)))


def _broadcast_in_dim(node: Node, count: int, x: Numbers) -> Numbers:
    shape, lead = _shape(node), x.shape[:count]
    inner = [1] * len(shape)
    for size, at in zip(x.shape[count:], node.eqn.params["broadcast_dimensions"], strict=True):
        inner[at] = size
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *shape))


def _transpose(node: Node, count: int, x: Numbers) -> Numbers:
    order = node.eqn.params["permutation"]
    return x.transpose((*range(count), *(count + d for d in order)))


def _slice(node: Node, count: int, x: Numbers) -> Numbers:
    params = node.eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[(*(slice(None),) * count, *(slice(a, b, c) for a, b, c in bounds))]


def _iota(node: Node, count: int) -> Numbers:
    shape, at = _shape(node), node.eqn.params["dimension"]
    numbers = np.arange(shape[at]).reshape([-1 if d == at else 1 for d in range(len(shape))])
    return np.broadcast_to(numbers, shape)


def _concatenate(node: Node, count: int, *xs: Numbers) -> Numbers:
    lead = np.broadcast_shapes(*(x.shape[:count] for x in xs))
    spread = [np.broadcast_to(x, (*lead, *x.shape[count:])) for x in xs]
    return np.concatenate(spread, count + node.eqn.params["dimension"])


def _dot_general(node: Node, count: int, x: Numbers, y: Numbers) -> Numbers:
    (left, right), (left_batch, right_batch) = node.eqn.params["dimension_numbers"]
    lead, a = list(range(count)), list(range(count, x.ndim))
    b = list(range(x.ndim, x.ndim + y.ndim - count))
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        b[j] = a[i]
    rest = [k for i, k in enumerate(a) if i not in (*left, *left_batch)]
    rest += [k for j, k in enumerate(b) if j not in (*right, *right_batch)]
    result = [*lead, *(a[i] for i in left_batch), *rest]
    return np.einsum(x, [*lead, *a], y, [*lead, *b], result, optimize=True)


def _dynamic_slice(node: Node, count: int, array: Numbers, *starts: Numbers) -> Numbers:
    sizes = node.eqn.params["slice_sizes"]
    lead, array = _with_starts(count, array, starts)
    result = np.empty((*lead, *sizes), array.dtype)
    for shard, part in _parts(lead, array.shape[count:], starts, sizes):
        result[shard] = array[shard][part]
    return result


def _dynamic_update_slice(
    node: Node, count: int, array: Numbers, new: Numbers, *starts: Numbers
) -> Numbers:
    lead, array = _with_starts(count, array, (new, *starts))
    new, result = np.broadcast_to(new, (*lead, *new.shape[count:])), array.copy()
    for shard, part in _parts(lead, array.shape[count:], starts, new.shape[count:]):
        result[(*shard, *part)] = new[shard]
    return result


def _with_starts(
    count: int, array: Numbers, others: Sequence[Numbers]
) -> tuple[tuple[int, ...], Numbers]:
    """The sizes of the mesh axes, and the array with a copy for each shard."""
    lead = np.broadcast_shapes(*(x.shape[:count] for x in (array, *others)))
    return lead, np.broadcast_to(array, (*lead, *array.shape[count:]))


def _parts(
    lead: tuple[int, ...], shape: Sequence[int], starts: Sequence[Numbers], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each shard the part of its array. Parts that stick out are moved inside, as XLA does."""
    firsts = [np.broadcast_to(start, lead) for start in starts]
    for shard in np.ndindex(*lead):
        part = []
        for first, whole, size in zip(firsts, shape, sizes, strict=True):
            k = min(max(int(first[shard]), 0), whole - size)
            part.append(slice(k, k + size))
        yield shard, tuple(part)


_OF_FLOATS: Mapping[str, _Rule] = {
    **{name: _each(getattr(np, name)) for name in ("exp", "log", "log1p", "expm1", "tanh", "sin")},
    **{name: _each(getattr(np, name)) for name in ("cos", "sqrt", "sign", "floor", "ceil")},
    "div": _each(np.divide),
    "pow": _each(np.power),
    "rsqrt": _each(lambda x: 1 / np.sqrt(x)),
    "logistic": _each(lambda x: 1 / (1 + np.exp(-x))),
    "is_finite": _each(np.isfinite),
    "integer_pow": _integer_pow,
}
# NumPy does with integers and infinities what XLA does.
_RULES: Mapping[str, _Rule] = {
    "add": _each(np.add),
    "add_any": _each(np.add),
    "sub": _each(np.subtract),
    "mul": _each(np.multiply),
    "max": _each(np.maximum),
    "min": _each(np.minimum),
    "neg": _each(np.negative),
    "abs": _each(np.abs),
    "and": _each(np.bitwise_and),
    "or": _each(np.bitwise_or),
    "xor": _each(np.bitwise_xor),
    "not": _each(np.invert),
    "eq": _each(np.equal),
    "ne": _each(np.not_equal),
    "lt": _each(np.less),
    "le": _each(np.less_equal),
    "gt": _each(np.greater),
    "ge": _each(np.greater_equal),
    "square": _each(np.square),
    "clamp": _each(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "select_n": _each(lambda which, no, yes: np.where(which.astype(bool), yes, no)),
    # The result is given its dtype in any case.
    "convert_element_type": lambda node, count, x: x,
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "slice": _slice,
    "iota": _iota,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "reduce_sum": _over_axes(np.sum),
    "reduce_max": _over_axes(np.max),
    "reduce_min": _over_axes(np.min),
    "reduce_and": _over_axes(np.bitwise_and.reduce),
    "reduce_or": _over_axes(np.bitwise_or.reduce),
    "cumsum": _cumsum,
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}


# Collectives: from an array with all shards of the collective in front, the number of mesh axes that follow,
# and the parameters. After the first ones all shards have the same.


def _all_gather(x: Numbers, count: int, params: Mapping[str, Any]) -> Numbers:
    at = count + params["all_gather_dimension"]
    x = np.moveaxis(x, 0, at)
    if params["tiled"]:
        x = x.reshape((*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))
    return x


def _reduce_scatter(x: Numbers, count: int, params: Mapping[str, Any]) -> Numbers:
    shards, total, at = len(x), x.sum(0), count + params["scatter_dimension"]
    if params["tiled"]:
        sizes = shards, total.shape[at] // shards
        total = total.reshape((*total.shape[:at], *sizes, *total.shape[at + 1 :]))
    return np.moveaxis(total, at, 0)


def _ppermute(x: Numbers, count: int, params: Mapping[str, Any]) -> Numbers:
    sources, targets = np.array(params["perm"], int).reshape(-1, 2).T
    result = np.zeros_like(x)
    result[targets] = x[sources]
    return result


_Exchange: TypeAlias = Callable[[Numbers, int, Mapping[str, Any]], Numbers]
_UNIFORM: Mapping[str, _Exchange] = {
    "psum": lambda x, count, params: x.sum(0),
    "psum_invariant": lambda x, count, params: x.sum(0),
    "pmax": lambda x, count, params: x.max(0),
    "pmin": lambda x, count, params: x.min(0),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
}
_EXCHANGES = {**_UNIFORM, "reduce_scatter": _reduce_scatter, "ppermute": _ppermute}


def _exchanged(node: Node, values: Sequence[Stacked]) -> list[Stacked] | None:
    """The results of a collective; `None` where it is over lanes too, or over groups of shards."""
    names, params, scope = names_of(node.eqn), node.eqn.params, node.scope
    is_over_lanes = any(isinstance(name, int) for name in params.get("axes", ()))
    if is_over_lanes or params.get("axis_index_groups") or not {*names} <= {*scope.sizes}:
        return None
    results = []
    for value in values:
        x, rest = scope.flat(value, names)
        result = _EXCHANGES[node.name](x, len(rest), params).astype(x.dtype, copy=False)
        if node.name in _UNIFORM:
            results.append(Stacked(result, rest))
        else:
            results.append(scope.unflat(result, names, rest))
    return results
