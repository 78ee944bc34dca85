"""What JAX's check refuses is recorded again with casts; what it takes is not touched."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import testing
from statemesh._jax import _lifting as lifting
from tests.helpers import counted, make_mesh


X = jnp.arange(8.0)


def refused(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + y, c), jnp.zeros(()), x)[1]


def mapped(fun: Any, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("2"), (P("x"),), P("x"), **options)


def program_of(fun: Any) -> str:
    return str(jax.make_jaxpr(fun)(X))


def test_what_jax_takes_keeps_its_program_and_is_traced_once() -> None:
    traced = []

    def fun(x: Any) -> Any:
        traced.append(x.shape)
        start = lax.pcast(jnp.zeros(()), "x", to="varying")
        return lax.scan(lambda c, y: (c + y, c), start, x)[1] + lax.psum(x.sum(), "x")

    by_hand = jax.shard_map(fun, mesh=make_mesh("2"), in_specs=P("x"), out_specs=P("x"))
    assert program_of(mapped(fun)) == program_of(by_hand).replace(
        "in_specs=P('x')", "in_specs=(P('x'),)"
    )
    assert traced == [(4,)] * 2


@pytest.mark.parametrize("options", [{}, {"jit": False}])
def test_a_loop_starts_from_one_copy(options: Any) -> None:
    expected = [0, 0, 1, 3, 0, 4, 9, 15]
    np.testing.assert_array_equal(mapped(refused, **options)(X), expected)
    np.testing.assert_array_equal(jax.jit(mapped(refused, **options))(X), expected)


def test_jax_is_as_it_was_afterwards() -> None:
    before = [
        lifting._cell(jax.lax.scan).cell_contents,
        Primitive.bind,
        lifting._cell(jax.jvp).cell_contents,
    ]
    mapped(refused)(X)
    after = [
        lifting._cell(jax.lax.scan).cell_contents,
        Primitive.bind,
        lifting._cell(jax.jvp).cell_contents,
    ]
    assert all(a is b for a, b in zip(before, after, strict=True))
    with pytest.raises(TypeError, match="carry input and carry output must have equal types"):
        jax.shard_map(refused, mesh=make_mesh("2"), in_specs=P("x"), out_specs=P("x"))(X)


def test_another_thread_that_does_not_lift_is_refused_meanwhile() -> None:
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            jax.shard_map(refused, mesh=make_mesh("2"), in_specs=P("x"), out_specs=P("x"))(X)
        except TypeError as error:
            errors.append(error)

    with lifting.lifting():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_an_error_of_the_users_own_is_shown_as_it_is() -> None:
    def fun(x: Any) -> Any:
        refused(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mapped(fun)(X)

    def wrong(x: Any) -> Any:
        return refused(x) @ jnp.ones(3)

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        mapped(wrong)(X)


def test_a_gradient_is_summed_over_shards_where_the_check_sums_it() -> None:
    def loss(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, y: (c * w + y, None), jnp.zeros(()), x)[0]

    one = jax.grad(lambda w: loss(w, X[:4]) + loss(w, X[4:]))(2.0)
    inside = sm.shard_map(jax.grad(loss), make_mesh("2"), (P(), P("x")), P())
    np.testing.assert_allclose(inside(2.0, X), one)
    total = sm.shard_map(lambda w, x: lax.psum(loss(w, x), "x"), make_mesh("2"), (P(), P("x")), P())
    np.testing.assert_allclose(jax.grad(total)(2.0, X), one)
    assert_doubled = sm.shard_map(
        jax.grad(lambda w, x: lax.psum(loss(w, x), "x")), make_mesh("2"), (P(), P("x")), P()
    )
    np.testing.assert_allclose(assert_doubled(2.0, X), one)


def test_a_rule_of_a_custom_vjp_need_not_know_of_shards() -> None:
    @jax.custom_vjp
    def scaled(w: Any, x: Any) -> Any:
        return w * x

    def bwd(kept: Any, g: Any) -> Any:
        w, x = kept
        return lax.fori_loop(0, 3, lambda _, c: c + x * g / 3, jnp.zeros(4)).sum(), w * g

    scaled.defvjp(lambda w, x: (w * x, (w, x)), bwd)
    loss = lambda w, x: (scaled(w, x) + refused(x)).sum()
    inside = sm.shard_map(jax.grad(loss), make_mesh("2"), (P(), P("x")), P())
    np.testing.assert_allclose(inside(2.0, X), X.sum(), rtol=1e-5)
    values = sm.shard_map(
        lambda w, x: scaled(w, x) + refused(x), make_mesh("2"), (P(), P("x")), P("x")
    )
    np.testing.assert_allclose(jax.grad(lambda w: values(w, X).sum())(2.0), X.sum(), rtol=1e-5)


class Line(sm.Module):
    w: sm.ParamState
    seen: sm.LongTermState


def test_value_and_grad_of_what_is_lifted() -> None:
    model = Line(sm.ParamState(jnp.array(0.5)), sm.LongTermState(jnp.zeros(()), reduce="sum"))

    def loss(model: Line, x: Any) -> Any:
        last = lax.scan(lambda c, y: (c * model.w.value + y, None), jnp.zeros(()), x)[0]
        return last**2, model.replace(seen=model.seen.value + x.sum())

    def step(model: Line, x: Any) -> Any:
        return sm.value_and_grad(loss, axis_name="x")(model, x)

    (value, after), grads = sm.shard_map(step, make_mesh("2"), (None, P("x")), ((P(), P()), P()))(
        model, X
    )
    halves = [
        jax.value_and_grad(lambda w, h=h: loss(model.replace(w=w), h)[0])(0.5)
        for h in (X[:4], X[4:])
    ]
    np.testing.assert_allclose(value, (halves[0][0] + halves[1][0]) / 2)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], (halves[0][1] + halves[1][1]) / 2)
    assert float(after.seen.value) == 28


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: lax.cond(x[0] > 3, lambda: x, lambda: jnp.zeros(4)),
        lambda x: lax.cond(pred=x[0] > 3, true_fun=lambda: x, false_fun=lambda: jnp.zeros(4)),
        lambda x: lax.switch((x[0] > 3).astype(int), [lambda: jnp.zeros(4), lambda: x]),
    ],
)
def test_branches_of_which_one_is_a_constant(branch: Any) -> None:
    np.testing.assert_array_equal(mapped(branch)(X), [0, 0, 0, 0, 4, 5, 6, 7])


def test_lanes_of_pmap2_that_hold_a_loop() -> None:
    lanes = sm.pmap2(refused, in_axes=0, out_axes=0, axis_name="lane", devices=jax.devices()[:2])
    np.testing.assert_array_equal(lanes(X.reshape(2, 4)).reshape(-1), [0, 0, 1, 3, 0, 4, 9, 15])


def test_a_collective_over_lanes_of_a_vmap() -> None:
    """JAX's own asserts a thing that a checked map does not keep, without a word."""

    def lanes(x: Any) -> Any:
        return jax.vmap(lambda y: y - lax.pmean(y, "lane"), axis_name="lane")(x)

    np.testing.assert_array_equal(mapped(lanes)(X), [-1.5, -0.5, 0.5, 1.5] * 2)

    def counts(x: Any) -> Any:
        """A whole number that all lanes have is one value, and so is its sum."""
        one = jnp.int32(1) + 0 * lax.axis_index("x")
        count: Any = jax.vmap(lambda y: lax.psum(one, "lane"), 0, None, axis_name="lane")
        return count(x)[None]

    np.testing.assert_array_equal(mapped(counts)(X), [4, 4])

    def squares(x: Any) -> Any:
        """Of a float that all lanes have too."""
        total: Any = jax.vmap(lambda y: lax.psum(x[0] ** 2, "lane"), 0, None, axis_name="lane")
        return total(x)[None]

    np.testing.assert_array_equal(mapped(squares)(X), [0, 4 * 16])

    def asserting(x: Any) -> Any:
        assert x.ndim == 2
        return x

    fun, count = counted(asserting)
    with pytest.raises(AssertionError):
        mapped(fun)(X)
    assert count.times == 1  # An assertion of the user's is no refusal of JAX's.


