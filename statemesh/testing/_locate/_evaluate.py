"""The values of a flat program on all shards.

All of this runs inside `jax.enable_x64`.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._arithmetic import Promoted, promoted
from .._program._control_flow import Frame
from .._program._jaxprs import names_of
from .._program._replay import MOST_ROUNDS, Replay
from .._program._stacked import Axes, Scope, Stacked, as_names, names_of_spec
from .._types import AnyLeaf, Numbers
from ._graph import Constant, Operand, Program, Step


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "psum": np.sum,
    "psum_invariant": np.sum,
    "pmax": np.max,
    "pmin": np.min,
}
GATHERS = ("all_gather", "all_gather_invariant", "reduce_scatter")


def split(value: Stacked, step: Step) -> Stacked:
    """What `Scope.split` gives."""
    shape, names, at = list(value.x.shape[: len(value.axes)]), list(value.axes), []
    at = list(range(len(value.axes)))
    for size, entry in zip(value.shape, _entries(step, len(value.shape)), strict=True):
        for name in entry:
            names.append(name)
            at.append(len(shape))
            shape.append(step.scope.sizes[name])
        shape.append(size // math.prod(step.scope.shape(entry)))
    found = dict(zip(names, at, strict=True))
    axes = step.scope.in_order(names)
    x = np.moveaxis(
        np.asarray(value.x).reshape(shape), [found[name] for name in axes], range(len(axes))
    )
    return Stacked(x, axes)


def joined(value: Stacked, step: Step) -> Stacked:
    """What `Scope.joined` gives, of the first copy along the axes that the spec leaves out."""
    entries = _entries(step, len(value.shape))
    used = {name for entry in entries for name in entry}
    outer = step.around.sizes
    x = np.asarray(value.x)
    at = tuple(slice(None) if name in used or name in outer else 0 for name in value.axes)
    x, axes = x[at], [name for name in value.axes if name in used or name in outer]
    missing = [name for name in step.scope.in_order(used) if name not in axes]
    lead = step.scope.shape(missing)
    x = np.broadcast_to(x, (*lead, *x.shape))
    axes = [*missing, *axes]
    first = [name for name in axes if name not in used]
    order, shape = [axes.index(name) for name in first], list(step.scope.shape(first))
    for dim, (size, entry) in enumerate(zip(value.shape, entries, strict=True)):
        order += [*map(axes.index, entry), len(axes) + dim]
        shape.append(size * math.prod(step.scope.shape(entry)))
    return Stacked(x.transpose(order).reshape(shape), tuple(first))


def _entries(step: Step, rank: int) -> list[Axes]:
    spec = step.spec or ()
    return [as_names(entry) for entry in (*spec, *[None] * (rank - len(spec)))]


def over_shards(step: Step, values: Sequence[Stacked]) -> list[Stacked] | None:
    """The results of a reduction over shards."""
    params, scope = step.eqn.params, step.scope
    names = names_of(step.eqn)
    numbers = any(isinstance(name, int) for name in params["axes"])
    if params.get("axis_index_groups") is not None or numbers or not {*names} <= {*scope.sizes}:
        return None
    return [_reduced(step.name, value, names, scope) for value in values]


def _reduced(name: str, value: Stacked, names: Sequence[Hashable], scope: Scope) -> Stacked:
    over = tuple(i for i, axis in enumerate(value.axes) if axis in names)
    x = REDUCTIONS[name](value.x, axis=over) if over else value.x
    if name.startswith("psum"):
        # What all shards have alike is summed as often as there are shards.
        x = x * math.prod(scope.sizes[axis] for axis in names if axis not in value.axes)
    x = np.asarray(x).astype(value.x.dtype, copy=False)
    return Stacked(x, tuple(axis for axis in value.axes if axis not in names))


def gathered(step: Step, values: Sequence[Stacked]) -> list[Stacked] | None:
    """The results of a gathering from all shards, or of a sum of which each shard keeps a part."""
    params, scope, names = step.eqn.params, step.scope, names_of(step.eqn)
    if (
        params.get("axis_index_groups") is not None
        or len(names) != 1
        or names[0] not in scope.sizes
    ):
        return None
    (name,) = names
    run = _scattered if step.name == "reduce_scatter" else _gathered
    return [run(step, value, name) for value in values]


def _gathered(step: Step, value: Stacked, name: Hashable) -> Stacked:
    size, d = step.scope.sizes[name], step.eqn.params["all_gather_dimension"]
    axes = tuple(axis for axis in value.axes if axis != name)
    if name in value.axes:
        x = np.moveaxis(value.x, value.axes.index(name), len(axes) + d)
    else:
        one = np.expand_dims(value.x, len(axes) + d)
        x = np.repeat(one, size, len(axes) + d)
    if step.eqn.params["tiled"]:
        at = len(axes) + d
        x = x.reshape((*x.shape[:at], size * x.shape[at + 1], *x.shape[at + 2 :]))
    return Stacked(x, axes)


def _scattered(step: Step, value: Stacked, name: Hashable) -> Stacked:
    size, d = step.scope.sizes[name], step.eqn.params["scatter_dimension"]
    total = _reduced("psum", value, [name], step.scope)
    at, shape = len(total.axes) + d, total.x.shape
    left = (size, shape[at] // size) if step.eqn.params["tiled"] else (size,)
    x = total.x.reshape((*shape[:at], *left, *shape[at + 1 :]))
    axes = step.scope.in_order((*total.axes, name))
    return Stacked(np.moveaxis(x, at, axes.index(name)), axes)


def _dynamic_slice(step: Step, values: Sequence[Stacked]) -> Stacked:
    array, *starts = values
    axes = step.scope.union(values)
    sizes = step.eqn.params["slice_sizes"]
    whole = _on(array, axes, step)
    made = np.empty((*step.scope.shape(axes), *sizes), whole.dtype)
    for shard, at in _places(step, axes, starts, whole.shape[len(axes) :], sizes):
        made[shard] = whole[shard][at]
    return Stacked(made, axes)


def _dynamic_update_slice(step: Step, values: Sequence[Stacked]) -> Stacked:
    array, new, *starts = values
    axes = step.scope.union(values)
    made, part = _on(array, axes, step).copy(), _on(new, axes, step)
    for shard, at in _places(step, axes, starts, made.shape[len(axes) :], new.shape):
        made[(*shard, *at)] = part[shard]
    return Stacked(made, axes)


def _on(value: Stacked, axes: Any, step: Step) -> Numbers:
    """The array with a copy along each of these mesh axes."""
    sizes = iter(value.x.shape)
    lead = [next(sizes) if name in value.axes else 1 for name in axes]
    x = np.asarray(value.x).reshape((*lead, *value.shape))
    return np.broadcast_to(x, (*step.scope.shape(axes), *value.shape))


def _places(
    step: Step, axes: Any, starts: Sequence[Stacked], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each shard the part of its array. Parts that stick out are moved inside, as XLA does."""
    firsts = [_on(start, axes, step) for start in starts]
    for shard in np.ndindex(*step.scope.shape(axes)):
        at = []
        for first, whole, size in zip(firsts, shape, sizes, strict=True):
            k = min(max(int(first[shard]), 0), whole - size)
            at.append(slice(k, k + size))
        yield shard, tuple(at)


