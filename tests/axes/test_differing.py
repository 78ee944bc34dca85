"""Values that differ between shards although JAX types them as the same on all."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


X = np.arange(16, dtype=np.float32)
Step = Callable[[sm.State, jax.Array], Any]


def assert_replicated(x: jax.Array, expected: Any) -> None:
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected)


def add_one(state: sm.State) -> sm.State:
    return state.set(state.value + 1)


def same(state: sm.State) -> sm.State:
    return state


def own(x: jax.Array) -> jax.Array:
    """A predicate that differs between shards."""
    return jnp.sum(x) > 20


def in_cond(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(own(x), add_one, same, state)


def in_switch(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.switch(jax.lax.axis_index("x") % 3, [same, add_one, add_one], state)


def in_nested_cond(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(True, lambda s: in_cond(s, x), same, state)


def in_while(state: sm.State, x: jax.Array) -> Any:
    steps = jnp.sum(x).astype(int)
    return jax.lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, add_one(c[1])), (steps, state)
    )[1]


def in_scan(state: sm.State, x: jax.Array) -> Any:
    def body(pair: tuple[Any, Any], _: None) -> Any:
        first, second = pair
        return (second, in_cond(first, x)), None

    return jax.lax.scan(body, (state, state), length=3)[0][0]


def stacked_by_scan(state: sm.State, x: jax.Array) -> Any:
    _, each = jax.lax.scan(lambda c, _: (c, in_cond(state, x).value), 0, length=3)
    return state.set(each.sum())


def in_loop_with_consts(state: sm.State, x: jax.Array) -> Any:
    other = in_cond(state, x).value
    return jax.lax.fori_loop(0, 3, lambda i, s: s.set(s.value + other), state)


def in_jit(state: sm.State, x: jax.Array) -> Any:
    return jax.jit(in_cond)(state, x)


def in_remat(state: sm.State, x: jax.Array) -> Any:
    return jax.checkpoint(in_cond)(state, x)


def computed_from(state: sm.State, x: jax.Array) -> Any:
    chosen = jax.lax.cond(own(x), lambda: 1.0, lambda: 2.0)
    return state.set(jnp.sin(state.value) * chosen)


HIDING = [in_cond, in_switch, in_nested_cond, in_while, in_scan, stacked_by_scan]
HIDING += [in_loop_with_consts, in_jit, in_remat, computed_from]


def mapped(fun: Step, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(), (P(), P("x")), P(), **options)


@pytest.mark.parametrize("fun", HIDING)
def test_a_write_that_a_branch_makes_differ_is_refused(fun: Step) -> None:
    state = sm.State(1.0)
    with pytest.raises(sm.DivergedStateError, match=r"state: State.* varies over 'x'"):
        mapped(fun)(state, X)
    assert float(state.value) == 1


@pytest.mark.parametrize("fun", HIDING)
def test_a_policy_merges_what_a_branch_makes_differ(fun: Step) -> None:
    def own_write(x: jax.Array) -> Any:
        return fun(sm.State(1.0), x).value[None]

    each = sm.shard_map(own_write, make_mesh(), (P("x"),), P("x"))(X)
    assert each.min() < each.max()
    for reduce, merged in {"max": each.max(), "sum": 1 + (each - 1).sum()}.items():
        after = mapped(fun)(sm.State(1.0, reduce=reduce), X)
        assert_replicated(after.value, merged)


# Under `jax.vmap` a `cond` becomes a select, whose result JAX types right.
@pytest.mark.parametrize("around", [jax.jit, jax.grad, jax.vmap])
def test_it_is_refused_inside_transformations(around: Any) -> None:
    def total(x: jax.Array) -> Any:
        return mapped(in_cond)(sm.State(1.0), x).value

    with pytest.raises(sm.DivergedStateError, match=r"state: State.* varies over 'x'"):
        around(total)(X[None] if around is jax.vmap else X)


def test_the_axes_of_the_spec_may_differ() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        def go(s: sm.State) -> sm.State:
            return s.set(s.value + jax.lax.psum(1.0, "y"))

        return jax.lax.cond(jax.lax.axis_index("x") > 1, go, same, state)

    for spec in (P("x"), sm.PerShard("x")):
        call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x")), P())
        after = call(sm.State(np.zeros(4, np.float32), spec=spec), X)
        np.testing.assert_array_equal(after.value, [0, 0, 2, 2])


def with_where(state: sm.State, x: jax.Array) -> Any:
    return state.set(jnp.where(own(x), state.value + 1, state.value))


def with_cast(state: sm.State, x: jax.Array) -> Any:
    return state.set(jax.lax.pcast(in_cond(state, x).value, "x", to="varying"))


@pytest.mark.parametrize("fun", [with_where, with_cast])
def test_what_is_typed_to_differ_is_merged(fun: Step) -> None:
    assert float(mapped(fun)(sm.State(1.0, reduce="max"), X).value) == 2


def on_all_alike(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(jax.lax.psum(jnp.sum(x), "x") > 0, add_one, same, state)


def any_shard(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(jax.lax.pmax(own(x).astype(int), "x") > 0, add_one, same, state)


def reduced_after(state: sm.State, x: jax.Array) -> Any:
    return state.set(state.value + jax.lax.pmax(in_cond(state, x).value, "x") - 1)


def passed_through(state: sm.State, x: jax.Array) -> Any:
    def body(carry: Any) -> Any:
        i, s, y = carry
        return i - 1, s, y * 2

    steps = jnp.sum(x).astype(int) % 5
    y = jax.lax.pcast(1.0, "x", to="varying")
    _, after, _ = jax.lax.while_loop(lambda c: c[0] > 0, body, (steps, state, y))
    return add_one(jax.lax.cond(own(x), same, same, after))


def alike_in_a_loop(state: sm.State, x: jax.Array) -> Any:
    del x
    return jax.lax.while_loop(lambda s: s.value < 2, add_one, state)


@pytest.mark.parametrize(
    "fun", [on_all_alike, any_shard, reduced_after, passed_through, alike_in_a_loop]
)
def test_what_is_the_same_on_all_shards_passes(fun: Step) -> None:
    assert float(mapped(fun)(sm.State(1.0), X).value) == 2


@pytest.mark.parametrize("fun", HIDING)
def test_a_result_outside_of_states_is_refused(fun: Step) -> None:
    def value(state: sm.State, x: jax.Array) -> Any:
        return fun(state, x).value

    with pytest.raises(sm.SpecError, match=r"value\(\.\.\.\): .* varies over 'x' but its out_spec"):
        sm.shard_map(value, make_mesh(), (P(), P("x")), P())(sm.State(1.0), X)


def test_keys_need_no_such_check() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        return jax.lax.cond(own(x), lambda r: r.split()[1], lambda r: r, rng)

    rng = sm.RandomState(jax.random.key(0))
    after = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())(rng, X)
    assert after.key.sharding.is_fully_replicated


def test_the_check_traces_nothing_twice() -> None:
    fun, count = counted(on_all_alike)
    call = mapped(fun)
    state = sm.State(1.0)
    for _ in range(3):
        state = call(state, X)
    assert (count.times, float(state.value)) == (1, 4)


# What follows loses what varies by a rule of JAX's types. Each function takes the rows of one shard.
ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
KEY = jax.random.key(0)


def ordered(x: jax.Array) -> Any:
    return jnp.argsort(x[0])


def sorted_values(x: jax.Array) -> Any:
    return jax.lax.sort_key_val(x[0], jnp.arange(4))[1]


def sorted_by_two(x: jax.Array) -> Any:
    return jax.lax.sort((jnp.arange(4) // 2, x[0], jnp.arange(4)), num_keys=2)[2]


def permuted(x: jax.Array) -> Any:
    key = jax.random.fold_in(KEY, jax.lax.bitcast_convert_type(x[0, 0], jnp.uint32))
    return jax.random.permutation(key, 4)


def chosen(x: jax.Array) -> Any:
    key = jax.random.fold_in(KEY, jax.lax.bitcast_convert_type(x[0, 0], jnp.uint32))
    return jax.random.choice(key, 20, (3,), replace=False)


def exponent(x: jax.Array) -> Any:
    return jnp.frexp(x[0])[1]


def total_on_host(x: jax.Array) -> Any:
    form = jax.ShapeDtypeStruct((), jnp.float32)
    total = lambda x: np.asarray(x).sum()
    return jax.pure_callback(total, form, x, vmap_method="sequential")


def total_on_host_unordered(x: jax.Array) -> Any:
    form = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.experimental.io_callback(lambda x: np.asarray(x).sum(), form, x)


def scaled(x: jax.Array) -> Any:
    # The blocks that share a scale have 32 entries.
    wide = jnp.tile(x[0], 8).reshape(1, 32).astype(jnp.float8_e4m3fn)
    scale = jnp.ones((1, 1), jnp.float8_e8m0fnu)
    return jax.lax.scaled_dot(
        wide, wide.T, lhs_scale=scale, rhs_scale=scale.T, preferred_element_type=jnp.float32
    )


def rounds(x: jax.Array) -> Any:
    return jax.lax.while_loop(lambda i: i < 10 * jnp.abs(x).sum(), lambda i: i + 1, 0)


def branch(x: jax.Array) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0)


LOSING = [ordered, sorted_values, sorted_by_two, permuted, chosen, exponent, total_on_host]
LOSING += [total_on_host_unordered, rounds, branch]
LOSING += [scaled] if hasattr(jax.lax, "scaled_dot") else []


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


def by_lanes(x: jax.Array) -> Any:
    return jax.vmap(jnp.argsort)(x)


def stacked_in_scan(x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, x: (c, jnp.argsort(x)), 0, x)[1]


def carried_in_scan(x: jax.Array) -> Any:
    first = jnp.arange(4)
    return jax.lax.scan(lambda c, _: (jnp.argsort(x[0])[c], None), first, length=2)[0]


def carried_in_while(x: jax.Array) -> Any:
    def body(pair: Any) -> Any:
        return pair[0] + 1, jnp.argsort(x[0])[pair[1]]

    return jax.lax.while_loop(lambda pair: pair[0] < 1, body, (0, jnp.arange(4)))[1]


def in_branch(x: jax.Array) -> Any:
    return jax.lax.cond(True, lambda: jnp.argsort(x[0]), lambda: jnp.arange(4))


def gradient(x: jax.Array) -> Any:
    by_order = lambda w: (w[jnp.argsort(x[0])] * jnp.arange(4)).sum()
    return jax.grad(by_order)(jnp.arange(4.0))


def split_again(x: jax.Array) -> Any:
    whole = jax.lax.all_gather(x, "data")
    return jnp.argsort(whole[jax.lax.axis_index("data"), 0])


INSIDE = [jax.jit(ordered), jax.checkpoint(ordered), with_own_jvp, with_own_vjp, with_own_vmap]
INSIDE += [by_lanes, stacked_in_scan, carried_in_scan, carried_in_while, in_branch, gradient]
INSIDE += [split_again]


def name_of(fun: Any) -> str:
    return str(getattr(fun, "__name__", type(fun).__name__))


def of_shards(fun: Any) -> np.ndarray:
    """What the function makes of each shard's rows."""
    call = sm.shard_map(lambda x: fun(x)[None], meshes()[0], P("data"), P("data"))
    return np.asarray(call(ROWS))


