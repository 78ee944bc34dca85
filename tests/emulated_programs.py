"""Programs of one shard, each with its out spec: what `emulate` is held against real shards with.

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
    """One program.

    **Attributes:**

    - `run`: what one shard does.
    - `out`: the out spec of all it returns.
    - `checks`: the values of `check_vma` for which it is defined.
    """

    run: Callable[[Inputs], Any]
    out: P
    checks: tuple[bool, ...] = (True, False)


PROGRAMS: dict[str, Program] = {}


def program(
    out: P, *, checks: tuple[bool, ...] = (True, False)
) -> Callable[[Callable[[Inputs], Any]], Callable[[Inputs], Any]]:
    def add(run: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
        name = run.__name__
        assert name not in PROGRAMS
        PROGRAMS[name] = Program(run, out, checks)
        return run

    return add


def one(out: P, name: str, run: Callable[[Inputs], Any], **more: Any) -> None:
    """A program that is one expression."""
    assert name not in PROGRAMS
    PROGRAMS[name] = Program(run, out, **more)


def vary(x: Any, names: tuple[str, ...] = BOTH) -> Any:
    """Typed as varying, where anything is typed."""
    still = tuple(name for name in names if name not in jax.typeof(x).manual_axis_type.varying)
    checked = jax.typeof(lax.axis_index("x")).manual_axis_type.varying
    return lax.pcast(x, still, to="varying") if still and checked else x


def place() -> Any:
    """Of a shard among all."""
    return lax.axis_index(BOTH)


RING = [(k, (k + 1) % 4) for k in range(4)]
# Of these the check is a part.
UNCHECKED: Any = {"checks": (False,)}
# And of these it is none, so that once is enough.
ONCE: Any = {"checks": (True,)}


# Reductions

one(P(None, "y"), "psum_over_one", lambda v: lax.psum(v.a, "x"))
one(P("x"), "psum_over_the_other", lambda v: lax.psum(v.a, "y"))
one(P(), "psum_over_both", lambda v: lax.psum(v.a**2, BOTH))
one(P(None, "y"), "psum_of_a_tree", lambda v: lax.psum({"a": v.a, "i": [v.i]}, "x"))
one(P(), "psum_of_integers", lambda v: lax.psum(v.i * 12345, BOTH), **ONCE)
one(P(None, "y"), "psum_of_truths", lambda v: lax.psum(v.a > 0, "x"), **ONCE)
one(P(), "psum_of_a_constant", lambda v: lax.psum(1, "x") * v.w)
one(P(), "psum_of_what_is_the_same", lambda v: lax.psum(vary(v.w), BOTH))
one(P(None, "y"), "psum_twice", lambda v: lax.psum(vary(lax.psum(v.a, "x")), "x"))
one(P(), "psum_one_after_the_other", lambda v: lax.psum(lax.psum(v.a, "x") ** 2, "y"))
one(P(), "psum_of_half_precision", lambda v: lax.psum(v.i.astype(jnp.bfloat16), BOTH), **ONCE)
one(P(), "psum_of_complex", lambda v: lax.psum(v.a + 1j * v.i, BOTH), **ONCE)
one(
    EACH,
    "psum_in_groups",
    lambda v: lax.psum(v.a, "x", axis_index_groups=[[0, 2], [3, 1]]),
    **UNCHECKED,
)
one(
    EACH,
    "pmax_in_groups",
    lambda v: lax.pmax(v.i, "x", axis_index_groups=[[1, 2], [0, 3]]),
    **UNCHECKED,
)
one(P(None, "y"), "pmean_over_one", lambda v: lax.pmean(jnp.sin(v.a), "x"))
one(P(), "pmean_over_both", lambda v: lax.pmean(v.a, BOTH))
one(P(None, "y"), "pmax_over_one", lambda v: lax.pmax(v.i, "x"))
one(P(), "pmax_of_floats", lambda v: lax.pmax(v.a, BOTH))
one(P(), "pmin_over_both", lambda v: lax.pmin(v.i, BOTH))
one(P(), "pmin_of_small_integers", lambda v: lax.pmin(v.i.astype(jnp.int8), BOTH), **ONCE)
one(EACH, "a_share_of_the_whole", lambda v: v.a / lax.psum(jnp.abs(v.a).sum(), BOTH))


@program(P())
def variance_by_two_reductions(v: Inputs) -> Any:
    mean = lax.pmean(v.a.mean(), BOTH)
    return lax.pmean(((v.a - mean) ** 2).mean(), BOTH)


@program(P())
def where_the_largest_is(v: Inputs) -> Any:
    largest = lax.pmax(v.a.max(), BOTH)
    return lax.pmin(jnp.where(v.a.max() == largest, place(), 99), BOTH)


# Gathers

one(EACH, "all_gather_stacked", lambda v: lax.all_gather(v.a, "x"))
one(EACH, "all_gather_in_the_middle", lambda v: lax.all_gather(v.i, "x", axis=1))
one(EACH, "all_gather_tiled", lambda v: lax.all_gather(v.a, "x", axis=1, tiled=True))
one(EACH, "all_gather_over_both", lambda v: lax.all_gather(v.a, BOTH))
one(EACH, "all_gather_minor_first", lambda v: lax.all_gather(v.i, ("y", "x")))
one(EACH, "all_gather_tiled_over_both", lambda v: lax.all_gather(v.b, BOTH, tiled=True)[::5])
one(
    EACH,
    "all_gather_in_groups",
    lambda v: lax.all_gather(v.a, "x", axis_index_groups=[[3, 0], [1, 2]]),
    **UNCHECKED,
)
one(
    P(None, "y"),
    "all_gather_without_a_check",
    lambda v: lax.all_gather(v.a, "x", tiled=True),
    **UNCHECKED,
)
one(
    P(None, "y"),
    "all_gather_invariant",
    lambda v: lax.all_gather(v.a, "x", tiled=True, to="invarying"),
    checks=(True,),
)
one(P("x", "y"), "a_row_of_all", lambda v: lax.all_gather(v.a, "x")[(lax.axis_index("x") + 1) % 4])


# Scatters, permutations, exchanges

one(EACH, "psum_scatter_stacked", lambda v: lax.psum_scatter(v.b.reshape(4, 4), "x"))
one(
    EACH,
    "psum_scatter_tiled",
    lambda v: lax.psum_scatter(v.b, "x", scatter_dimension=1, tiled=True),
)
one(EACH, "psum_scatter_over_both", lambda v: lax.psum_scatter(v.b.T, BOTH, tiled=True))
one(EACH, "psum_scatter_minor_first", lambda v: lax.psum_scatter(v.b.T, ("y", "x")))
one(
    EACH,
    "psum_scatter_of_integers",
    lambda v: lax.psum_scatter(jnp.tile(v.i, 2), "x", scatter_dimension=1),
)
one(
    EACH,
    "psum_scatter_in_groups",
    lambda v: lax.psum_scatter(v.a, "x", axis_index_groups=[[0, 3], [1, 2]]),
    **UNCHECKED,
)
one(P("x", "y"), "ppermute_around", lambda v: lax.ppermute(v.a, "x", RING))
one(P("x", "y"), "ppermute_to_some", lambda v: lax.ppermute(v.i, "x", [(0, 2), (3, 0)]))
one(
    P("x", "y"),
    "ppermute_over_both",
    lambda v: lax.ppermute(v.a, BOTH, [(k, (k + 3) % 8) for k in range(8)]),
)
one(
    P("x", "y"),
    "ppermute_what_is_the_same",
    lambda v: lax.ppermute(vary(v.w), "x", [(0, 1)])[:2, None] * v.a,
)
one(P("x", "y"), "pshuffle", lambda v: lax.pshuffle(v.a, "x", [2, 0, 3, 1]))
one(EACH, "all_to_all_stacked", lambda v: lax.all_to_all(v.b.reshape(4, 2, 2), "x", 0, 0))
one(EACH, "all_to_all_to_another_axis", lambda v: lax.all_to_all(v.b.reshape(2, 4, 2), "x", 1, 2))
one(EACH, "all_to_all_tiled", lambda v: lax.all_to_all(v.b, "x", 1, 0, tiled=True))
one(EACH, "all_to_all_tiled_in_place", lambda v: lax.all_to_all(v.b, "x", 1, 1, tiled=True))
one(
    EACH,
    "all_to_all_of_integers",
    lambda v: lax.all_to_all(jnp.tile(v.i, (1, 2)) + place(), "x", 1, 0, tiled=True),
    **ONCE,
)
one(EACH, "all_to_all_over_both", lambda v: lax.all_to_all(v.b, BOTH, 1, 0, tiled=True))
one(
    EACH,
    "all_to_all_in_groups",
    lambda v: lax.all_to_all(v.a, "x", 0, 1, axis_index_groups=[[0, 1], [2, 3]]),
    **UNCHECKED,
)
one(EACH, "pswapaxes", lambda v: lax.pswapaxes(v.b.reshape(2, 2, 4), "x", 2))


@program(EACH)
def there_and_back(v: Inputs) -> Any:
    apart = lax.all_to_all(jnp.tanh(v.b), "x", 1, 0, tiled=True)
    return lax.all_to_all(apart**2, "x", 0, 1, tiled=True)


# Where a shard is, and types

one(P("x"), "axis_index_of_one", lambda v: lax.axis_index("x")[None])
one(EACH, "axis_index_of_both", lambda v: place()[None] + v.n)
one(EACH, "axis_index_minor_first", lambda v: lax.axis_index(("y", "x"))[None], **ONCE)
one(P(), "axis_sizes", lambda v: v.w * lax.axis_size("x") + lax.axis_size(BOTH))
one(EACH, "cast_to_varying", lambda v: lax.pcast(v.w, BOTH, to="varying") * v.a[0, 0])
one(
    P("y"),
    "own_part_of_what_is_the_same",
    lambda v: lax.dynamic_slice(v.w, (lax.axis_index("y"),), (2,)),
)


# Branches and loops


@program(P(None, "y"))
def scan_with_a_psum(v: Inputs) -> Any:
    def body(total: Any, row: Any) -> Any:
        return total + lax.psum(row, "x"), None

    return lax.scan(body, vary(jnp.zeros(2), ("y",)), v.a)[0][None]


@program(EACH)
def scan_backwards(v: Inputs) -> Any:
    def body(carry: Any, xs: Any) -> Any:
        row, number = xs
        new = 0.5 * carry + row * number
        return new, (new, lax.ppermute(new, "x", RING))

    last, (made, passed) = lax.scan(body, v.a[0], (v.a, jnp.arange(2.0)), reverse=True)
    return last + made + passed


@program(P())
def scan_of_what_is_the_same_beside_what_is_not(v: Inputs) -> Any:
    def body(carry: Any, row: Any) -> Any:
        same, own = carry
        own = own + row
        return (same + lax.psum(own.sum(), BOTH), own), same

    (same, _), sames = lax.scan(body, (jnp.float32(0), v.a[0]), v.a)
    return same + sames


@program(EACH)
def scan_over_nothing(v: Inputs) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c) + place(), None), v.a, None, length=3)[0]


@program(EACH)
def while_a_number_of_times(v: Inputs) -> Any:
    return lax.fori_loop(0, v.n, lambda k, x: lax.ppermute(x, "x", RING) + k, v.a)


@program(P())
def while_until_all_agree(v: Inputs) -> Any:
    def body(state: Any) -> Any:
        x, size, rounds = state
        x = x * 0.5
        return x, lax.pmax(jnp.abs(x).max(), BOTH), rounds + 1

    start = (v.a, lax.pmax(jnp.abs(v.a).max(), BOTH), 0)
    return lax.while_loop(lambda state: state[1] > 0.1, body, start)[1:]


@program(P("x", "y"), **ONCE)
def while_each_its_own_time(v: Inputs) -> Any:
    def body(state: Any) -> Any:
        return state[0] * 1.5, state[1] + 1

    limit = 10.0 + place()
    made, rounds = lax.while_loop(
        lambda state: jnp.abs(state[0]).max() < limit, body, (v.a, vary(jnp.int32(0)))
    )
    return made, rounds[None, None]


@program(P("y"))
def while_along_one_axis_with_a_psum_over_the_other(v: Inputs) -> Any:
    own = lax.psum(jnp.abs(v.a).sum(), "x")  # the same along x
    rounds = vary(jnp.int32(0), ("y",))

    def body(state: Any) -> Any:
        total, rounds = state
        return total * 0.7 + lax.psum(vary(total, ("x",)), "x") * 0.01, rounds + 1

    return jnp.stack([r[None] for r in lax.while_loop(lambda s: s[0] > 1, body, (own, rounds))], -1)


@program(P())
def cond_with_a_psum(v: Inputs) -> Any:
    return lax.cond(v.w[0] > 0, lambda x: lax.psum(x, BOTH), lambda x: lax.psum(-x, BOTH), v.a)


@program(EACH)
def cond_by_place(v: Inputs) -> Any:
    return lax.cond(lax.axis_index("x") > 1, jnp.sin, lambda x: x * x, v.a)


@program(EACH)
def cond_that_asks_where_it_is(v: Inputs) -> Any:
    def there(x: Any) -> Any:
        return x * lax.axis_index("x") + 10 * lax.axis_index("y")

    return lax.cond(v.a[0, 0] > v.a[1, 1], there, lambda x: vary(x), v.a)


@program(EACH, **ONCE)
def switch_by_place(v: Inputs) -> Any:
    branches = [lambda x: x * 2, jnp.sin, lambda x: x - x.sum()]
    return lax.switch(place() % 3, branches, v.a)


@program(EACH)
def cond_along_one_axis_with_a_psum_over_the_other(v: Inputs) -> Any:
    def both(x: Any) -> Any:
        return x * vary(lax.psum(x, "y"))

    return lax.cond(lax.axis_index("x") == 2, both, lambda x: x + place(), v.a)


@program(EACH, **ONCE)
def cond_that_keeps_others_from_a_loop_without_end(v: Inputs) -> Any:
    def halve(x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).max() > 0.5, lambda y: y / 2, x)

    def double(x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).max() < 0.5, lambda y: y * 2, x)

    return lax.cond(lax.axis_index("y") == 0, halve, double, v.a)


@program(EACH)
def cond_in_a_scan(v: Inputs) -> Any:
    def body(carry: Any, row: Any) -> Any:
        new = lax.cond(row[0] > carry[0], lambda: row, lambda: carry * 0.5)
        return new, lax.psum(vary(new), "x")

    last, sums = lax.scan(body, v.a[0], v.a)
    return last + sums


@program(P(), **ONCE)
def scan_in_a_scan(v: Inputs) -> Any:
    def outer(total: Any, row: Any) -> Any:
        def inner(carry: Any, x: Any) -> Any:
            return carry * 0.9 + lax.psum(x, BOTH), None

        return total + lax.scan(inner, total, row)[0], None

    return lax.scan(outer, jnp.float32(0.1), v.a)[0]


one(
    EACH,
    "map_over_rows",
    lambda v: lax.map(lambda row: row / lax.psum(row**2 + 1, "x"), v.a),
    **ONCE,
)
one(EACH, "associative_scan", lambda v: lax.associative_scan(jnp.multiply, v.a, axis=1), **ONCE)


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


one(EACH, "jit_inside", lambda v: jitted(jitted(v.a)), **ONCE)
one(EACH, "remat_inside", lambda v: jax.checkpoint(lambda x: jnp.sin(lax.psum(x, "x") * x))(v.a))
one(EACH, "custom_jvp_inside", lambda v: bent(v.a) + jax.nn.relu(v.a) + jax.nn.softmax(v.a))
one(
    P("x", "y"),
    "custom_vjp_with_collectives",
    lambda v: joined_backwards(v.a) ** 2 * joined_forwards(v.a),
    **UNCHECKED,
)
one(EACH, "custom_vmap_inside", lambda v: known_alone(v.a), **ONCE)
one(
    EACH,
    "linear_call_inside",
    lambda v: linear_call(lambda r, x: r * x, lambda r, t: r * t, vary(v.w[0]), v.a),
    **ONCE,
)
one(
    P(),
    "vmap_with_its_own_axis",
    lambda v: lax.psum(
        jax.vmap(lambda r: (r - lax.pmean(r, "lane")) ** 2, axis_name="lane")(v.a).sum(), BOTH
    ),
    **UNCHECKED,
)
one(
    P(),
    "psum_over_lanes_and_shards",
    lambda v: jax.vmap(lambda r: lax.psum(r, ("x", "lane", "y")), axis_name="lane")(v.a),
    **UNCHECKED,
)
one(EACH, "vmap_over_a_psum", lambda v: jax.vmap(lambda r: r * lax.psum(r, "x"))(v.a))


# Gradients inside


def loss(w: Any, x: Any) -> Any:
    return ((x * w[0] + jnp.sin(w[1]) - w[2]) ** 2).mean()


one(EACH, "grad_of_a_psum", lambda v: vary(jax.grad(lambda w: lax.psum(loss(w, v.a), BOTH))(v.w)))
one(P(), "psum_of_a_grad", lambda v: lax.psum(jax.grad(loss)(vary(v.w), v.a), BOTH))
one(EACH, "grad_of_ones_own", lambda v: jax.grad(loss)(vary(v.w), v.a))
one(EACH, "grad_as_the_check_has_it", lambda v: vary(jax.grad(loss)(v.w, v.a)))
one(
    EACH,
    "grad_of_a_pmean_in_data",
    lambda v: jax.grad(lambda x: lax.pmean(loss(v.w, x), BOTH))(v.a),
)
one(
    EACH,
    "grad_through_a_gather",
    lambda v: jax.grad(lambda x: (lax.all_gather(x, "x") ** 2 * (1 + place())).sum())(v.a),
)
one(
    EACH,
    "grad_through_a_scatter",
    lambda v: jax.grad(lambda x: (lax.psum_scatter(x, BOTH, scatter_dimension=1) ** 3).sum())(v.b),
)
one(
    EACH,
    "grad_through_an_exchange",
    lambda v: jax.grad(lambda x: (lax.all_to_all(x, "x", 1, 0, tiled=True) ** 2 * place()).sum())(
        v.b
    ),
)
one(
    EACH,
    "jvp_inside",
    lambda v: jax.jvp(lambda x: lax.psum(x**2, "x") * x, (v.a,), (jnp.cos(v.a),)),
)
one(P(), "hessian_inside", lambda v: lax.psum(jax.hessian(loss)(vary(v.w), v.a), BOTH), **ONCE)


@program(EACH)
def grad_through_a_scan_of_permutations(v: Inputs) -> Any:
    def rolled(w: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return lax.ppermute(jnp.sin(x * w[0]), "x", RING), x.sum()

        last, sums = lax.scan(body, v.a, None, length=3)
        return lax.psum(last.sum() + sums.sum() * w[1], BOTH)

    return vary(jax.grad(rolled)(v.w))


@program(EACH)
def grad_through_remat_and_branches(v: Inputs) -> Any:
    @jax.checkpoint
    def chosen(w: Any) -> Any:
        return lax.cond(w[0] > 0, lambda: loss(w, v.a), lambda: loss(-w, v.a))

    return vary(jax.grad(lambda w: lax.pmean(chosen(w), BOTH))(v.w))


@program(EACH)
def grad_of_a_branch_by_place(v: Inputs) -> Any:
    def chosen(x: Any) -> Any:
        # The branch not taken has a gradient of nan.
        return lax.cond(x[0, 0] > 0, jnp.sqrt, lambda y: y * 3, x).sum()

    return jax.grad(chosen)(jnp.where(place() % 3 == 0, v.a**2, 0))


# Random numbers

one(
    EACH,
    "random_by_place",
    lambda v: jax.random.normal(jax.random.fold_in(jax.random.key(1), place()), (2,)),
    **ONCE,
)
one(
    EACH,
    "random_of_another_kind",
    lambda v: jax.random.uniform(jax.random.fold_in(jax.random.key(1, impl="rbg"), place()), (2,)),
    **ONCE,
)
one(P(), "random_the_same", lambda v: jax.random.bernoulli(jax.random.key(7), 0.5, (9,)), **ONCE)


@program(EACH, **ONCE)
def random_many_ways(v: Inputs) -> Any:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), lax.axis_index("x")), 2)
    drawn = jax.vmap(lambda key: jax.random.bernoulli(key, 0.3, (2,)))(keys)
    return drawn + jax.random.randint(keys[1], (2, 2), 0, 100)


@program(EACH, **ONCE)
def keys_that_travel(v: Inputs) -> Any:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), place()), 2)
    data = jax.random.key_data(keys)
    return lax.ppermute(data, "x", RING), lax.all_gather(data, "y")


# Whatever else one shard does

one(
    EACH,
    "sorts_and_indices",
    lambda v: jnp.sort(v.i, 0) + jnp.argmax(v.a, 1) + jnp.cumsum(v.i, 1),
    **ONCE,
)
one(EACH, "matrix_products", lambda v: v.b @ v.b.T @ v.a, **ONCE)
one(
    P("x", "y"),
    "scattered_and_gathered",
    lambda v: v.a.at[lax.axis_index("x") % 2].add(v.a[:, lax.axis_index("y")]),
    **ONCE,
)
one(EACH, "linear_algebra", lambda v: jnp.linalg.cholesky(v.a @ v.a.T + 3 * jnp.eye(2)), **ONCE)
one(EACH, "convolution", lambda v: jnp.convolve(v.b[0], v.b[1, :3], mode="same"), **ONCE)
one(EACH, "fourier", lambda v: jnp.abs(jnp.fft.rfft(v.b)), **ONCE)
one(EACH, "of_size_zero", lambda v: lax.psum(v.a[:, :0], "x").sum() + v.a, **ONCE)
one(
    EACH,
    "called_back",
    lambda v: jax.pure_callback(lambda x: np.sort(np.asarray(x), 1), jax.typeof(v.i), v.i),
    **UNCHECKED,
)


# Those of which gradients are compared, in `a`, `b` and `w`: for every rule with a derivative of its own.
SMOOTH = (
    *(
        "psum_over_one",
        "psum_of_what_is_the_same",
        "psum_twice",
        "psum_in_groups",
        "pmean_over_one",
    ),
    *("a_share_of_the_whole", "all_gather_stacked", "all_gather_tiled", "all_gather_over_both"),
    *("all_gather_invariant", "all_gather_without_a_check", "a_row_of_all", "psum_scatter_stacked"),
    *(
        "psum_scatter_over_both",
        "ppermute_around",
        "ppermute_what_is_the_same",
        "all_to_all_stacked",
    ),
    *("there_and_back", "cast_to_varying", "own_part_of_what_is_the_same", "scan_with_a_psum"),
    *("scan_backwards", "cond_with_a_psum", "cond_by_place", "cond_in_a_scan", "remat_inside"),
    *("cond_along_one_axis_with_a_psum_over_the_other", "custom_jvp_inside", "jit_inside"),
    *("custom_vjp_with_collectives", "psum_over_lanes_and_shards", "grad_of_a_psum"),
)