def primitive_of_another_library() -> Any:
    """It tells JAX shapes and dtypes only."""
    twice = Primitive("twice")
    twice.def_impl(lambda x: 2 * x)
    twice.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(twice, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    ad.primitive_jvps[twice] = lambda x, t, **_: (twice.bind(*x), twice.bind(*t))
    ad.primitive_transposes[twice] = lambda ct, x: [twice.bind(ct)]
    return twice


def test_a_primitive_of_another_library_has_types() -> None:
    """Without types JAX sums this gradient of `x` over shards."""
    twice = primitive_of_another_library()
    inner = jax.jit(lambda x: twice.bind(x) * 3)
    loss = lambda w, x: (w * inner(x) * x).sum()
    expected = jax.grad(loss, argnums=(0, 1))(2.0, X)
    specs = (P(), P("x"))
    inside = sm.shard_map(jax.grad(loss, argnums=(0, 1)), make_mesh("2"), specs, specs)
    for grad, right in zip(inside(2.0, X), expected, strict=True):
        np.testing.assert_allclose(grad, right)
    values = sm.shard_map(lambda w, x: w * inner(x) * x, make_mesh("2"), specs, P("x"))
    outside = jax.grad(lambda w, x: values(w, x).sum(), argnums=(0, 1))(2.0, X)
    for grad, right in zip(outside, expected, strict=True):
        np.testing.assert_allclose(grad, right)


def test_a_state_that_a_loop_changes_is_still_checked() -> None:
    fun = lambda state, x: lax.scan(lambda s, y: (s.set(s.value + y), None), state, x)[0]
    call = sm.shard_map(fun, make_mesh("2"), (None, P("x")), P())
    assert float(call(sm.State(0.0, reduce="sum"), X).value) == 28
    with pytest.raises(sm.DivergedStateError, match="varies over 'x'"):
        call(sm.State(0.0), X)


def test_shards_that_would_wait_for_each_other_are_an_error() -> None:
    def fun(x: Any) -> Any:
        body = lambda c: (c[0] + 1, c[1] + lax.psum(x.sum(), "x"))
        return lax.while_loop(lambda c: c[0] < x.sum(), body, (0, jnp.zeros(())))[1] + refused(x)

    with pytest.raises(sm.StatemeshError, match="would wait for each other for ever"):
        mapped(fun)(X)


def test_what_cannot_be_lifted_names_the_line_and_what_to_write(monkeypatch: Any) -> None:
    monkeypatch.setattr(lifting, "_vary", lambda x, axes: x)
    with pytest.raises(
        sm.StatemeshError,
        match=r"casts do not mend it.*\n.*your line: test_lifting.py:\d+ \(refused\)",
    ):
        mapped(refused)(X)


def recorded_for_zeros(derivative: Callable[..., Any], start: Any) -> Callable[..., Any]:
    """A loop as some libraries run it: its body is recorded for zeros that all shards share."""

    def fun(x: Any) -> Any:
        body = jax.make_jaxpr(derivative)(jnp.float32(0), x[0])
        again = lambda c, y: (jax.core.eval_jaxpr(body.jaxpr, body.consts, c, y)[0], None)
        return lax.scan(again, start(), x)[0][None]

    return fun


def test_a_loop_of_lanes_that_was_recorded_for_other_types() -> None:
    def halvings(y: Any) -> Any:
        return lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] / 2, c[1] + 1), (y, 0))[1]

    def fun(x: Any) -> Any:
        recorded = jax.make_jaxpr(jax.vmap(halvings))(jnp.zeros(4))
        return jax.core.eval_jaxpr(recorded.jaxpr, recorded.consts, x)[0] + 0 * refused(x)

    np.testing.assert_array_equal(mapped(fun)(X), [0, 0, 1, 2, 2, 3, 3, 3])


