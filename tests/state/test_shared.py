"""Equal `pmap2`s of one function share what they compiled, and keep nothing alive."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from statemesh._call import _shared
from tests.helpers import compiles, counted, older_objects_frozen


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
        {"in_axes": (0,)},
        {"in_axes": None, "axis_size": 8},
        {"out_axes": (0,)},
        {"axis_name": "y"},
        {"axis_size": 8},
        {"devices": jax.devices()},
        {"backend": "cpu"},
        {"donate_argnums": 0},
        {"unexpected_out_state_mapping": "ignore"},
        {"state_in_axes": sm.BatchState},
        {"state_out_axes": {None: sm.BatchState}},
    ],
    ids=str,
)
def test_declared_otherwise_it_is_another(declared: dict[str, Any]) -> None:
    def fun(x: Any) -> Any:
        return x

    one = sm.pmap2(fun, **declared)
    assert one._pipeline is not sm.pmap2(fun)._pipeline
    assert one._pipeline is sm.pmap2(fun, **declared)._pipeline


def test_equal_values_of_other_types_are_other_values() -> None:
    def fun(x: Any) -> Any:
        return x

    sm.pmap2(fun, in_axes=0)(X)
    with pytest.raises(TypeError):
        sm.pmap2(fun, in_axes=False)(X)
    with pytest.raises(TypeError):
        sm.pmap2(fun, in_axes=(False,))(X)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_a_pair_and_a_tuple_are_other_values() -> None:
    def fun(pair: Any) -> Any:
        return pair[0] + pair[1]

    sm.pmap2(fun, in_axes=((0, 0),))((X, X))
    sm.pmap2(fun, in_axes=(Pair(0, 0),))(Pair(X, X))
    with pytest.raises(ValueError, match="in_axes"):
        sm.pmap2(fun, in_axes=((0, 0),))(Pair(X, X))


@older_objects_frozen()
def test_function_is_not_kept_alive() -> None:
    def make() -> tuple[Any, list[Any]]:
        big = jnp.ones(1000)

        def fun(x: Any) -> Any:
            return x + big[0]

        mapped = sm.pmap2(fun)
        return mapped, [weakref.ref(x) for x in (fun, big, mapped._pipeline)]

    mapped, refs = make()
    gc.collect()
    np.testing.assert_array_equal(mapped(X), X + 1)
    np.testing.assert_array_equal(mapped.unsharded(X), X + 1)
    functools.update_wrapper(mapped, len)
    np.testing.assert_array_equal(mapped(jnp.arange(4.0)), np.arange(4) + 1)
    del mapped
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_what_may_change_or_keep_it_alive_is_not_shared() -> None:
    def fun(tree: Any) -> Any:
        return tree

    axes = [0]
    for declared in (
        {"in_axes": (axes,)},
        {"state_in_axes": lambda path, state: fun is not None},
        {"state_in_axes": {0: [sm.BatchState]}},
        {"static_broadcasted_argnums": 0},
    ):
        one, other = (sm.pmap2(fun, **declared) for _ in range(2))
        assert one._pipeline is not other._pipeline

    class Layer(sm.Module):
        def __call__(self, x: Any) -> Any:
            return x

    callables: list[Any] = [Layer(), functools.partial(fun), Layer().__call__, jnp.sin]
    for each in callables:
        assert sm.pmap2(each)._pipeline is not sm.pmap2(each)._pipeline


def test_new_code_is_another_function() -> None:
    def fun(x: Any) -> Any:
        return x + 1

    def changed(x: Any) -> Any:
        return x + 2

    sm.pmap2(fun)(X)
    fun.__code__ = changed.__code__
    np.testing.assert_array_equal(sm.pmap2(fun)(X), X + 2)


def test_few_are_kept() -> None:
    def fun(x: Any) -> Any:
        return x

    made = [sm.pmap2(fun, str(k))._pipeline for k in range(100)]
    assert len(_shared._pipelines[fun]) == _shared._KEPT
    assert sm.pmap2(fun, "99")._pipeline is made[99]
    assert sm.pmap2(fun, "0")._pipeline is not made[0]


def test_threads_share() -> None:
    fun, count = counted(lambda x: x + 1)
    sm.pmap2(fun)(X)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(20):
            if not np.array_equal(sm.pmap2(fun)(X), X + 1):
                wrong.append(fun)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert count.times == 1


def doubled(x: Any) -> Any:
    return 2 * x


def test_copies_and_pickles() -> None:
    mapped = sm.pmap2(doubled)
    for one in (pickle.loads(pickle.dumps(mapped)), copy.copy(mapped), copy.deepcopy(mapped)):
        np.testing.assert_array_equal(one(X), 2 * X)
        assert one.__wrapped__ is doubled


def test_mistakes_are_told_every_time() -> None:
    fun: Any = lambda x, y: x
    for _ in range(2):
        with pytest.raises(TypeError, match="'y'"):
            sm.pmap2(fun)(X)