def meshes() -> list[jax.sharding.Mesh]:
    auto = (jax.sharding.AxisType.Auto,)
    return [jax.make_mesh((8,), ("data",)), jax.make_mesh((8,), ("data",), axis_types=auto)]


@pytest.mark.parametrize("fun", LOSING + INSIDE, ids=name_of)
def test_what_types_have_lost_is_refused_or_merged(fun: Any) -> None:
    each = of_shards(fun)
    assert not all(np.array_equal(one, each[0]) for one in each)
    write = lambda state, x: state.set(fun(x))
    for mesh in meshes():
        call = sm.shard_map(write, mesh, (None, P("data")), P())
        with pytest.raises(sm.DivergedStateError, match=r"state: State.* varies over 'data'"):
            call(sm.State(each[0]), ROWS)
        with pytest.raises(sm.SpecError, match=r" varies over 'data' but its out_spec is P\(\)"):
            sm.shard_map(lambda x: fun(x), mesh, P("data"), P())(ROWS)
        for reduce in ("max", lambda old, new, names: jax.lax.pmax(new, names)):
            after = call(sm.State(each[0], reduce=reduce), ROWS)
            assert_replicated(after.value, each.max(axis=0))


@pytest.mark.parametrize("fun", [ordered, total_on_host, rounds, carried_in_scan], ids=name_of)
def test_it_is_merged_without_the_check(fun: Any) -> None:
    each = of_shards(fun)
    write = lambda state, x: state.set(fun(x))
    call = sm.shard_map(write, meshes()[0], (None, P("data")), P(), check_vma=False)
    after = call(sm.State(each[0], reduce="max"), ROWS)
    assert_replicated(after.value, each.max(axis=0))


