"""A traced program, replayed over stacked shards. The one file here that knows jaxprs."""

import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _errors as errors
from ._collectives import RULES, collective, names_of
from ._control import Frame, Gaps, Step, cond, one_by_one, scan, while_
from ._promises import Promise, gap
from ._stacked import Scope, Stacked, as_names, names_of_spec
from ._tokens import has_hash


core: Any = importlib.import_module("jax.extend.core")

_CONTROL: Mapping[str, Step] = {"cond": cond, "while": while_, "scan": scan}

# Equations that run one jaxpr, once. What is differentiated is the program, never its replay: so a rule for
# derivatives, or for `vmap`, has been used before this sees it, or is not wanted.
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call"),
)
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")

# Equations that say where a value lies, or what its type is.
_IDENTITIES = (
    *("pvary", "pcast", "reshard", "sharding_constraint", "mesh_cast", "device_put"),
    "layout_constraint",
)
_LAYOUTS = ("sharding", "out_sharding")

# Equations whose rule for `vmap` does not do what shards do: they draw other numbers, or ask Python once.
_ALONE = (
    *("random_bits", "random_split", "random_fold_in", "rng_bit_generator", "pure_callback"),
    *("io_callback", "ffi_call"),
)
_SAFE_KEYS = ("fry", "threefry2x32")


