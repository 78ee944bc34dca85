"""Noise as large as rounding, which shows what rounding may change.

Every operation that rounds changes its results at random, by as much as rounding in its dtype may. What moves
from run to run is ill-conditioned, and by how much it moves is what rounding explains (Parker, Monte Carlo
Arithmetic, 1997).
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf
from ._arithmetic import Promoted, dtype_of, is_inexact
from ._jaxprs import Equation


# Operations whose results are exact: they move numbers, choose among them, or round by intention.
_EXACT = frozenset(
    (
        *("reshape", "broadcast_in_dim", "slice", "gather", "select_n", "concatenate", "transpose"),
        *("squeeze", "rev", "pad", "dynamic_slice", "dynamic_update_slice", "expand_dims", "copy"),
        *("broadcast", "split", "scatter", "copy_p", "iota", "optimization_barrier", "sort"),
        *("top_k", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round", "clamp"),
        *("reduce_max", "reduce_min", "cummax", "cummin", "stop_gradient", "real", "imag"),
        *("complex", "conj", "all_gather", "all_gather_invariant", "ppermute", "all_to_all"),
        *("pmax", "pmin", "pbroadcast", "random_wrap", "random_unwrap"),
    )
)
# Operations that round once. The result of another one may be off by a few digits more.
_ONCE = frozenset(
    (
        *("add", "sub", "mul", "div", "add_any", "sqrt", "integer_pow", "square"),
        *("reduce_sum", "cumsum", "dot_general", "conv_general_dilated", "convert_element_type"),
        *("reduce_precision", "psum", "psum_invariant", "reduce_scatter"),
        *("scatter-add", "scatter_add"),
    )
)
_SEVERAL = 4.0

# Dot products of narrow dtypes are summed in float32.
_WIDE_SUMS = ("dot_general", "conv_general_dilated")
_COLLECTIVE_SUMS = ("psum", "psum_invariant", "reduce_scatter")


class Noisy(Promoted):
    """Floats in double precision, with noise.

    **Arguments:**

    - `noise`: an array of three numbers: by how much each result is off, in parts of it; by how much, in
        units of the roundoff of its own dtype; and the number that the random numbers come from.
    - `rounded`: literals that were rounded when the program was traced, by dtype and value: the program that
        it is compared with has others, such as the parts that each of several shards has in a mean.
    """

    def __init__(self, noise: Any, rounded: Collection[tuple[str, float]]) -> None:
        super().__init__()
        self.noise, self.rounded = noise, rounded
        self.seed = jnp.asarray(noise[2], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.salts = itertools.count()

    def literal(self, x: AnyLeaf, dtype: Any) -> AnyLeaf:
        wide = super().literal(x, dtype)
        if (
            not is_inexact(dtype)
            or (str(dtype), float(np.real(np.asarray(x, dtype)))) not in self.rounded
        ):
            return wide
        noisy = self.noise[0] + self.noise[1] > 0
        unit = jnp.where(noisy, roundoff(dtype), 0.0)
        return _moved(wide, unit, self.seed ^ np.uint64(_salt(next(self.salts))))

    def before(self, eqn: Equation, xs: Sequence[AnyLeaf], shards: int = 1) -> Sequence[AnyLeaf]:
        terms = _terms(eqn, shards)
        own = self.keeps_dtype(eqn)
        if terms <= 1 and not own:
            return xs
        # The order of a sum changes the error of each term.
        times, inner = math.sqrt(terms), eqn.primitive.name in _WIDE_SUMS
        pairs = zip(xs, eqn.invars, strict=True)
        return [self._off(x, v, times, inner=inner, own=own) for x, v in pairs]

    def after(self, eqn: Equation, made: Sequence[AnyLeaf], shards: int = 1) -> Sequence[AnyLeaf]:
        name = eqn.primitive.name
        own = self.keeps_dtype(eqn) or name in self.own_dtype
        if name in _EXACT or (own and not any(is_inexact(dtype_of(v)) for v in eqn.invars)):
            return made
        if name == "convert_element_type":
            given, new = roundoff(dtype_of(eqn.invars[0])), roundoff(dtype_of(eqn.outvars[0]))
            # An integer may have more digits than the float that it becomes.
            if new <= given:
                return made
        terms = _terms(eqn, shards)
        times = 1.0 if name in _ONCE else _SEVERAL
        if terms > 1:
            inner = name in _WIDE_SUMS
            pairs = zip(made, eqn.outvars, strict=True)
            made = [self._off(x, v, math.sqrt(terms), inner=inner) for x, v in pairs]
            if not inner:
                return made
        return [self._off(x, v, times, own=own) for x, v in zip(made, eqn.outvars, strict=True)]

    def _off(
        self, x: AnyLeaf, var: Any, times: float, *, inner: bool = False, own: bool = False
    ) -> AnyLeaf:
        """The numbers, each off by noise of so many times the roundoff of a variable's dtype."""
        if not is_inexact(x.dtype) or x.size == 0:
            return x
        unit = roundoff(dtype_of(var))
        if inner:
            unit = min(unit, roundoff(np.float32))
        amount = self.noise[0] + self.noise[1] * unit
        if own:
            amount = jnp.where(amount > 0, jnp.maximum(amount, unit), 0.0)
        return _moved(x, amount * times, self.seed ^ np.uint64(_salt(next(self.salts))))


def _salt(number: int) -> int:
    return number * 0xD1B54A32D192ED03 % 2**64


@jax.jit
def _moved(x: AnyLeaf, amount: Any, seed: Any) -> AnyLeaf:
    """Each number off by a random part of it: equal numbers by the same part, so that copies stay copies."""
    real = x.real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    bits = jax.lax.bitcast_convert_type(real, np.uint64)
    # The upper half of a product with an odd number depends on all lower digits (multiplicative hashing).
    mixed = (bits ^ seed) * np.uint64(0xFF51AFD7ED558CCD) >> np.uint64(11)
    return x * ((1 - amount) + mixed.astype(np.float64) * (amount * 2.0**-52))


def roundoff(dtype: Any) -> float:
    """The distance from one to the next number of a dtype; zero for exact dtypes."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0  # type: ignore[no-untyped-call]


def _terms(eqn: Equation, shards: int) -> int:
    """How many terms each result of an equation sums."""
    name, params = eqn.primitive.name, eqn.params
    if name in _COLLECTIVE_SUMS:
        return shards
    shapes: list[tuple[int, ...]] = [v.aval.shape for v in eqn.invars]  # type: ignore[attr-defined]
    if name in ("reduce_sum", "reduce_prod"):
        return int(math.prod(shapes[0][axis] for axis in params["axes"]))
    if name in ("cumsum", "cumprod", "cumlogsumexp"):
        return int(shapes[0][params["axis"]])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        return int(math.prod(shapes[1]) // max(shapes[1][features], 1))
    if name in ("scatter-add", "scatter_add", "scatter-mul", "scatter_mul"):
        return math.prod(shapes[1][:-1])
    if name == "reduce_window_sum":
        return int(math.prod(params["window_dimensions"]))
    return 1
