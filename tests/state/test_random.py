"""`RandomState`: the streams of shards, the key that comes back, and rows that are the same on any mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, slow


structure: Any = jax.tree.structure


def data(keys: Any) -> np.ndarray[Any, Any]:
    """One row of numbers for each key."""
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


def distinct(*keys: Any) -> bool:
    rows = np.concatenate([data(k) for k in keys])
    return len(np.unique(rows, axis=0)) == len(rows)


def same(keys: Any, others: Any) -> None:
    np.testing.assert_array_equal(data(keys), data(others))


def make_rng(seed: int = 0, **meta: Any) -> sm.RandomState:
    return sm.RandomState(jax.random.key(seed), **meta)


X: Any = np.ones(16, np.float32)


def both(rng: sm.RandomState, index: Any) -> tuple[jax.Array, sm.RandomState]:
    """One key for each shard, and the state with which a shard continues."""
    del index
    key, rng = rng.split()
    return key[None], rng


def test_draws_outside() -> None:
    rng = make_rng(tag="t", name="n")
    key, after = rng.split()
    keys, last = after.split(4)
    rows, end = last.rows(5)
    assert (key.shape, keys.shape, rows.shape) == ((), (4,), (5,))
    for state in (after, last, end):
        assert (type(state), state.tag, state.name) == (sm.RandomState, frozenset("t"), "n")
        assert state.key is state.value
        assert state.key.dtype == rng.key.dtype == key.dtype == keys.dtype == rows.dtype
        assert structure(state) == structure(rng)
    same(key, rng.split()[0])


def test_an_axis_name_outside_means_one_shard() -> None:
    plain, _ = make_rng().rows(6)
    for name in ("x", ("x", "y")):
        same(make_rng().rows(6, name)[0], plain)
    same(jax.jit(lambda rng: rng.rows(6, "x")[0])(make_rng()), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "name", "options"),
    [
        (lambda call: call, "2", {"check_vma": False, "donate": "states"}),
        (jax.jit, "2x2", {"axis_names": {"x"}}),
        slow(lambda call: call, "2", {"jit": False}),
    ],
    ids=["unchecked", "one axis", "eager"],
)
def test_a_call_under_every_option(wrap: Any, name: str, options: dict[str, Any]) -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        keys, rng = both(rng, 0)
        return keys, *rng.rows(len(x), "x")

    def run(wrap: Any, name: str, **options: Any) -> Any:
        specs = ((P(), P("x")), (P("x"), P("x"), P()))
        call = wrap(sm.shard_map(fun, make_mesh(name), *specs, **options))
        return jax.tree.map(data, call(jax.tree.map(jnp.copy, make_rng(1)), X))

    got, expected = run(wrap, name, **options), run(lambda call: call, "2")
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_draws_in_a_scan_and_in_a_branch_that_all_shards_take() -> None:
    def fun(rng: sm.RandomState, x: jax.Array, go: Any) -> Any:
        def body(rng: sm.RandomState, _: None) -> Any:
            key, rng = rng.split()
            rows, rng = rng.rows(len(x), "x")
            return rng, (key, rows)

        rng, (keys, rows) = jax.lax.scan(body, rng, length=3)
        return keys[None], rows, jax.lax.cond(go > 0, lambda r: r.split()[1], lambda r: r, rng)

    call = sm.shard_map(fun, make_mesh(), (P(), P("x"), P()), (P("x"), P(None, "x"), P()))
    for go in (0, 1):
        own, rows, plain = fun(make_rng(), jnp.ones(16), jnp.asarray(go))
        keys, got, after = call(make_rng(), X, go)
        same(keys[0], own)
        same(got, rows)
        same(after.key, plain.key)
        assert distinct(keys, got, after.key)


def in_cond(rng: sm.RandomState, drawing: jax.Array) -> Any:
    return jax.lax.cond(drawing, both, lambda r, i: (r.key[None], r), rng, 0)


def in_where(rng: sm.RandomState, drawing: jax.Array) -> Any:
    key, after = rng.split()
    return key[None], jax.tree.map(lambda a, b: jnp.where(drawing, a, b), after, rng)


def in_while(rng: sm.RandomState, drawing: jax.Array) -> Any:
    count = jnp.where(drawing, 2, 0)
    key, _ = rng.split()
    _, rng = jax.lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1].split()[1]), (count, rng)
    )
    return key[None], rng


# Which of 8 shards draw: some in the middle; all but the first; all but one in the middle.
DRAWING: list[tuple[Any, Callable[[Any], Any]]] = [
    (in_cond, lambda index: index % 3 == 1),
    (in_where, lambda index: index % 3 == 1),
    (in_while, lambda index: index % 3 == 1),
    (in_where, lambda index: index != 0),
    (in_where, lambda index: index != 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_draws_of_some_shards_only_are_not_drawn_again(check_vma: bool) -> None:
    def fun(rngs: list[sm.RandomState]) -> Any:
        index = jax.lax.axis_index("x")
        pairs = [draw(rng, do(index)) for (draw, do), rng in zip(DRAWING, rngs, strict=True)]
        return [keys for keys, _ in pairs], [rng for _, rng in pairs]

    call = sm.shard_map(fun, make_mesh(), P(), (P("x"), P()), check_vma=check_vma)
    rngs = [make_rng() for _ in DRAWING]
    drawn: list[list[Any]] = [[] for _ in DRAWING]
    held: list[list[Any]] = [[make_rng().key] for _ in DRAWING]
    for _ in range(3):
        keys, rngs = call(rngs)
        for k, (_, do) in enumerate(DRAWING):
            drawn[k].append(keys[k][do(np.arange(8))])
            held[k].append(rngs[k].key)
    assert all(distinct(*keys) for keys in (*drawn, *held[:3]))


def after_fold_in(rng: sm.RandomState) -> sm.RandomState:
    return rng.set(jax.random.fold_in(rng.key, 7))


def after_split(rng: sm.RandomState) -> sm.RandomState:
    return rng.replace(value=jax.random.split(rng.key, 3)[2])


def in_jit(rng: sm.RandomState) -> sm.RandomState:
    after: sm.RandomState = jax.jit(after_fold_in)(rng)
    return after


def in_scan(rng: sm.RandomState) -> sm.RandomState:
    after, _ = jax.lax.scan(lambda rng, _: (after_fold_in(rng), None), rng, length=2)
    return after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writes", "options"),
    [
        ([after_fold_in, after_split, in_jit, in_scan], {}),
        ([after_fold_in, in_scan], {"check_vma": False}),
    ],
    ids=["checked", "unchecked"],
)
def test_a_new_key_set_inside_is_that_of_the_unsharded_run(
    writes: Any, options: dict[str, Any]
) -> None:
    def own(rngs: list[sm.RandomState]) -> Any:
        drawn = [both(write(rng), 0) for write, rng in zip(writes, rngs, strict=True)]
        return [keys for keys, _ in drawn], [rng for _, rng in drawn]

    plain = rngs = [make_rng(seed) for seed in range(len(writes))]
    call = sm.shard_map(own, make_mesh(), P(), (P("x"), P()), **options)
    drawn = []
    for _ in range(2):
        first, plain = own(plain)
        keys, rngs = call(rngs)
        for k in range(len(writes)):
            same(rngs[k].key, plain[k].key)
            same(keys[k][:1], first[k])
            drawn += [keys[k], rngs[k].key]
    assert distinct(*drawn)


@pytest.mark.slow
def test_rows_in_a_nested_call_before_and_after_a_new_key() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        first, rng = rng.rows(len(x), ("x", "y"))
        rng = after_fold_in(rng.split()[1])
        rows, rng = rng.rows(len(x), ("x", "y"))
        more, rng = after_split(rng).rows(len(x), ("x", "y"))
        return (first, rows, more), rng

    def outer(rng: sm.RandomState, x: jax.Array) -> Any:
        specs = ((P(), P("y")), (P("y"), P()))
        return sm.shard_map(fun, make_mesh("4x2"), *specs, axis_names={"y"})(rng, x)

    call = sm.shard_map(outer, make_mesh("4x2"), (P(), P("x")), (P("x"), P()), axis_names={"x"})
    rows, after = call(make_rng(), X)
    expected, plain = fun(make_rng(), jnp.ones(16))
    jax.tree.map(same, rows, expected)
    same(after.key, plain.key)


def test_a_key_that_all_shards_agree_on_is_kept() -> None:
    call = sm.shard_map(lambda rng, key: rng.set(key), make_mesh(), (P(), P()), P())
    np.testing.assert_array_equal(data(call(make_rng(), jax.random.key(7)).key), [[0, 7]])
    itself = sm.shard_map(lambda rng: rng.set(rng.key), make_mesh(), P(), P())
    same(itself(make_rng(3)).key, make_rng(3).key)


def test_a_key_of_another_implementation_put_in_by_replace() -> None:
    def fun(rng: sm.RandomState) -> sm.RandomState:
        number = jax.random.key_data(rng.key)[1]
        new = jax.random.wrap_key_data(jnp.stack([number] * 4), impl="rbg")
        return rng.replace(value=new)

    for call in (sm.shard_map(fun, make_mesh(), P(), P()), jax.jit(fun)):
        after = call(make_rng(5))
        assert after.key.dtype == jax.random.key(0, impl="rbg").dtype
        np.testing.assert_array_equal(jax.random.key_data(after.key), [5] * 4)


def test_several_keys_put_in_by_replace_are_refused_inside() -> None:
    def fun(rng: sm.RandomState) -> sm.RandomState:
        return rng.replace(value=rng.split(4)[0])

    assert fun(make_rng()).key.shape == (4,)
    with pytest.raises(sm.StatemeshError, match=r"holds keys of shape \(4,\)"):
        sm.shard_map(fun, make_mesh(), P(), P())(make_rng())


def test_a_drawn_key_put_in_by_replace_is_no_reason_to_draw_it_again() -> None:
    def own(rng: sm.RandomState) -> Any:
        drawn, _ = rng.split()
        return drawn[None], rng.replace(value=drawn)

    call = sm.shard_map(own, make_mesh(), P(), (P("x"), P()))
    keys, rng = call(make_rng())
    again, _ = call(rng)
    assert distinct(keys, again)


def test_keys_per_shard() -> None:
    rng = sm.RandomState(jax.random.split(jax.random.key(0), 4), spec=sm.PerShard("x"))

    def fun(rng: sm.RandomState) -> Any:
        assert rng.key.shape == ()
        return both(rng, 0)

    call = sm.shard_map(fun, make_mesh("4x2"), P(), (P(("x", "y")), P()))
    keys, after = call(rng)
    more, last = call(after)
    assert (after.key.shape, keys.shape) == ((4,), (8,))
    assert distinct(keys, after.key, more, last.key, rng.key)
    alone = [sm.RandomState(key).split() for key in rng.key]
    same(after.key, jnp.stack([r.key for _, r in alone]))
    same(keys[::2], jnp.stack([k for k, _ in alone]))


@pytest.mark.slow
def test_nested_calls() -> None:
    mesh = make_mesh("4x2")

    def outer(rng: sm.RandomState) -> Any:
        inner = sm.shard_map(lambda r: both(r, 0), mesh, P(), (P("y"), P()), axis_names={"y"})
        before, rng = both(rng, 0)
        keys, rng = inner(rng)
        more, rng = inner(rng)
        last, rng = both(rng, 0)
        return jnp.concatenate([before, last])[None], jnp.concatenate([keys, more])[None], rng

    call = sm.shard_map(outer, mesh, P(), (P("x"), P("x"), P()), axis_names={"x"})
    rng, drawn, plain = make_rng(), [], make_rng()
    for _ in range(2):
        own, inner, rng = call(rng)
        assert (own.shape, inner.shape) == ((4, 2), (4, 4))
        drawn += [own, inner]
        for _ in range(4):
            plain = plain.split()[1]
        same(rng.key, plain.key)
    assert distinct(*drawn)


def test_rows_in_bare_mapped_calls() -> None:
    expected = data(make_rng().rows(16)[0])
    lanes = jax.vmap(lambda _: make_rng().rows(2, "x")[0], axis_name="x")(jnp.ones(8))
    np.testing.assert_array_equal(data(lanes), expected)
    call = jax.jit(
        jax.shard_map(
            lambda rng, x: rng.rows(len(x), "x")[0],
            mesh=make_mesh(),
            in_specs=(P(), P("x")),
            out_specs=P("x"),
        )
    )
    np.testing.assert_array_equal(data(call(make_rng(), X)), expected)
