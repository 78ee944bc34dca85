"""Replayed programs: held against the same programs on devices, and what cannot be replayed or differs."""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import emulate
from tests.helpers import make_mesh, slow

from .emulated_programs import PROGRAMS, SPECS, Inputs, inputs


# The dearest, and what runs with the check too.
DEAR = (
    *("permutations", "random_numbers", "scans", "gradients_of_data", "gradients_of_parameters"),
    *("calls", "where_a_shard_is", "a_gradient_of_a_psum", "reductions_over_both_axes"),
    *("whatever_else_one_shard_does", "branches"),
)
CASES = [
    (slow if check < max(program.checks) or name in DEAR else pytest.param)(name, check)
    for name, program in PROGRAMS.items()
    for check in program.checks
]


def results(name: str, check: bool, mesh: Mesh | AbstractMesh) -> Any:
    """What a program gives, with the gradient of a weighted sum of all floats in it if it is smooth."""
    program = PROGRAMS[name]
    mapped = sm.shard_map(program.run, mesh, (SPECS,), program.out, check_vma=check)

    def call(v: Inputs) -> Any:
        return mapped(v) if isinstance(mesh, Mesh) else emulate(mapped, v)

    def weighted(floats: Any, v: Inputs) -> Any:
        a, b, w = floats
        result = call(v._replace(a=a, b=b, w=w))
        total = jnp.float32(0)
        for x in jax.tree.leaves(result):
            if jnp.issubdtype(x.dtype, jnp.floating):
                # Of weights that are not the same anywhere.
                total += (x * jnp.cos(jnp.arange(1.0, x.size + 1)).reshape(x.shape)).sum()
        return total, result

    v = inputs()
    if program.smooth:
        return jax.jit(jax.grad(weighted, has_aux=True))((v.a, v.b, v.w), v)
    return jax.jit(call)(v)


@pytest.mark.parametrize(("name", "check"), CASES)
def test_a_program_means_what_it_does_on_devices(name: str, check: bool) -> None:
    kinds = (AxisType.Explicit if check else AxisType.Auto,) * 2
    emulated = results(name, check, AbstractMesh((4, 2), ("x", "y"), axis_types=kinds))
    expected = results(name, check, make_mesh("4x2", *kinds))
    structures: list[Any] = [jax.tree.structure(tree) for tree in (emulated, expected)]
    assert structures[0] == structures[1]
    paths = jax.tree_util.tree_flatten_with_path(emulated)[0]
    for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        exact = np.asarray(x).dtype.kind in "biu"
        x, y = np.asarray(x, complex), np.asarray(y, complex)
        atol = 0 if exact else 1e-5 * np.abs(y).max(initial=1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=str(path))
    if PROGRAMS[name].smooth:
        assert any(np.abs(x).max() > 0 for x in expected[0])


MESH = AbstractMesh((4, 2), ("x", "y"))
X = jnp.arange(32.0).reshape(8, 4)
SPLIT = P("x", "y")


def emulated(fun: Any, out: Any = SPLIT, check: bool = False) -> Any:
    return emulate(sm.shard_map(fun, MESH, in_specs=SPLIT, out_specs=out, check_vma=check), X)


def refusal(fun: Any, out: Any = SPLIT) -> str:
    with pytest.raises(sm.StatemeshError) as caught:
        emulated(fun, out)
    return str(caught.value)


# What devices of the CPU cannot do, or do in a way of their own


def test_a_broadcast_from_one_shard() -> None:
    """Which JAX has, and its CPU devices have not."""
    received = emulated(lambda x: jax.lax.pbroadcast(x, "x", 2), check=True)
    np.testing.assert_array_equal(received, np.tile(X[4:6], (4, 1)))


def test_shards_of_axes_left_to_the_compiler_are_none() -> None:
    def half(x: Any) -> Any:
        assert x.shape == (2, 4)
        return x * jax.lax.psum(x.sum(), "x")

    call = sm.shard_map(half, MESH, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    np.testing.assert_allclose(emulate(call, X), X * X.sum())


def nested(mesh: Any) -> sm.StatefulMapping:
    def inner(x: Any) -> Any:
        return x * jax.lax.psum(x.sum(), "y") + jax.lax.axis_index("x")

    def outer(x: Any) -> Any:
        there = sm.shard_map(inner, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})
        return there(x) - jax.lax.psum(x, "x")

    return sm.shard_map(outer, mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})