def _running(reduce: Callable[..., Any]) -> Callable[[Step, Sequence[Stacked]], Stacked]:
    def run(step: Step, values: Sequence[Stacked]) -> Stacked:
        (value,) = values
        axis = len(value.axes) + step.eqn.params["axis"]
        if not step.eqn.params["reverse"]:
            return Stacked(reduce(value.x, axis=axis), value.axes)
        return Stacked(np.flip(reduce(np.flip(value.x, axis), axis=axis), axis), value.axes)

    return run


def _position(find: Callable[..., Any]) -> Callable[[Step, Sequence[Stacked]], Stacked]:
    def run(step: Step, values: Sequence[Stacked]) -> Stacked:
        (value,) = values
        (axis,) = step.eqn.params["axes"]
        return Stacked(find(value.x, axis=len(value.axes) + axis), value.axes)

    return run


INDEXED: Mapping[str, Callable[[Step, Sequence[Stacked]], Stacked]] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "cumsum": _running(np.cumsum),
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
}


_logistic: Callable[[Numbers], Numbers] = lambda x: 1 / (1 + np.exp(-x))

# Operations on each number. NumPy does with integers and infinities what XLA does.
_EACH: Mapping[str, Callable[..., Any]] = {
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
    "stop_gradient": lambda x: x,
    "square": np.square,
    "copy": lambda x: x,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
_EACH_FLOAT: Mapping[str, Callable[..., Any]] = {
    "div": np.divide,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": _logistic,
    "pow": np.power,
    "is_finite": np.isfinite,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
}
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_and": np.all,
    "reduce_or": np.any,
}

