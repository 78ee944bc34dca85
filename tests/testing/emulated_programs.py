"""Programs of one shard, with their out specs: `emulate` is held against real shards with them.

All get the same inputs on a mesh of 4 x 2: `a` and `i`, floats and integers of `(2, 2)`; `b`, floats of
`(2, 8)`; `w`, three floats, and `n`, an integer, the same on all shards.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec as P


class Inputs(NamedTuple):
    """What the programs get: a shard's part inside, the whole outside."""

    a: Any
    i: Any
    b: Any
    w: Any
    n: Any


SPECS = Inputs(P("x", "y"), P("x", "y"), P(("x", "y")), P(), P())
BOTH = ("x", "y")
EACH = P(("x", "y"))
RING = [(k, (k + 1) % 4) for k in range(4)]


def inputs() -> Inputs:
    """The whole arrays."""
    rng = np.random.default_rng(5)
    return Inputs(
        a=rng.normal(size=(8, 4)).astype(np.float32),
        i=rng.integers(-9, 9, (8, 4)).astype(np.int32),
        b=rng.normal(size=(16, 8)).astype(np.float32),
        w=np.array([0.5, -1.25, 2.0], np.float32),
        n=np.int32(3),
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """What one shard does, the out specs, the values of `check_vma`, and whether its gradient is compared."""

    run: Callable[[Inputs], Any]
    out: Any
    checks: tuple[bool, ...]
    smooth: bool


PROGRAMS: dict[str, Program] = {}
# Both where the check changes what JAX makes of a program; else once is enough.
EITHER, CHECKED, UNCHECKED = (True, False), (True,), (False,)


def program(
    out: Any, checks: tuple[bool, ...] = EITHER, *, smooth: bool = False
) -> Callable[[Callable[[Inputs], Any]], Callable[[Inputs], Any]]:
    def add(run: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
        assert run.__name__ not in PROGRAMS
        PROGRAMS[run.__name__] = Program(run, out, checks, smooth)
        return run

    return add


def vary(x: Any, names: tuple[str, ...] = BOTH) -> Any:
    """Typed as varying, where anything is typed."""
    still = tuple(name for name in names if name not in jax.typeof(x).manual_axis_type.varying)
    checked = jax.typeof(lax.axis_index("x")).manual_axis_type.varying
    return lax.pcast(x, still, to="varying") if still and checked else x


def place() -> Any:
    """Of a shard among all."""
    return lax.axis_index(BOTH)


# Collectives


@program(P(None, "y"), smooth=True)
def reductions_over_one_axis(v: Inputs) -> Any:
    return {
        "psum": lax.psum(v.a, "x"),
        "psum of a tree": lax.psum({"a": v.a, "i": [v.i]}, "x"),
        "psum of truths": lax.psum(v.a > 0, "x"),
        "psum twice": lax.psum(vary(lax.psum(v.a, "x")), "x"),
        "pmean": lax.pmean(jnp.sin(v.a), "x"),
        "pmax": lax.pmax(v.i, "x"),
    }


@program(P(), smooth=True)
def reductions_over_both_axes(v: Inputs) -> Any:
    mean = lax.pmean(v.a, BOTH)
    return {
        "psum": lax.psum(v.a**2, BOTH),
        "psum of integers": lax.psum(v.i * 12345, BOTH),
        "psum of a constant": lax.psum(1, "x") * v.w,
        "psum of what is the same": lax.psum(vary(v.w), BOTH),
        "one after the other": lax.psum(lax.psum(v.a, "x") ** 2, "y"),
        "pmean": mean,
        "variance": lax.pmean((v.a - mean) ** 2, BOTH),
        "pmin": lax.pmin(v.i, BOTH),
        "axis sizes": v.w * lax.axis_size("x") + lax.axis_size(BOTH),
    }


@program(P(), CHECKED)
def reductions_of_other_dtypes(v: Inputs) -> Any:
    largest = lax.pmax(v.a.max(), BOTH)
    return {
        "half precision": lax.psum(v.i.astype(jnp.bfloat16), BOTH),
        "complex": lax.psum(v.a + 1j * v.i, BOTH),
        "small integers": lax.pmin(v.i.astype(jnp.int8), BOTH),
        "where the largest is": lax.pmin(jnp.where(v.a.max() == largest, place(), 99), BOTH),
    }


@program({"x": P("x"), "each": EACH}, CHECKED, smooth=True)
def where_a_shard_is(v: Inputs) -> Any:
    return {
        "x": [lax.axis_index("x")[None], lax.psum(v.a, "y")],
        "each": {
            "both": place()[None] + v.n,
            "minor first": lax.axis_index(("y", "x"))[None],
            "share": v.a / lax.psum(jnp.abs(v.a).sum(), BOTH),
            "cast": lax.pcast(v.w, BOTH, to="varying") * v.a[0, 0],
        },
    }


@program(EACH, CHECKED, smooth=True)
def gathers(v: Inputs) -> Any:
    return {
        "stacked": lax.all_gather(v.a, "x"),
        "in the middle": lax.all_gather(v.i, "x", axis=1),
        "tiled": lax.all_gather(v.a, "x", axis=1, tiled=True),
        "over both": lax.all_gather(v.a, BOTH),
        "minor first": lax.all_gather(v.i, ("y", "x")),
        "tiled over both": lax.all_gather(v.b, BOTH, tiled=True)[::5],
    }


@program(P(None, "y"), CHECKED, smooth=True)
def a_gather_that_is_the_same_everywhere(v: Inputs) -> Any:
    return lax.all_gather(v.a, "x", tiled=True, to="invarying")


@program(EACH, CHECKED, smooth=True)
def scatters(v: Inputs) -> Any:
    return {
        "stacked": lax.psum_scatter(v.b.reshape(4, 4), "x"),
        "tiled": lax.psum_scatter(v.b, "x", scatter_dimension=1, tiled=True),
        "over both": lax.psum_scatter(v.b.T, BOTH, tiled=True),
        "minor first": lax.psum_scatter(v.b.T, ("y", "x")),
        "of integers": lax.psum_scatter(jnp.tile(v.i, 2), "x", scatter_dimension=1),
    }


@program({"y": P("y"), "both": P("x", "y")}, CHECKED, smooth=True)
def permutations(v: Inputs) -> Any:
    return {
        "y": lax.dynamic_slice(v.w, (lax.axis_index("y"),), (2,)),
        "both": {
            "around": lax.ppermute(v.a, "x", RING),
            "to some": lax.ppermute(v.i, "x", [(0, 2), (3, 0)]),
            "over both": lax.ppermute(v.a, BOTH, [(k, (k + 3) % 8) for k in range(8)]),
            "of what is the same": lax.ppermute(vary(v.w), "x", [(0, 1)])[:2, None] * v.a,
            "shuffled": lax.pshuffle(v.a, "x", [2, 0, 3, 1]),
            "a row of all": lax.all_gather(v.a, "x")[(lax.axis_index("x") + 1) % 4],
        },
    }


@program(EACH, CHECKED, smooth=True)
def exchanges(v: Inputs) -> Any:
    apart = lax.all_to_all(jnp.tanh(v.b), "x", 1, 0, tiled=True)
    numbers = jnp.tile(v.i, 4)
    return {
        "stacked": lax.all_to_all(v.b.reshape(4, 2, 2), "x", 0, 0),
        # JAX has a wrong type for the gradient of these two.
        "to another axis": lax.all_to_all(numbers.reshape(2, 4, 2), "x", 1, 2),
        "swapped": lax.pswapaxes(numbers.reshape(2, 2, 4), "x", 2),
        "tiled": lax.all_to_all(v.b, "x", 1, 0, tiled=True),
        "tiled in place": lax.all_to_all(v.b, "x", 1, 1, tiled=True),
        "over both": lax.all_to_all(v.b, BOTH, 1, 0, tiled=True),
        "there and back": lax.all_to_all(apart**2, "x", 0, 1, tiled=True),
    }


@program({"each": EACH, "y": P(None, "y")}, UNCHECKED, smooth=True)
def collectives_in_groups(v: Inputs) -> Any:
    groups = {"axis_index_groups": [[0, 2], [3, 1]]}
    return {
        "each": {
            "psum": lax.psum(v.a, "x", **groups),
            "pmax": lax.pmax(v.i, "x", **groups),
            "all_gather": lax.all_gather(v.a, "x", **groups),
            "psum_scatter": lax.psum_scatter(v.a, "x", **groups),
            "all_to_all": lax.all_to_all(v.i, "x", 0, 1, **groups),
        },
        "y": lax.all_gather(v.a, "x", tiled=True),
    }


# Branches and loops


@program({"each": EACH, "y": P(None, "y")}, CHECKED, smooth=True)
def scans(v: Inputs) -> Any:
    def total(carry: Any, row: Any) -> Any:
        return carry + lax.psum(row, "x"), None

    def backwards(carry: Any, xs: Any) -> Any:
        row, number = xs
        new = 0.5 * carry + row * number
        return new, (new, lax.ppermute(new, "x", RING))

    last, (every, passed) = lax.scan(backwards, v.a[0], (v.a, jnp.arange(2.0)), reverse=True)
    return {
        "each": {
            "backwards": last + every + passed,
            "over nothing": lax.scan(
                lambda c, _: (jnp.sin(c) + place(), None), v.a, None, length=3
            )[0],
            "map": lax.map(lambda row: row / lax.psum(row**2 + 1, "x"), v.a),
            "associative": lax.associative_scan(jnp.multiply, v.a, axis=1),
        },
        "y": lax.scan(total, vary(jnp.zeros(2), ("y",)), v.a)[0][None],
    }


@program(P(), CHECKED)
def scans_of_what_is_the_same(v: Inputs) -> Any:
    def beside(carry: Any, row: Any) -> Any:
        same, varying = carry
        varying = varying + row
        return (same + lax.psum(varying.sum(), BOTH), varying), same

    def outer(total: Any, row: Any) -> Any:
        def inner(carry: Any, x: Any) -> Any:
            return carry * 0.9 + lax.psum(x, BOTH), None

        return total + lax.scan(inner, total, row)[0], None

    (same, _), sames = lax.scan(beside, (jnp.float32(0), v.a[0]), v.a)
    return same + sames, lax.scan(outer, jnp.float32(0.1), v.a)[0]


@program({"each": EACH, "all": P()}, CHECKED)
def whiles_that_all_leave_together(v: Inputs) -> Any:
    def halve(state: Any) -> Any:
        x, size, rounds = state
        x = x * 0.5
        return x, lax.pmax(jnp.abs(x).max(), BOTH), rounds + 1

    start = (v.a, lax.pmax(jnp.abs(v.a).max(), BOTH), 0)
    return {
        "each": lax.fori_loop(0, v.n, lambda k, x: lax.ppermute(x, "x", RING) + k, v.a),
        "all": lax.while_loop(lambda state: state[1] > 0.1, halve, start)[1:],
    }


@program({"y": P("y"), "each": P("x", "y")}, CHECKED)
def whiles_that_shards_leave_by_themselves(v: Inputs) -> Any:
    limit = 10.0 + place()
    start = vary(lax.psum(jnp.abs(v.a).sum(), "x"), ("y",)), vary(jnp.int32(0), ("y",))

    def along_y(state: Any) -> Any:
        total, rounds = state
        return total * 0.7 + lax.psum(vary(total, ("x",)), "x") * 0.01, rounds + 1

    grown, rounds = lax.while_loop(
        lambda state: jnp.abs(state[0]).max() < limit,
        lambda state: (state[0] * 1.5, state[1] + 1),
        (v.a, vary(jnp.int32(0))),
    )
    along = lax.while_loop(lambda state: state[0] > 1, along_y, start)
    return {"y": [x[None] for x in along], "each": [grown, rounds[None, None]]}


@program({"each": EACH, "all": P()}, smooth=True)
def branches(v: Inputs) -> Any:
    def in_a_scan(carry: Any, row: Any) -> Any:
        new = lax.cond(row[0] > carry[0], lambda: row, lambda: carry * 0.5)
        return new, lax.psum(vary(new), "x")

    def asks(x: Any) -> Any:
        return x * lax.axis_index("x") + 10 * lax.axis_index("y")

    def over_y(x: Any) -> Any:
        return x * vary(lax.psum(x, "y"))

    last, sums = lax.scan(in_a_scan, v.a[0], v.a)
    column = lax.axis_index("x")
    return {
        "each": {
            "by place": lax.cond(column > 1, jnp.sin, lambda x: x * x, v.a),
            "asks where it is": lax.cond(v.a[0, 0] > v.a[1, 1], asks, lambda x: vary(x), v.a),
            "psum along the other axis": lax.cond(column == 2, over_y, lambda x: x + place(), v.a),
            "in a scan": last + sums,
            "switch": lax.switch(
                place() % 3, [lambda x: x * 2, jnp.sin, lambda x: x - x.sum()], v.a
            ),
        },
        "all": lax.cond(v.w[0] > 0, lambda x: lax.psum(x, BOTH), lambda x: lax.psum(-x, BOTH), v.a),
    }


@program(EACH, CHECKED)
def a_branch_keeps_others_from_a_loop_without_end(v: Inputs) -> Any:
    def halve(x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).max() > 0.5, lambda y: y / 2, x)

    def double(x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).max() < 0.5, lambda y: y * 2, x)

    return lax.cond(lax.axis_index("y") == 0, halve, double, v.a)


