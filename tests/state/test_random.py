"""`RandomState`: the streams of shards, the key that comes back, and rows that are the same on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
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


def draw(rng: sm.RandomState, x: jax.Array) -> Any:
    """Each kind of draw, several times. Draws that differ between shards have a leading axis."""
    first, rng = rng.split()
    some, rng = rng.split(3)
    rows, rng = rng.rows(len(x), "x")
    alike, rng = rng.rows(2)
    last, rng = rng.split()
    more, rng = rng.rows(len(x), "x")
    return jnp.stack([first, last, *some])[None], rows, more, alike, rng


X: Any = np.ones(16, np.float32)


def mapped(mesh: Mesh) -> Any:
    return sm.shard_map(draw, mesh, (P(), P("x")), (P("x"), P("x"), P("x"), P(), P()))


def both(rng: sm.RandomState, index: Any) -> tuple[jax.Array, sm.RandomState]:
    """One key for each shard, and the state with which a shard continues."""
    del index
    key, rng = rng.split()
    return key[None], rng


def test_a_typed_key_is_demanded() -> None:
    raw = (np.zeros(2, np.uint32), jax.random.PRNGKey(0))
    for key in (3, 0.5, None, "key", *raw, {"a": jax.random.key(0)}, make_rng()):
        with pytest.raises(TypeError, match="typed key"):
            sm.RandomState(key)
    with pytest.raises(TypeError):
        sm.RandomState()
    with pytest.raises(sm.StructureError):
        make_rng().set(jax.random.PRNGKey(0))
    # A key is never split over a mesh.
    for make in (make_rng, make_rng().replace):
        with pytest.raises(sm.SpecError, match="PerShard"):
            make(spec=P("x"))
    assert make_rng(spec=sm.PerShard("x")).spec == sm.PerShard("x")


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1", AxisType.Explicit),
        slow("2", AxisType.Auto),
        ("8", AxisType.Explicit),
        slow("8", AxisType.Auto),
    ],
)
def test_calls_on_every_mesh(name: str, kind: AxisType) -> None:
    own, rows, more, alike, rng = draw(make_rng(1), X)
    call = mapped(make_mesh(name, kind))
    shards, got_rows, got_more, got_alike, after = call(make_rng(1), X)
    # The rows, the draws of the first shard and the state that comes back are those of the unsharded
    # run. The other shards have their own keys.
    same(got_rows, rows)
    same(got_more, more)
    same(got_alike, alike)
    np.testing.assert_array_equal(data(shards)[:5], data(own))
    same(after.key, rng.key)
    assert structure(after) == structure(make_rng())
    drawn = [shards, got_rows, got_more, got_alike, after.key, make_rng(1).key]
    for _ in range(3):
        *keys, after = call(after, X)
        drawn += [*keys, after.key]
    assert distinct(*drawn)


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


def test_rows_and_streams_over_two_axes() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        rows, rng = rng.rows(len(x), ("x", "y"))
        half, rng = rng.rows(2 * len(x), "x")
        key, rng = rng.split()
        return key[None], rows, half, rng

    mesh, every = make_mesh("4x2"), P(("x", "y"))
    call = sm.shard_map(fun, mesh, (P(), every), (every, every, P("x"), P()))
    keys, rows, half, after = call(make_rng(), X)
    key, own_rows, own_half, plain = fun(make_rng(), jnp.ones(16))
    same(rows, own_rows)
    same(rows, make_rng().rows(16)[0])
    same(half, own_half[:16])
    same(keys[0], key)
    same(after.key, plain.key)
    assert keys.shape == (8,)
    assert distinct(keys, rows, half, after.key)


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


@pytest.mark.parametrize(
    ("draws", "check_vma"),
    [(in_cond, True), (in_cond, False), (in_where, True), (in_while, True), (in_while, False)],
)
def test_draws_of_some_shards_only_are_not_drawn_again(draws: Any, check_vma: bool) -> None:
    def fun(rng: sm.RandomState) -> Any:
        return draws(rng, jax.lax.axis_index("x") % 3 == 1)

    call = sm.shard_map(fun, make_mesh(), P(), (P("x"), P()), check_vma=check_vma)
    rng, drawn, held = make_rng(), [], [make_rng().key]
    for _ in range(3):
        keys, rng = call(rng)
        drawn.append(keys[1::3])
        held.append(rng.key)
    assert distinct(*drawn)
    assert distinct(*held)


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


@pytest.mark.parametrize(
    ("writes", "options"),
    [
        ([after_fold_in, after_split, in_jit, in_scan], {}),
        ([after_fold_in, in_scan], {"check_vma": False}),
        slow([after_fold_in], {"jit": False}),
    ],
    ids=["checked", "unchecked", "eager"],
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


def test_rows_of_lanes_after_a_new_key() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        return after_fold_in(rng).rows(len(x), "x")

    want, plain = fun(make_rng(), jnp.ones(16))
    for to in (sm.vmap2, sm.pmap2):
        mapping: Any = to(fun, axis_name="x", in_axes=(None, 0))
        rows, after = mapping(make_rng(), jnp.ones((8, 2)))
        same(rows, want)
        same(after.key, plain.key)


@pytest.mark.parametrize(("of", "check_vma"), [(0, True), (0, False), (3, True)])
def test_a_key_that_only_some_shards_go_on_from_is_not_drawn_from_again(
    of: int, check_vma: bool
) -> None:
    def fun(rng: sm.RandomState) -> Any:
        key, after = rng.split()
        stays = jax.lax.axis_index("x") == of
        return key[None], rng.set(jnp.where(stays, rng.key, after.key))

    call = sm.shard_map(fun, make_mesh(), P(), (P("x"), P()), check_vma=check_vma)
    rng, drawn = make_rng(), []
    for _ in range(3):
        keys, rng = call(rng)
        drawn += [keys[:of], keys[of + 1 :]]
    assert distinct(*drawn)


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


@pytest.mark.parametrize(("first", "check_vma"), [(True, True), slow(False, False)])
def test_nested_calls(first: bool, check_vma: bool) -> None:
    mesh = make_mesh("4x2")

    def outer(rng: sm.RandomState) -> Any:
        inner = sm.shard_map(
            lambda r: both(r, 0), mesh, P(), (P("y"), P()), axis_names={"y"}, check_vma=check_vma
        )
        before, rng = both(rng, 0) if first else (jax.random.split(jax.random.key(9), 0), rng)
        keys, rng = inner(rng)
        more, rng = inner(rng)
        last, rng = both(rng, 0)
        return jnp.concatenate([before, last])[None], jnp.concatenate([keys, more])[None], rng

    call = sm.shard_map(
        outer, mesh, P(), (P("x"), P("x"), P()), axis_names={"x"}, check_vma=check_vma
    )
    rng, drawn, plain = make_rng(), [], make_rng()
    for _ in range(2):
        own, inner, rng = call(rng)
        assert (own.shape, inner.shape) == ((4, 1 + first), (4, 4))
        drawn += [own, inner]
        for _ in range(3 + first):
            plain = plain.split()[1]
        same(rng.key, plain.key)
    assert distinct(*drawn)


def test_an_unbound_axis_name_is_an_error() -> None:
    mesh, lanes = make_mesh("4x2"), jnp.ones(8)

    def rows(rng: sm.RandomState) -> Any:
        return rng.rows(2, ("x", "nowhere"))[0]

    def beside(rng: sm.RandomState) -> Any:
        return rng.rows(2, "y")[0]

    calls: list[Any] = [
        sm.shard_map(rows, mesh, P(), P()),
        sm.shard_map(beside, mesh, P(), P(), axis_names={"x"}),
        jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P()),
        lambda rng: jax.vmap(lambda _: rows(rng), axis_name="x")(lanes),
    ]
    for call in calls:
        with pytest.raises(sm.StatemeshError, match="axis"):
            call(make_rng())


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


def test_a_bare_spec_for_states_leaves_the_key_alone() -> None:
    def fun(rng: sm.RandomState, s: sm.State) -> Any:
        assert (rng.key.shape, s.value.shape) == ((), (2,))
        key, rng = rng.split()
        return key[None], rng, s.set(s.value + 1)

    call = sm.shard_map(
        fun, make_mesh(), P(), (P("x"), P(), P()), state_in_specs=P("x"), state_out_specs=P("x")
    )
    keys, rng, state = call(make_rng(), sm.State(X))
    assert rng.key.sharding.spec == P()
    assert state.value.sharding.spec == P("x")
    same(rng.key, make_rng().split()[1].key)
    assert distinct(keys, rng.key)
