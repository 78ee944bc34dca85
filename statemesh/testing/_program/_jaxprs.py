"""What the replay asks of jaxprs. The one file of `testing` that knows `jax.extend`."""

import difflib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._caches import is_hashable
from .._types import Fun
from ._stacked import as_names


Equation: TypeAlias = core.JaxprEqn
# With its constants or without: newer versions of JAX make `ClosedJaxpr` and `Jaxpr` one class.
Jaxpr: TypeAlias = Any
Atom: TypeAlias = core.Var | core.Literal
Value = TypeVar("Value")

# The parameters in which a call keeps the jaxpr that it runs.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
_LINEAR_SOLVE = "custom_linear_solve"
# Equations that run one jaxpr once. Their custom rules for derivatives and for `vmap` are not needed here:
# JAX differentiates the traced program, never its replay.
CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint"),
    *("composite", "custom_partitioning"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call", _LINEAR_SOLVE),
)

# Equations that say where a value lies, what its type is, or what may be done with it.
_IDENTITIES = (
    *("pvary", "pcast", "reshard", "sharding_constraint", "mesh_cast", "device_put"),
    "layout_constraint",
    # Those of Equinox refuse transformations, of which the program has none left.
    *("nontraceable", "nonbatchable", "nondifferentiable_backward"),
)
_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(atom: object) -> TypeGuard[core.Literal]:
    return isinstance(atom, core.Literal)


def is_identity(eqn: Equation) -> bool:
    """Whether an equation hands its operands on as they are."""
    return eqn.primitive.name in _IDENTITIES


def called(eqn: Equation) -> Jaxpr:
    """The jaxpr that a call runs."""
    if eqn.primitive.name == _LINEAR_SOLVE:
        return eqn.params["jaxprs"].solve
    return next(eqn.params[key] for key in _CALLED if hasattr(eqn.params.get(key), "eqns"))


