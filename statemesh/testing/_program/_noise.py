"""Noise as large as rounding, which shows what rounding may change.

Every operation that rounds changes its results at random, by as much as rounding in its dtype may. What moves
from run to run is ill-conditioned, and by how much it moves is what rounding explains (Parker, Monte Carlo
Arithmetic, 1997).

A result that is exact is not moved: counts, positions and masks stay whole numbers, and thresholds on them
hold. Whether a sum of products is exact can be computed. The *grain* of a number is the value of its lowest
digit that is not zero. All terms are multiples of the least grain, and so are all partial sums, in any order.
They are exact where none can have more digits than the dtype has: where the sum of the sizes of the terms is
at most that many grains. Of an operation with one result for each number less is asked, since programs have
many of these: what it rounds in double precision has digits to the last place.
"""

import functools
import math
import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf
from ._jaxprs import Equation, nested_equations
from ._literals import Exact
from ._numbers import is_inexact, promoted, roundoff
from ._stacked import numpy_of


# Parameters that say where a value lies on a mesh.
_LAYOUTS = ("sharding", "out_sharding")
# Parameters that give the dtype of a result.
_DTYPES = ("dtype", "new_dtype", "preferred_element_type")

_FLOATS = (jnp.float16, jnp.bfloat16, np.float32, np.float64)

# Operations of a caller's own code, or on the bits of numbers: they need the dtype of the program.
_OWN_DTYPE = (
    *("pure_callback", "io_callback", "ffi_call", "debug_callback", "bitcast_convert_type"),
    *("nextafter", "pallas_call", "call_hi_primitive"),
)

_MARKS = ("", "-add", "-sub", "-mul", "-min", "-max")
SCATTERS: Mapping[str, Callable[..., Any]] = {
    f"scatter{mark}": getattr(jax.lax, f"scatter{mark.replace('-', '_')}")
    for mark in (*_MARKS, *(mark.replace("-", "_") for mark in _MARKS))
}


class OwnDtypes:
    """How a replay computes: in the dtypes of the program."""

    def value(self, x: AnyLeaf) -> AnyLeaf:
        """An input or a constant of the program, as the replay holds it."""
        return x

    def literal(self, atom: Any) -> AnyLeaf:
        """A literal of the program, as the replay holds it."""
        # As a NumPy array, which has no mesh: the literal may carry the mesh of where it was traced.
        return np.asarray(atom.val, dtype_of(atom))

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        """The results, on one shard, of an equation that is no collective and runs no other equations."""
        return _results(eqn, xs)

    def reduced(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        run: Callable[..., list[AnyLeaf]],
        shards: int = 1,
        lanes: int = 0,
    ) -> list[AnyLeaf]:
        """The results of an equation that `run` computes.

        **Arguments:**

        - `shards`: over how many a collective is.
        - `lanes`: how many of the first axes of the operands each have results of their own.
        """
        del eqn, shards, lanes
        return run(*xs)


