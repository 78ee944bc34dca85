"""Means of states over all devices: joined by statemesh, and one by one by hand.

    python tests/benchmarks/joined.py [--processes 1 2] [--devices 8] [--rounds 3] [--donate]

Every state lies on every device and moves towards the mean of the input; then the mean over the devices is
taken, on meshes of Explicit and of Auto axes. Several processes share the devices, and talk to each other
as processes on several machines do. One run calls the programs in turn and waits for each result. It
prints, for some numbers and sizes of states, the median time of a call, and the ratio. `--donate` gives the
old states up.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


# So many states of so many bytes each.
CASES = [
    *((10, 64), (100, 64), (100, 4 * 2**10), (16, 64 * 2**10), (8, 256 * 2**10), (8, 512 * 2**10)),
    *((8, 2**20), (4, 4 * 2**20), (2, 16 * 2**20), (2, 64 * 2**20)),
]


AXES = ("Explicit", "Auto")


def programs(axes: str, donate: bool, count: int, size: int) -> dict[str, Callable[[], None]]:
    """A call of each program on a mesh of these axes, with the states that the previous call left."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import statemesh as sm

    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType[axes],))

    def put(value: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    x = put(np.ones(mesh.size, np.float32), P("x"))
    # Each program has its own arrays, which it may give up.
    start, ours_start = (
        [put(np.full(size // 4, k, np.float32), P()) for k in range(count)] for _ in range(2)
    )

    def moved(value: jax.Array, x: jax.Array) -> jax.Array:
        return 0.9 * value + 0.1 * x.mean()

    def by_hand(values: Sequence[jax.Array], x: jax.Array) -> Any:
        return 2 * x, [jax.lax.pmean(moved(value, x), "x") for value in values]

    def step(states: Sequence[sm.State], x: jax.Array) -> Any:
        return 2 * x, [state.set(moved(state.value, x)) for state in states]

    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P("x"), P()))
    hand: Any = jax.jit(mapped, donate_argnums=(0,) if donate else ())
    gives: Any = "states" if donate else "none"
    ours: Any = sm.shard_map(step, mesh, (None, P("x")), (P("x"), P()), donate=gives)

    def made(call: Any, states: Any) -> Callable[[], None]:
        def run() -> None:
            nonlocal states
            result, states = call(states, x)
            jax.block_until_ready((result, states))

        return run

    states = [sm.State(value, reduce="mean") for value in ours_start]
    return {f"{axes}, by hand": made(hand, start), f"{axes}, joined": made(ours, states)}


def measure(rounds: int, seconds: float, donate: bool) -> None:
    import jax

    for count, size in CASES:
        runs: dict[str, Callable[[], None]] = {}
        for axes in AXES:
            runs |= programs(axes, donate, count, size)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
            run()
        # All processes make the same number of calls.
        begin = time.perf_counter()
        runs["Explicit, by hand"]()
        calls = max(2, min(200, int(seconds / (time.perf_counter() - begin + 1e-4))))
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            calls = int(multihost_utils.broadcast_one_to_all(calls))
        for turn in range(rounds * calls):
            for name in sorted(runs, reverse=bool(turn % 2)):
                begin = time.perf_counter()
                runs[name]()
                times[name].append(time.perf_counter() - begin)
        for axes in AXES if jax.process_index() == 0 else ():
            hand, joined = (
                statistics.median(times[f"{axes}, {name}"]) * 1e3 for name in ("by hand", "joined")
            )
            print(
                f"| {axes} | {jax.process_count()} | {len(jax.devices())} | {count} | {size} "
                f"| {hand:.2f} | {joined:.2f} | {joined / hand:.2f} |",
                flush=True,
            )


def start(processes: int, devices: int, options: argparse.Namespace) -> None:
    """Measure in so many processes, which share the devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    common = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    common += ["--donate"] if options.donate else []
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *common, "--one", str(k), str(processes), str(port)],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        for k in range(processes)
    ]
    for process in running:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--donate", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        print(
            "| axes | processes | devices | states | bytes of each | by hand, ms | joined, ms | ratio |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for processes in options.processes:
            start(processes, options.devices, options)
        return
    own, count, port = options.one
    if int(count) > 1:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(own))
    measure(options.rounds, options.seconds, options.donate)


if __name__ == "__main__":
    main()
