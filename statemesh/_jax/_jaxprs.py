"""Traced programs: what their equations do, how to change and run them, and links in them."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .._base._types import NO_AXES, Array, ArrayLike, Axes, AxisName, PyTree, flat_names
from . import _compat as compat
from ._compat import ClosedJaxpr, Equation, Jaxpr, Operand, core, tree_util


AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr

_SUMS = ("psum", "psum_invariant", "unreduced_psum")
_GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
_JOINING = (*_SUMS, *_GATHERS, "pmax", "pmin", "unreduced_pmax", "unreduced_pmin")
# It changes only the type: over which axes a value may differ.
_VARYING = "pvary"


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A rule for `custom_vmap` that says what its function does, because the jaxpr does not show it.

    **Attributes:**

    - `exchanged_over`, `joined_over`: the axes over which instances get anything from each other; and those
        over which all of them get the same.
    - `joins`: whether the function reduces many arrays by few collectives.
    - `pending`: a reduction of a loss that is to be decided.
    """

    run: Callable[..., Any]
    exchanged_over: Axes = NO_AXES
    joined_over: Axes = NO_AXES
    joins: bool = False
    pending: Any = None

    def __call__(self, size: int, batched: Sequence[bool], *operands: Any) -> Any:
        return self.run(size, batched, *operands)


# That of equations whose jaxprs show what they do.
_NO_RULE = Rule(lambda size, batched, *operands: (operands, batched))


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """A jaxpr without the constants that it may be closed over."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(operand: Operand) -> bool:
    """Whether an operand is a constant written out."""
    return isinstance(operand, core.Literal)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")


def jaxprs_of(eqn: Equation) -> list[Jaxpr]:
    """The jaxprs that an equation runs."""
    values = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [open_jaxpr(value) for value in values if _is_jaxpr(value)]


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """All equations of a jaxpr, and of the jaxprs that they run."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations(inner)


# The result is `Any` in its parts: what they are depends on the first.
def control_flow(eqn: Equation) -> tuple[Any, ...] | None:
    """An equation that runs other jaxprs, as its kind and these jaxprs; `None` for any other.

    `("cond", branches)`, `("while", predicate, body, their numbers of constants)`, `("scan", body, numbers of
    constants and carried values)`, `("call", jaxpr)`.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            return "cond", [open_jaxpr(branch) for branch in params["branches"]]
        case "while":
            cond, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
            return "while", cond, body, params["cond_nconsts"], params["body_nconsts"]
        case "scan":
            body = open_jaxpr(params["jaxpr"])
            # Scanned and stacked arrays have one axis more outside than inside.
            carry = _count_alike(eqn.outvars, body.outvars)
            return "scan", body, _count_alike(eqn.invars, body.invars) - carry, carry
        case "reduce" | "reduce_window":
            # Their jaxpr joins two entries, and its results go into it again.
            return None
    if (single := unjoined(eqn)) is not None:
        return "call", single
    called = [
        open_jaxpr(j) for name in ("jaxpr", "call_jaxpr") if (j := params.get(name)) is not None
    ]
    if len(called) == 1 and len(called[0].invars) == len(eqn.invars):
        return "call", called[0]
    return None


def _shape(operand: Operand) -> tuple[int, ...]:
    return getattr(operand.aval, "shape", ())


def _count_alike(outer: Sequence[Operand], inner: Sequence[Operand]) -> int:
    return sum(_shape(a) == _shape(b) for a, b in zip(outer, inner, strict=True))


def axes_named(eqn: Equation) -> tuple[AxisName, ...]:
    """The mapped axes that an equation names, in its order."""
    params = (eqn.params.get(key) for key in ("axes", "axis_name"))
    names = (name for param in params for name in flat_names(param))
    return tuple(name for name in names if not isinstance(name, int | np.integer))


def collective(eqn: Equation) -> tuple[Axes, Axes]:
    """The axes over which an equation makes its results equal, and those over which it makes them differ.

    A collective of unknown name is taken to make them differ.
    """
    # Our own collectives over lanes are calls whose rule says it.
    if by_rule := rule_of(eqn).joined_over:
        return by_rule, NO_AXES
    names = frozenset(axes_named(eqn))
    joins = eqn.primitive.name in _JOINING and eqn.params.get("axis_index_groups") is None
    return (names, NO_AXES) if joins else (NO_AXES, names)


def gathered_by(eqn: Equation) -> Axes:
    """The axes over which an equation gives all instances one value, typed as one that may differ."""
    return collective(eqn)[0] if eqn.primitive.name == "all_gather" else NO_AXES


def permutes_all(eqn: Equation) -> bool:
    """Whether an equation gives every instance the value of another: equal values then stay equal.

    An instance that gets nothing has zeros instead. How many instances there are is known only while the axes
    are bound.
    """
    if eqn.primitive.name != "ppermute":
        return False
    try:
        count = math.prod(map(jax.lax.axis_size, flat_names(eqn.params["axis_name"])))
    except NameError:
        return False
    return len({to for _, to in eqn.params["perm"]}) == count


def is_sum(eqn: Equation) -> bool:
    """Whether an equation sums over mapped axes."""
    return eqn.primitive.name in _SUMS


def name_given(eqn: Equation) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gives a value by this equation."""
    return eqn.params.get("name") if eqn.primitive.name == "name" else None