def varying_zero() -> Any:
    return lax.pcast(jnp.float32(0), "x", to="varying")


def test_a_derivative_that_was_recorded_for_what_shards_share_is_not_summed_in_silence() -> None:
    decayed = lambda v, y: v + y * jax.grad(lambda v: v * v + v * y)(v)
    with pytest.raises(
        sm.StatemeshError,
        match=r"it was recorded \(as by jax.make_jaxpr\) for a value that all shards share.*\n"
        r".*test_lifting.py:\d+: float32\[\], summed over 'x'\n.*`x = jax.lax.pcast\(x, 'x', to=",
    ):
        mapped(recorded_for_zeros(decayed, lambda: jnp.float32(0)))(X)

    def by_one_copy(v: Any, y: Any) -> Any:
        gradient: Any = jax.grad(lambda w: w * y * v)
        return v + y * gradient(jnp.float32(2))

    # The derivative by what is one copy is a sum over shards, beside a value on its line that is none.
    total = mapped(recorded_for_zeros(by_one_copy, lambda: 1 + varying_zero()))(X / 8)
    plainly: Any = lambda x: lax.scan(
        lambda c, y: (by_one_copy(c, y), None), 1 + varying_zero(), x
    )[0]
    np.testing.assert_allclose(total, mapped(lambda x: plainly(x)[None])(X / 8), rtol=1e-6)


