"""Equal `pmap2`s of one function share what they compiled, and keep nothing alive."""

import functools
import gc
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import assert_same, compiles, counted, older_objects_frozen


X = np.arange(8, dtype=np.float32)


def test_mapped_anew_it_is_traced_once() -> None:
    fun, count = counted(lambda s, x: (x + s.value, s.set(s.value + 1)))
    s, times = sm.State(0.0), []
    for _ in range(5):
        with compiles() as seen:
            y, s = sm.pmap2(fun, "x", in_axes=(None, 0), out_axes=(0, None))(s, X)
        times.append(seen.times)
    assert count.times == 1
    assert times[1:] == [0] * 4
    np.testing.assert_array_equal(y, X + 4)


@pytest.mark.parametrize(
    "declared",
    [
        {"in_axes": None, "axis_size": 8},
        {"out_axes": (0, 0)},
        {"axis_name": "y"},
        {"devices": jax.devices()[::-1]},
        {"backend": "cpu"},
        {"donate_argnums": 0},
        {"unexpected_out_state_mapping": "ignore"},
        {"state_in_axes": sm.State},
        {"state_out_axes": {None: sm.State}},
    ],
    ids=str,
)
def test_equal_declarations_share_and_others_do_not(declared: dict[str, Any]) -> None:
    def step(s: Any, x: Any) -> Any:
        return sm.psum(x, "y") if declared.get("axis_name") else x.sum(), s

    def run(fun: Any, **declared: Any) -> Any:
        s, x = (jax.device_put(v) for v in (np.ones(8), np.ones((8, 2), np.float32)))
        return jax.tree.leaves(sm.pmap2(fun, **declared)(sm.State(s), x))

    fun, count = counted(step)
    if "axis_name" not in declared:
        run(fun)
    first, traced = run(fun, **declared), count.times
    second = run(fun, **declared)
    assert count.times == traced
    # A function that was never mapped in another way.
    for x, y, z in zip(first, second, run(lambda s, x: step(s, x), **declared), strict=True):
        assert_same((x, y), (z, z))
        assert x.sharding == y.sharding == z.sharding


@older_objects_frozen()
def test_function_is_not_kept_alive() -> None:
    def make() -> tuple[Any, list[Any]]:
        big = jnp.ones(1000)

        def fun(x: Any) -> Any:
            return x + big[0]

        return sm.pmap2(fun), [weakref.ref(x) for x in (fun, big)]

    mapped, refs = make()
    gc.collect()
    np.testing.assert_array_equal(mapped(X), X + 1)
    np.testing.assert_array_equal(mapped.unsharded(X), X + 1)
    functools.update_wrapper(mapped, len)
    np.testing.assert_array_equal(mapped(jnp.arange(4.0)), np.arange(4) + 1)
    del mapped
    gc.collect()
    assert [ref() for ref in refs] == [None] * 2


@older_objects_frozen()
def test_nor_by_a_filter_that_refers_to_it() -> None:
    def make() -> Any:
        def fun(state: Any) -> Any:
            return state

        declared: Any = lambda path, state: fun is not None
        sm.pmap2(fun, state_in_axes=declared)(sm.State(X))
        return weakref.ref(fun)

    ref = make()
    gc.collect()
    assert ref() is None


class Pair(NamedTuple):
    left: Any
    right: Any


def test_equal_values_of_other_types_are_other_values() -> None:
    def fun(pair: Any) -> Any:
        return pair[0] + pair[1]

    sm.pmap2(fun, in_axes=((0, 0),))((X, X))
    sm.pmap2(fun, in_axes=(Pair(0, 0),))(Pair(X, X))
    with pytest.raises(ValueError, match="in_axes"):
        sm.pmap2(fun, in_axes=((0, 0),))(Pair(X, X))
    with pytest.raises(TypeError):
        sm.pmap2(fun, in_axes=((False, False),))((X, X))


def test_what_may_change_is_not_shared() -> None:
    def fun(pair: Any) -> Any:
        return pair[0].sum()

    axes: list[Any] = [0, 0]
    assert sm.pmap2(fun, in_axes=(axes,))([X, X]).tolist() == X.tolist()
    axes[0] = None
    assert sm.pmap2(fun, in_axes=(axes,))([X, X]).tolist() == [28] * 8

    class Layer(sm.Module):
        weight: Any

        def __call__(self, x: Any) -> Any:
            return x * self.weight

        def twice(self, x: Any) -> Any:
            return 2 * self(x)

    for weight in (1, 3):
        layer = Layer(weight)
        calls: list[tuple[Any, Any, Any]] = [
            (sm.pmap2(layer), (X,), X),
            (sm.pmap2(layer.twice), (X,), 2 * X),
            (sm.pmap2(functools.partial(layer, X[1]), axis_size=8), (), np.ones(8)),
        ]
        for call, args, wanted in calls:
            np.testing.assert_array_equal(call(*args), weight * wanted)


def test_new_code_is_another_function() -> None:
    def fun(x: Any) -> Any:
        return x + 1

    def changed(x: Any) -> Any:
        return x + 2

    sm.pmap2(fun)(X)
    fun.__code__ = changed.__code__
    np.testing.assert_array_equal(sm.pmap2(fun)(X), X + 2)


def test_few_are_kept() -> None:
    fun, count = counted(lambda x: x)
    names = [str(k) for k in range(40)]
    for name in names:
        sm.pmap2(fun, name)(X)
    assert count.times == 40
    sm.pmap2(fun, names[-1])(X)
    assert count.times == 40
    sm.pmap2(fun, names[0])(X)
    assert count.times == 41