def forwards(eqn: Equation) -> bool:
    """Whether an equation's one result is its one operand, but for its dtype or type."""
    return eqn.primitive.name in ("name", "copy", "convert_element_type", _VARYING)


# Each result depends on the operand with its number only.
_ONE_BY_ONE = (*_JOINING, _VARYING, "optimization_barrier", "device_put")


def operands_of_results(eqn: Equation) -> list[Iterable[int]]:
    """For each result of an equation that runs no other jaxpr the numbers of the operands it depends on."""
    count, name = len(eqn.invars), eqn.primitive.name
    if name in _ONE_BY_ONE and count == len(eqn.outvars):
        return [(k,) for k in range(count)]
    if name == "sort":
        return [(*range(eqn.params["num_keys"]), k) for k in range(count)]
    return [range(count)] * len(eqn.outvars)


def is_opaque(eqn: Equation) -> bool:
    """Whether an equation runs a user's code that no jaxpr shows, as that of `jax.lax.custom_root` may."""
    return hides_function(eqn.primitive.name, eqn.params)


def hides_function(primitive: str, params: Mapping[str, Any]) -> bool:
    """The same of a call of a primitive. Others of the same name, such as that of `jnp.ldexp`, hold none."""
    return primitive == "call_hi_primitive" and any(
        callable(held)
        for param in params.values()
        for held in getattr(param, "__dict__", {}).values()
    )


def has_own_types(eqn: Equation) -> bool:
    """Whether the types of an equation's results come of its own rule, and not of jaxprs that it runs."""
    if _is_mapped_by_rule(eqn):
        return False
    flow = control_flow(eqn)
    return flow is None or flow[0] in ("cond", "while")


def is_backward(eqn: Equation) -> bool:
    """Whether an equation stands in the backward pass of a derivative."""
    return "transpose(" in str(getattr(eqn.source_info, "name_stack", ""))


def mapped_by_rule(eqn: Equation) -> Jaxpr | None:
    """What a call of a `custom_vmap` function runs where no `vmap` maps it; `None` for other equations.

    `None` also for one that has another form, `apart`, and for one whose rule exchanges values between lanes.
    """
    rule = rule_of(eqn)
    if not _is_mapped_by_rule(eqn) or rule.joins or rule.exchanged_over:
        return None
    return open_jaxpr(eqn.params["call"])


def exchanged_over(jaxpr: Jaxpr) -> Axes:
    """The axes over which a program's instances get anything from each other."""
    return NO_AXES.union(*map(exchanged_by, jaxpr.eqns))