# Calls, and rules of one's own


@jax.jit
def jitted(x: Any) -> Any:
    return jnp.tanh(x) + lax.psum(x, "x")


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.abs(x)


@bent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return bent(x), 3 * t * jnp.cos(x)


@jax.custom_vjp
def joined_backwards(x: Any) -> Any:
    """As it is; backwards a sum over shards, as tensor parallelism has it."""
    return x


joined_backwards.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "x"),))


@jax.custom_vjp
def joined_forwards(x: Any) -> Any:
    return lax.psum(x, "x")


joined_forwards.defvjp(lambda x: (lax.psum(x, "x"), None), lambda _, ct: (ct,))


@custom_vmap
def known_alone(x: Any) -> Any:
    return x * 2


@known_alone.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    raise AssertionError("shards are no lanes")


@program(EACH, CHECKED, smooth=True)
def calls(v: Inputs) -> Any:
    return {
        "jit": jitted(jitted(v.a)),
        "remat": jax.checkpoint(lambda x: jnp.sin(lax.psum(x, "x") * x))(v.a),
        "custom_jvp": bent(v.a) + jax.nn.relu(v.a) + jax.nn.softmax(v.a),
        "vmap over a psum": jax.vmap(lambda r: r * lax.psum(r, "x"))(v.a),
    }


