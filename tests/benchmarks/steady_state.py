"""What a mapped call costs beside the same program written by hand.

    python tests/benchmarks/steady_state.py [--devices 8 1] [--states 1 10 100 1000] [--rounds 1]

The two are called in turn in one run, each result waited for before the next call, with the order
changing every time, and medians are compared. Printed are the time of a call on the wall, the processor
time of the calling thread until dispatch returns, and the time of the first call (trace and compile).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm


SIZE = 16


def programs(mesh: Mesh, count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same step over `count` sharded buffers, by hand and with statemesh; each feeds itself.

    Both return one array to wait for: all that a program computes is ready at once, and to look
    through a tree for arrays would be timed with the call.
    """

    def by_hand(*arrays: jax.Array) -> Any:
        *buffers, x = arrays
        return (x * 2, *(b + x for b in buffers))

    def step(states: list[sm.State], x: jax.Array) -> Any:
        return x * 2, [s.set(s.value + x) for s in states]

    sharding = NamedSharding(mesh, P("x"))
    x = jax.device_put(np.ones(SIZE, np.float32), sharding)
    hand = jax.jit(jax.shard_map(by_hand, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    mine = sm.shard_map(step, mesh, (P(), P("x")), (P("x"), P()))
    arrays = [jax.device_put(np.zeros(SIZE, np.float32), sharding) for _ in range(count)]
    states: Any = [sm.State(jnp.zeros(SIZE), spec=P("x")) for _ in range(count)]
    states, x = mine.place(states, x)

    def call_hand() -> Any:
        nonlocal arrays
        result, *arrays = hand(*arrays, x)
        return result

    def call_mine() -> Any:
        nonlocal states
        result, states = mine(states, x)
        return result

    return call_hand, call_mine


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until the result is there, and of the thread until the call returns."""
    wall, thread = time.perf_counter(), time.thread_time()
    result = call()
    thread = time.thread_time() - thread
    jax.block_until_ready(result)
    return time.perf_counter() - wall, thread


def first_calls(mesh: Mesh, count: int) -> list[float]:
    """Median seconds to trace, compile and run once: of new functions each time."""
    times: tuple[list[float], ...] = ([], [])
    for i in range(min(9, max(3, 900 // count))):
        calls = programs(mesh, count)
        for k in (0, 1) if i % 2 else (1, 0):
            times[k].append(timed(calls[k])[0])
    return [statistics.median(column) for column in times]


def measure(mesh: Mesh, count: int) -> None:
    first = first_calls(mesh, count)
    calls = programs(mesh, count)
    for call in calls * 3:
        timed(call)
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for i in range(max(60, 6000 // (count + 10))):
        for k in (0, 1) if i % 2 else (1, 0):
            times[k].append(timed(calls[k]))
    (wall, thread), (my_wall, my_thread) = (
        [statistics.median(column) * 1e6 for column in zip(*rows, strict=True)] for rows in times
    )
    print(
        f"| {mesh.size} | {count} | {wall:.0f} | {my_wall:.0f} | {my_wall / wall:.3f} "
        f"| {thread:.0f} | {my_thread:.0f} | {my_thread - thread:+.0f} "
        f"| {first[0]:.3f} | {first[1]:.3f} | {first[1] / first[0]:.2f} |",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--states", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"JAX {jax.__version__}, {os.cpu_count()} cores; medians, microseconds (first: seconds)\n"
    )
    print("| devices | states | hand | ours | ratio ", end="")
    print("| thread hand | ours | more | first hand | ours | ratio |")
    print("| " + "--- | " * 11)
    for _ in range(options.rounds):
        for devices in options.devices:
            mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
            for count in options.states:
                measure(mesh, count)


if __name__ == "__main__":
    main()