NESTED: dict[str, Callable[..., Any]] = {
    "vmap": lambda f: lambda x: jax.vmap(f)(x.reshape(2, -1)).reshape(-1),
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
}


@pytest.mark.parametrize("name", NESTED)
def test_inside_of_other_transformations(name: str) -> None:
    around = NESTED[name]
    expected = np.concatenate([around(refused)(X[:4]), around(refused)(X[4:])])
    np.testing.assert_allclose(mapped(around(refused))(X), expected)


def test_what_is_taken_from_the_interior_of_jax_is_there() -> None:
    """Where JAX moves one of these, this fails, and not a user's program."""
    for public in (
        jax.lax.scan,
        jax.lax.while_loop,
        jax.lax.cond,
        jax.lax.switch,
        jax.lax.custom_linear_solve,
        jax.linear_transpose,
        jax.jvp,
        jax.make_jaxpr,
    ):
        assert lifting._cell(public).cell_contents.__name__ == public.__name__
    assert "random_insert_pvary" in inspect.unwrap(jax.random.gamma).__globals__
    wrappers = lifting._Wrappers()
    wrappers.prepare()
    assert len(wrappers.replaced) == 20
    for module in (lifting._src_derivatives, lifting._src_api):
        assert module.core is lifting._src_core
    assert callable(lifting._src_ad.ValAccum.accum)
    assert lifting._src_mlir._lowerings
    assert callable(lifting._src_pe._cached_abstract_eval.cache_clear)
    assert {"typematch", "typecompat"} <= set(dir(lifting._src_core))
    assert lifting._src_core.eval_jaxpr.__code__.co_filename == lifting._src_core.__file__
    traceback: Any = source_info_util.current().traceback
    assert [len(x) for x in traceback.raw_frames()] == [len(traceback.frames)] * 2


def test_an_operation_has_the_users_line_and_not_ours() -> None:
    (eqn,) = [e for e in jax.make_jaxpr(mapped(refused))(X).eqns if e.primitive.name == "shard_map"]
    (loop,) = [e for e in eqn.params["jaxpr"].eqns if e.primitive.name == "scan"]
    assert "statemesh" not in source_info_util.summarize(loop.source_info).split("/")
    files = [frame.file_name for frame in loop.source_info.traceback.frames]
    assert any(file.endswith("test_lifting.py") for file in files)


def shares_its_total(x: Any, w: Any) -> Any:
    total = lax.scan(lambda c, y: (c + y * w, c), jnp.zeros(()), x)[0]
    return x * total


