"""The values of a graph on all shards. All of this runs inside `jax.enable_x64`.

NumPy runs the operations that it has, and the replay the others. This is a second interpreter beside
`_program/_replay.py`, for speed: a replay is compiled as a whole and called often, while `locate` runs single
nodes, once or a few times each. JAX would compile each of them for each shape, which takes far longer than to
run it. A test runs nodes of all planted models both ways and expects the same numbers.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._program._collective_rules import RULES, collective
from .._program._jaxprs import is_literal, names_of
from .._program._literals import Exact
from .._program._noise import Promoted
from .._program._numbers import is_key, numbers, promoted
from .._program._replay import Frame, Replay
from .._program._stacked import Axes, MappedAxes, Stacked, names_of_spec
from .._types import AnyLeaf, Numbers
from ._graph import Graph, Node


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
    - `exact`: the numbers that literals stand for, which double precision uses.
    """

    def __init__(self, graph: Graph, wide: bool, exact: Exact) -> None:
        super().__init__("locate", graph.jaxpr)
        self.graph, self.wide, self.exact = graph, wide, exact
        if wide:
            self.arithmetic = Promoted(exact)
        self._compiled = functools.lru_cache(_MOST_COMPILED)(self._compile)

    def constants(self) -> Values:
        """Those of the graph."""
        make = self.arithmetic
        return {
            x: in_numpy(make.literal(y) if is_literal(y) else make.value(y))
            for x, y in self.graph.constants.items()
        }

    def run_node(self, node: Node, known: MutableMapping[int, Stacked]) -> None:
        """Add the results of a node to what is known."""
        results = self.results(node, [known[x] for x in node.operands])
        known.update(zip(node.results, results, strict=True))

    def results(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of a node."""
        rounds = self.wide and id(node.eqn) in self.exact.compared
        by_numpy = None if rounds else results_by_numpy(node, values, self.wide)
        return self.results_by_jax(node, values) if by_numpy is None else by_numpy

    def results_by_jax(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        if node.kind == "split":
            return [node.scope.split(values[0], node.spec)]
        if node.kind == "join":
            return [_joined(values[0], node)]
        if node.name in _COMPILED:
            results = self._compiled(node)(list(values))
        else:
            frame = Frame(node.scope, self.no_differences)
            results = self._equation(node.eqn, list(values), frame)
        return [in_numpy(value.x, value.axes) for value in results]

    def _compile(self, node: Node) -> Callable[[list[Stacked]], list[Stacked]]:
        def run(values: list[Stacked]) -> list[Stacked]:
            return self._equation(node.eqn, values, Frame(node.scope, self.no_differences))

        run.__name__ = f"locate_{node.name}"
        # In narrow dtypes the rounding must be that of a program that is compiled as usual.
        fast = _COMPILE_FAST if self.wide and jax.default_backend() == "cpu" else None
        return jax.jit(run, compiler_options=fast)


def _joined(value: Stacked, node: Node) -> Stacked:
    kept = {*names_of_spec(node.spec), *node.around.sizes}
    # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
    first = tuple(slice(None) if name in kept else 0 for name in value.axes)
    axes = tuple(name for name in value.axes if name in kept)
    return node.scope.joined(Stacked(value.x[first], axes), node.spec)


def in_numpy(x: AnyLeaf, axes: Axes = ()) -> Stacked:
    """A value as NumPy's array, unless it is an array of keys."""
    return Stacked(x if is_key(x) else np.asarray(x), axes)


def on_all_shards(value: Stacked, scope: MappedAxes) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    return scope.spread(Stacked(numbers(value.x), value.axes), scope.sizes).x


# By NumPy

# A rule gives the result on one shard from the parameters of the equation and the operands.
_Rule: TypeAlias = Callable[..., Any]


def results_by_numpy(node: Node, values: Sequence[Stacked], wide: bool) -> list[Stacked] | None:
    """The results of a node by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `wide`: whether floats are in double precision.
    """
    if node.kind != "run" or not all(_is_number(value.x.dtype) for value in values):
        return None
    scope, eqn = node.scope, node.eqn
    with np.errstate(all="ignore"):
        if node.name in RULES:
            names = {*names_of(eqn)}
            if not names or not names <= {*scope.sizes} or eqn.params.get("axis_index_groups"):
                return None
            return [collective(eqn, value, scope, _vmap) for value in values]
        # Without a dtype it may be a token or a reference.
        dtype = getattr(eqn.outvars[0].aval, "dtype", None)
        dtype = promoted(dtype) if wide and dtype is not None else dtype
        if not _is_number(dtype) or not _is_computed_alike(node, values, dtype):
            return None
        axes = scope.union(values)
        if node.name in _ON_EACH_NUMBER:
            rank = max(len(value.shape) for value in values)
            result = _ON_EACH_NUMBER[node.name](*[_aligned(x, axes, rank) for x in values])
        else:
            rule: _Rule = functools.partial(_ON_ONE_SHARD[node.name], eqn.params)
            for name in reversed(axes):
                rule = _vmap(rule, [0 if name in value.axes else None for value in values])
            result = rule(*[value.x for value in values])
        return [Stacked(np.asarray(result).astype(dtype, copy=False), axes)]


def _is_number(dtype: Any) -> bool:
    # The kind of bfloat16 and of other narrow dtypes, with which NumPy cannot compute, is V.
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _is_computed_alike(node: Node, values: Sequence[Stacked], dtype: Any) -> bool:
    """Whether NumPy does with these operands what XLA does."""
    name, xs = node.name, [value.x for value in values]
    floats = all(x.dtype.kind == "f" for x in xs)
    if name in _OF_FLOATS:
        return floats
    if name == "convert_element_type" and floats and dtype.kind != "f":
        # XLA and NumPy make other integers of numbers that are too large.
        return False
    if name == "dot_general" and any(x.dtype != dtype for x in xs):
        return False
    # Of no numbers NumPy has no largest.
    return all(x.size for x in xs) and (name in _ON_EACH_NUMBER or name in _ON_ONE_SHARD)


def _aligned(value: Stacked, axes: Axes, rank: int) -> Numbers:
    """The array with axes of size one for mesh axes that it lacks, and where a number meets an array."""
    lead = iter(value.x.shape)
    sizes = [next(lead) if name in value.axes else 1 for name in axes]
    return value.x.reshape((*sizes, *(1,) * (rank - len(value.shape)), *value.shape))


def _vmap(rule: _Rule, in_axes: Sequence[int | None], out_axes: int = 0) -> _Rule:
    """`jax.vmap` for NumPy."""

    def mapped(*xs: Numbers) -> Numbers:
        both = zip(xs, in_axes, strict=True)
        each = [itertools.repeat(x) if at is None else np.moveaxis(x, at, 0) for x, at in both]
        return np.stack([rule(*parts) for parts in zip(*each, strict=False)], out_axes)

    return mapped


_Params: TypeAlias = Mapping[str, Any]


def _broadcast_in_dim(params: _Params, x: Numbers) -> Numbers:
    inner = [1] * len(params["shape"])
    for size, at in zip(x.shape, params["broadcast_dimensions"], strict=True):
        inner[at] = size
    return np.broadcast_to(x.reshape(inner), params["shape"])


def _slice(params: _Params, x: Numbers) -> Numbers:
    starts, strides = params["start_indices"], params["strides"]
    return x[tuple(map(slice, starts, params["limit_indices"], strides or [1] * len(starts)))]


def _cumsum(params: _Params, x: Numbers) -> Numbers:
    axis = params["axis"]
    if not params["reverse"]:
        return np.cumsum(x, axis)
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def _integer_pow(params: _Params, x: Numbers) -> Numbers:
    y = params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _dot_general(params: _Params, x: Numbers, y: Numbers) -> Numbers:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    a, b = list(range(x.ndim)), list(range(x.ndim, x.ndim + y.ndim))
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        b[j] = a[i]
    rest = [k for i, k in enumerate(a) if i not in (*left, *left_batch)]
    rest += [k for j, k in enumerate(b) if j not in (*right, *right_batch)]
    return np.einsum(x, a, y, b, [*(a[i] for i in left_batch), *rest], optimize=True)


def _part(x: Numbers, starts: Sequence[Numbers], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of an array is. One that sticks out is moved inside, as XLA does."""
    limits = np.subtract(x.shape, sizes)
    firsts = [min(max(int(first), 0), limit) for first, limit in zip(starts, limits, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: _Params, x: Numbers, *starts: Numbers) -> Numbers:
    return x[_part(x, starts, params["slice_sizes"])]


def _dynamic_update_slice(params: _Params, x: Numbers, new: Numbers, *starts: Numbers) -> Numbers:
    result = x.copy()
    result[_part(x, starts, new.shape)] = new
    return result


_NAMED_ALIKE = "exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "sqrt", "sign", "floor", "ceil"
# With integers and infinities, NumPy does in the others what XLA does.
_OF_FLOATS = (*_NAMED_ALIKE, "div", "pow", "rsqrt", "logistic", "is_finite", "integer_pow")
_ON_EACH_NUMBER: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _NAMED_ALIKE},
    "div": np.divide,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "is_finite": np.isfinite,
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "square": np.square,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    # The result is given its dtype in any case.
    "convert_element_type": lambda x: x,
}
_ON_ONE_SHARD: Mapping[str, _Rule] = {
    "integer_pow": _integer_pow,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "slice": _slice,
    "iota": lambda params: np.indices(params["shape"])[params["dimension"]],
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "dot_general": _dot_general,
    "reduce_sum": lambda params, x: x.sum(params["axes"]),
    "reduce_max": lambda params, x: x.max(params["axes"]),
    "reduce_min": lambda params, x: x.min(params["axes"]),
    "reduce_and": lambda params, x: np.bitwise_and.reduce(x, params["axes"]),
    "reduce_or": lambda params, x: np.bitwise_or.reduce(x, params["axes"]),
    "cumsum": _cumsum,
    "argmax": lambda params, x: x.argmax(*params["axes"]),
    "argmin": lambda params, x: x.argmin(*params["axes"]),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
