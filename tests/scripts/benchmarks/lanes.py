"""The cost of `pmap2` and `vmap2`, compared with the same programs written by hand.

    python -m tests.scripts.benchmarks.lanes [--states 1 10 100 1000] [--lanes 8] [--size 16] [--rounds 1]

`pmap2` is compared with `jax.jit(jax.shard_map(...))` and `jax.pmap`, and `vmap2` with
`jax.jit(jax.vmap(...))`. Each of these runs over a flat list of arrays, which is the least that a call can
cost, and over the same tree of states. The arrays for `pmap2` lie on a mesh of Explicit and on one of Auto
axes, and are kept or donated. It compares medians of microseconds. `--size` is the length of each state in
each lane. The computation of a call grows with it, and the overhead of statemesh does not.
"""

import argparse
import itertools
import os
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.scripts.benchmarks import timing


def by_hand(*arrays: jax.Array) -> Any:
    """One lane: the result, and every buffer with the input added."""
    *buffers, x = arrays
    return (x * 2, *(b + x for b in buffers))


def step(states: list[sm.State], x: jax.Array) -> Any:
    """The same computation with states."""
    return x * 2, [s.set(s.value + x) for s in states]


def arrays(count: int, lanes: int, size: int) -> tuple[list[Any], Any]:
    return [jnp.zeros((lanes, size)) for _ in range(count)], jnp.ones((lanes, size))


def on_devices(axes: str, donate: bool, *sizes: int) -> dict[str, timing.Call]:
    count, lanes, _ = sizes
    mesh = timing.mesh_of(axes, lanes, "i")

    def placed() -> Any:
        """Arrays that a program may give up."""
        return jax.device_put(arrays(*sizes), NamedSharding(mesh, P("i")))

    def shard(*parts: jax.Array) -> Any:
        return [out[None] for out in by_hand(*(part[0] for part in parts))]

    def shard_of_states(states: list[sm.State], x: jax.Array) -> Any:
        inner = jax.tree.map(lambda part: part[0], (states, x))
        return jax.tree.map(lambda out: out[None], step(*inner))

    specs: Any = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    first, every = ((0,), tuple(range(count))) if donate else ((), ())
    flat = jax.jit(jax.shard_map(shard, **specs), donate_argnums=every)
    tree = jax.jit(jax.shard_map(shard_of_states, **specs), donate_argnums=first)
    ours = sm.pmap2(step, "i", state_in_axes=sm.State, donate_argnums=first)
    # `jax.pmap` does not take arrays on Explicit axes.
    pmapped = jax.pmap(by_hand, devices=jax.devices()[:lanes], donate_argnums=every)
    host, x = arrays(*sizes)
    x, *host = pmapped(*host, x)
    return {
        "flat": timing.fed_back_flat(flat, *placed()),
        "tree": timing.fed_back(tree, *of_states(*placed())),
        "ours": timing.fed_back(ours, *of_states(*placed())),
        "jax.pmap": timing.fed_back_flat(pmapped, host, x),
    }


def of_states(values: list[Any], x: Any) -> tuple[list[sm.State], Any]:
    return [sm.State(value) for value in values], x


def in_lanes(*sizes: int) -> dict[str, timing.Call]:
    flat, states = arrays(*sizes), of_states(*arrays(*sizes))
    return {
        "flat": timing.fed_back_flat(jax.jit(jax.vmap(by_hand)), *flat),
        "tree": timing.fed_back(jax.jit(jax.vmap(step)), *states),
        "ours": timing.fed_back(sm.vmap2(step, state_in_axes=sm.State), *states),
    }


OTHERS = ("flat", "tree", "jax.pmap")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {os.cpu_count()} cores\n")
    timing.print_head("call", "states", *OTHERS, "ours", *(f"to {other}" for other in OTHERS))
    for count in options.states * options.rounds:
        sizes = count, options.lanes, options.size
        rows = {"vmap2": in_lanes(*sizes)}
        for axes, donate in itertools.product(("Explicit", "Auto"), (False, True)):
            rows[f"pmap2, {axes}{', donating' if donate else ''}"] = on_devices(
                axes, donate, *sizes
            )
        calls = {(row, what): call for row in rows for what, call in rows[row].items()}
        times = timing.medians(calls, max(60, 6000 // (count + 10)))
        for row in rows:
            others = [times.get((row, other)) for other in OTHERS]
            ours = times[row, "ours"]
            walls = ["" if t is None else 1e6 * t for t in (*others, ours)]
            timing.print_row(row, count, *walls, *("" if t is None else ours / t for t in others))


if __name__ == "__main__":
    main()