_NONE = np.dtype(object)

# From the array of one operand, the number of mesh axes in front, and the step.
_One: TypeAlias = Callable[[Numbers, int, Step], Any]


def _reshape(x: Numbers, count: int, step: Step) -> Any:
    return x.reshape((*x.shape[:count], *_shape(step)))


def _broadcast_in_dim(x: Numbers, count: int, step: Step) -> Any:
    shape = _shape(step)
    inner = [1] * len(shape)
    for size, at in zip(x.shape[count:], step.eqn.params["broadcast_dimensions"], strict=True):
        inner[at] = size
    lead = x.shape[:count]
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *shape))


def _transpose(x: Numbers, count: int, step: Step) -> Any:
    return x.transpose((*range(count), *(count + d for d in step.eqn.params["permutation"])))


def _slice(x: Numbers, count: int, step: Step) -> Any:
    params = step.eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[(*(slice(None),) * count, *(slice(a, b, c) for a, b, c in bounds))]


def _integer_pow(x: Numbers, count: int, step: Step) -> Any:
    del count
    y = step.eqn.params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _same(x: Numbers, count: int, step: Step) -> Any:
    del count, step
    return x


def _rev(x: Numbers, count: int, step: Step) -> Any:
    return np.flip(x, tuple(count + d for d in step.eqn.params["dimensions"]))


_SINGLE: Mapping[str, _One] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "slice": _slice,
    "integer_pow": _integer_pow,
    "convert_element_type": _same,
    "rev": _rev,
}


def quick(step: Step, values: Sequence[Stacked], wide: bool) -> list[Stacked] | None:
    """The results of a step by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `wide`: whether floats are in double precision.
    """
    if not all(_is_plain(value.x) for value in values):
        return None
    if step.kind != "run":
        return [split(values[0], step) if step.kind == "split" else joined(values[0], step)]
    name = step.name
    dtype = _dtype(step.eqn.outvars[0].aval, wide)
    if dtype.kind not in "biuf":
        return None
    if name == "iota":
        return [Stacked(_iota(step).astype(dtype))]
    xs = [np.asarray(value.x) for value in values]
    given = [Stacked(x, value.axes) for x, value in zip(xs, values, strict=True)]
    with np.errstate(all="ignore"):
        if step.name == "unstack":
            return _unstacked(given[0], step)
        if name in REDUCTIONS:
            return over_shards(step, given)
        if name in GATHERS:
            return gathered(step, given)
        if len(step.results) != 1 or not _is_known(name, step, xs):
            return None
        made = INDEXED[name](step, given) if name in INDEXED else _made(name, step, given)
    if made is None:
        return None
    return [Stacked(np.asarray(made.x).astype(dtype, copy=False), made.axes)]


def _dtype(aval: Any, wide: bool) -> Any:
    if not hasattr(aval, "dtype") or jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _NONE
    return np.dtype(promoted(aval.dtype) if wide else aval.dtype)


def _is_plain(x: Any) -> bool:
    return not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) and x.dtype.kind in "biuf"


