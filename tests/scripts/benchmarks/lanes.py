"""The cost of `pmap2` and `vmap2`, compared with the same programs written by hand.

    python tests/benchmarks/lanes.py [--states 1 10 100 1000] [--lanes 8] [--size 16] [--rounds 1]

`pmap2` is compared with `jax.jit(jax.shard_map(...))` and `jax.pmap`, and `vmap2` with
`jax.jit(jax.vmap(...))`. Each of these runs over a flat list of arrays, which is the least that a call can
cost, and over the same tree of states. The arrays for `pmap2` lie on a mesh of Explicit and on one of Auto
axes, and are kept or donated. One run calls all of them in turn, in an order that changes every time, and
waits for each result. It compares medians. `--size` is the length of each state in each lane. The
computation of a call grows with it, and the overhead of statemesh does not.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.benchmarks.timing import timed


def by_hand(*arrays: jax.Array) -> Any:
    """One lane: the result, and every buffer with the input added."""
    *buffers, x = arrays
    return (x * 2, *(b + x for b in buffers))


def step(states: list[sm.State], x: jax.Array) -> Any:
    """The same computation with states."""
    return x * 2, [s.set(s.value + x) for s in states]


def fed_back(call: Callable[..., Any], arrays: list[Any], x: Any) -> Callable[[], Any]:
    """A hand-written program that continues with what it returned."""

    def again() -> Any:
        nonlocal arrays
        result, *arrays = call(*arrays, x)
        return result

    return again


def states_fed_back(call: Callable[..., Any], states: Any, x: Any) -> Callable[[], Any]:
    """The same for a program over states."""

    def again() -> Any:
        nonlocal states
        result, states = call(states, x)
        return result

    return again


def on_devices(
    axes: AxisType, donate: bool, count: int, lanes: int, size: int
) -> dict[str, Callable[[], Any]]:
    mesh = Mesh(np.array(jax.devices()[:lanes]), ("i",), axis_types=(axes,))
    sharding = NamedSharding(mesh, P("i"))

    def placed() -> tuple[list[Any], Any]:
        """Arrays that a program may give up."""
        flat, x = jax.device_put(arrays(count, lanes, size), sharding)
        return flat, x

    def shard(*parts: jax.Array) -> Any:
        return [out[None] for out in by_hand(*(part[0] for part in parts))]

    def shard_of_states(states: list[sm.State], x: jax.Array) -> Any:
        inner = jax.tree.map(lambda part: part[0], (states, x))
        return jax.tree.map(lambda out: out[None], step(*inner))

    specs: Any = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    given, every = ((0,), tuple(range(count))) if donate else ((), ())
    devices = jax.devices()[:lanes]
    tree = jax.jit(jax.shard_map(shard_of_states, **specs), donate_argnums=given)
    ours = sm.pmap2(step, "i", state_in_axes=sm.State, donate_argnums=given)
    (first, x), (second, _), (third, _) = (placed() for _ in range(3))
    # `jax.pmap` does not take arrays on Explicit axes.
    fourth, host = arrays(count, lanes, size)
    pmapped = jax.pmap(by_hand, devices=devices, donate_argnums=every)
    result, *fourth = pmapped(*fourth, host)
    return {
        "flat": fed_back(jax.jit(jax.shard_map(shard, **specs), donate_argnums=every), first, x),
        "tree": states_fed_back(tree, [sm.State(array) for array in second], x),
        "ours": states_fed_back(ours, [sm.State(array) for array in third], x),
        "jax.pmap": fed_back(pmapped, fourth, result),
    }


def in_lanes(count: int, lanes: int, size: int) -> dict[str, Callable[[], Any]]:
    flat, x = arrays(count, lanes, size)
    states = [sm.State(array) for array in flat]
    return {
        "flat": fed_back(jax.jit(jax.vmap(by_hand)), flat, x),
        "tree": states_fed_back(jax.jit(jax.vmap(step)), states, x),
        "ours": states_fed_back(sm.vmap2(step, state_in_axes=sm.State), states, x),
    }


def arrays(count: int, lanes: int, size: int) -> tuple[list[Any], Any]:
    return [jnp.zeros((lanes, size)) for _ in range(count)], jnp.ones((lanes, size))


def measure(calls: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """The median wall time of a call, in microseconds."""
    names = list(calls)
    for call in [*calls.values()] * 3:
        timed(call)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(max(60, 6000 // (count + 10))):
        k = i % len(names)
        for name in (*names[k:], *names[:k]) if i % 2 else (*names[k::-1], *names[:k:-1]):
            times[name].append(timed(calls[name])[0])
    return {name: statistics.median(column) * 1e6 for name, column in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"JAX {jax.__version__}, {os.cpu_count()} cores; medians, microseconds; "
        f"{options.lanes} lanes, {options.size} entries each\n"
    )
    print("| call | states | flat | tree | jax.pmap | ours | to flat | to tree | to jax.pmap |")
    print("| " + "--- | " * 9)
    for _ in range(options.rounds):
        for count in options.states:
            sizes = count, options.lanes, options.size
            rows = {"vmap2": in_lanes(*sizes)}
            for axes, donate in itertools.product(
                (AxisType.Explicit, AxisType.Auto), (False, True)
            ):
                name = f"pmap2, {axes.name}{', donating' if donate else ''}"
                rows[name] = on_devices(axes, donate, *sizes)
            calls = {f"{row}: {what}": call for row in rows for what, call in rows[row].items()}
            found = measure(calls, count)
            for row in rows:
                ours = found[f"{row}: ours"]
                others = [found.get(f"{row}: {other}") for other in ("flat", "tree", "jax.pmap")]
                times = [*others, ours, *(other and ours / other for other in others)]
                shown = ["" if t is None else f"{t:.2f}" if t < 10 else f"{t:.0f}" for t in times]
                print(f"| {row} | {count} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