def operands_of_call(eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
    """Those operands of a call that its jaxpr gets."""
    if eqn.primitive.name != _LINEAR_SOLVE:
        return operands
    # Before the right-hand sides come the constants of four functions, of which the third solves.
    counts = eqn.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    return [*operands[first : first + counts.solve], *operands[sum(counts) :]]


def counts_of_scan(eqn: Equation) -> tuple[int, int]:
    """How many constants and how many carries a scan has."""
    # Versions of JAX store these counts under different names. What is scanned over or stacked has one axis
    # more outside than inside; constants and what is carried have as many.
    body = opened(eqn.params["jaxpr"])

    def with_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(np.ndim(a.aval) == np.ndim(b.aval) for a, b in pairs)

    carries = with_equal_ranks(eqn.outvars, body.outvars)
    return with_equal_ranks(eqn.invars, body.invars) - carries, carries


def interpreted(
    jaxpr: Jaxpr,
    inputs: Iterable[Value],
    literal: Callable[[core.Literal], Value],
    run: Callable[[Equation, list[Value]], Sequence[Value]],
) -> list[Value]:
    """What stands for the results of a jaxpr.

    **Arguments:**

    - `inputs`: what stands for its constants, and for its inputs.
    - `literal`: gives what stands for a literal.
    - `run`: gives what stands for the results of an equation, from what stands for its operands.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    # What is not read any more is dropped: the values of all equations may fill the memory.
    last = {
        atom: k for k, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars if not is_literal(atom)
    }
    last |= dict.fromkeys((atom for atom in jaxpr.outvars if not is_literal(atom)), len(jaxpr.eqns))

    def value_of(atom: Atom) -> Value:
        return literal(atom) if is_literal(atom) else known[atom]

    for k, eqn in enumerate(jaxpr.eqns):
        results = run(eqn, [value_of(atom) for atom in eqn.invars])
        for atom in eqn.invars:
            if not is_literal(atom) and last[atom] == k:
                known.pop(atom, None)
        pairs = zip(eqn.outvars, results, strict=True)
        known.update((atom, x) for atom, x in pairs if atom in last)
    return [value_of(atom) for atom in jaxpr.outvars]


def operands_of_loop(
    eqn: Equation, operands: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value], Sequence[Value]]:
    """What each round of a scan or a `while_loop` gets: constants, what is carried, and what is scanned."""
    if eqn.primitive.name == "while":
        of_condition = eqn.params["cond_nconsts"]
        first = of_condition + eqn.params["body_nconsts"]
        return operands[of_condition:first], operands[first:], []
    first, carries = counts_of_scan(eqn)
    return operands[:first], operands[first : first + carries], operands[first + carries :]


def inner_jaxprs(eqn: Equation) -> list[Jaxpr]:
    """The jaxprs that an equation runs."""
    values = eqn.params.values()
    each = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [opened(x) for x in each if hasattr(x, "eqns")]


def nested_equations(eqn: Equation) -> Iterator[Equation]:
    """All equations in the jaxprs that an equation runs."""
    for jaxpr in inner_jaxprs(eqn):
        yield from all_equations(jaxpr)


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from nested_equations(eqn)


def names_of(eqn: Equation) -> tuple[Hashable, ...]:
    """The axis names over which an equation is a collective."""
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(name for name in as_names(names) if not isinstance(name, int))


def new_axes(eqn: Equation) -> Mapping[Hashable, int]:
    """The axes that a `shard_map` maps over, with their sizes, in the order of its mesh."""
    mesh, new = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    return {name: mesh.shape[name] for name in mesh.axis_names if name in new}


def axes_named(eqn: Equation) -> set[Hashable]:
    """Whatever may be the name of a mesh axis among the parameters of an equation."""
    values = [value for key, value in eqn.params.items() if "axes" in key or "axis" in key]
    # An integer counts the axes of an array.
    named = [name for value in values for name in as_names(value) if not isinstance(name, int)]
    return {name for name in named if is_hashable(name)}


def is_draw(eqn: Equation) -> bool:
    """Whether an equation draws random numbers from a key."""
    return eqn.primitive.name in _DRAWS


def draws(jaxpr: Jaxpr) -> bool:
    """Whether a program draws random numbers."""
    return any(map(is_draw, all_equations(opened(jaxpr))))


def is_short(value: float, dtype: Any) -> bool:
    """Whether a number needs no more than half of the digits of a dtype."""
    digits = int(jnp.finfo(dtype).nmant) // 2  # type: ignore[no-untyped-call]
    mantissa, _ = math.frexp(value)
    return (mantissa * 2.0 ** (digits + 1)).is_integer()


def aligned(left: Sequence[Hashable], right: Sequence[Hashable]) -> dict[int, int]:
    """The numbers of equal keys, in order: the longest runs that two sequences have in common."""
    # Most keys are equal, and what `difflib` looks at takes a time that grows with its square.
    shortest = min(len(left), len(right))
    start = next((i for i in range(shortest) if left[i] != right[i]), shortest)
    rest = shortest - start
    end = next((k for k in range(rest) if left[-1 - k] != right[-1 - k]), rest)
    same = {i: i for i in range(start)}
    same |= {len(left) - k: len(right) - k for k in range(1, end + 1)}
    middle = [keys[start : len(keys) - end] for keys in (left, right)]
    matcher = difflib.SequenceMatcher(None, middle[0], middle[1], autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        same |= {start + a + k: start + b + k for k in range(size)}
    return same


def as_function(closed: Jaxpr) -> Callable[..., list[jax.Array]]:
    """A traced program as a function of its constants and its inputs."""
    count = len(closed.consts)
    # The stubs of older versions do not name this class.
    make: Any = core
    run: Fun = core.jaxpr_as_fun

    def whole(*arrays: Any) -> list[jax.Array]:
        return run(make.ClosedJaxpr(closed.jaxpr, arrays[:count]))(*arrays[count:])

    return whole


def with_all_values(closed: Jaxpr) -> tuple[Jaxpr, list[Equation]]:
    """A program that gives the results of all its equations, then its own; and the equations of the first."""
    values = [
        (var, eqn)
        for eqn in closed.jaxpr.eqns
        for var in eqn.outvars
        if not isinstance(var, core.DropVar) and hasattr(var.aval, "dtype")
    ]
    make: Any = core
    outvars = [*(var for var, _ in values), *closed.jaxpr.outvars]
    whole = make.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)
    return whole, [eqn for _, eqn in values]


# Where values come from


# The numbers of the arguments of the whole program that a value depends on.
Sources: TypeAlias = frozenset[int]
NONE: Sources = frozenset()


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """For each result the number of the constant or argument that it is; `None` if it is computed."""

    def run(eqn: Equation, numbers: list[int | None]) -> Sequence[int | None]:
        return numbers if is_identity(eqn) else [None] * len(eqn.outvars)

    count = len(jaxpr.constvars) + len(jaxpr.invars)
    return interpreted(jaxpr, range(count), lambda _: None, run)


def split_inputs(jaxpr: Jaxpr) -> Sources:
    """The numbers of the arguments of which a shard gets a part."""
    split: set[int] = set()

    def flow(jaxpr: Jaxpr, inputs: Sequence[Sources]) -> list[Sources]:
        constants = [NONE] * len(jaxpr.constvars)
        return interpreted(jaxpr, [*constants, *inputs], lambda _: NONE, through)

    def through(eqn: Equation, sources: list[Sources]) -> Sequence[Sources]:
        if eqn.primitive.name in CALLS:
            return flow(opened(called(eqn)), operands_of_call(eqn, sources))
        if eqn.primitive.name == "shard_map":
            for some, spec in zip(sources, eqn.params["in_specs"], strict=True):
                split.update(some if any(spec) else NONE)
        return [NONE.union(*sources)] * len(eqn.outvars)

    jaxpr = opened(jaxpr)
    flow(jaxpr, [frozenset([k]) for k in range(len(jaxpr.invars))])
    return frozenset(split)


def sources_of(jaxpr: Jaxpr) -> tuple[list[Sources], frozenset[Sources]]:
    """For each result the arguments that it depends on other than by drawing; and those of each draw's key.

    In a loop whose carries change their places, an argument too many can be named.
    """
    drawn: set[Sources] = set()

    def flow(jaxpr: Jaxpr, inputs: Sequence[Sources]) -> list[Sources]:
        constants = [NONE] * len(jaxpr.constvars)
        return interpreted(jaxpr, [*constants, *inputs], lambda _: NONE, through)

    def through(eqn: Equation, sources: list[Sources]) -> list[Sources]:
        every, count, inner = NONE.union(*sources), len(eqn.outvars), inner_jaxprs(eqn)
        if is_draw(eqn):
            drawn.add(every)
            return [NONE] * count
        # A branch gets all operands but the predicate; what is called, or scanned, gets all.
        is_branch = eqn.primitive.name == "cond"
        operands = sources[1:] if is_branch else sources
        fits = all((len(x.invars), len(x.outvars)) == (len(operands), count) for x in inner)
        if not inner or not fits:
            drawn.update([every] if any(map(draws, inner)) else ())
            return [every] * count
        if eqn.primitive.name == "scan":
            return rounds(eqn, inner[0], operands)
        of_each = [flow(jaxpr, operands) for jaxpr in inner]
        predicate = sources[0] if is_branch else NONE
        return [predicate.union(*some) for some in zip(*of_each, strict=True)]

    def rounds(eqn: Equation, body: Jaxpr, operands: list[Sources]) -> list[Sources]:
        """What the results of a scan depend on once its carries have gone round."""
        first, count = counts_of_scan(eqn)
        while True:
            results = flow(body, operands)
            new = list(operands)
            for k in range(count):
                new[first + k] |= results[k]
            if new == operands:
                return results
            operands = new

    jaxpr = opened(jaxpr)
    return flow(jaxpr, [frozenset([k]) for k in range(len(jaxpr.invars))]), frozenset(drawn)