def exchanged_by(eqn: Equation) -> Axes:
    """The axes over which the instances get anything from each other by one equation."""
    if eqn.primitive.name in ("axis_index", _VARYING):
        return NO_AXES
    # Our own functions with a rule for `vmap` say themselves what they exchange: their jaxprs do not show it.
    return rule_of(eqn).exchanged_over.union(*collective(eqn), *map(exchanged_over, jaxprs_of(eqn)))


# The names that JAX's users know, where its own differ.
_SPELLINGS = {
    "psum2": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "unreduced_reduce_scatter": "reduce_scatter",
}


def spelled(primitive: str) -> str:
    """The name by which users know a collective."""
    return _SPELLINGS.get(primitive, primitive)


def made_varying(eqn: Equation) -> Axes:
    """The axes over which an equation types its operand as varying, leaving its value as it is."""
    return frozenset(eqn.params.get("axes", ())) if eqn.primitive.name == _VARYING else NO_AXES


def rule_of(eqn: Equation) -> Rule:
    """The rule of a call of a `custom_vmap` function of ours; one that says nothing for other equations."""
    # JAX has wrapped it by `functools.update_wrapper`.
    rule = inspect.unwrap(eqn.params["rule"]) if _is_mapped_by_rule(eqn) else None
    return rule if isinstance(rule, Rule) else _NO_RULE


def _is_mapped_by_rule(eqn: Equation) -> bool:
    return eqn.primitive.name == "custom_vmap_call"


def unjoined(eqn: Equation) -> Jaxpr | None:
    """What an equation that reduces many arrays by few collectives does, with one for each array.

    `None` for any other equation.
    """
    if not rule_of(eqn).joins:
        return None
    body = open_jaxpr(eqn.params["call"])
    single = next(e for e in body.eqns if e.params.keys() & {"axes", "axis_name"})
    pairs = zip(list[Any](body.invars), list[Any](body.outvars), strict=True)
    return with_equations(body, [single.replace(invars=[x], outvars=[y]) for x, y in pairs])


def with_own_derivative(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr that has a derivative of its own."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def inputs_read(jaxpr: AnyJaxpr) -> list[bool]:
    """For each input of a traced program whether its results, or its effects, depend on it.

    A `shard_map` in the program is looked into.
    """
    used = {id(v) for v in open_jaxpr(jaxpr).outvars}
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(id(v) in used for v in eqn.outvars):
            continue
        inner = open_jaxpr(eqn.params["jaxpr"]) if eqn.primitive.name == "shard_map" else None
        read = [True] * len(eqn.invars) if inner is None else inputs_read(inner)
        used |= {id(v) for v, hit in zip(eqn.invars, read, strict=True) if hit}
    return [id(v) in used for v in open_jaxpr(jaxpr).invars]


def with_jaxprs(eqn: Equation, new: Mapping[int, Jaxpr]) -> Equation:
    """An equation that runs other jaxprs, each given under the `id` of the one that it replaces."""

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(replaced, value)) if any(map(_is_jaxpr, value)) else value
        if not _is_jaxpr(value):
            return value
        opened = open_jaxpr(value)
        inner = new.get(id(opened), opened)
        return inner if opened is value else value.replace(jaxpr=inner)

    return eqn.replace(params={name: replaced(value) for name, value in eqn.params.items()})


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Equation]) -> Jaxpr:
    """A jaxpr with other equations."""
    effects = set(jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=list(eqns), effects=effects)


def with_open(closed: AnyJaxpr, jaxpr: Jaxpr) -> AnyJaxpr:
    """A closed jaxpr with another one inside."""
    replace: Callable[..., AnyJaxpr] = closed.replace
    return jaxpr if open_jaxpr(closed) is closed else replace(jaxpr=jaxpr)