@pytest.mark.parametrize("fun", [ordered, total_on_host, gradient], ids=name_of)
def test_lanes_on_devices_are_merged_too(fun: Any) -> None:
    write = lambda state, x: state.set(fun(x))
    mapped = sm.pmap2(write, in_axes=(None, 0), axis_name="data")
    each = of_shards(fun)
    after = mapped(sm.State(each[0], reduce="max"), ROWS[:, None])
    assert_replicated(after.value, each.max(axis=0))
    with pytest.raises(sm.BatchAxisError):
        mapped(sm.State(each[0]), ROWS[:, None])


def chained(x: jax.Array) -> Any:
    """A reduction in which a value takes two steps from the first operand to the last result."""
    join = lambda a, b: (a[0] + b[0], a[0] + b[1], a[1] + b[2])
    zeros = (jnp.float32(0),) * 3
    return jax.lax.reduce((x[0], jnp.ones(4), jnp.ones(4)), zeros, join, (0,))[2]


def test_a_reduction_of_several_arrays_is_followed_through_all_its_steps() -> None:
    each = of_shards(chained)
    assert not all(each == each[0])
    write = lambda state, x: state.set(chained(x))
    mapped = sm.pmap2(write, in_axes=(None, 0), axis_name="data")
    with pytest.raises(sm.BatchAxisError):
        mapped(sm.State(0.0), ROWS[:, None])


