"""Programs in double precision, equation by equation: held against the same programs compiled as a whole."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing._program._literals import Exact
from statemesh.testing._program._noise import Noisy, Promoted
from statemesh.testing._program._numbers import numbers
from statemesh.testing._program._replay import Replay
from statemesh.testing._program._stepped import Stepped
from statemesh.testing._program._trace import NO_MESH, is_array_or_type, trace

from .emulated_programs import PROGRAMS, SPECS, inputs


MESH = AbstractMesh((4, 2), ("x", "y"))
# Of the programs of one shard, those that are dear to compile.
DEAR = ("calls", "gradients_of_data", "gradients_of_parameters", "whatever_else_one_shard_does")


def traced(fun: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """A program, and its inputs in double precision."""
    leaves, treedef = jax.tree.flatten((args, {}))
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
    closed = trace(fun, treedef, arrays).closed
    with jax.enable_x64(True):
        given = [*closed.consts, *filter(is_array_or_type, arrays)]
        return closed, [Promoted(Exact()).value(jnp.asarray(x)) for x in given]


def stepped(
    closed: Any, runs: Sequence[Any], noise: Any = None
) -> list[tuple[list[Any], tuple[Any, Any]]]:
    """What each run gives, equation by equation."""
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        return Stepped("a program", closed.jaxpr, Exact()).runs(runs, noise, frozenset())


def compiled(closed: Any, given: Sequence[Any]) -> tuple[list[Any], tuple[Any, Any]]:
    """What JAX gives, which compiles the program as a whole."""
    replay = Replay("a program", closed.jaxpr)
    replay.arithmetic = Promoted(Exact())
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        return cast(Any, jax.jit(replay)(*given))


def assert_close(got: Any, want: Any) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    x, y = numbers(got), numbers(want)
    if y.dtype.kind not in "fc":
        np.testing.assert_array_equal(x, y)
        return
    largest = np.abs(y[np.isfinite(y)]).max(initial=1)
    np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13 * float(largest))


def assert_alike(closed: Any, given: Sequence[Any]) -> None:
    """Assert that both ways give the same, also in differences between copies."""
    ((results, differences),) = stepped(closed, [given])
    wanted, other = compiled(closed, given)
    for got, want in zip(results, wanted, strict=True):
        assert_close(got, want)
    np.testing.assert_allclose(differences[0], other[0], rtol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in DEAR)) for x in PROGRAMS]
)
def test_programs_of_shards(name: str) -> None:
    program = PROGRAMS[name]
    mapped = sm.shard_map(program.run, MESH, (SPECS,), program.out, check_vma=max(program.checks))
    assert_alike(*traced(mapped, inputs()))


def loops(x: Any) -> Any:
    """Short and long, both ways, with values that differ from shard to shard only later."""
    shard = lax.axis_index("x")
    short, mean = lax.scan(
        lambda z, row: (lax.psum(z, "x") / 4 + row, z + shard), jnp.zeros(3), x, reverse=True
    )
    long, _ = lax.scan(lambda z, k: (jnp.sin(z + k), None), short, jnp.arange(20.0))
    return mean, long, lax.fori_loop(0, 3, lambda k, z: z * (k + shard), jnp.ones(3))


def branches(x: Any) -> Any:
    """One for all shards, one for each, and more of them than there are."""
    shard = lax.axis_index("x")
    first = lax.cond(lax.psum(x.sum(), "x") > 0, jnp.sin, jnp.cos, x)
    own = lax.cond(shard > 1, lambda x: x * 2, lambda x: x + shard, x)
    return first, own, lax.switch(7, [jnp.sin, jnp.cos, jnp.tan], x)


def places(x: Any) -> Any:
    """Reads and writes at indices, also at those that an array does not have."""
    shard = lax.axis_index("x")
    at = jnp.array([0, 5, -1, 1]) + shard
    modes = ("clip", "fill", "promise_in_bounds")
    read = [x.at[at % 2 if mode == "promise_in_bounds" else at].get(mode=mode) for mode in modes]
    whole = jnp.arange(6).at[at].get(mode="fill")
    rows = jax.vmap(lambda row, k: row[k], in_axes=(0, None))(x, jnp.array([2, 0]))
    new = jnp.ones((4, 3)) * shard
    written = [
        x.at[at].set(new, mode="drop", unique_indices=True),
        x.at[at % 2].add(new),
        x.at[at].multiply(new, mode="clip"),
        x.at[at].max(new),
        x.at[:, at % 3].min(jnp.ones((2, 4))),
    ]
    part = lax.dynamic_slice(x, (shard, 1), (1, 2))
    return read, whole, rows, written, lax.dynamic_update_slice(x, part, (0, shard))


def shapes(x: Any) -> Any:
    pieces = [x, jnp.split(x, (1, 2), axis=1), [*x], jnp.stack([x, x + 1], axis=1)]
    padded = lax.pad(x, jnp.float32(2), [(1, 0, 0), (0, 2, 0)])
    turned = lax.reshape(x, (3, 2), dimensions=(1, 0))
    joined = jnp.concatenate([x, x[:1]])
    return pieces, padded, x[::-1], joined, turned, jnp.cumsum(x[::-1], axis=1)[::-1]


def whole_numbers(x: Any) -> Any:
    n = (x * 10).astype(jnp.int32) + lax.axis_index("x")
    bits = n.astype(jnp.uint32)
    return (
        *(n // 3, n % -4, lax.div(n, jnp.int32(3)), lax.rem(n, jnp.int32(-3)), jnp.sign(n)),
        *(bits >> 3, bits << 2, lax.bitcast_convert_type(bits >> 9 | 0x3F800000, jnp.float32)),
    )


def products(x: Any) -> Any:
    y = jnp.sin(x).reshape(3, 2)
    batched = jnp.einsum("bij,bjk->bik", x.reshape(1, 2, 3), y.reshape(1, 3, 2))
    return x @ y, batched, jnp.tensordot(x, y.T, 2), jnp.einsum("ij,kj->kij", x, y.T)


def large(x: Any) -> Any:
    """So many numbers that JAX runs the operations."""
    wide = jnp.tile(x, (100, 200)) * lax.axis_index("x")
    return wide.sum(), jnp.sin(wide)[:2, :2], (wide @ wide.T)[:2, :2]


@pytest.mark.parametrize(
    "fun",
    [loops, branches, places, shapes, whole_numbers, products, large],
    ids=lambda f: f.__name__,
)
def test_operations(fun: Any) -> None:
    # Each shard gives what it has, stacked.
    stacked = lambda x: jax.tree.map(lambda y: y[None], fun(x))
    mapped = sm.shard_map(stacked, AbstractMesh((4,), ("x",)), P("x"), P("x"), check_vma=False)
    assert_alike(*traced(mapped, np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)))


def test_an_equation_without_operands_and_results(capfd: pytest.CaptureFixture[str]) -> None:
    def shown(x: Any) -> Any:
        jax.debug.print("it runs")
        return x * 2

    assert_alike(*traced(shown, np.ones(2, np.float32)))
    jax.effects_barrier()
    assert "it runs" in capfd.readouterr().out


def test_runs_side_by_side_are_those_that_go_alone() -> None:
    def step(x: Any, key: Any) -> Any:
        long, _ = lax.scan(lambda z, k: (jnp.sin(z + k), None), x, jnp.arange(20.0))
        noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("x")), x.shape)
        chosen = lax.cond(x.sum() > 0, jnp.exp, jnp.tanh, x + noise)
        return long, lax.psum(chosen @ x.T, "x") / 3, jnp.where(chosen > 0.5, chosen, 0), -x

    out = (P("x"), P(), P("x"), P("x"))
    mapped = sm.shard_map(step, AbstractMesh((4,), ("x",)), (P("x"), P()), out, check_vma=False)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    closed, given = traced(mapped, x, jax.random.key(0))
    rows = np.array([[0.0, 1.0, float(k)] for k in range(3)])
    together = stepped(closed, [given] * 3, rows)
    for k, (results, differences) in enumerate(together):
        ((alone, other),) = stepped(closed, [given], rows[k : k + 1])
        for got, want in zip(results, alone, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(differences[0], other[0])
    # They differ where something rounds.
    first, second = ([np.asarray(x) for x in results] for results, _ in together[:2])
    differ = [(a != b).any() for a, b in zip(first, second, strict=True)]
    assert differ == [True, True, True, False]


def test_numpy_moves_numbers_as_far_as_jax() -> None:
    fun = lambda x, y: (x + y, x * y, jnp.sqrt(y), (x * 64).round().sum(0), x - x)
    args = [np.random.default_rng(k).uniform(1, 2, (5, 3)).astype(np.float32) for k in range(2)]
    closed, given = traced(fun, *args)
    row = np.array([0.0, 1.0, 7.0])
    ((by_numpy, _),) = stepped(closed, [given], row[None])
    replay = Replay("a program", closed.jaxpr)

    def run(noise: Any, *xs: Any) -> Any:
        replay.arithmetic = Noisy(noise, frozenset(), Exact())
        return replay(*xs)[0]

    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        by_jax = jax.jit(run)(row, *given)
        exact, _ = compiled(closed, given)
    for got, want in zip(by_numpy, by_jax, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-15)
    pairs = zip(by_numpy, exact, strict=True)
    moved = [float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs]
    # By the roundoff of float32. Sums of whole numbers, and zero, do not round.
    assert all(1e-9 < x < 1e-6 for x in moved[:3]) and moved[3:] == [0, 0]
