"""The kinds of state, and kinds that other authors write."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


structure: Any = jax.tree.structure
ABOVE: dict[type[sm.State], set[type[sm.State]]] = {
    sm.State: set(),
    sm.ShortTermState: set(),
    sm.HiddenState: {sm.ShortTermState},
    sm.NonBatchState: {sm.ShortTermState},
    sm.LongTermState: set(),
    sm.ParamState: {sm.LongTermState},
    sm.BatchState: {sm.LongTermState},
    sm.RandomState: set(),
}
PLAIN = [kind for kind in ABOVE if kind is not sm.RandomState]


class Tally(sm.LongTermState):
    """A float total that holds this shard's addition inside a mapped call."""

    __slots__ = ()

    def enter(self, axis_names: tuple[Any, ...]) -> sm.State:
        return self.set(jnp.zeros_like(self.value))

    def leave(self, old: sm.State | None, axis_names: tuple[Any, ...]) -> sm.State:
        added = jax.lax.psum(self.value, axis_names) if axis_names else self.value
        return self.set(added if old is None else old.value + added)


class Small(Tally):
    """A kind derived from another one, without slots of its own."""


class Watched(sm.State):
    """A kind that records the arguments of its two methods."""

    __slots__ = ()

    def enter(self, axis_names: tuple[Any, ...]) -> sm.State:
        seen.append(("enter", axis_names))
        return self.set(self.value + 1)

    def leave(self, old: sm.State | None, axis_names: tuple[Any, ...]) -> sm.State:
        seen.append(("leave", axis_names, old))
        return super().leave(old, axis_names)


seen: list[tuple[Any, ...]] = []


def count(total: Any, rows: jax.Array) -> Any:
    return total.set(total.value + rows.sum())


def test_relations() -> None:
    for kind, above in ABOVE.items():
        state = kind(jax.random.key(0)) if kind is sm.RandomState else kind(1.0)
        assert sm.is_state(state)
        for other in ABOVE:
            expected = other in {kind, sm.State, *above}
            assert isinstance(state, other) is expected
            assert issubclass(kind, other) is expected


def test_a_kind_is_kept() -> None:
    states = [kind(np.arange(3.0), tag="t") for kind in (*PLAIN, Tally, Small)]
    mapped = sm.shard_map(lambda states: [s.set(s.value) for s in states], make_mesh(), P(), P())
    jitted: Any = jax.jit(lambda states: states)
    for state, same, written in zip(states, jitted(states), mapped(states), strict=True):
        for other in (
            same,
            written,
            state.set(np.ones(3, np.float32)),
            state.replace(value=1, tag="u"),
            structure(state).unflatten([None]),
            jax.tree.map(lambda x: x + 1, state),
            eqx.tree_at(lambda s: s.value, state, jnp.ones(3)),
        ):
            assert type(other) is type(state)


def test_an_outside_kind_in_shard_map() -> None:
    mesh = make_mesh("4x2")
    call = sm.shard_map(count, mesh, (None, P(mesh.axis_names)), P())
    rows = np.ones(8, np.float32)
    # From here on float32 has no odd numbers, so increments found by subtraction would be lost.
    large = 2.0**24
    total: Any = Tally(large, tag="t")
    for calls in (1, 2, 3):
        total = call(total, rows)
        assert type(total) is Tally
        assert total.tag == {"t"}
        assert float(total.value) == large + 8 * calls
    assert float(call(Small(3.0), rows).value) == 11


def test_an_outside_kind_under_options_and_transformations() -> None:
    rows = np.ones(16, np.float32)
    for options in ({"check_vma": False}, {"jit": False}, {"donate": "states"}):
        call = sm.shard_map(count, make_mesh(), (None, P("x")), P(), **options)
        assert float(call(Tally(5.0), rows).value) == 21
    assert float(call.unsharded(Tally(5.0), rows).value) == 21
    call = sm.shard_map(count, make_mesh(), (None, P("x")), P())
    last, _ = jax.lax.scan(lambda t, _: (call(t, rows), None), Tally(0.0), length=3)
    assert float(last.value) == 48
    slope = jax.jit(jax.grad(lambda rows: call(Tally(5.0), rows).value * 2.0))(rows)
    np.testing.assert_array_equal(slope, 2)