def _is_known(name: str, step: Step, xs: Sequence[Numbers]) -> bool:
    floats = all(x.dtype.kind == "f" for x in xs)
    if name == "convert_element_type":
        # XLA and NumPy make other integers of numbers that are too large.
        return not floats or promoted(step.eqn.params["new_dtype"]).kind == "f"
    if name in ("integer_pow", *_EACH_FLOAT):
        return floats
    if name in (*_REDUCTIONS, *INDEXED):
        return all(x.size for x in xs)
    return name in _EACH or name in _SINGLE or name in ("select_n", "dot_general", "concatenate")


def _made(name: str, step: Step, values: Sequence[Stacked]) -> Stacked | None:
    axes = step.scope.union(values)
    if name in _SINGLE:
        return Stacked(_SINGLE[name](values[0].x, len(axes), step), axes)
    if name in _REDUCTIONS:
        over = tuple(len(axes) + d for d in step.eqn.params["axes"])
        return Stacked(_REDUCTIONS[name](values[0].x, axis=over), axes)
    xs = [_aligned(value, axes) for value in values]
    if name == "dot_general":
        return Stacked(_dot(xs, len(axes), step), axes)
    if name == "concatenate":
        lead = step.scope.shape(axes)
        wide = [np.broadcast_to(x, (*lead, *x.shape[len(axes) :])) for x in xs]
        return Stacked(np.concatenate(wide, len(axes) + step.eqn.params["dimension"]), axes)
    if name == "select_n":
        return _select(_of_one_rank(xs, len(axes)), axes)
    each = _EACH.get(name) or _EACH_FLOAT[name]
    return Stacked(each(*_of_one_rank(xs, len(axes))), axes)


def _aligned(value: Stacked, axes: Sequence[Hashable]) -> Numbers:
    """The array with axes of size one where it has no copy for each shard."""
    x: Numbers = value.x
    lead = iter(x.shape)
    sizes = [next(lead) if name in value.axes else 1 for name in axes]
    return x.reshape((*sizes, *value.shape))


def _of_one_rank(xs: Sequence[Numbers], count: int) -> list[Numbers]:
    """The arrays with axes of size one where a number meets an array."""
    rank = max(x.ndim for x in xs)
    return [x.reshape((*x.shape[:count], *(1,) * (rank - x.ndim), *x.shape[count:])) for x in xs]


def _select(xs: Sequence[Numbers], axes: Axes) -> Stacked | None:
    which, *cases = xs
    return (
        Stacked(np.where(which.astype(bool), cases[1], cases[0]), axes) if len(cases) == 2 else None
    )


def _dot(xs: Sequence[Numbers], count: int, step: Step) -> Numbers:
    (left, right), (left_batch, right_batch) = step.eqn.params["dimension_numbers"]
    letters = iter(range(100))
    lead = [next(letters) for _ in range(count)]
    a = [next(letters) for _ in range(xs[0].ndim - count)]
    b = [next(letters) for _ in range(xs[1].ndim - count)]
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in left_batch]
    rest = [k for i, k in enumerate(a) if i not in (*left, *left_batch)]
    rest += [k for j, k in enumerate(b) if j not in (*right, *right_batch)]
    return np.einsum(xs[0], [*lead, *a], xs[1], [*lead, *b], [*lead, *batch, *rest], optimize=True)


def _shape(step: Step) -> tuple[int, ...]:
    aval: Any = step.eqn.outvars[0].aval
    return tuple(map(operator.index, aval.shape))


def _iota(step: Step) -> Numbers:
    params, shape = step.eqn.params, _shape(step)
    along = [1] * len(shape)
    along[params["dimension"]] = -1
    counted = np.arange(shape[params["dimension"]]).reshape(along)
    return np.broadcast_to(counted, shape)


def _unstacked(value: Stacked, step: Step) -> list[Stacked]:
    at = len(value.axes) + step.eqn.params["axis"]
    return [Stacked(x, value.axes) for x in np.moveaxis(value.x, at, 0)]


