"""A steady call asks JAX for an earlier program only, and takes nothing else for JAX's refusal."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm


class Watched:
    """A node of the arguments. What is in `hooks` happens while they are flattened."""

    hooks: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, x: Any) -> None:
        self.x = x


def _children(node: Watched) -> tuple[tuple[Any], None]:
    while Watched.hooks:
        Watched.hooks.pop()()
    return (node.x,), None


jax.tree_util.register_pytree_node(Watched, _children, lambda _, children: Watched(*children))


def steady() -> tuple[Any, sm.State, Watched]:
    """A call that is like those before it."""
    mesh = jax.make_mesh((8,), ("data",))
    mapped = sm.shard_map(
        lambda s, node: (s.set(s.value + 1), 2 * node.x), mesh, (None, P("data")), (P(), P("data"))
    )
    node = Watched(jax.device_put(np.arange(8.0), NamedSharding(mesh, P("data"))))
    (state,) = mapped.place(sm.State(0), node)[:1]
    for _ in range(3):
        state, _ = mapped(state, node)
    return mapped, state, node


@contextmanager
def on_signal(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind_of_error", [RuntimeError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_comes_through(kind_of_error: Any) -> None:
    mapped, state, node = steady()

    def stop() -> None:
        raise kind_of_error("stop: 're-tracing' is no refusal, 'no_tracing' is not set")

    with on_signal(stop):
        Watched.hooks.append(lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(kind_of_error, match="stop"):
            mapped(state, node)
    after, doubled = mapped(state, node)
    assert int(after.value) == 4
    np.testing.assert_array_equal(doubled, 2 * np.arange(8.0))


def test_a_signal_handler_may_compute() -> None:
    mapped, state, node = steady()
    results: list[float] = []

    def compute() -> None:
        results.append(float(jax.jit(lambda x: x + 1)(1.0)))
        fresh = sm.vmap2(lambda s, x: s.value + x, in_axes=(None, 0))
        for _ in range(3):
            results.append(float(fresh(sm.State(1.0), jnp.arange(3.0))[2]))
        # The very call that was interrupted, with other arrays.
        results.append(float(mapped(state, Watched(np.ones(16)))[1].sum()))

    with on_signal(compute):
        Watched.hooks.append(lambda: signal.raise_signal(signal.SIGUSR1))
        after, _ = mapped(state, node)
    assert results == [2, 3, 3, 3, 32]
    assert int(after.value) == 4


def test_an_array_that_was_given_up_is_named() -> None:
    mapped, state, node = steady()
    gone = Watched(node.x + 0)
    gone.x.delete()
    with pytest.raises(sm.StatemeshError, match=r"<lambda>.*\n  - node\[<flat index 0>\]"):
        mapped(state, gone)
    assert int(mapped(state, node)[0].value) == 4