def calling(fun: Callable[..., list[Array]], eqn: Equation) -> Equation:
    """An equation that runs `fun` on the operands of `eqn`, in the place of `eqn` and of its line."""

    def settled(*operands: Array) -> list[Array]:
        # An operand returned as it came in would be no result of the call; a name makes it one.
        return [checkpoint_name(x, "settled") for x in fun(*operands)]

    avals = [jax.ShapeDtypeStruct(_shape(v), getattr(v.aval, "dtype", None)) for v in eqn.invars]
    (call,) = open_jaxpr(jax.make_jaxpr(jax.jit(settled))(*avals)).eqns
    operands, results = list(eqn.invars), list(eqn.outvars)
    return call.replace(invars=operands, outvars=results, source_info=eqn.source_info)


def runs(jaxpr: Jaxpr) -> Callable[..., list[Array]]:
    """An open jaxpr as a function of arrays."""
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))


def run_jaxpr(closed: ClosedJaxpr, arrays: Sequence[ArrayLike]) -> list[Array]:
    """The results of a traced program, as arrays even where they are constants of it."""
    outputs = core.jaxpr_as_fun(closed)(*arrays)
    return [
        x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype)
        for x, aval in zip(outputs, closed.out_avals, strict=True)
    ]


def needed(jaxpr: Jaxpr, results: Sequence[Operand], with_effects: bool) -> list[Equation]:
    """The equations that these results are made from, and with `with_effects` those that have effects."""
    wanted = {v for v in results if not is_literal(v)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if (with_effects and eqn.effects) or wanted.intersection(eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if not is_literal(v))
    return kept[::-1]


def run_only(closed: ClosedJaxpr, arrays: Sequence[ArrayLike], results: Sequence[int]) -> list[Any]:
    """Some results of a traced program, for which nothing that they do not need is run."""
    jaxpr = closed.jaxpr
    outvars = [jaxpr.outvars[i] for i in results]
    variables, values = [*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arrays]
    known: dict[Operand, Any] = dict(zip(variables, values, strict=True))

    def value(atom: Operand) -> Any:
        return getattr(atom, "val", None) if is_literal(atom) else known[atom]

    for eqn in needed(jaxpr, outvars, with_effects=False):
        with compat.in_place_of(eqn):
            params = eqn.primitive.get_bind_params(eqn.params)
            outputs = eqn.primitive.bind(*map(value, eqn.invars), **params)
        several = eqn.primitive.multiple_results
        known.update(zip(eqn.outvars, outputs if several else [outputs], strict=True))
    return list(map(value, outvars))


# The user called `set` or `replace`, which says for certain what the new value continues.
WRITTEN = "continues, as written"
# JAX rebuilt the State, as in `jax.tree.map`. The program may show that its arrays continue another state.
REBUILT = "continues, as rebuilt"


class Links:
    """The links that are made in one trace.

    **Arguments:**

    - `followed`: the kinds and metadata of the states that are linked.
    """

    def __init__(self, followed: frozenset[Hashable]) -> None:
        self.followed = followed
        # For each token the trace in which it was made, and the arrays of the State.
        self._made: dict[object, tuple[Any, Sequence[Any]]] = {}

    @contextmanager
    def linking(self) -> Iterator[None]:
        """Within this context every new State is linked to the one that it continues."""
        mark = _active.set(self)
        try:
            yield
        finally:
            _active.reset(mark)
            # JAX's caches keep tokens alive for longer than the trace, which holds much memory.
            self._made.clear()

    def written(self, value: Any, old: Any) -> tuple[Any, object]:
        """A value that continues `old`, and its token."""
        return self._linked(_WRITTEN, value, tree_util.tree_leaves(old), None)

    def rebuilt(self, value: Any, token: object) -> tuple[Any, object]:
        """The value of a State that JAX has rebuilt, and the State's new token."""
        trace, old = self._made.get(token, (None, ()))
        if trace is not compat.current_trace(()):
            old = ()
        return self._linked(_REBUILT, value, old, token)

    def _linked(
        self, continues: Callable[[Any, Any], Any], value: Any, old: Sequence[Any], token: object
    ) -> tuple[Any, object]:
        leaves, treedef = tree_util.tree_flatten(value)
        if not leaves or not all(isinstance(x, jax.Array) for x in leaves):
            # JAX also rebuilds nodes around placeholders, and a State may have no arrays at all.
            return value, token
        if old and any(x is not y for x, y in zip(leaves, old, strict=False)):
            before = [*old, *[old[0]] * len(leaves)]
            leaves = [continues(x, y) for x, y in zip(leaves, before, strict=False)]
            value = treedef.unflatten(leaves)
        token = object()
        self._made[token] = compat.current_trace(()), leaves
        return value, token


_active: ContextVar[Links | None] = ContextVar("links", default=None)
active = _active.get


def _link(name: str) -> Callable[[Any, Any], Any]:
    # It has a derivative of its own, so that no transformation drops the operand that it does not use.
    @jax.custom_jvp
    def continues(new: Any, old: Any) -> Any:
        return checkpoint_name(new, name)

    @continues.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return continues(*primals), tangents[0]

    return continues


_WRITTEN = _link(WRITTEN)
_REBUILT = _link(REBUILT)


def link_made(eqn: Any) -> str | None:
    """`WRITTEN` or `REBUILT` for an equation that links its first operand to its second, else `None`."""
    if not with_own_derivative(eqn) or len(eqn.invars) != 2:
        return None
    names = [name_given(e) for jaxpr in jaxprs_of(eqn) for e in jaxpr.eqns]
    return next((name for name in names if name in (WRITTEN, REBUILT)), None)


def traced_outside(fun: Callable[..., PyTree], *arrays: PyTree) -> ClosedJaxpr:
    """The jaxpr of `fun` as it is outside any mapped call, even if this is called inside one.

    JAX keeps what is mapped, and whether it checks types, for each thread.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    wide = bool(jax.config.jax_enable_x64)

    def trace() -> ClosedJaxpr:
        with jax.enable_x64(wide):
            traced: ClosedJaxpr = jax.make_jaxpr(fun)(*shapes)
        return traced

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trace).result()


def primitive_of_cast() -> Any:
    """The primitive that types a value as varying. JAX exports it under no name."""
    mesh, spec = jax.sharding.AbstractMesh((1,), ("x",)), jax.sharding.PartitionSpec("x")
    cast = jax.shard_map(
        lambda x: compat.vary(x, ["x"]),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=spec,
    )
    eqns = equations(open_jaxpr(traced_outside(cast, np.zeros(1, np.float32))))
    return next(eqn.primitive for eqn in eqns if eqn.primitive.name == _VARYING)


def run_varying(closed: ClosedJaxpr, arrays: Sequence[Array]) -> list[Array]:
    """The results, inside a checked `shard_map`, of a program that was traced outside of any.

    Its equations do not say what varies. So every operand is typed as varying over all axes over which any of
    the arrays does.
    """
    over = NO_AXES.union(*map(compat.varying, arrays))

    def run(jaxpr: Jaxpr, consts: Sequence[ArrayLike], arguments: Sequence[Array]) -> list[Array]:
        known: dict[Operand, ArrayLike] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True)
        )

        def value(atom: Operand) -> Array:
            x = getattr(atom, "val", None) if is_literal(atom) else known[atom]
            return compat.vary(jnp.asarray(x, getattr(atom.aval, "dtype", None)), over)

        for eqn in jaxpr.eqns:
            operands = list(map(value, eqn.invars))
            match control_flow(eqn):
                case ("call", inner):
                    outputs = run(inner, consts_of(eqn), operands)
                case _:
                    result = _in_place(eqn, operands)
                    outputs = list(result) if eqn.primitive.multiple_results else [result]
            known.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(value, jaxpr.outvars))

    return run(open_jaxpr(closed), closed.consts, arrays)


# Calls whose derivative is that of what they call.
CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


def run_by(
    name: str, operands: Sequence[Any], params: Mapping[str, Any]
) -> list[tuple[AnyJaxpr, list[Any]]]:
    """The jaxprs that a call, a branch or a loop runs, each with its operands; scanned ones are whole."""
    if name in CALLS:
        return [(params.get("jaxpr", params.get("call_jaxpr")), list(operands))]
    if name == "cond":
        return [(branch, list(operands[1:])) for branch in params["branches"]]
    if name == "while":
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        of_cond, of_body, init = operands[:first], operands[first:second], operands[second:]
        return [
            (params["cond_jaxpr"], [*of_cond, *init]),
            (params["body_jaxpr"], [*of_body, *init]),
        ]
    return [(params["jaxpr"], list(operands))] if name == "scan" else []


def run_anew(
    name: str,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    runs: Callable[[AnyJaxpr], Callable[..., Sequence[Any]]],
) -> list[Array]:
    """What a call, a branch or a loop gives if it is traced again, with what `runs` makes of its jaxprs."""
    (jaxpr, given), *others = run_by(name, operands, params)
    if name in CALLS:
        fun = runs(jaxpr)
        if "policy" in params:
            again = jax.checkpoint(fun, policy=params["policy"], prevent_cse=params["prevent_cse"])
            return list(again(*given))
        fun.__name__ = params.get("name", name)
        return list(jax.jit(fun)(*given))
    if name == "cond":
        branches = [jaxpr, *(branch for branch, _ in others)]
        return list(jax.lax.switch(operands[0], list(map(runs, branches)), *given))
    if name == "while":
        ((body, of_body),) = others
        carried = len(given) - params["cond_nconsts"]
        closed, of_body = given[:-carried], of_body[:-carried]
        holds: Callable[[Any], Any] = lambda carry: runs(jaxpr)(*closed, *carry)[0]
        step_of: Callable[[Any], Any] = lambda carry: tuple(runs(body)(*of_body, *carry))
        if jaxpr.out_avals[0].shape:
            # A `vmap` has given each lane a condition: where it no longer holds the carry stays.
            in_lanes, of_all = holds, step_of
            holds = lambda carry: jnp.any(in_lanes(carry))
            step_of = lambda carry: _chosen(in_lanes(carry), of_all(carry), carry)
        return list(jax.lax.while_loop(holds, step_of, tuple(given[-carried:])))
    if "num_consts" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        of_consts, of_carry, _ = params["ft_in"].update(operands).unpack()
        consts, carries = len(list(of_consts)), len(list(of_carry))

    def step(carry: Any, x: Any) -> Any:
        results = runs(jaxpr)(*given[:consts], *carry, *x)
        return tuple(results[:carries]), tuple(results[carries:])

    init, scanned = tuple(given[consts : consts + carries]), tuple(given[consts + carries :])
    how = {key: params[key] for key in ("length", "reverse", "unroll")}
    after, stacked = jax.lax.scan(step, init, scanned, **how)
    return [*after, *stacked]


def _chosen(lanes: Array, some: Sequence[Array], others: Sequence[Array]) -> tuple[Array, ...]:
    """Arrays with the lanes of `some` that are chosen, and else those of `others`."""
    over: Callable[[Array], Array] = lambda x: jax.lax.broadcast_in_dim(
        lanes, x.shape, range(lanes.ndim)
    )
    return tuple(jax.lax.select(over(x), x, y) for x, y in zip(some, others, strict=True))


def _in_place(eqn: Equation, operands: Sequence[Array]) -> Any:
    """What an equation makes. A sum over axes of arrays is written as one over mapped axes after a `vmap`."""
    reduce: dict[str, Callable[..., Array]] = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}
    if (of_numpy := reduce.get(eqn.primitive.name)) is None:
        return eqn.primitive.bind(*operands, **eqn.params)
    outputs = [of_numpy(x, axis=eqn.params["axes"]) for x in operands]
    return outputs if eqn.primitive.multiple_results else outputs[0]


def consts_of(eqn: Equation) -> Sequence[ArrayLike]:
    """The constants that a called jaxpr is closed over."""
    called = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    consts = (getattr(jaxpr, "consts", None) for jaxpr in called)
    return next((held for held in consts if held is not None), ())