# What is compiled here runs a few times.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_COMPILED = ("scan", "while", "cond", "random_bits", "random_split", "random_fold_in", "sort")

Values = dict[int, Stacked]


class Evaluator(Replay):
    """What runs the steps of a flat program.

    **Arguments:**

    - `program`: the program.
    - `wide`: whether floats are in double precision; else in their own dtypes.
    """

    most_rounds = MOST_ROUNDS

    def __init__(self, program: Program, wide: bool) -> None:
        super().__init__("locate", program.jaxpr)
        self.wide = wide
        if wide:
            self.arithmetic = Promoted()
        self._compiled: dict[Hashable, Any] = {}

    def step(self, step: Step, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of one step."""
        made = quick(step, values, self.wide)
        if made is not None:
            return made
        if step.kind == "split":
            assert step.spec is not None
            return [step.scope.split(values[0], step.spec)]
        if step.kind == "join":
            assert step.spec is not None
            left = [
                n
                for n in values[0].axes
                if n not in (*names_of_spec(step.spec), *step.around.sizes)
            ]
            # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
            first = tuple(0 if n in left else slice(None) for n in values[0].axes)
            axes = tuple(n for n in values[0].axes if n not in left)
            return [step.scope.joined(Stacked(values[0].x[first], axes), step.spec)]
        if step.name in _COMPILED:
            return self._run_compiled(step, values)
        return self._equation(step.eqn, list(values), Frame(step.scope, self.no_differences))

    def _run_compiled(self, step: Step, values: Sequence[Stacked]) -> list[Stacked]:
        stacks = tuple(value.axes for value in values)
        key = id(step), stacks
        if key not in self._compiled:
            axes: list[Axes] = []

            def run(*xs: Any) -> list[AnyLeaf]:
                given = [Stacked(x, names) for x, names in zip(xs, stacks, strict=True)]
                frame = Frame(step.scope, self.no_differences)
                made = self._equation(step.eqn, given, frame)
                axes[:] = [value.axes for value in made]
                return [value.x for value in made]

            # In narrow dtypes the rounding must be that of a program that is compiled as usual.
            fast = _COMPILE_FAST if self.wide and jax.default_backend() == "cpu" else None
            # The step is kept, because its number may be given to another one once it is gone.
            self._compiled[key] = jax.jit(run, compiler_options=fast), axes, step
        run_compiled, found, _ = self._compiled[key]
        made = run_compiled(*[value.x for value in values])
        return [Stacked(x, names) for x, names in zip(made, found, strict=True)]

    def operand(self, x: Operand, known: Mapping[int, Stacked]) -> Stacked:
        return Stacked(self.arithmetic.value(x.value)) if isinstance(x, Constant) else known[x]

    def run_step(self, step: Step, known: Values) -> None:
        """Add the results of a step to what is known."""
        made = self.step(step, [self.operand(x, known) for x in step.operands])
        known.update(zip(step.results, made, strict=True))


def as_numbers(x: AnyLeaf) -> Numbers:
    """The numbers of an array; for keys, those of their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = np.asarray(x)
    # What is compared is not rounded, and NumPy cannot compute with bfloat16.
    return found.astype(np.float64) if jnp.issubdtype(found.dtype, jnp.floating) else found


def on_all_shards(value: Stacked, scope: Scope) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    x, names = as_numbers(value.x), list(scope.sizes)
    new = tuple(i for i, name in enumerate(names) if name not in value.axes)
    x = np.expand_dims(x, new)
    return np.broadcast_to(x, (*scope.sizes.values(), *x.shape[len(names) :]))


def is_key(x: AnyLeaf) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def last_reads(program: Program) -> Mapping[int, int]:
    """For each value the number of the last step that reads it."""
    found: dict[int, int] = {}
    for i, step in enumerate(program.steps):
        found |= dict.fromkeys(step.inputs, i)
    results = [x for x in program.results if isinstance(x, int)]
    return found | dict.fromkeys(results, len(program.steps))