@program({"all": P(), "both": P("x", "y")}, UNCHECKED, smooth=True)
def calls_without_a_check(v: Inputs) -> Any:
    def centered(row: Any) -> Any:
        return (row - lax.pmean(row, "lane")) ** 2

    def summed(row: Any) -> Any:
        return lax.psum(row, ("x", "lane", "y"))

    return {
        "all": [
            lax.psum(jax.vmap(centered, axis_name="lane")(v.a).sum(), BOTH),
            jax.vmap(summed, axis_name="lane")(v.a),
        ],
        "both": joined_backwards(v.a) ** 2 * joined_forwards(v.a),
    }


@program(EACH, UNCHECKED)
def callbacks_and_rules_for_lanes(v: Inputs) -> Any:
    sort: Any = lambda x: np.sort(np.asarray(x), 1)
    return jax.pure_callback(sort, jax.typeof(v.i), v.i), known_alone(v.a)


# Gradients inside


def loss(w: Any, x: Any) -> Any:
    return ((x * w[0] + jnp.sin(w[1]) - w[2]) ** 2).mean()


@program(EACH, smooth=True)
def a_gradient_of_a_psum(v: Inputs) -> Any:
    return vary(jax.grad(lambda w: lax.psum(loss(w, v.a), BOTH))(v.w))


