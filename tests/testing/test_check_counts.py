"""Mistakes behind counts, positions, ranks and masks are found: whole numbers have no rounding."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import UntestedWarning, emulate
from tests.helpers import slow

from .checked import check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)

one_hot: Any = lambda x: jax.nn.one_hot(x.argmax(-1), 4, dtype=x.dtype)
mask: Any = lambda x: (x[..., 0] > 0).astype(x.dtype)
row: Any = lambda x: jnp.broadcast_to(jnp.arange(8, dtype=x.dtype), x.shape[:-1])
kept: Any = lambda x, keep: jnp.where(keep, x.max(-1), 0)
counted: Any = lambda x: (jnp.cumsum(one_hot(x), 1) * one_hot(x)).sum(-1)
lengths: Any = lambda x: mask(x).sum(1, keepdims=True)
ranks: Any = lambda x: (x[..., :1] > x[..., None, :, 0]).astype(x.dtype).sum(-1)
scores: Any = lambda x: x.argmax(-1).astype(x.dtype)

chosen: Any = lambda y: jnp.einsum("bte,bte->bt", y, one_hot(y)) - y.max(-1)
scanned: Any = lambda x: lax.scan(lambda n, m: (n + m, n + m), 0 * x[:, 0, 0], mask(x).T)[1].T
in_segment: Any = lambda at: jax.ops.segment_sum(jnp.ones(8, X.dtype), at, 4)[at]
scattered: Any = lambda x: lax.psum_scatter(one_hot(x).sum((0, 1)), "x", tiled=True)
logs: Any = lambda x: jnp.where(x > 0.7, 0, -jnp.inf)


def combined(x: Any) -> Any:
    """What comes back of two slots for each expert."""
    places = jax.nn.one_hot(counted(x).astype(int) - 1, 2, dtype=x.dtype)
    slots = jnp.einsum("bte,btc->btec", one_hot(x), places)
    return jnp.einsum("btec,bec->bt", slots, jnp.einsum("btec,bt->bec", slots, x.max(-1)))


# What is kept, by a threshold on exact numbers: with noise in these, the threshold would jump.
PATTERNS: dict[str, Callable[[Any], Any]] = {
    # Counts, and the capacity of experts
    "capacity": lambda x: kept(x, counted(x) <= 2),
    # Masks that are summed
    "lengths": lambda x: kept(x, row(x) < lengths(x)),
    "product_of_a_mask_so_far": lambda x: kept(x, jnp.cumprod(mask(x), 1) == 0),
    "matmul_of_masks": lambda x: kept(x, jnp.einsum("bt,bs->bts", mask(x), mask(x)).sum(-1) >= 3),
    "variance_of_a_mask": lambda x: kept(x, mask(x).var(1, keepdims=True) >= 0.1875),
    "logsumexp_of_a_mask": lambda x: kept(x, jax.nn.logsumexp(logs(x), 2) <= 0),
    "scan": lambda x: kept(x, scanned(x) <= 2),
    "associative_scan": lambda x: kept(x, lax.associative_scan(jnp.add, mask(x), axis=1) <= 2),
    "segments": lambda x: kept(x, jax.vmap(in_segment)(x.argmax(-1)) >= 3),
    # Positions and ranks
    "rank": lambda x: kept(x, ranks(x) < 3),
    "rounded": lambda x: kept(x, jnp.round(scores(x) * 0.5) == 1),
    "powers_of_two": lambda x: kept(x, 2.0 ** scores(x) >= 4),
    "pooled_counts": lambda x: kept(
        x,
        lax.reduce_window(mask(x), np.float32(0).astype(x.dtype), lax.add, (1, 2), (1, 1), "SAME")
        >= 1,
    ),
    "slots_by_rank": lambda x: kept(x, combined(x) == x.max(-1)),
    "chosen_by_a_product": lambda x: kept(x, chosen(jnp.tanh(x)) >= 0),
    # The same, computed twice
    "function_again": lambda x: kept(x, jnp.tanh(x).max(-1) == jnp.tanh(x.max(-1))),
    "difference_turned_around": lambda x: kept(
        x, jnp.abs(x[..., 0] - x[..., 1]) <= jnp.abs(x[..., 1] - x[..., 0])
    ),
    # Over all shards
    "count_over_shards": lambda x: kept(x, lax.psum(mask(x).sum(), "x") >= 12),
    "scattered_counts": lambda x: kept(
        x, lax.all_gather(scattered(x), "x", tiled=True)[x.argmax(-1)] >= 8
    ),
    # Functions that are exact for some numbers
    "saturated_tanh": lambda x: kept(x, jnp.tanh(1e6 * x[..., 0]) >= 1),
    "hard_softmax": lambda x: kept(x, jax.nn.softmax(1e6 * x).cumsum(1).max(-1) <= 2),
    "inverse_of_a_power": lambda x: kept(x, (2 * mask(x) + 2) ** -2 == 0.0625),
}


def losses(x: Any, mistake: Any, *names: str) -> dict[str, Any]:
    return {n: mistake * lax.pmean(PATTERNS[n](x).mean(), "x") for n in names or PATTERNS}


def report_of(x: Any, mesh: Any, *names: str) -> str:
    """What is said of a mistake behind each of these counts."""
    mistaken: Any = lambda x: losses(x, 1 + 0.2 * (lax.axis_size("x") - 1), *names)
    return report(mistaken, x, meshes=[mesh])


def assert_found(x: Any, mesh: Any, *names: str) -> None:
    """Assert that a mistake behind each of these counts is found."""
    text = report_of(x, mesh, *names)
    # The first four results are named.
    assert text.count("\n  - ") == 4
    assert f"\n  and {len(names or PATTERNS) - 4} more." in text


NARROW = (
    "capacity",
    "variance_of_a_mask",
    "segments",
    "slots_by_rank",
    "hard_softmax",
    "rank",
)
# Beside another use of the same function XLA may compute it in two ways that round differently.
ALONE = "function_again"


@pytest.mark.slow
def test_mistakes_behind_whole_numbers_are_found() -> None:
    mesh = jax.make_mesh((2,), ("x",))
    narrow = jnp.asarray(X, jnp.bfloat16)
    assert_found(X, mesh, *sorted({*PATTERNS} - {*NARROW, ALONE}))
    assert_found(narrow, mesh, *NARROW)
    assert f"['{ALONE}'] is off by" in report_of(narrow, mesh, ALONE)


@pytest.mark.slow
def test_a_maximum_is_one_of_the_numbers_that_it_is_taken_of() -> None:
    """In its derivative too, where XLA computes these numbers again.

    The quick suite leaves it out, since JAX 0.10 drops the barrier that the noise needs for it.
    """

    def scaled(x: Any) -> Any:
        products = jnp.where(jnp.tri(8) > 0, x @ x.swapaxes(1, 2) * 0.5, -1e4)
        shifted = jnp.exp(products - products.max(-1)[..., None])
        # By a mean that rounds differently on each mesh.
        return shifted.sum(-1) * lax.pmean(jnp.tanh(x).mean(), "x")

    checked = check(scaled, X, meshes=[{"x": 4}], out_specs=P("x"), gradients=True)
    assert checked.unjudged == {}


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_large_whole_numbers_that_differ_are_not_equal(dtype: str) -> None:
    """Double precision has one number for both, in results and in copies that are promised to be equal."""
    more = {
        "result": lambda n: n + jnp.asarray(lax.axis_size("x") - 1, n.dtype),
        "copies": lambda n: n + lax.axis_index("x").astype(n.dtype),
    }
    with jax.enable_x64(True):
        large = np.array([2**53], dtype)
        check(lambda n: n + 0, large, in_specs=P())
        for name, counted in more.items():
            text = report(counted, large, in_specs=P(), check_vma=False)
            assert ("off by 1" if name == "result" else "differs by 1") in text


def test_a_result_of_which_nothing_is_judged_is_named() -> None:
    def chaotic(x: Any) -> Any:
        # On each mesh it is off by another part of rounding.
        start = lax.pmean(jnp.square(jnp.sin(x)).mean(), "x") + 1e-15 * lax.axis_size("x")
        return lax.fori_loop(0, 200, lambda _, z: 3.95 * z * (1 - z), start)

    with pytest.warns(UntestedWarning, match=r"chaotic\(\.\.\.\): none of its numbers") as caught:
        assert check(chaotic, X).unjudged == {"chaotic(...)": 1}
    assert len(caught) == 1


def test_a_result_that_only_leaves_its_range_with_other_values_is_named() -> None:
    def chaotic(x: Any) -> Any:
        z = lax.fori_loop(0, 200, lambda _, z: 3.9 * z * (1 - z), x - 4.5)
        return z / lax.axis_size("x")

    # Generic values are not between 4.5 and 5.5: from these the map goes to minus infinity.
    x = np.linspace(4.6, 5.4, 8, dtype=np.float32)
    with pytest.warns(UntestedWarning, match=r"chaotic\(\.\.\.\): none of its numbers"):
        assert check(chaotic, x, out_specs=P("x")).unjudged == {"chaotic(...)": 8}


def test_a_count_of_the_host_is_named() -> None:
    """It is another one in each run, so that nothing is known of it."""
    runs = itertools.count()

    def counted(x: Any) -> Any:
        return jax.pure_callback(lambda: np.full(6, next(runs), np.int32), jax.typeof(whole))

    whole = jnp.zeros(6, jnp.int32)
    with pytest.warns(UntestedWarning, match=r"counted\(\.\.\.\): none of its numbers"):
        assert check(counted, X, check_vma=False).unjudged == {"counted(...)": 6}


@pytest.mark.slow
def test_a_verdict_does_not_depend_on_checks_before() -> None:
    tenth: Any = lambda x: x / 10
    by_a_product: Any = lambda x: x * 0.1
    for unsharded in (tenth, by_a_product, tenth, tenth):
        check(by_a_product, X, out_specs=P("x"), unsharded=unsharded)
    other = lambda x: x / 10.001
    assert "off by" in report(by_a_product, X, out_specs=P("x"), unsharded=other)


@pytest.mark.slow
def test_the_programs_of_an_emulated_call_are_bounded() -> None:
    traced: list[float] = []

    def scaled(x: Any, by: float) -> Any:
        traced.append(by)
        return x * by

    mapped = sm.shard_map(scaled, jax.make_mesh((2,), ("x",)), (P("x"), None), P("x"))
    for by in (*range(40), 39, 0):
        emulate(mapped, X, float(by))
    # The last program was kept; the first one made place for others.
    assert traced.count(39.0) < traced.count(0.0)


# Loops


def newton(x: Any, relative: bool = False) -> Any:
    a = lax.psum((x * x).sum(), "x") + 1
    far = lambda z: jnp.abs(z * z - a) > 1e-4 * (a if relative else 1)
    return lax.while_loop(far, lambda z: 0.5 * (z + a / z), a / 2 + 0.5)


@pytest.mark.slow
def test_a_loop_that_never_ends_with_large_values_is_named() -> None:
    with pytest.warns(UntestedWarning, match="was stopped after 10,000 rounds") as caught:
        checked = check(newton, X)
    assert "with large values" in str(caught[0].message)
    assert "test_check_counts.py" in str(caught[0].message)
    assert "on mesh x=2" in checked.agreed
    assert "on mesh x=2 with large values" not in checked.agreed
    # One with a relative tolerance converges.
    agreed = check(lambda x: newton(x, relative=True), X).agreed
    assert "on mesh x=2 with large values" in agreed


def doubled_until_large(x: Any) -> Any:
    def one(row: Any) -> Any:
        return lax.while_loop(lambda c: jnp.abs(c).sum() < 30, lambda c: 2 * c + 1, row)

    return jax.vmap(jax.vmap(one))(x)


def a_root(x: Any) -> Any:
    return lax.custom_root(
        lambda z: z**3 - jnp.abs(x) - 1,
        jnp.ones_like(x),
        lambda f, z: lax.fori_loop(0, 20, lambda _, z: z - f(z) / (3 * z * z + 1e-6), z),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("fun", [doubled_until_large, slow(a_root)])
def test_loops_in_lanes_and_roots_are_replayed(fun: Any) -> None:
    more: Any = {"out_specs": P("x"), "gradients": fun is a_root, "check_vma": False}
    check(fun, X, **more)
    mistaken: Any = lambda x: fun(x) * (1 + 0.2 * (lax.axis_size("x") - 1))
    assert "calls do not agree" in report(mistaken, X, **more)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")
def test_arrays_of_another_mesh() -> None:
    in_half = lambda x: lax.psum(jnp.exp(x.astype(jnp.float16) * 30).sum(0), "x")
    four = jax.make_mesh((4,), ("x",))
    check(in_half, jax.device_put(X, jax.NamedSharding(four, P("x"))))


@pytest.mark.slow
def test_a_key_that_is_made_inside_does_not_hide_the_line() -> None:
    def drawn(data: Any, x: Any) -> Any:
        noise = jax.random.normal(jax.random.wrap_key_data(data), x.shape[1:])
        return lax.psum(x.sum(0), "x") * lax.axis_size("x") + noise  # twice

    data = np.array([0, 1], np.uint32)
    assert "# twice" in report(drawn, data, X, in_specs=(P(), P("x")))


def test_tracers_do_not_leak() -> None:
    total = lambda x: lax.psum(x.sum(0), "x") * lax.axis_size("x")
    with jax.checking_leaks():
        assert "calls do not agree" in report(total, X)