def test_a_loss_that_types_have_lost_is_reduced_once() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        return ordered(x)[0].astype(jnp.float32), w

    step = sm.value_and_grad(loss_fn, axis_name="data")
    call = sm.shard_map(lambda w, x: step(w, x)[0][0], meshes()[0], (P(), P("data")), P())
    assert_replicated(call(jnp.ones(4), ROWS), of_shards(ordered)[:, 0].mean())


def order_of_all(x: jax.Array) -> Any:
    return jnp.argsort(jax.lax.all_gather(x, "data", to="invarying")[:, 0, 0])


def order_of_same(x: jax.Array) -> Any:
    # JAX types the gathered array as one that varies.
    return jnp.argsort(jax.lax.all_gather(x, "data")[:, 0, 0])


def beside_a_barrier(x: jax.Array) -> Any:
    return jax.lax.optimization_barrier((ordered(x), jnp.arange(4)))[1]


def summed_in_a_function_of_its_own(x: jax.Array) -> Any:
    @jax.custom_batching.custom_vmap
    def total(x: jax.Array) -> Any:
        return jax.lax.psum(x, "data")

    total.def_vmap(lambda n, batched, x: (jax.lax.psum(x, "data"), True))
    return total(ordered(x))


def summed(x: jax.Array) -> Any:
    return jax.lax.psum(ordered(x), "data")


def summed_by_us(x: jax.Array) -> Any:
    return sm.pmax(ordered(x), "data") + sm.psum(ordered(x), "data")


def root_of_a_sum(x: jax.Array) -> Any:
    def solve(f: Any, start: jax.Array) -> jax.Array:
        total: jax.Array = jax.lax.psum(start - f(start), "data")
        return total

    root: jax.Array = jax.lax.custom_root(lambda v: v - x[0], jnp.zeros(4), solve, lambda g, y: y)
    return root


SAME = [order_of_all, order_of_same, beside_a_barrier, summed, summed_by_us]
SAME += [summed_in_a_function_of_its_own, root_of_a_sum]


@pytest.mark.parametrize("fun", SAME, ids=name_of)
def test_what_is_the_same_passes_whatever_made_it(fun: Any) -> None:
    each = of_shards(fun)
    for mesh in meshes():
        call = sm.shard_map(lambda s, x: s.set(fun(x)), mesh, (None, P("data")), P())
        assert_replicated(call(sm.State(each[0]), ROWS).value, each[0])


LOSING_FORMS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "a row": lambda fun, x: fun(x[0]),
    "a matrix": lambda fun, x: fun(x),
    "two rows": lambda fun, x: fun(x[0], x[1]),
    "integers": lambda fun, x: fun((x[0] * 100).astype(int) % 7),
    "a key": lambda fun, x: fun(own_key(x), (3,)),
}
MODULES = [jnp, jnp.linalg, jnp.fft, jax.lax, jax.random, jax.nn, jax.scipy.special]
MODULES += [jax.scipy.linalg, jax.scipy.signal, jax.scipy.fft]
# They write files, or the configuration.
NOT_CALLED = ("save", "savez", "load", "set_printoptions")


def own_key(x: jax.Array) -> Any:
    return jax.random.fold_in(KEY, (x[0, 0] * 1000).astype(jnp.uint32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_function_makes_shards_differ_in_silence(module: Any) -> None:
    """It is called as simply as that; what cannot be called so, or JAX refuses, says nothing."""
    names = [name for name in dir(module) if not name.startswith("_") and name not in NOT_CALLED]
    rows = np.abs(np.random.default_rng(1).normal(size=(32, 4))).astype(np.float32)
    ran = 0
    for name, form in itertools.product(names, LOSING_FORMS.values()):
        fun = getattr(module, name)
        if not callable(fun) or isinstance(fun, type):
            continue

        def of_rows(x: jax.Array, fun: Any = fun, form: Any = form) -> list[Any]:
            return [y for y in jax.tree.leaves(form(fun, x)) if isinstance(y, jax.Array)]

        call = sm.shard_map(of_rows, meshes()[1], P("data"), P())
        try:
            jax.eval_shape(call, rows)
        except sm.SpecError:
            ran += 1
            continue
        except Exception:
            continue
        ran += 1
        for made in jax.tree.map(_numbers, call(rows)):
            first, *others = [np.asarray(shard.data) for shard in made.addressable_shards]
            for other in others:
                np.testing.assert_array_equal(other, first, err_msg=name)
    assert ran > 10


def _numbers(x: jax.Array) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