class Promoted(OwnDtypes):
    """Floats in double precision, in which rounding hides nothing.

    An operation that cannot run in double precision runs in its own dtype.

    **Arguments:**

    - `exact`: the numbers that literals stand for.

    **Attributes:**

    - `own_dtype`: the operations on floats that run in their own dtype, by their names.
    """

    def __init__(self, exact: Exact) -> None:
        self.exact = exact
        self.own_dtype: set[str] = set()

    def value(self, x: AnyLeaf) -> AnyLeaf:
        wide = promoted(x.dtype)
        return x if wide == x.dtype else x.astype(wide)

    def literal(self, atom: Any) -> AnyLeaf:
        known = self.exact.of(atom)
        return self.value(super().literal(atom)) if known is None else known

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        name = eqn.primitive.name
        if id(eqn) in self.exact.compared:
            # What is compared may be what the dtype makes of the same number: a mark in data, or a limit that
            # is an argument.
            limits = jnp.finfo(dtype_of(eqn.invars[0]))  # type: ignore[no-untyped-call]
            bits = {"exponent_bits": limits.nexp, "mantissa_bits": limits.nmant}
            xs = [jax.lax.reduce_precision(x, **bits) for x in xs]
        if name == "reduce_precision":
            return list(xs)
        if name == "convert_element_type" and is_inexact(eqn.params["new_dtype"]):
            dtype = promoted(eqn.params["new_dtype"])
            # A derivative may make a real number of a complex one. JAX would warn of the part that is lost.
            is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
            return [jnp.asarray(xs[0].real if is_real else xs[0], dtype)]
        if not self.keeps_dtype(eqn):
            try:
                return _promoted_results(eqn, _results(eqn, xs, wide=True))
            except NotImplementedError:  # It has no rule for `vmap`, in whatever dtype.
                raise
            except Exception:  # To a dtype that it does not know, a primitive may say anything.
                pass
        pairs = zip(xs, eqn.invars, strict=True)
        narrow = [jnp.asarray(x, dtype_of(v)) if is_inexact(x.dtype) else x for x, v in pairs]
        # Random bits become floats in this way, exactly.
        if any(is_inexact(x.dtype) for x in xs):
            self.own_dtype.add(name)
        return _promoted_results(eqn, _results(eqn, narrow))

    def keeps_dtype(self, eqn: Equation) -> bool:
        """Whether an equation is never run in double precision."""
        name = eqn.primitive.name
        return name in _OWN_DTYPE or (name not in SCATTERS and any(nested_equations(eqn)))


def _promoted_results(eqn: Equation, results: Sequence[AnyLeaf]) -> list[AnyLeaf]:
    wanted: list[Any] = [promoted(dtype_of(v)) for v in eqn.outvars]
    pairs = zip(results, wanted, strict=True)
    return [x if x.dtype == wide else jnp.asarray(x, wide) for x, wide in pairs]


def dtype_of(var: Any) -> Any:
    """The dtype of a variable of a program."""
    return var.aval.dtype


