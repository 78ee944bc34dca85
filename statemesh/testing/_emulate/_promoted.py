"""The arithmetic of a replay: in the program's own dtypes, or with all floats in double precision.

In double precision rounding hides nothing: what two programs that should agree differ by is a mistake. How far apart
rounding may bring them is measured on the programs themselves. A run can be given noise: every operation that rounds
then changes its results, at random, by as much as rounding may. What moves is ill-conditioned, and by how much it moves is
what rounding explains (Parker, Monte Carlo arithmetic, 1997). An operation that cannot run in double
precision runs in its own dtype, and gets the noise of that dtype.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf
from ._jaxprs import Equation, nested_equations


# Parameters that say where a value lies on a mesh.
_LAYOUTS = ("sharding", "out_sharding")
# Parameters that give the dtype of a result.
_DTYPES = ("dtype", "new_dtype", "preferred_element_type")

# Operations whose results are exact: they move numbers, choose among them, or round by intention.
_EXACT = frozenset(
    [
        "reshape",
        "broadcast_in_dim",
        "slice",
        "gather",
        "select_n",
        "concatenate",
        "transpose",
        "neg",
        "abs",
        "max",
        "min",
        "copy",
        "sign",
        "squeeze",
        "rev",
        "pad",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "sort",
        "top_k",
        "argmax",
        "argmin",
        "reduce_max",
        "reduce_min",
        "floor",
        "ceil",
        "round",
        "clamp",
        "real",
        "imag",
        "complex",
        "conj",
        "iota",
        "split",
        "scatter",
        "cummax",
        "cummin",
        "optimization_barrier",
        "stop_gradient",
        "random_bits",
        "random_wrap",
        "random_unwrap",
        "copy_p",
        "broadcast",
        "reduce_and",
        "reduce_or",
        "select_and_scatter_add",
        "all_gather",
        "all_gather_invariant",
        "ppermute",
        "all_to_all",
        "pmax",
        "pmin",
        "pbroadcast",
    ]
)
# Operations that round once. What is in neither set may be off by a few digits more.
_ONCE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "add_any",
        "reduce_sum",
        "cumsum",
        "dot_general",
        "conv_general_dilated",
        "convert_element_type",
        "psum",
        "psum_invariant",
        "reduce_scatter",
        "scatter-add",
        "scatter_add",
        "sqrt",
        "integer_pow",
        "square",
    ]
)
_APPROXIMATED = 4.0

# Operations of a caller's own code, or on the bits of numbers: only the dtype of the program is right for them.
_OWN_DTYPE = frozenset(
    [
        "pure_callback",
        "io_callback",
        "ffi_call",
        "debug_callback",
        "bitcast_convert_type",
        "nextafter",
        "pallas_call",
    ]
)

_SCATTERS: Mapping[str, Callable[..., Any]] = {
    f"scatter{mark}": getattr(jax.lax, f"scatter{mark.replace('-', '_')}")
    for mark in ("", "-add", "-sub", "-mul", "-min", "-max", "_add", "_sub", "_mul", "_min", "_max")
}

# Dot products of narrow dtypes are summed in float32.
_WIDE_SUMS = ("dot_general", "conv_general_dilated")


class OwnDtypes:
    """The arithmetic of the program as it is."""

    def value(self, x: AnyLeaf) -> AnyLeaf:
        """A constant or an input of the program, as the replay holds it."""
        return x

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        """The results of an equation that is no collective and runs no other equations."""
        return _results(eqn, _parameters(eqn), xs)

    def summed(
        self, eqn: Equation, var: Any, terms: int, rule: Callable[[Any], Any], x: Any
    ) -> Any:
        """The result of a collective of so many shards."""
        del eqn, var, terms
        return rule(x)


@dataclasses.dataclass
class Promoted:
    """Floats in double precision, with noise.

    **Attributes:**

    - `noise`: an array of three numbers: by how much each result is off, in parts of the result; by how much in
        units of the roundoff of its own dtype; and the number that the random numbers come from.
    - `own_dtype`: collects the operations that could not run in double precision.
    """

    noise: Any
    own_dtype: set[str]
    salts: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)

    def value(self, x: AnyLeaf) -> AnyLeaf:
        wide = promoted(x.dtype)
        return x if wide == x.dtype else jnp.asarray(x, wide)

    def bind(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        name = eqn.primitive.name
        if name == "reduce_precision":
            return [self._off(xs[0], eqn.outvars[0], 1.0)]
        if name == "convert_element_type" and is_inexact(eqn.params["new_dtype"]):
            # Values of JAX's types may be narrower than those of the replay: only what is rounded gets noise.
            made = [jnp.asarray(xs[0], promoted(eqn.params["new_dtype"]))]
            narrower = roundoff(eqn.params["new_dtype"]) > roundoff(eqn.invars[0].aval.dtype)
            return [self._off(made[0], eqn.outvars[0], 1.0)] if narrower else made
        scatters = name in _SCATTERS
        if name in _OWN_DTYPE or (any(nested_equations(eqn)) and not scatters):
            return self._in_own_dtype(eqn, xs)
        terms = math.sqrt(_terms(eqn))
        if terms > 1:
            xs = [self._off(x, v, terms, inner=name) for x, v in zip(xs, eqn.invars, strict=True)]
        try:
            made = _scattered(eqn, xs) if scatters else _results(eqn, _promoted_parameters(eqn), xs)
        except NotImplementedError:
            raise
        except (
            Exception
        ):  # What a primitive says to a dtype that it does not know may be any error.
            return self._in_own_dtype(eqn, xs)
        made = [self._typed(x, v) for x, v in zip(made, eqn.outvars, strict=True)]
        if name in _EXACT:
            return made
        factor = 1.0 if name in _ONCE else _APPROXIMATED
        return [
            self._off(self._off(x, v, terms, inner=name) if terms > 1 else x, v, factor)
            for x, v in zip(made, eqn.outvars, strict=True)
        ]

    def summed(
        self, eqn: Equation, var: Any, terms: int, rule: Callable[[Any], Any], x: Any
    ) -> Any:
        if eqn.primitive.name in _EXACT or not is_inexact(x.dtype):
            return rule(x)
        return self._off(rule(self._off(x, var, math.sqrt(terms))), var, math.sqrt(terms))

    def _in_own_dtype(self, eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
        narrow = [
            jnp.asarray(self._off(x, v, 1.0, own=True), v.aval.dtype) if is_inexact(x.dtype) else x
            for x, v in zip(xs, eqn.invars, strict=True)
        ]
        made = _results(eqn, _parameters(eqn), narrow)
        wide = [self._typed(x, v) for x, v in zip(made, eqn.outvars, strict=True)]
        # Random bits become floats in this way, exactly.
        if not any(is_inexact(x.dtype) for x in xs):
            return wide
        self.own_dtype.add(eqn.primitive.name)
        return [self._off(x, v, 1.0, own=True) for x, v in zip(wide, eqn.outvars, strict=True)]

    def _typed(self, x: AnyLeaf, var: Any) -> AnyLeaf:
        wide = promoted(var.aval.dtype)
        return x if x.dtype == wide else jnp.asarray(x, wide)

    def _off(
        self, x: AnyLeaf, var: Any, times: float, *, inner: str = "", own: bool = False
    ) -> AnyLeaf:
        """The numbers, each off by noise of so many times the roundoff of a variable's dtype."""
        if not is_inexact(x.dtype) or x.size == 0:
            return x
        unit = roundoff(var.aval.dtype)
        if inner in _WIDE_SUMS:
            unit = min(unit, roundoff(np.float32))
        absolute, relative, seed = self.noise[0], self.noise[1], self.noise[2]
        amount = absolute + relative * unit
        if own:
            amount = jnp.where(amount > 0, jnp.maximum(amount, unit), 0.0)
        return x * (1 + amount * times * _hashed(x, seed, next(self.salts)))


