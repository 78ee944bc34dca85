"""Many random programs run at once: on devices, emulated, and as plain Python, compared array by array."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from statemesh.testing import emulate

from .source import Program, executed


# Small programs of which each is run a few times: how fast they are does not matter.
QUICKLY: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Values are of a few units, chains short, reductions over some ten terms.
TOLERANCE = 2e-4


class OneShard:
    """`jax.lax` for a function that runs on the whole arrays, as the only shard: control flow is Python's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)

    def psum(self, x: Any, axis_name: Any) -> Any:
        return x

    pmean = pmax = pmin = psum

    def axis_index(self, axis_name: Any) -> Any:
        return jnp.int32(0)

    def all_gather(self, x: Any, axis_name: Any, **options: Any) -> Any:
        assert options.pop("tiled") and set(options) <= {"axis", "to"}
        return x

    def cond(self, on: Any, yes: Any, no: Any, *given: Any) -> Any:
        return yes(*given) if on else no(*given)

    def switch(self, index: Any, branches: Any, *given: Any) -> Any:
        return branches[int(index)](*given)

    def fori_loop(self, start: int, stop: Any, body: Any, carry: Any) -> Any:
        for i in range(start, int(stop)):
            carry = body(i, carry)
        return carry

    def while_loop(self, going: Any, body: Any, carry: Any) -> Any:
        while going(carry):
            carry = body(carry)
        return carry

    def scan(self, body: Any, carry: Any, over: Any) -> Any:
        stacked = []
        for item in over:
            carry, one = body(carry, item)
            stacked.append(one)
        return carry, None if stacked[0] is None else jnp.stack(stacked)


class Uncompiled:
    """`jax` without what compiles or recomputes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def jit(self, fun: Any) -> Any:
        return fun

    checkpoint = jit


def plain(program: Program) -> Callable[..., Any]:
    """The program without a mesh, without the engine, and without anything compiled for it."""
    step = executed(program.code.definitions, lax=OneShard(), jax=Uncompiled())["step"]
    return lambda *args: step(*jax.tree.map(jnp.asarray, args))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a program gives something else than its reference."""

    program: Program
    what: str


def _off(program: Program, got: Any, want: Any, how: str) -> list[Difference]:
    why = difference(got, want)
    return [Difference(program, f"{how}: {why}")] if why else []


def difference(got: Any, want: Any) -> str:
    """What is off in one result, or nothing."""
    tree_util: Any = jax.tree_util  # Of its `PyTreeDef` the stubs know nothing.
    paths, structure = tree_util.tree_flatten_with_path(got)
    if structure != tree_util.tree_structure(want):
        return "another structure"
    for (path, x), y in zip(paths, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        x, y = _data(x), _data(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: {x.dtype}{x.shape} for {y.dtype}{y.shape}"
        if np.issubdtype(x.dtype, np.integer):
            if not np.array_equal(x, y):
                return f"{name}: {x} for {y}"
        elif not np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE):
            return f"{name}: {x} for {y}"
    return ""


def _data(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_host(tree: Any) -> Any:
    """Arrays as a new call may get them, wherever they were."""

    def leaf(x: Any) -> Any:
        return jax.random.wrap_key_data(_data(x)) if _is_key(x) else np.asarray(x)

    return jax.tree.map(leaf, tree)


def compiled(calls: Sequence[Callable[..., Any]], args: Sequence[Any]) -> Callable[[Any], Any]:
    """All of these calls in one program."""

    def run(all_args: Any) -> list[Any]:
        return [call(*own) for call, own in zip(calls, all_args, strict=True)]

    done: Any = jax.jit(run).lower(list(args)).compile(QUICKLY)
    return lambda all_args: jax.block_until_ready(done(list(all_args)))


def check_all(programs: Sequence[Program], *, emulated_too: bool = False) -> list[Difference]:
    """Run programs of one kind; what is off.

    All different codes are compiled as one, and run once for each of their values; with the first ones again,
    on the model that came back. Portable programs are
    compared with the plain function, smooth ones with its gradients too; others with what `emulate` says.

    **Arguments:**

    - `emulated_too`: whether portable ones are compared with `emulate` as well.
    """
    by_code: dict[Any, list[Program]] = {}
    for program in programs:
        by_code.setdefault(program.code, []).append(program)
    groups = list(by_code.values())
    first = [group[0] for group in groups]
    args = [program.args for program in first]
    on_devices = compiled([_call(p, p.mapped) for p in first], args)
    portable = first[0].portable
    replayed = None
    if not portable or emulated_too:
        replayed = compiled([_call(p, _emulated(p)) for p in first], args)
    off: list[Difference] = []
    for k in range(max(map(len, groups))):
        # Where there are no more values, the last ones stand in, and are not looked at again.
        batch = [group[min(k, len(group) - 1)] for group in groups]
        new = [i for i, group in enumerate(groups) if k < len(group)]
        args = [program.args for program in batch]
        for call in ("first call", "second call")[: 1 + (k == 0)]:
            found = on_devices(args)
            if replayed is not None:
                wanted = replayed(args)
                off += [
                    d for i in new for d in _off(batch[i], found[i], wanted[i], f"emulated, {call}")
                ]
            if portable:
                for i in new:
                    want = _call(batch[i], plain(batch[i]))(*args[i])
                    off += _off(batch[i], found[i], want, f"plain, {call}")
            args = [(on_host(made[0][1]), *own[1:]) for made, own in zip(found, args, strict=True)]
    return off


def _emulated(program: Program) -> Callable[..., Any]:
    return lambda *args: emulate(program.mapped, *args)


def _call(program: Program, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, and for smooth programs its gradient."""
    if not program.smooth:
        return lambda *args: (call(*args),)

    def loss(inexact: Any, rest: Any) -> Any:
        result = call(*eqx.combine(inexact, rest))
        floats = [x for x in jax.tree.leaves(result) if eqx.is_inexact_array(x)]
        # Of weights that are nowhere the same.
        weights = [jnp.cos(jnp.arange(1.0, x.size + 1)).reshape(x.shape) for x in floats]
        return sum(((x * w).sum() for x, w in zip(floats, weights, strict=True)), 0.0), result

    def run(*args: Any) -> Any:
        inexact, rest = eqx.partition(args, eqx.is_inexact_array)
        gradient, result = jax.grad(loss, has_aux=True)(inexact, rest)
        return result, gradient

    return run