def _results(eqn: Equation, xs: Sequence[AnyLeaf], *, wide: bool = False) -> list[AnyLeaf]:
    """The results of an equation in its own dtypes, or in double precision."""
    # On one device a layout on a mesh means nothing.
    params = {key: None if key in _LAYOUTS else value for key, value in eqn.params.items()}
    if wide:
        dtypes = {key: promoted(params[key]) for key in _DTYPES if params.get(key) is not None}
        params |= dtypes | ({"precision": None} if "precision" in params else {})
        if eqn.primitive.name in SCATTERS:
            # The equation holds the update as a jaxpr of its own dtype, so it is made anew.
            passed = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [SCATTERS[eqn.primitive.name](*xs, **{key: params[key] for key in passed})]
    if "_prim" in params:
        # What newer versions of JAX expand only when they compile, such as `custom_root`. In double precision
        # the numbers in it would get other dtypes than those that it was traced with.
        with jax.enable_x64(any(dtype_of(v).itemsize == 8 for v in (*eqn.invars, *eqn.outvars))):
            primitive: Any = params["_prim"]
            args = jax.tree.unflatten(primitive.in_tree, xs)
            return list(jax.tree.leaves(primitive.expand(*args)))
    results = eqn.primitive.bind(*xs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


# Operations whose results are exact: they move numbers, choose among them, or round by intention.
_EXACT = frozenset(
    (
        *("reshape", "broadcast_in_dim", "slice", "gather", "select_n", "concatenate", "transpose"),
        *("squeeze", "rev", "pad", "dynamic_slice", "dynamic_update_slice", "expand_dims", "copy"),
        *("broadcast", "split", "tile", "scatter", "copy_p", "iota", "optimization_barrier"),
        *("empty", "empty2", "select_if_vmap", "maybe_set", "name", "unstack"),
        *("sort", "top_k", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round", "clamp"),
        *("rem", "reduce_max", "reduce_min", "cummax", "cummin", "stop_gradient", "real", "imag"),
        *("reduce_window_max", "reduce_window_min", "scatter-max", "scatter_max"),
        *("scatter-min", "scatter_min", "complex", "conj"),
        *("all_gather", "all_gather_invariant", "ppermute", "all_to_all"),
        *("pmax", "pmin", "pbroadcast", "random_wrap", "random_unwrap"),
    )
)
# Operations with one result for each number, and those of them that only change the dtype.
_CONVERSIONS = ("convert_element_type", "reduce_precision")
_ELEMENTWISE = ("add", "sub", "mul", "add_any", "integer_pow", "square", *_CONVERSIONS)
# How many terms there are in each result of a sum, or factors, from parameters and the shapes of operands.
_TERMS: Mapping[str, Callable[[Mapping[str, Any], Sequence[tuple[int, ...]]], int]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod"), lambda p, shapes: math.prod(shapes[0][k] for k in p["axes"])
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cumlogsumexp"), lambda p, shapes: shapes[0][p["axis"]]),
    **dict.fromkeys(
        ("scatter-add", "scatter_add", "scatter-mul", "scatter_mul"),
        lambda p, shapes: math.prod(shapes[1][:-1]),
    ),
    "dot_general": lambda p, shapes: math.prod(shapes[0][k] for k in p["dimension_numbers"][0][0]),
    "conv_general_dilated": lambda p, shapes: (
        math.prod(shapes[1]) // max(shapes[1][p["dimension_numbers"].rhs_spec[0]], 1)
    ),
    "reduce_window_sum": lambda p, shapes: math.prod(p["window_dimensions"]),
}
_COLLECTIVE_SUMS = ("psum", "psum_invariant", "reduce_scatter")
# Sums of products of their operands: their exactness is computed.
_SUMS = frozenset({*_TERMS, *_COLLECTIVE_SUMS} - {"cumlogsumexp"})
# Operations that round once. The result of another one may be off by a few digits more.
_ONCE = _SUMS - {"reduce_window_sum", "reduce_prod", "cumprod", "scatter-mul", "scatter_mul"}
_ONCE |= {*_ELEMENTWISE, "div", "sqrt"}
_SEVERAL = 4.0

# Functions that give short numbers for zero, or are one for what is large. (What is zero is not moved, such
# as the logarithm of one.)
_SHORT = ("exp", "exp2", "cos", "cosh", "logistic", "erfc", "tanh", "erf")

# For multiplicative hashing.
_ODD = 0xD1B54A32D192ED03

# The bits of a number below its highest digit.
_FRACTION = np.uint64(2**52 - 1)

# Dot products of narrow dtypes are summed in float32.
_WIDE_SUMS = ("dot_general", "conv_general_dilated")


class Noisy(Promoted):
    """Floats in double precision, with noise.

    **Arguments:**

    - `noise`: an array of three numbers: whether each result is off by the roundoff of double precision;
        whether it is off by that of its own dtype; and the number that the random numbers come from. Or
        such a row for each of several runs, all of one kind: these are the first axis of all operands.
    - `rounded`: literals that were rounded when the program was traced, by dtype and value: the program that
        it is compared with has others, such as the parts that each of several shards has in a mean. Those
        that are known exactly were rounded to double precision.
    - `exact`: the numbers that literals stand for.
    """

    def __init__(self, noise: Any, rounded: Collection[tuple[str, float]], exact: Exact) -> None:
        super().__init__(exact)
        self.rounded = rounded
        # What all operations use is computed once. XLA would merge the copies, but slowly.
        self.numpy = numpy_of(noise)
        of_double, of_own, _ = noise[0] if noise.ndim == 2 else noise
        self.noisy = (of_double + of_own > 0).astype(np.float64)
        self.in_own_dtypes = of_own > 0
        self.units: dict[float, Any] = {}
        self.units = {unit: self._in_this_run(unit) for unit in map(roundoff, _FLOATS)}
        self.seed = noise[..., 2].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def literal(self, atom: Any) -> AnyLeaf:
        literal = OwnDtypes.literal(self, atom)
        known = self.exact.of(atom)
        x = literal if known is None else known
        wide = self.value(x)
        if is_inexact(x.dtype) and (str(x.dtype), float(np.real(x))) in self.rounded:
            wide = self._off(wide, roundoff(x.dtype), "literal")
        if known is None:
            return wide
        # The dtype of the program makes the same of it in every run.
        return self.numpy.where(self.in_own_dtypes, self.value(literal), wide)

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        run = super().bind
        return self.reduced(eqn, xs, lambda *xs: run(eqn, xs))

    def reduced(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        run: Callable[..., list[AnyLeaf]],
        shards: int = 1,
        lanes: int = 0,
    ) -> list[AnyLeaf]:
        name = eqn.primitive.name
        narrows = self.keeps_dtype(eqn)
        if narrows:
            pairs = zip(xs, eqn.invars, strict=True)
            xs = [self._off(x, roundoff(dtype_of(v)), "operand") for x, v in pairs]
        outputs = run(*xs)
        narrows = narrows or name in self.own_dtype
        # Random bits become floats in their own dtype, exactly.
        source = eqn.invars if narrows else eqn.outvars
        if name in _EXACT or not any(is_inexact(dtype_of(v)) for v in source):
            return outputs
        units = [roundoff(dtype_of(v)) if narrows else self._unit(v) for v in eqn.outvars]
        if name == "reduce_precision":
            units = [self._in_this_run(2.0 ** -eqn.params["mantissa_bits"])]
        terms = _terms(eqn, shards)
        times = math.sqrt(terms)
        if narrows or name not in _SUMS:
            exact = self._is_exact(eqn, xs, outputs, units[0], narrows)
            times *= 1.0 if name in _ONCE else _SEVERAL
            results = zip(outputs, units, strict=True)
            return [self._off(x, unit * times, name, exact) for x, unit in results]
        ((x,), (unit,)) = outputs, units
        inner = unit
        if name in _WIDE_SUMS and terms > 1:
            inner = self.numpy.minimum(unit, self._in_this_run(roundoff(np.float32)))
        sizes, finest = self._sizes_and_fineness(eqn, xs, x, run)
        exact = _fits(sizes, finest, inner)
        if terms <= 1:
            return [self._off(x, unit, name, exact)]
        # The order of a sum changes the error of each term.
        x = self._off(x, inner * times, name, exact, sizes * (2 / times), self._order(xs, x, lanes))
        if name in _WIDE_SUMS:
            x = self._off(x, unit, "result", _fits(abs(x), _fineness(x, inner), unit))
        return [x]

    def _order(self, xs: Sequence[AnyLeaf], result: AnyLeaf, lanes: int) -> AnyLeaf:
        """What the order of a sum makes of each result: all of a shard's have the same."""
        number = _order([x.reshape(*x.shape[:lanes], -1) for x in xs])
        return number.reshape((*number.shape, *[1] * (result.ndim - lanes)))

    def _unit(self, var: Any) -> Any:
        """The roundoff of a variable in this run; zero for exact dtypes."""
        dtype = dtype_of(var)
        return self._in_this_run(roundoff(dtype)) if is_inexact(dtype) else 0.0

    def _in_this_run(self, unit: float) -> Any:
        """The roundoff `unit` where the noise is that of the program's dtypes, else double precision's."""
        if unit in self.units:
            return self.units[unit]
        return self.numpy.where(self.in_own_dtypes, unit, roundoff(np.float64))

    def _sizes_and_fineness(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        outputs: AnyLeaf,
        run: Callable[..., list[AnyLeaf]],
    ) -> tuple[AnyLeaf, AnyLeaf]:
        """For each result of a sum, the sum of the sizes of its terms, and how fine they are."""
        inexact = [is_inexact(dtype_of(v)) for v in eqn.invars]
        if not any(inexact):
            return abs(outputs), _fineness(outputs, roundoff(np.float64))

        def over(of: Callable[[AnyLeaf, Any], AnyLeaf]) -> AnyLeaf:
            operands = zip(xs, eqn.invars, inexact, strict=True)
            inputs = [of(x, v).astype(x.dtype) if hit else x for x, v, hit in operands]
            return run(*inputs)[0].real

        sizes = over(lambda x, v: abs(x))
        if jnp.issubdtype(outputs.dtype, jnp.complexfloating):
            return sizes, jnp.full_like(sizes, jnp.inf)
        return sizes, over(lambda x, v: _fineness(x, self._unit(v)))

    def _is_exact(
        self,
        eqn: Equation,
        xs: Sequence[AnyLeaf],
        outputs: Sequence[AnyLeaf],
        unit: Any,
        narrows: bool,
    ) -> AnyLeaf:
        """Where an operation that rounds each result once did not have to round it."""
        name = eqn.primitive.name
        if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in (*xs, *outputs)):
            return np.False_
        if name in _SHORT:
            return (xs[0] == 0) | (abs(outputs[0]) == 1)
        if name == "pow" and is_inexact(xs[1].dtype):
            # XLA computes whole powers of powers of two exactly.
            short = (_grain(xs[0])[1] == xs[0]) & (_grain(outputs[0])[1] == outputs[0])
            return short & (xs[1] % 1 == 0)
        source = eqn.invars[0]
        if name in _CONVERSIONS and not narrows and is_inexact(dtype_of(source)):
            return (self._unit(source) >= unit) | _is_short(xs[0], unit)
        if (name in _ELEMENTWISE and not narrows) or name in ("div", "sqrt", "integer_pow"):
            return _is_short_or_an_operand(outputs[0], unit, xs)
        return np.False_

    def _off(
        self,
        x: AnyLeaf,
        unit: Any,
        name: str,
        exact: AnyLeaf = np.False_,
        sizes: AnyLeaf | None = None,
        order: AnyLeaf | None = None,
    ) -> AnyLeaf:
        """The numbers, each off by a roundoff of it, and of the sizes of its terms, where it is not exact.

        Rounding makes the same number of what is computed twice, and so does noise: it depends on the number,
        the operation and, for a sum, the order of the terms.
        """
        if not is_inexact(x.dtype) or x.size == 0:
            return x
        salt = np.uint64(zlib.crc32(name.encode()) * _ODD % 2**64)
        seed = self.seed.reshape((*self.seed.shape, *[1] * (x.ndim - self.seed.ndim)))
        seed = seed ^ salt if order is None else seed ^ salt ^ order
        moved = _moved(x, self.noisy * unit, sizes, exact, seed)
        # XLA would compute the noise anew for each use, compile it as often, and may round that of a sum
        # differently there. A function such as `tanh` stays in one loop with its uses: alone, it may be other
        # for other shapes.
        is_materialized = name in _ONCE or sizes is not None
        traced = is_materialized and numpy_of(moved) is jnp
        return jax.lax.optimization_barrier(moved) if traced else moved


_Fun = TypeVar("_Fun", bound=Callable[..., Any])


def _traced_once(fun: _Fun) -> _Fun:
    """A function of arrays. That of JAX's is traced once for each type of its arguments."""
    traced = jax.jit(fun)

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        return (fun if numpy_of(*jax.tree.leaves(args)) is np else traced)(*args)

    return cast(_Fun, run)


@_traced_once
def _order(rows: Sequence[AnyLeaf]) -> AnyLeaf:
    """For each shard a number that depends on all operands and the order of the numbers in them.

    It does not depend on signs.

    **Arguments:**

    - `rows`: the operands, with all numbers of a shard on their last axis.
    """
    number: Any = np.uint64(0)
    for x in rows:
        digits = _digits(x) if is_inexact(x.dtype) else x.astype(np.uint64)
        places = np.arange(1, 2 * x.shape[-1], 2).astype(np.uint64) * np.uint64(_ODD)
        number = (number + (digits * places).sum(-1)) * np.uint64(_ODD)
    return number


def _digits(x: AnyLeaf) -> AnyLeaf:
    """The bits of the sizes of numbers. Rounding is the same for a number and its negative."""
    return _bits(abs(x.real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x))


def _bits(x: AnyLeaf) -> AnyLeaf:
    return x.view(np.uint64)


@_traced_once
def _is_short(x: AnyLeaf, unit: Any) -> AnyLeaf:
    """Whether numbers have no more digits than a dtype with this roundoff has.

    What was rounded in double precision has digits to the last place, so that a number with fewer was not.
    One in 2**16 is taken for exact by chance where the dtype is double precision itself.
    """
    last = numpy_of(unit).maximum(unit, 2.0**-36)
    # The value of the digits of a number between one and two that the dtype does not have.
    beyond = (last * 2.0**52).astype(np.uint64) - np.uint64(1)
    return (_bits(x) & beyond) == 0


@_traced_once
def _is_short_or_an_operand(x: AnyLeaf, unit: Any, operands: Sequence[AnyLeaf]) -> AnyLeaf:
    """Whether results are short or have the digits of an operand.

    They have these after adding zero, or multiplying by a power of two.
    """
    alike = [(_bits(x) ^ _bits(y)) & _FRACTION == 0 for y in operands if y.dtype == x.dtype]
    return functools.reduce(operator.or_, alike, _is_short(x, unit))


@_traced_once
def _moved(x: AnyLeaf, amount: Any, sizes: AnyLeaf | None, exact: AnyLeaf, seed: Any) -> AnyLeaf:
    """Each number off by a random part of it: equal numbers by the same part, so that copies stay copies."""
    numpy = numpy_of(x)
    # The upper half of a product with an odd number depends on all lower digits (multiplicative hashing).
    mixed = (_digits(x) ^ seed) * np.uint64(0xFF51AFD7ED558CCD) >> np.uint64(11)
    part = mixed.astype(np.float64) * 2.0**-52 - 1
    moved = x * (1 + amount * part)
    if sizes is not None:
        moved += numpy.where(numpy.isfinite(sizes), sizes * amount * part, 0.0)
    return numpy.where(exact, x, moved)


def _grain(x: AnyLeaf) -> tuple[AnyLeaf, AnyLeaf]:
    """For each number the values of its highest digit and of its lowest one that is not zero."""
    bits = _bits(x)
    digits = bits & _FRACTION
    top = bits & np.uint64(0x7FF << 52)
    lowest = (top | (digits & (~digits + np.uint64(1)))).view(np.float64)
    top = top.view(np.float64)
    return top, numpy_of(x).where(digits == 0, top, lowest - top)


@_traced_once
def _fineness(x: AnyLeaf, unit: Any) -> AnyLeaf:
    """How fine the numbers are: a power of one over the grain, and zero for zero.

    Where the grains are factors, the fineness of the product is the product of these. Where terms are
    summed, the sum is nearly that of the finest one, the more so the higher the power is.
    """
    numpy, (top, grain) = numpy_of(x), _grain(x)
    # What has more digits than its dtype stands for a number that is rounded to them.
    return numpy.where(x == 0, 0.0, 1 / _fourth_power(numpy.maximum(grain, top * unit)))


@_traced_once
def _fits(sizes: AnyLeaf, fineness: AnyLeaf, unit: Any) -> AnyLeaf:
    """Whether sums of terms that are so large and so fine need no more digits than a dtype has."""
    return _fourth_power(sizes) * fineness <= _fourth_power(2 / unit)


def _fourth_power(x: AnyLeaf) -> AnyLeaf:
    square = x * x
    return square * square


def _terms(eqn: Equation, shards: int) -> int:
    """How many terms each result of an equation sums."""
    name, shapes = eqn.primitive.name, [getattr(v.aval, "shape", ()) for v in eqn.invars]
    if name in _COLLECTIVE_SUMS:
        return shards
    return int(_TERMS[name](eqn.params, shapes)) if name in _TERMS else 1