def test_an_untouched_state_does_not_leave() -> None:
    call = sm.shard_map(lambda t, x: (x + t.value, t), make_mesh(), (None, P("x")), (P("x"), P()))
    total, rows = call.place(Tally(5.0), np.arange(8, dtype=np.float32))
    y, after = call(total, rows)
    np.testing.assert_array_equal(y, np.arange(8))
    assert after.value is total.value


def test_a_state_made_inside_has_no_old_one() -> None:
    call = sm.shard_map(lambda x: Tally(x.sum()), make_mesh(), P("x"), P())
    assert float(call(np.arange(8.0)).value) == 28


def test_what_the_methods_are_given() -> None:
    mesh = make_mesh("4x2")

    def run(fun: Any, state: Watched) -> Any:
        seen.clear()
        after = sm.shard_map(fun, mesh, (P(), P(("x", "y"))), P())(state, np.arange(8.0))
        entered, *left = seen
        assert entered[0] == "enter"
        return after, entered[1], left

    total = Watched(1.0, reduce="sum")
    after, entered, left = run(lambda s, x: s.set(s.value + x.sum()), total)
    assert (type(after), float(after.value)) == (Watched, 1 + 8 * 1 + 28)
    assert entered == ("x", "y")
    ((_, merging, old),) = left
    # `old` is the state before `enter`, so the increment includes what `enter` added.
    assert merging == ("x", "y")
    assert (type(old), old.reduce) == (Watched, "sum")

    one = Watched(np.zeros(4), reduce="mean", spec=sm.PerShard("x"))
    after, entered, left = run(lambda s, x: s.set(s.value + x.sum()), one)
    assert entered == ("y",)
    ((_, merging, old),) = left
    assert merging == ("y",)
    assert old.value.shape == ()
    np.testing.assert_array_equal(after.value, 1 + np.arange(8.0).reshape(4, 2).mean(1))

    split = Watched(np.zeros(8), spec=P(("x", "y")))
    after, entered, left = run(lambda s, x: s.set(s.value + x), split)
    assert (entered, left[0][1]) == ((), ())
    np.testing.assert_array_equal(after.value, 1 + np.arange(8.0))

    agreed = Watched(0.0)
    after, entered, left = run(lambda s, x: s.set(s.value + 2), agreed)
    assert (entered, left[0][1]) == (("x", "y"), ())
    assert float(after.value) == 3


def test_a_kind_may_look_like_another_inside() -> None:
    class Sleeping(sm.HiddenState):
        """A kind whose inner state is a plain one without a policy."""

        def enter(self, axis_names: tuple[Any, ...]) -> sm.State:
            return sm.State(self.value * 2, reduce="max")

    types = []

    def fun(state: sm.State, x: jax.Array) -> tuple[jax.Array, sm.State]:
        types.append(type(state))
        return x + state.value, state.set(state.value + x.sum())

    call = sm.shard_map(fun, make_mesh(), (None, P("x")), (P("x"), P()))
    y, after = call(Sleeping(3.0), np.arange(8, dtype=np.float32))
    assert types == [sm.State]
    np.testing.assert_array_equal(y, 6 + np.arange(8))
    assert (type(after), float(after.value)) == (sm.State, 13.0)


def test_a_kind_that_merges_nothing_is_found_out() -> None:
    class Careless(sm.State):
        def leave(self, old: sm.State | None, axis_names: tuple[Any, ...]) -> sm.State:
            return self

    call = sm.shard_map(count, make_mesh(), (None, P("x")), P())
    with pytest.raises(sm.DivergedStateError, match="Careless"):
        call(Careless(0.0, reduce="sum"), np.arange(8, dtype=np.float32))


def test_models_that_differ_in_a_type_alone_are_two() -> None:
    mesh = make_mesh("2")
    call = sm.shard_map(lambda node: jax.tree.map(jnp.negative, node), mesh, P(), P())
    for kind in (sm.ParamState, sm.BatchState, sm.State) * 2:
        assert type(call(kind(np.float32(1)))) is kind
        assert type(sm.pack({"s": kind(1.0)}, mesh).unpack()["s"]) is kind
