"""Values that differ between shards although JAX types them as the same on all."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._base import _errors as errors
from tests.helpers import counted, default_kind, make_mesh, slow


each_kind = pytest.mark.usefixtures("each_kind")


# A row for each of four shards.
ROWS = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
KEY = jax.random.key(0)
WHOLE = P()


def assert_replicated(x: jax.Array, expected: Any) -> None:
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected)


def mapped(fun: Callable[..., Any], out_specs: Any = WHOLE, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (None, P("x")), out_specs, **options)


def per_shard(functions: dict[str, Callable[[Any], Any]]) -> dict[str, np.ndarray]:
    """What each function makes of the row of every shard, stacked."""
    stacked = lambda _, x: {name: fun(x)[None] for name, fun in functions.items()}
    results: dict[str, Any] = mapped(stacked, P("x"))(None, ROWS)
    return {name: np.asarray(y) for name, y in results.items()}


# Branches and loops over a state whose predicate differs between shards.


def add_one(state: sm.State) -> sm.State:
    return state.set(state.value + 1)


def same(state: sm.State) -> sm.State:
    return state


def own(x: jax.Array) -> jax.Array:
    """A predicate that differs between shards."""
    return jnp.sum(x) > 0


def in_cond(state: sm.State, x: jax.Array) -> Any:
    return lax.cond(own(x), add_one, same, state)


def in_while(state: sm.State, x: jax.Array) -> Any:
    steps = jnp.sum(10 * x).astype(int)
    count = lambda c: (c[0] - 1, add_one(c[1]))
    return lax.while_loop(lambda c: c[0] > 0, count, (steps, state))[1]


def in_scan(state: sm.State, x: jax.Array) -> Any:
    body = lambda pair, _: ((pair[1], in_cond(pair[0], x)), None)
    return lax.scan(body, (state, state), length=3)[0][0]


def in_loop_with_consts(state: sm.State, x: jax.Array) -> Any:
    other = in_cond(state, x).value
    return lax.fori_loop(0, 3, lambda i, s: s.set(s.value + other), state)


Step = Callable[[sm.State, jax.Array], Any]
HIDING: dict[str, Step] = {
    "state in cond": in_cond,
    "state in switch": lambda s, x: lax.switch(
        lax.axis_index("x") % 3, [same, add_one, add_one], s
    ),
    "state in while": in_while,
    "state in scan": in_scan,
    "state in a loop with constants": in_loop_with_consts,
    "state in remat": jax.checkpoint(in_cond),
}


# Under `jax.vmap` a `cond` becomes a select, whose result JAX types right.
@pytest.mark.parametrize("around", [jax.jit, jax.grad, jax.vmap])
def test_it_is_refused_inside_transformations(around: Any) -> None:
    def total(x: jax.Array) -> Any:
        return mapped(in_cond)(sm.State(1.0), x).value

    with pytest.raises(sm.DivergedStateError, match=r"state: State.* varies over 'x'"):
        around(total)(ROWS[None] if around is jax.vmap else ROWS)


@each_kind
def test_the_axes_of_the_spec_may_differ() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        go = lambda s: s.set(s.value + lax.psum(1.0, "y"))
        return lax.cond(lax.axis_index("x") > 1, go, same, state)

    for spec in (P("x"), sm.PerShard("x")):
        call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x")), P())
        after = call(sm.State(np.zeros(4, np.float32), spec=spec), ROWS)
        np.testing.assert_array_equal(after.value, [0, 0, 2, 2])


def reduced_after(state: sm.State, x: jax.Array) -> Any:
    return state.set(state.value + lax.pmax(in_cond(state, x).value, "x") - 1)


def passed_through(state: sm.State, x: jax.Array) -> Any:
    steps, y = jnp.sum(10 * x).astype(int) % 5, lax.pcast(1.0, "x", to="varying")
    body = lambda c: (c[0] - 1, c[1], c[2] * 2)
    _, after, _ = lax.while_loop(lambda c: c[0] > 0, body, (steps, state, y))
    return add_one(lax.cond(own(x), same, same, after))


ALIKE: dict[str, Step] = {
    "a sum": lambda s, x: lax.cond(lax.psum(jnp.sum(x), "x") != 0, add_one, same, s),
    "any shard": lambda s, x: lax.cond(lax.pmax(own(x).astype(int), "x") > 0, add_one, same, s),
    "reduced after": reduced_after,
    "passed through": passed_through,
    "in a loop": lambda s, x: lax.while_loop(lambda s: s.value < 2, add_one, s),
}
# These differ, and JAX types them so.
TYPED: dict[str, Step] = {
    "where": lambda s, x: s.set(jnp.where(own(x), s.value + 1, s.value)),
    "cast": lambda s, x: s.set(lax.pcast(in_cond(s, x).value, "x", to="varying")),
}


@each_kind
def test_what_is_the_same_on_all_shards_passes() -> None:
    def write(states: Any, x: jax.Array) -> Any:
        return {name: (ALIKE | TYPED)[name](state, x) for name, state in states.items()}

    # Where types have lost something it is traced again, and a third time where the user has cast it.
    for kinds, reduce, times in ((ALIKE, None, 2), (TYPED, "max", 3)):
        fun, count = counted(write)
        call = mapped(fun)
        states = {name: sm.State(1.0, reduce=reduce) for name in kinds}
        for _ in range(2):
            for name, state in call(states, ROWS).items():
                assert float(state.value) == 2, name
        assert count.times == times


def test_keys_need_no_such_check() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        return lax.cond(own(x), lambda r: r.split()[1], lambda r: r, rng)

    after = mapped(fun)(sm.RandomState(KEY), ROWS)
    assert after.key.sharding.is_fully_replicated


# What follows loses what varies by a rule of JAX's types. Each function takes the row of one shard.


def own_key(x: jax.Array) -> Any:
    return jax.random.fold_in(KEY, (x[0, 0] * 1000).astype(jnp.uint32))


def ordered(x: jax.Array) -> Any:
    return jnp.argsort(x[0])


def on_host(x: Any) -> Any:
    return np.asarray(x).sum()


def scaled(x: jax.Array) -> Any:
    # The blocks that share a scale have 32 entries.
    wide = jnp.tile(x[0], 8).reshape(1, 32).astype(jnp.float8_e4m3fn)
    scale = jnp.ones((1, 1), jnp.float8_e8m0fnu)
    return lax.scaled_dot(
        wide, wide.T, lhs_scale=scale, rhs_scale=scale.T, preferred_element_type=jnp.float32
    )


@jax.custom_jvp
def with_own_jvp(x: jax.Array) -> Any:
    return ordered(x)


@jax.custom_vjp
def with_own_vjp(x: jax.Array) -> Any:
    return ordered(x)


@jax.custom_batching.custom_vmap
def with_own_vmap(x: jax.Array) -> Any:
    return ordered(x)


with_own_jvp.defjvp(lambda xs, ts: (ordered(*xs), np.zeros(4, jax.dtypes.float0)))
with_own_vjp.defvjp(lambda x: (ordered(x), None), lambda _, g: (jnp.zeros((1, 4)),))
with_own_vmap.def_vmap(lambda n, batched, x: (jax.vmap(ordered)(x), True))


def carried_in_while(x: jax.Array) -> Any:
    body = lambda pair: (pair[0] + 1, ordered(x)[pair[1]])
    return lax.while_loop(lambda pair: pair[0] < 1, body, (0, jnp.arange(4)))[1]


def chained(x: jax.Array) -> Any:
    """A reduction in which a value takes two steps from the first operand to the last result."""
    join = lambda a, b: (a[0] + b[0], a[0] + b[1], a[1] + b[2])
    zeros = (jnp.float32(0),) * 3
    return lax.reduce((x[0], jnp.ones(4), jnp.ones(4)), zeros, join, (0,))[2]


TOTAL = jax.ShapeDtypeStruct((), jnp.float32)
LOSING: dict[str, Callable[[Any], Any]] = {
    "argsort": ordered,
    "sort_key_val": lambda x: lax.sort_key_val(x[0], jnp.arange(4))[1],
    "sort": lambda x: lax.sort((jnp.arange(4) // 2, x[0], jnp.arange(4)), num_keys=2)[2],
    "permutation": lambda x: jax.random.permutation(own_key(x), 4),
    "choice": lambda x: jax.random.choice(own_key(x), 20, (3,), replace=False),
    "frexp": lambda x: jnp.frexp(x[0])[1],
    "ldexp": lambda x: jnp.ldexp(jnp.float32(1), jnp.ravel(x).astype(int)),
    "pure_callback": lambda x: jax.pure_callback(on_host, TOTAL, x, vmap_method="sequential"),
    "io_callback": lambda x: jax.experimental.io_callback(on_host, TOTAL, x),
    "while": lambda x: lax.while_loop(lambda i: i < 10 * jnp.abs(x).sum(), lambda i: i + 1, 0),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0),
    # And argsort inside of other things.
    "jit": jax.jit(ordered),
    "checkpoint": jax.checkpoint(ordered),
    "custom_jvp": with_own_jvp,
    "custom_vjp": with_own_vjp,
    "custom_vmap": with_own_vmap,
    "lanes": jax.vmap(jnp.argsort),
    "stacked in scan": lambda x: lax.scan(lambda c, x: (c, jnp.argsort(x)), 0, x)[1],
    "carried in scan": lambda x: lax.scan(
        lambda c, _: (ordered(x)[c], None), jnp.arange(4), length=2
    )[0],
    "carried in while": carried_in_while,
    "branch": lambda x: lax.cond(True, lambda: ordered(x), lambda: jnp.arange(4)),
    "reduction of several arrays": chained,
    "split again": lambda x: jnp.argsort(lax.all_gather(x, "x")[lax.axis_index("x"), 0]),
}
if hasattr(lax, "scaled_dot"):
    LOSING["scaled_dot"] = scaled


LOSING |= {
    name: lambda x, step=step: step(sm.State(1.0), x).value  # type: ignore[misc]
    for name, step in HIDING.items()
}


def write_all(states: Any, x: jax.Array) -> Any:
    return {name: state.set(LOSING[name](x)) for name, state in states.items()}


def largest(old: Any, new: Any, axis_names: Any) -> Any:
    return lax.pmax(new, axis_names)


@pytest.fixture(scope="module")
def each() -> dict[str, np.ndarray]:
    return per_shard(LOSING)


@pytest.mark.slow
@each_kind
def test_what_types_have_lost_is_refused(
    each: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "MOST_LISTED", 1000)
    with pytest.raises(sm.SpecError) as raised:
        mapped(lambda _, x: {name: fun(x) for name, fun in LOSING.items()})(None, ROWS)
    for name, values in each.items():
        assert not all(np.array_equal(y, values[0]) for y in values)
        assert re.search(rf"\['{name}'\]: .* varies over 'x' but its out_spec", str(raised.value))
    lanes = sm.pmap2(write_all, in_axes=(None, 0), axis_name="x")
    # An error names so many states.
    for k in range(0, len(each), 10):
        states = {name: sm.State(each[name][0]) for name in list(each)[k : k + 10]}
        with pytest.raises(sm.DivergedStateError) as raised_of_states:
            mapped(write_all)(states, ROWS)
        with pytest.raises(sm.BatchAxisError) as raised_of_lanes:
            lanes(states, ROWS[:, None])
        for name in states:
            shown = rf"states\['{name}'\]: State.* varies over 'x'"
            assert re.search(shown, str(raised_of_states.value))
            assert f"states['{name}']: State" in str(raised_of_lanes.value)


@pytest.mark.parametrize("how", ["checked", "function", slow("unchecked"), "devices"])
def test_what_types_have_lost_is_merged(each: dict[str, np.ndarray], how: str) -> None:
    reduce: Any = largest if how == "function" else "max"
    states = {name: sm.State(values[0], reduce=reduce) for name, values in each.items()}
    with default_kind(AxisType.Auto if how == "unchecked" else AxisType.Explicit):
        if how == "devices":
            after = sm.pmap2(write_all, in_axes=(None, 0), axis_name="x")(states, ROWS[:, None])
        else:
            after = mapped(write_all, check_vma=how != "unchecked")(states, ROWS)
    for name, values in each.items():
        assert_replicated(after[name].value, values.max(axis=0))


def test_a_loss_that_types_have_lost_is_reduced_once(each: dict[str, np.ndarray]) -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        return ordered(x)[0].astype(jnp.float32), w

    step = sm.value_and_grad(loss_fn, axis_name="x")
    loss = mapped(lambda w, x: step(w, x)[0][0])(jnp.ones(4), ROWS)
    assert_replicated(loss, each["argsort"][:, 0].mean())


def summed_in_a_function_of_its_own(x: jax.Array) -> Any:
    @jax.custom_batching.custom_vmap
    def total(x: jax.Array) -> Any:
        return lax.psum(x, "x")

    total.def_vmap(lambda n, batched, x: (lax.psum(x, "x"), True))
    return total(ordered(x))


def root_of_a_sum(x: jax.Array) -> Any:
    solve = lambda f, start: lax.psum(start - f(start), "x")
    return lax.custom_root(lambda v: v - x[0], jnp.zeros(4), solve, lambda g, y: y)


SAME: dict[str, Callable[[Any], Any]] = {
    "gathered": lambda x: jnp.argsort(lax.all_gather(x, "x", to="invarying")[:, 0, 0]),
    # JAX types the gathered array as one that varies.
    "gathered, typed to vary": lambda x: jnp.argsort(lax.all_gather(x, "x")[:, 0, 0]),
    "beside a barrier": lambda x: lax.optimization_barrier((ordered(x), jnp.arange(4)))[1],
    "psum": lambda x: lax.psum(ordered(x), "x"),
    "our sums": lambda x: sm.pmax(ordered(x), "x") + sm.psum(ordered(x), "x"),
    "a function of its own": summed_in_a_function_of_its_own,
    "custom_root": root_of_a_sum,
}


@each_kind
def test_what_is_the_same_passes_whatever_made_it() -> None:
    wanted = per_shard(SAME)
    write = lambda states, x: {name: s.set(SAME[name](x)) for name, s in states.items()}
    after = mapped(write)({name: sm.State(y[0]) for name, y in wanted.items()}, ROWS)
    for name, values in wanted.items():
        assert_replicated(after[name].value, values[0])


# A function is called in the first of these ways that it takes.
FORMS: list[Callable[[Any, jax.Array], Any]] = [
    lambda fun, x: fun(x[0]),
    lambda fun, x: fun(x),
    lambda fun, x: fun(x[0], x[1]),
    lambda fun, x: fun((x[0] * 100).astype(int) % 7),
    lambda fun, x: fun(own_key(x), (3,)),
]
MODULES = [jnp, jnp.linalg, jnp.fft, lax, jax.random, jax.nn, jax.scipy.special]
MODULES += [jax.scipy.linalg, jax.scipy.signal, jax.scipy.fft]
# They write files, or the configuration.
NOT_CALLED = ("save", "savez", "load", "set_printoptions")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_function_makes_shards_differ_in_silence(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called as simply as that; what cannot be called so, or JAX refuses, says nothing."""
    monkeypatch.setattr(errors, "MOST_LISTED", 1000)
    names = {name for name in dir(module) if not name.startswith("_")} - set(NOT_CALLED)
    functions = {name: getattr(module, name) for name in sorted(names)}
    functions = {name: fun for name, fun in functions.items() if not isinstance(fun, type)}
    rows = np.abs(np.random.default_rng(1).normal(size=(8, 4))).astype(np.float32)
    refused: set[str] = set()

    def every(x: jax.Array) -> dict[str, Any]:
        """All in one program, which is traced and compiled once."""
        results = {}
        for name, fun in functions.items():
            for form in FORMS if callable(fun) and name not in refused else ():
                with contextlib.suppress(Exception):
                    leaves = jax.tree.leaves(form(fun, x))
                    results[name] = [y for y in leaves if isinstance(y, jax.Array)]
                    break
        return results

    call = sm.shard_map(every, make_mesh("2", AxisType.Explicit), P("x"), P())
    with pytest.raises(sm.SpecError) as raised:
        jax.eval_shape(call, rows)
    refused |= set(re.findall(r"\(\.\.\.\)\['(\w+)'\]", str(raised.value)))
    assert len(refused) > 3
    for name, results in call(rows).items():
        for result in results:
            if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
                result = jax.random.key_data(result)
            first, other = [np.asarray(shard.data) for shard in result.addressable_shards]
            np.testing.assert_array_equal(other, first, err_msg=name)