@program({"each": EACH, "all": P()})
def gradients_of_parameters(v: Inputs) -> Any:
    @jax.checkpoint
    def by_branches(w: Any) -> Any:
        return lax.cond(w[0] > 0, lambda: loss(w, v.a), lambda: loss(-w, v.a))

    def through_permutations(w: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return lax.ppermute(jnp.sin(x * w[0]), "x", RING), x.sum()

        last, sums = lax.scan(body, v.a, None, length=3)
        return lax.psum(last.sum() + sums.sum() * w[1], BOTH)

    return {
        "each": {
            "of one shard": jax.grad(loss)(vary(v.w), v.a),
            "as the check has it": vary(jax.grad(loss)(v.w, v.a)),
            "through branches": vary(jax.grad(lambda w: lax.pmean(by_branches(w), BOTH))(v.w)),
            "through permutations": vary(jax.grad(through_permutations)(v.w)),
        },
        "all": lax.psum(jax.grad(loss)(vary(v.w), v.a), BOTH),
    }


@program(EACH, CHECKED)
def gradients_of_data(v: Inputs) -> Any:
    def gathered(x: Any) -> Any:
        return (lax.all_gather(x, "x") ** 2 * (1 + place())).sum()

    def scattered(x: Any) -> Any:
        return (lax.psum_scatter(x, BOTH, scatter_dimension=1) ** 3).sum()

    def exchanged(x: Any) -> Any:
        return (lax.all_to_all(x, "x", 1, 0, tiled=True) ** 2 * place()).sum()

    def by_place(x: Any) -> Any:
        # The branch not taken has a gradient of nan.
        return lax.cond(x[0, 0] > 0, jnp.sqrt, lambda y: y * 3, x).sum()

    return {
        "of a pmean": jax.grad(lambda x: lax.pmean(loss(v.w, x), BOTH))(v.a),
        "through a gather": jax.grad(gathered)(v.a),
        "through a scatter": jax.grad(scattered)(v.b),
        "through an exchange": jax.grad(exchanged)(v.b),
        "of a branch": jax.grad(by_place)(jnp.where(place() % 3 == 0, v.a**2, 0)),
        "forwards": jax.jvp(lambda x: lax.psum(x**2, "x") * x, (v.a,), (jnp.cos(v.a),)),
        "twice": jax.hessian(loss)(vary(v.w), v.a),
    }


# Random numbers, and whatever else one shard does


@program({"each": EACH, "all": P()}, CHECKED)
def random_numbers(v: Inputs) -> Any:
    key = jax.random.fold_in(jax.random.key(1), place())
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), lax.axis_index("x")), 2)
    other = jax.random.fold_in(jax.random.key(1, impl="rbg"), place())
    data = jax.random.key_data(jax.random.split(key, 2))
    return {
        "each": {
            "by place": jax.random.normal(key, (2,)),
            "of another kind": jax.random.uniform(other, (2,)),
            "in lanes": jax.vmap(lambda key: jax.random.bernoulli(key, 0.3, (2,)))(keys),
            "integers": jax.random.randint(keys[1], (2, 2), 0, 100),
            "keys that travel": [lax.ppermute(data, "x", RING), lax.all_gather(data, "y")],
        },
        "all": jax.random.bernoulli(jax.random.key(7), 0.5, (9,)),
    }


@program({"each": EACH, "both": P("x", "y")}, CHECKED)
def whatever_else_one_shard_does(v: Inputs) -> Any:
    row, column = lax.axis_index("x"), lax.axis_index("y")
    return {
        "each": {
            "sorts and indices": jnp.sort(v.i, 0) + jnp.argmax(v.a, 1) + jnp.cumsum(v.i, 1),
            "matrix products": v.b @ v.b.T @ v.a,
            "linear algebra": jnp.linalg.cholesky(v.a @ v.a.T + 3 * jnp.eye(2)),
            "convolution": jnp.convolve(v.b[0], v.b[1, :3], mode="same"),
            "fourier": jnp.abs(jnp.fft.rfft(v.b)),
            "linear_call": linear_call(lambda r, x: r * x, lambda r, t: r * t, vary(v.w[0]), v.a),
            "of size zero": lax.psum(v.a[:, :0], "x").sum() + v.a,
        },
        "both": v.a.at[row % 2].add(v.a[:, column]),
    }