def test_one_shard_map_inside_another() -> None:
    result = np.asarray(emulate(nested(MESH), X))
    by_row = np.asarray(X).reshape(4, 2, 4)
    expected = by_row * by_row.sum((1, 2), keepdims=True) + np.arange(4.0)[:, None, None]
    np.testing.assert_allclose(result, (expected - by_row.sum(0)).reshape(8, 4))
    np.testing.assert_allclose(result, nested(make_mesh("4x2"))(X))


def test_each_shard_prints_and_calls_back_for_itself(capfd: pytest.CaptureFixture[str]) -> None:
    shapes: list[Any] = []

    def ask(x: Any) -> Any:
        shapes.append(np.asarray(x).shape)
        return np.asarray(x) * 2

    def shard(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return jax.pure_callback(ask, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    np.testing.assert_array_equal(emulated(shard), X * 2)
    assert shapes == [(2, 2)] * 8
    jax.effects_barrier()
    lines = capfd.readouterr().out.split()
    expected = [x.sum() for rows in np.split(np.asarray(X), 4) for x in np.split(rows, 2, axis=1)]
    assert sorted(map(float, lines)) == sorted(expected)


def test_primitives_of_equinox_see_the_lanes_of_one_shard_only() -> None:
    def rows(x: Any) -> Any:
        x = eqxi.nonbatchable(x)
        largest = eqxi.unvmap_max(x)
        signs = jnp.stack([eqxi.unvmap_any(x > 5), eqxi.unvmap_all(x > 2)])
        # Without a `vmap` it takes the first, whatever the predicate says.
        first = eqxi.select_if_vmap_p.bind(x[0] < 0, x, -x)
        return x + largest, signs, first

    x = jnp.arange(8)
    on_devices = sm.shard_map(rows, make_mesh("2"), P("x"), P("x"))
    emulated = emulate(sm.shard_map(rows, AbstractMesh((2,), ("x",)), P("x"), P("x")), x)
    for result, expected in zip(emulated, on_devices(x), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_collectives_in_a_linear_solve_are_replayed() -> None:
    def shard(x: Any) -> Any:
        def solve(_: Any, b: Any) -> Any:
            return b / jax.lax.psum(jnp.ones(()), "x")

        return jax.lax.custom_linear_solve(lambda y: 4 * y, x, solve)

    np.testing.assert_allclose(emulated(shard), X / MESH.shape["x"])


# What cannot be replayed

ON_DEVICES = (
    " Run the call on devices; simulated ones will do "
    "(XLA_FLAGS=--xla_force_host_platform_device_count=8)."
)


def test_what_is_no_operation_of_one_shard_is_refused_by_name() -> None:
    def refers(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = 2 * x
        return ref[...]

    def ragged(x: Any) -> Any:
        ones = jnp.ones(4, jnp.int32)
        return jax.lax.ragged_all_to_all(x, x, 0 * ones, ones, 0 * ones, ones, axis_name="x")

    text = "refers: `new_ref` cannot be replayed on one device: it reads or writes a reference."
    assert refusal(refers) == text + ON_DEVICES
    text = "ragged: `ragged_all_to_all` cannot be replayed on one device."
    assert refusal(ragged) == text + ON_DEVICES


def test_a_spec_inside_that_names_an_axis_of_the_outer_call_is_refused() -> None:
    """JAX makes such ones itself, for gradients of nested calls, and cannot run them."""
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(sm.StatemeshError) as caught:
        jax.grad(lambda x: emulate(nested(mesh), x).sum())(X)
    assert str(caught.value) == (
        "the gradient of outer: `shard_map` cannot be replayed on one device: one inside another names 'x', "
        "which the outer one maps over." + ON_DEVICES
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

    line = "  - a `while` with `pmax`, `ppermute` over 'x' inside goes one way on x=0, another on x=3\n"
    assert line in refusal(loop)


def test_a_branch_that_is_used_twice_differs_where_it_says() -> None:
    """One jaxpr, run by JAX's cache on values that are stacked along other axes."""

    @jax.jit
    def inner(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 20, lambda: jax.lax.psum(x, ("x", "y")), lambda: x)

    def shard(x: Any) -> Any:
        by_row = jax.lax.all_gather(x[0, 0], "y")
        return inner(by_row * 0) + inner(jnp.stack([x[0, 0], 0 * x[0, 0]])) + inner(by_row)

    assert "goes one way on x=0, y=0, another on x=3, y=0\n" in refusal(shard, P())


# Results that are not the same as promised


def test_every_result_that_differs_is_named() -> None:
    def shard(x: Any) -> Any:
        first = jnp.where(jax.lax.axis_index("y") == 1, x.at[1, 0].add(0.25), x)
        state = sm.State(jax.lax.axis_index("x"))
        return {"sum": jax.lax.psum(x, ("x", "y")), "first": [first, x[0, 0] > 20]}, state

    assert refusal(shard, ({"sum": P(), "first": [P("x"), P()]}, P())) == (
        "shard: results that are promised to be the same on several shards differ:\n"
        "  - shard(...)[0]['first'][0]: float32[8,2] with out spec P('x') is one copy for all shards along "
        "'y', but differs by 2.25 at [1, 0] between x=0, y=0 and x=0, y=1\n"
        "  - shard(...)[0]['first'][1]: bool[] with out spec P() is one copy for all shards along 'x', 'y', "
        "but differs by 1 between x=0, y=0 and x=3, y=0\n"
        "  - shard(...)[1].value: int32[] with out spec P() is one copy for all shards along 'x', but "
        "differs by 3 between x=0 and x=3\n"
        "Reduce them over these axes inside (jax.lax.psum, pmean), let a state's `reduce` do it, or name the "
        "axes in the out specs."
    )


def test_promises_are_checked_in_a_loop_and_under_an_eager_gradient() -> None:
    call = sm.shard_map(lambda x: x, MESH, in_specs=P("x"), out_specs=P(), check_vma=False)

    def whole(x: Any) -> Any:
        return jax.lax.scan(lambda c, k: (c + call(x * k).sum(), None), 0.0, jnp.arange(3.0))[0]

    with pytest.raises(sm.StatemeshError) as caught:
        emulate(whole, X)
    # The largest: twice the difference of the first and the last rows.
    assert (
        "  - result 0 of a shard_map: float32[2,4] with out spec P() is one copy for all shards along 'x', "
        "but differs by 48 at [0, 0] between x=0 and x=3\n" in str(caught.value)
    )
    with pytest.raises(sm.StatemeshError, match="differs by 6"):
        jax.grad(lambda x: emulate(call, x).sum())(jnp.arange(8.0))


@pytest.mark.parametrize(
    ("check_vma", "text"),
    [
        (True, r"s: State\(float32\[\]\) varies over 'x' but leaves with P\(\)"),
        (False, r"write\(\.\.\.\)\.value: .* differs by 1 between x=0 and x=2"),
    ],
)
def test_a_write_that_a_branch_makes_differ_is_found(check_vma: bool, text: str) -> None:
    """JAX's types do not see it. The mapped call does, if it checks, and else the replay."""

    def write(s: Any, x: Any) -> Any:
        return s.set(jax.lax.cond(x[0] > 3, lambda: 1.0, lambda: 2.0))

    specs: Any = {"in_specs": (None, P("x")), "out_specs": P(), "check_vma": check_vma}
    call = sm.shard_map(write, MESH, **specs)
    with pytest.raises(sm.StatemeshError, match=text):
        emulate(call, sm.State(0.0), jnp.arange(8.0))


DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"]


@pytest.mark.slow
def test_differences_are_found_in_every_dtype() -> None:
    def shard(x: Any) -> Any:
        place = jax.lax.axis_index("x") + 0 * x[0, 0].astype(int)
        return {"key": jax.random.key(place), **{d: (place > 2).astype(d) for d in DTYPES}}

    text = refusal(shard, P())
    assert [name for name in ("key", *DTYPES) if f"['{name}']" not in text] == []
    whole = emulated(lambda x: jax.tree.map(lambda y: y[None], shard(x)), P("x"))
    assert {y.shape for y in jax.tree.leaves(whole)} == {(4,)}


def rounded(x: Any) -> Any:
    del x
    eps = float(np.finfo(np.float32).eps)
    return jnp.where(jax.lax.axis_index("x") == 1, 1 + eps, 1.0)


SAME: list[tuple[Callable[[Any], Any], float]] = [
    (rounded, 1.0),
    (lambda x: x.sum() * jnp.nan, np.nan),
]
OTHER: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: 1 + (rounded(x) > 1) * 0.001, "differs by 0.001"),
    (lambda x: jnp.where(x[0, 0] == 0, jnp.nan, 1.0), "differs by inf"),
]


def test_rounding_is_no_difference_and_nan_is_the_same_as_nan_only() -> None:
    for fun, value in SAME:
        np.testing.assert_equal(float(emulated(fun, P())), value)
    for fun, text in OTHER:
        assert text in refusal(fun, P())