@pytest.mark.slow
def test_the_equivalence_check_names_the_line_of_a_loop() -> None:
    with pytest.raises(AssertionError, match=r"test_lifting.py:\d+: total = lax.scan") as raised:
        testing.assert_equivalent(
            shares_its_total, (X, 2.0), meshes=[{"x": 2}], in_specs=(P("x"), P()), out_specs=P("x")
        )
    assert "with jax.lax.psum(..., 'x')" in str(raised.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_loops_in_nested_maps_start_from_one_copy(kind: AxisType) -> None:
    def inner(x: Any) -> Any:
        return refused(x).sum()[None]

    def outer(x: Any) -> Any:
        parts = sm.shard_map(inner, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})
        return parts(refused(x))

    mapped = sm.shard_map(outer, make_mesh("2x2", kind), P("x"), P("x"), axis_names={"x"})
    # The halves of [0, 0, 1, 3] and [0, 4, 9, 15], each cumulated once more and summed.
    np.testing.assert_array_equal(mapped(X), [0, 1, 0, 9])


# Lanes of a `vmap`, over which a library reduces by JAX's own functions


class Normalized(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, axis_name: Any, mode: Any) -> None:
        self.dense = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(3, axis_name, mode=mode)

    def __call__(self, x: Any, state: Any) -> Any:
        h, state = self.norm(self.dense(x), state)
        return jnp.tanh(h), state


@pytest.mark.parametrize("mode", ["batch", pytest.param("ema", marks=pytest.mark.slow)])
def test_batch_norm_of_equinox_runs_with_its_own_state(mode: str) -> None:
    """Statistics over the rows of all shards, and the gradient through them, are those of one device."""
    rows = jnp.sin(jnp.arange(64.0)).reshape(16, 4)

    def loss(net: Any, state: Any, rows: Any) -> Any:
        batched = jax.vmap(net, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
        h, state = batched(rows, state)
        return (h**2).mean(), state

    gradient: Any = eqx.filter_value_and_grad(loss, has_aux=True)

    def shard(net: Any, state: Any, rows: Any) -> Any:
        (value, state), grads = gradient(net, state, rows)
        # The shards' gradients are summed.
        return jax.lax.pmean(value, "x"), state, jax.tree.map(lambda x: x / 4, grads)

    compiled: Any = eqx.filter_jit(gradient)
    made: Any = eqx.nn.make_with_state(Normalized)
    net, state = made("rows", mode)
    for _ in range(2):
        (value, state), grads = compiled(net, state, rows)
    wanted = (value, state, grads)

    net, state = made(("rows", "x"), mode)
    step = sm.shard_map(shard, make_mesh("4"), (P(), P(), P("x")), (P(), P(), P()))
    for _ in range(2):
        value, state, grads = step(net, state, rows)
    for got, want in zip(
        jax.tree.leaves((value, state, grads)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def reduced(x: Any, axis_name: Any) -> Any:
    """A loss of one row, as a library would reduce it over all."""
    mean, largest = lax.pmean(jnp.sin(x), axis_name), lax.pmax(lax.stop_gradient(x), axis_name)
    return (x - mean) ** 3 / (1 + largest) + lax.psum(1, axis_name) * x


@pytest.mark.parametrize("is_inside", [False, True], ids=["of all rows", "of each row"])
def test_reductions_over_rows_and_shards_have_the_gradients_of_one_device(is_inside: bool) -> None:
    """Each row differentiates its own loss, where others contribute too; or all rows together."""

    def gradient(x: Any, axis_name: Any) -> Any:
        if is_inside:
            return jax.vmap(jax.grad(lambda x: reduced(x, axis_name)), axis_name="rows")(x)
        return jax.grad(
            lambda x: jax.vmap(lambda x: reduced(x, axis_name), axis_name="rows")(x).sum()
        )(x)

    with lifting.lifting():
        over_shards = jax.jit(
            jax.shard_map(
                lambda x: gradient(x, ("rows", "x")),
                mesh=make_mesh("2"),
                in_specs=P("x"),
                out_specs=P("x"),
            )
        )(X)
    np.testing.assert_allclose(
        over_shards, jax.jit(gradient, static_argnums=1)(X, "rows"), rtol=2e-5
    )
