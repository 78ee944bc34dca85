"""The replay of traced programs, held against the same programs on devices."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import emulate

from .emulated_programs import PROGRAMS, SMOOTH, SPECS, Inputs, inputs
from .helpers import make_mesh


pytestmark = pytest.mark.slow


CHECKED = [(name, check) for name, program in PROGRAMS.items() for check in program.checks]
DIFFERENTIATED = [(name, check) for name, check in CHECKED if name in SMOOTH]

tree_structure: Any = jax.tree.structure

# All programs are compiled as one, with as little ado as there is.
QUICKLY: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mapped(name: str, check: bool, mesh: Mesh | AbstractMesh) -> sm.StatefulMapping:
    program = PROGRAMS[name]
    return sm.shard_map(
        program.run, mesh, in_specs=(SPECS,), out_specs=program.out, check_vma=check
    )


def caller(name: str, check: bool, emulated: bool) -> Callable[[Inputs], Any]:
    mesh = make_mesh("4x2")
    if not emulated:
        return mapped(name, check, mesh)
    call = mapped(name, check, AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2))
    return lambda v: emulate(call, v)


def run_all(of: Callable[[str], Callable[[Inputs], Any]], names: list[str]) -> dict[str, Any]:
    funs = {name: of(name) for name in names}
    lowered = jax.jit(lambda v: {name: fun(v) for name, fun in funs.items()}).lower(inputs())
    found: dict[str, Any] = jax.block_until_ready(lowered.compile(QUICKLY)(inputs()))
    return found


@cache
def results(check: bool, emulated: bool) -> dict[str, Any]:
    names = [name for name, checked in CHECKED if checked == check]
    return run_all(lambda name: caller(name, check, emulated), names)


@cache
def gradients(check: bool, emulated: bool) -> dict[str, Any]:
    def of(name: str) -> Callable[[Inputs], Any]:
        call = caller(name, check, emulated)

        def loss(floats: Any, v: Inputs) -> Any:
            a, b, w = floats
            made = jax.tree.leaves(call(v._replace(a=a, b=b, w=w)))
            # Of weights that are not the same anywhere.
            weights = [jnp.cos(jnp.arange(1.0, x.size + 1)).reshape(x.shape) for x in made]
            return sum((x * weight).sum() for x, weight in zip(made, weights, strict=True))

        return lambda v: jax.grad(loss)((v.a, v.b, v.w), v)

    return run_all(of, [name for name, checked in DIFFERENTIATED if checked == check])


def assert_same(found: Any, expected: Any) -> None:
    assert tree_structure(found) == tree_structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype.kind in "biu":
            np.testing.assert_array_equal(x, y)
        else:
            x, y = x.astype(complex), y.astype(complex)
            largest = np.abs(y).max(initial=1e-3)
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * largest)


def test_there_are_programs_enough() -> None:
    assert len(PROGRAMS) >= 100 and len(DIFFERENTIATED) >= 50
    assert {check for _, check in CHECKED} == {True, False}


@pytest.mark.parametrize(("name", "check"), CHECKED)
def test_a_program_means_what_it_does_on_devices(name: str, check: bool) -> None:
    assert_same(results(check, emulated=True)[name], results(check, emulated=False)[name])


@pytest.mark.parametrize(("name", "check"), DIFFERENTIATED)
def test_its_gradient_does_too(name: str, check: bool) -> None:
    found = gradients(check, emulated=True)[name]
    expected = gradients(check, emulated=False)[name]
    assert any(np.abs(x).max() > 0 for x in expected)
    assert_same(found, expected)


MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X = jnp.arange(32.0).reshape(8, 4)


SPLIT = P("x", "y")


def emulated(fun: Any, out: Any = SPLIT, check: bool = False) -> Any:
    return emulate(sm.shard_map(fun, MESH, in_specs=SPLIT, out_specs=out, check_vma=check), X)


def refusal(fun: Any, **more: Any) -> str:
    with pytest.raises(sm.StatemeshError) as caught:
        emulated(fun, **more)
    return str(caught.value)


def test_a_broadcast_from_one_shard() -> None:
    """Which JAX has, and its CPU devices have not."""
    made = emulated(lambda x: jax.lax.pbroadcast(x, "x", 2), check=True)
    np.testing.assert_array_equal(made, np.tile(X[4:6], (4, 1)))


def test_shards_of_axes_left_to_the_compiler_are_none() -> None:
    def half(x: Any) -> Any:
        assert x.shape == (2, 4)
        return x * jax.lax.psum(x.sum(), "x")

    call = sm.shard_map(half, MESH, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    np.testing.assert_allclose(emulate(call, X), X * X.sum())


def test_one_shard_map_inside_another() -> None:
    def inner(x: Any) -> Any:
        return x * jax.lax.psum(x.sum(), "y") + jax.lax.axis_index("x")

    def outer(x: Any) -> Any:
        there = sm.shard_map(inner, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})
        return there(x) - jax.lax.psum(x, "x")

    def call(mesh: Any) -> sm.StatefulMapping:
        return sm.shard_map(outer, mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})

    found = np.asarray(emulate(call(MESH), X))
    by_row = np.asarray(X).reshape(4, 2, 4)
    expected = by_row * by_row.sum((1, 2), keepdims=True) + np.arange(4.0)[:, None, None]
    np.testing.assert_allclose(found, (expected - by_row.sum(0)).reshape(8, 4))
    np.testing.assert_allclose(found, call(make_mesh("4x2"))(X))


def test_a_program_among_other_equations() -> None:
    call = sm.shard_map(lambda x: jax.lax.psum(x, "x"), MESH, in_specs=P("x"), out_specs=P())

    @jax.jit
    def whole(x: Any) -> Any:
        total, sums = jax.lax.scan(lambda c, r: (c + call(r).sum(), call(r)), 0.0, x)
        return total, sums.T + 1

    total, sums = emulate(whole, X.reshape(2, 4, 4))
    assert float(total) == X.sum()
    np.testing.assert_array_equal(sums[:, 0], X.reshape(2, 4, 4).sum(1).T + 1)


def test_what_each_shard_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def shard(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x

    emulated(shard)
    jax.effects_barrier()
    lines = capfd.readouterr().out.split()
    expected = [x.sum() for rows in np.split(np.asarray(X), 4) for x in np.split(rows, 2, axis=1)]
    assert sorted(map(float, lines)) == sorted(expected)


def test_each_shard_calls_back_for_itself() -> None:
    seen: list[Any] = []

    def ask(x: Any) -> Any:
        seen.append(np.asarray(x).shape)
        return np.asarray(x) * 2

    def shard(x: Any) -> Any:
        return jax.pure_callback(ask, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    np.testing.assert_array_equal(emulated(shard), X * 2)
    assert seen == [(2, 2)] * 8


def test_references_are_refused() -> None:
    def shard(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = 2 * x
        return ref[...]

    assert refusal(shard) == (
        "shard: `new_ref` cannot be replayed on one device: it reads or writes a reference. Run the call on "
        "devices; simulated ones will do (XLA_FLAGS=--xla_force_host_platform_device_count=8)."
    )


def test_unknown_collectives_are_refused_by_name() -> None:
    def shard(x: Any) -> Any:
        one = jnp.ones(4, jnp.int32)
        return jax.lax.ragged_all_to_all(x, x, 0 * one, one, 0 * one, one, axis_name="x")

    assert refusal(shard) == (
        "shard: `ragged_all_to_all` cannot be replayed on one device. Run the call on devices; simulated "
        "ones will do (XLA_FLAGS=--xla_force_host_platform_device_count=8)."
    )


def test_collectives_in_a_linear_solve_are_replayed() -> None:
    def shard(x: Any) -> Any:
        def solve(_: Any, b: Any) -> Any:
            return b / jax.lax.psum(jnp.ones(()), "x")

        return jax.lax.custom_linear_solve(lambda y: 4 * y, x, solve)

    np.testing.assert_allclose(emulated(shard), X / MESH.shape["x"])


def test_a_spec_inside_that_names_an_axis_of_the_outer_call_is_refused() -> None:
    """JAX makes such ones itself, for gradients of nested calls, and cannot run them."""

    def outer(x: Any) -> Any:
        there = sm.shard_map(
            lambda z: z * jax.lax.psum(z.sum(), "y"),
            in_specs=P(None, "y"),
            out_specs=P(None, "y"),
            axis_names={"y"},
        )
        return there(x)

    call = sm.shard_map(outer, MESH, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with pytest.raises(sm.StatemeshError) as caught:
        jax.grad(lambda x: emulate(call, x).sum())(X)
    assert str(caught.value) == (
        "the gradient of outer: `shard_map` cannot be replayed on one device: one inside another names 'x', "
        "which the outer one maps over. Run the call on devices; simulated ones will do "
        "(XLA_FLAGS=--xla_force_host_platform_device_count=8)."
    )


def test_collectives_that_some_shards_never_reach() -> None:
    def branch(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 50, lambda: jax.lax.psum(x, "x"), lambda: x)

    assert refusal(branch) == (
        "branch: on devices some shards would wait in collectives for others that never come:\n"
        "  - a `cond` with `psum` over 'x' inside goes one way on x=0, another on x=2\n"
        "Move the collectives out, or make the predicate the same on all shards (jax.lax.pmax)."
    )

    def loop(x: Any) -> Any:
        def body(y: Any) -> Any:
            return y + jax.lax.pmax(jax.lax.ppermute(y, "x", [(0, 1)]), "x")

        return jax.lax.while_loop(lambda y: y.sum() < 90, body, x)

    assert refusal(loop) == (
        "loop: on devices some shards would wait in collectives for others that never come:\n"
        "  - a `while` with `pmax`, `ppermute` over 'x' inside goes one way on x=0, another on x=3\n"
        "Move the collectives out, or make the predicate the same on all shards (jax.lax.pmax)."
    )


def test_results_that_are_not_the_same_as_promised() -> None:
    def shard(x: Any) -> Any:
        first = jnp.where(jax.lax.axis_index("y") == 1, x.at[1, 0].add(0.25), x)
        return {"sum": jax.lax.psum(x, ("x", "y")), "first": [first, x[0, 0] > 20]}

    assert refusal(shard, out={"sum": P(), "first": [P("x"), P()]}) == (
        "shard: results that are promised to be the same on several shards differ:\n"
        "  - shard(...)['first'][0]: float32[8,2] with out spec P('x') is one copy for all shards along 'y', "
        "but differs by 2.25 at [1, 0] between x=0, y=0 and x=0, y=1\n"
        "  - shard(...)['first'][1]: bool[] with out spec P() is one copy for all shards along 'x', 'y', but "
        "differs by 1 between x=0, y=0 and x=3, y=0\n"
        "Reduce them over these axes inside (jax.lax.psum, pmean), let a state's `reduce` do it, or name the "
        "axes in the out specs."
    )


def test_results_in_a_loop_that_are_not_the_same_as_promised() -> None:
    call = sm.shard_map(lambda x: x, MESH, in_specs=P("x"), out_specs=P(), check_vma=False)

    def whole(x: Any) -> Any:
        return jax.lax.scan(lambda c, k: (c + call(x * k).sum(), None), 0.0, jnp.arange(3.0))[0]

    with pytest.raises(sm.StatemeshError) as caught:
        emulate(whole, X)
    # The largest of all rounds: twice the difference of the first and the last rows.
    assert (
        "  - result 0 of a shard_map: float32[2,4] with out spec P() is one copy for all shards along 'x', "
        "but differs by 48 at [0, 0] between x=0 and x=3\n" in str(caught.value)
    )


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "complex64", "key"]
)
def test_differences_are_found_in_every_dtype(dtype: str) -> None:
    def shard(x: Any) -> Any:
        del x
        place = jax.lax.axis_index("x")
        return jax.random.key(place) if dtype == "key" else (place > 2).astype(dtype)

    assert "differs by" in refusal(shard, out=P())
    np.testing.assert_array_equal(emulated(lambda x: shard(x)[None], out=P("x")).shape, (4,))


def test_rounding_is_no_difference() -> None:
    def shard(x: Any) -> Any:
        eps = float(np.finfo(np.float32).eps)
        return jnp.where(jax.lax.axis_index("x") == 1, 1 + eps, 1.0)

    assert float(emulated(shard, out=P())) == 1
    assert "differs by 0.001" in refusal(lambda x: 1 + (shard(x) > 1) * 0.001, out=P())


def test_nan_is_the_same_as_nan_and_nothing_else() -> None:
    assert np.isnan(emulated(lambda x: x.sum() * jnp.nan, out=P()))

    def shard(x: Any) -> Any:
        return jnp.where(x[0, 0] == 0, jnp.nan, 1.0)

    assert "differs by inf" in refusal(shard, out=P())


def test_a_call_that_is_used_twice_differs_where_it_says() -> None:
    """One jaxpr, run by JAX's cache on values that are stacked along other axes."""

    @jax.jit
    def inner(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 20, lambda: jax.lax.psum(x, ("x", "y")), lambda: x)

    def shard(x: Any) -> Any:
        by_row = jax.lax.all_gather(x[0, 0], "y")
        return inner(by_row * 0) + inner(jnp.stack([x[0, 0], 0 * x[0, 0]])) + inner(by_row)

    assert "goes one way on x=0, y=0, another on x=3, y=0\n" in refusal(shard, out=P())