NO_NOISE = np.zeros(3)


def is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def promoted(dtype: Any) -> Any:
    """The dtype that stands for a dtype in double precision."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def roundoff(dtype: Any) -> float:
    """The distance from one to the next number of a dtype; zero for exact dtypes."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0  # type: ignore[no-untyped-call]


def _hashed(x: AnyLeaf, seed: Any, salt: int) -> AnyLeaf:
    """A random number in [-1, 1] for each number: the same one for the same number, so that copies stay copies."""
    real = x.real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    bits = jax.lax.bitcast_convert_type(real, np.uint64)
    start = jnp.asarray(seed, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (start + np.uint64(salt * 0xD1B54A32D192ED03 % 2**64))) * np.uint64(
        0xFF51AFD7ED558CCD
    )
    bits = (bits ^ (bits >> np.uint64(32))) * np.uint64(0xC4CEB9FE1A85EC53)
    bits = bits ^ (bits >> np.uint64(29))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def _scattered(eqn: Equation, xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
    # The equation holds the update as a jaxpr of its own dtype, so it is made anew.
    params = eqn.params
    return [
        _SCATTERS[eqn.primitive.name](
            *xs,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )
    ]


def _results(eqn: Equation, params: Mapping[str, Any], xs: Sequence[AnyLeaf]) -> list[AnyLeaf]:
    made = eqn.primitive.bind(*xs, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _parameters(eqn: Equation) -> dict[str, Any]:
    # On one device a layout on a mesh means nothing.
    return {key: None if key in _LAYOUTS else value for key, value in eqn.params.items()}


def _promoted_parameters(eqn: Equation) -> dict[str, Any]:
    params = _parameters(eqn)
    for key in _DTYPES:
        if params.get(key) is not None:
            params[key] = promoted(params[key])
    if "precision" in params and eqn.primitive.name in _WIDE_SUMS:
        params["precision"] = None
    return params


def _terms(eqn: Equation) -> int:
    """How many terms each result of an equation sums."""
    name, params = eqn.primitive.name, eqn.params
    shapes: list[tuple[int, ...]] = [v.aval.shape for v in eqn.invars]  # type: ignore[attr-defined]
    if name in ("reduce_sum", "reduce_prod"):
        return math.prod(shapes[0][axis] for axis in params["axes"])
    if name in ("cumsum", "cumprod", "cumlogsumexp"):
        return shapes[0][params["axis"]]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        return math.prod(shapes[1]) // max(shapes[1][features], 1)
    if name in ("scatter-add", "scatter_add", "scatter-mul", "scatter_mul"):
        return math.prod(shapes[1][:-1])
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    return 1