class Replay:
    """A program of several inputs, run on one device.

    **Arguments:**

    - `name`: what messages call it.
    - `jaxpr`: the program; its constants count as inputs, before the others.
    """

    def __init__(self, name: str, jaxpr: Any) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.promises: list[Promise] = list(_promises(jaxpr))
        self._promise_at = {(id(p.eqn), p.index): i for i, p in enumerate(self.promises)}
        count = len(self.promises)
        self.no_gaps: Gaps = (np.zeros(count, np.float32), np.zeros((count, 2), np.int32))
        self._axes: dict[Any, list[tuple[Hashable, ...]]] = {}

    def __call__(self, *arrays: Any) -> tuple[list[Any], Gaps]:
        frame = Frame(Scope(), self.no_gaps)
        made = self._run(self.jaxpr, [Stacked(x) for x in arrays], frame)
        return [value.x for value in made], frame.gaps

    def run(self, jaxpr: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        """A jaxpr, with constants or without, as a part of the program."""
        consts = [Stacked(x) for x in getattr(jaxpr, "consts", ())]
        return self._run(_open(jaxpr), [*consts, *values], frame)

    def axes(
        self, jaxpr: Any, values: Sequence[Stacked], scope: Scope
    ) -> list[tuple[Hashable, ...]]:
        """Over which axes the results of a jaxpr are stacked."""
        stacks = tuple(value.axes for value in values)
        key = (id(jaxpr), stacks, tuple(scope.sizes), tuple(scope.places))
        if key not in self._axes:

            def probe(*xs: Any) -> None:
                given = [Stacked(x, axes) for x, axes in zip(xs, stacks, strict=True)]
                made = self.run(jaxpr, given, Frame(scope, self.no_gaps))
                self._axes[key] = [value.axes for value in made]

            jax.eval_shape(probe, *[value.x for value in values])
        return self._axes[key]

    def _run(self, jaxpr: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def value_of(atom: Any) -> Stacked:
            if isinstance(atom, core.Literal):
                # Without the mesh that was around where it was made.
                return Stacked(np.asarray(atom.val, atom.aval.dtype))
            found: Stacked = known[atom]
            return found

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, [value_of(atom) for atom in eqn.invars], frame)
            known.update(zip(eqn.outvars, made, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, values: list[Stacked], frame: Frame) -> list[Stacked]:
        name, scope = eqn.primitive.name, frame.scope
        if is_identity(eqn):
            return values
        if name in _CALLS:
            return self.run(called(eqn), values, frame)
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, values, frame)
        if name == "shard_map":
            return self._shard_map(eqn, values, frame)
        used = _axes_named(eqn) & {*scope.sizes, *scope.places}
        if name == "axis_index" and used:
            return [_axis_index(eqn.params["axis_name"], scope)]
        if used:
            self._check_collective(eqn, used, scope)
            return [collective(eqn, value, scope) for value in values]
        if why := _not_replayed(eqn):
            raise errors.not_replayed(self.name, name, why)
        over = scope.union(values)
        if over and name in _ALONE and not _draws_safely(eqn):
            return one_by_one(_plain, over, self, eqn, values, frame)
        try:
            return _plain(self, eqn, values, frame)
        except NotImplementedError:
            if not over:
                raise
            # Nothing is known of how it is mapped.
            return one_by_one(_plain, over, self, eqn, values, frame)
        except NameError as error:
            # A collective that is not known, over an axis that nothing binds here.
            raise errors.not_replayed(self.name, name) from error

    def _check_collective(self, eqn: Any, used: set[Hashable], scope: Scope) -> None:
        name = eqn.primitive.name
        known = name in RULES and used == {*names_of(eqn)} <= {*scope.sizes}
        if not known or len(eqn.invars) != len(eqn.outvars):
            raise errors.not_replayed(self.name, name)

    def _shard_map(self, eqn: Any, values: list[Stacked], frame: Frame) -> list[Stacked]:
        params, scope = eqn.params, frame.scope
        sizes = {name: params["mesh"].shape[name] for name in _new_axes(eqn)}
        for spec in (*params["in_specs"], *params["out_specs"]):
            if again := [name for name in names_of_spec(spec) if name not in sizes]:
                # JAX makes such ones for the gradient of nested calls, and cannot compile them.
                why = f"one inside another names {again[0]!r}, which the outer one maps over"
                raise errors.not_replayed(self.name, "shard_map", why)
        inside = Scope({**scope.sizes, **sizes}, scope.places)
        split = [inside.split(v, spec) for v, spec in zip(values, params["in_specs"], strict=True)]
        inner = Frame(inside, frame.gaps)
        made = self.run(params["jaxpr"], split, inner)
        for k, (value, spec) in enumerate(zip(made, params["out_specs"], strict=True)):
            left = [
                name for name in value.axes if name in sizes and name not in names_of_spec(spec)
            ]
            made[k] = self.promised(eqn, k, value, left, inner)
        frame.gaps = inner.gaps
        return [inside.joined(v, spec) for v, spec in zip(made, params["out_specs"], strict=True)]

    def promised(
        self, eqn: Any, index: int, value: Stacked, left: Sequence[Hashable], frame: Frame
    ) -> Stacked:
        """The one copy that is kept along the axes `left`; that shards have the same is noted, or not."""
        if not left:
            return value
        at = self._promise_at[id(eqn), index]
        amount, place = gap(value, left)
        here = np.arange(len(self.promises)) == at
        where = jnp.stack([self.promises[at].seen(value, left), place])
        frame.note(jnp.where(here, amount, 0), jnp.where(here[:, None], where, 0))
        first = tuple(0 if name in left else slice(None) for name in value.axes)
        return Stacked(value.x[first], tuple(name for name in value.axes if name not in left))

    def joined(self, eqn: Any) -> frozenset[Hashable]:
        """The axes over which there are collectives in what an equation runs."""
        return frozenset(name for one in _collectives(eqn) for name in names_of(one))


def is_identity(eqn: Any) -> bool:
    """Whether an equation hands its operands on as they are."""
    return eqn.primitive.name in _IDENTITIES


def called(eqn: Any) -> Any:
    """The jaxpr that a call runs."""
    return next(eqn.params[key] for key in _CALLED if hasattr(eqn.params.get(key), "eqns"))


def collectives_in(eqn: Any) -> list[str]:
    """The collectives in what an equation runs, by name."""
    return sorted({one.primitive.name for one in _collectives(eqn)})


def draws(closed: Any) -> bool:
    """Whether a program draws random numbers."""
    return any(eqn.primitive.name in _DRAWS for eqn in _all_equations(closed.jaxpr))


_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A traced program as a function of its constants and its inputs."""
    count = len(closed.consts)

    def run(*arrays: Any) -> list[Any]:
        opened = core.ClosedJaxpr(closed.jaxpr, arrays[:count])
        made: list[Any] = core.jaxpr_as_fun(opened)(*arrays[count:])
        return made

    return run


def _plain(replay: Any, eqn: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    del replay
    # Where parts lie on a mesh means nothing here.
    params = {key: None if key in _LAYOUTS else value for key, value in eqn.params.items()}
    bind = partial(eqn.primitive.bind, **params)
    several = eqn.primitive.multiple_results
    return frame.scope.over_axes(lambda *xs: bind(*xs) if several else [bind(*xs)], values)


def _axis_index(name: Hashable, scope: Scope) -> Stacked:
    if name in scope.places:
        return Stacked(scope.places[name])
    return Stacked(jnp.arange(scope.sizes[name], dtype=jnp.int32), (name,))


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple) else (value,):
            if hasattr(one, "eqns"):
                yield _open(one)


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jaxprs(eqn):
            yield from _all_equations(inner)


def _collectives(eqn: Any) -> Iterator[Any]:
    for jaxpr in _jaxprs(eqn):
        for one in _all_equations(jaxpr):
            if one.primitive.name in RULES:
                yield one


def _new_axes(eqn: Any) -> list[Hashable]:
    """The axes that a `shard_map` maps over, in the order of its mesh."""
    new = eqn.params["newly_manual_axes"]
    return [name for name in eqn.params["mesh"].axis_names if name in new]


def _promises(jaxpr: Any) -> Iterator[Promise]:
    """Every result of a `shard_map` of which one copy is kept for several shards; every predicate."""
    for eqn in {id(eqn): eqn for eqn in _all_equations(jaxpr)}.values():
        name = eqn.primitive.name
        if name in ("cond", "while"):
            yield Promise(eqn, 0)
        if name == "shard_map":
            for k, spec in enumerate(eqn.params["out_specs"]):
                if {*_new_axes(eqn)} - {*names_of_spec(spec)}:
                    yield Promise(eqn, k, spec)


def _axes_named(eqn: Any) -> set[Hashable]:
    """Whatever may be the name of a mesh axis among the parameters of an equation."""
    values = [value for key, value in eqn.params.items() if "axes" in key or "axis" in key]
    # Numbers are axes of arrays.
    named = [one for value in values for one in as_names(value) if not isinstance(one, int)]
    return {one for one in named if has_hash(one)}


def _not_replayed(eqn: Any) -> str:
    """Why an equation that is no collective cannot be replayed; nothing if it can."""
    if any(hasattr(var.aval, "inner_aval") for var in (*eqn.invars, *eqn.outvars)):
        return "it reads or writes a reference"
    for inner in _jaxprs(eqn):
        for one in _all_equations(inner):
            name = one.primitive.name
            if name in RULES or name in ("shard_map", "axis_index"):
                return f"it runs `{name}` inside"
    return ""


def _draws_safely(eqn: Any) -> bool:
    """Whether random numbers, and new keys, are the same however many keys they come of at once."""
    if eqn.primitive.name not in ("random_bits", "random_split", "random_fold_in"):
        return False
    dtype = eqn.invars[0].aval.dtype
    return any(name in str(dtype) for name in _SAFE_KEYS)
