"""What a call with many small states costs: by hand, with statemesh, and packed.

    python tests/benchmarks/packing.py [--states 1 100 1000] [--donate states]

Each state is an array of 64 floats, split over 8 devices, and every call writes all of them. The three calls
are made in turn in one run, each result waited for before the next, and medians are compared. Printed are the
time of a call on the wall, that until it returns without its result, that to trace and compile, and the
bytes that the compiled program moves by XLA's own account.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm


SIZE = 64


def step(model: Any, x: jax.Array) -> Any:
    mean = jax.lax.pmean(x.sum(), "x")
    return mean, jax.tree.map(lambda value: 0.99 * value + mean, model)


def calls(mesh: Mesh, count: int, donate: Any) -> dict[str, tuple[Callable[..., Any], Any]]:
    """By name, a call and what it starts with."""
    values = [np.full(SIZE, k, np.float32) for k in range(count)]
    model = {f"s{k}": sm.State(value, spec=P("x")) for k, value in enumerate(values)}
    mapped = sm.shard_map(step, mesh, (None, P("x")), (P(), P()), donate=donate)
    again = sm.shard_map(step, mesh, (None, P("x")), (P(), P()), donate=donate)
    by_hand = jax.shard_map(step, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P(), P("x")))
    flat = tuple(jax.device_put(value, NamedSharding(mesh, P("x"))) for value in values)
    donated = (0,) if donate == "states" else ()
    return {
        "hand": (jax.jit(by_hand, donate_argnums=donated), flat),
        "ours": (mapped, sm.place(model, mesh)),
        "packed": (again, sm.pack(model, mesh)),
    }


def measure(mesh: Mesh, count: int, donate: Any) -> None:
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    made = calls(mesh, count, donate)
    models = {name: model for name, (_, model) in made.items()}
    walls: dict[str, list[float]] = {name: [] for name in made}
    hosts: dict[str, list[float]] = {name: [] for name in made}
    firsts: dict[str, float] = {}
    moved: dict[str, float] = {}
    for name, (call, model) in made.items():
        start = time.perf_counter()
        compiled = call.lower(model, x).compile()  # type: ignore[attr-defined]
        firsts[name] = time.perf_counter() - start
        cost = compiled.cost_analysis()
        moved[name] = cost["bytes accessed"] / count
    for _ in range(40):
        for name, (call, _) in made.items():
            start = time.perf_counter()
            _, models[name] = call(models[name], x)
            returned = time.perf_counter()
            jax.block_until_ready(models[name])
            walls[name].append(time.perf_counter() - start)
            hosts[name].append(returned - start)
    for name in made:
        wall = statistics.median(walls[name][5:])
        ratio = wall / statistics.median(walls["hand"][5:])
        host = statistics.median(hosts[name][5:])
        print(
            f"| {count} | {name} | {1e6 * wall:.0f} | {ratio:.3f} | {1e6 * host:.0f} | {firsts[name]:.2f} "
            f"| {moved[name]:.0f} |",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--donate", choices=["none", "states"], default="none")
    options = parser.parse_args(argv)
    print(
        f"JAX {jax.__version__}, {os.cpu_count()} cores; medians, microseconds (compile: seconds)\n"
    )
    print("| states | call | wall | to hand | until it returns | compile | bytes for each state |")
    print("| " + "--- | " * 7)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    for count in options.states:
        measure(mesh, count, options.donate)


if __name__ == "__main__":
    main()
