"""Reductions over all devices, joined by statemesh and one by one: means of states, and training steps.

    python -m tests.scripts.benchmarks.joined [--processes 1 2] [--devices 8] [--rounds 3] [--donate]
    python -m tests.scripts.benchmarks.joined --models transformer cnn mlp [--kibibytes 0 64 128 256 1024]

Without `--models` every state lies on every device and moves towards the mean of the input; then the mean
over the devices is taken, on meshes of Explicit and of Auto axes. One by one it is taken by hand. It prints,
for some numbers and sizes of states, the median time of a call, and the ratio. `--donate` gives the old
states up.

With `--models` these models are trained data-parallel, and gradients are joined that are smaller than each
number of KiB, in buckets of four times as much. Zero joins nothing. It prints the median time of a step, and
the median and the range, over the rounds, of its ratio to that of a step that joins nothing.

One run calls all programs in turn and waits for each result. Several processes share the devices, and talk
to each other as processes on several machines do.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, get_args

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._axes import _joined
from tests.processes import free_port
from tests.scripts.benchmarks.peers._case import Axes, Case, timed
from tests.scripts.benchmarks.peers._models import Model
from tests.scripts.benchmarks.peers._training import with_statemesh


# So many states of so many bytes each. The last ones go alone.
CASES = ((10, 64), (100, 64), (100, 4 * 2**10), (16, 64 * 2**10), (8, 256 * 2**10))
AXES = get_args(Axes)


Call = Callable[[], Any]


def programs(axes: str, donate: bool, count: int, size: int) -> dict[tuple[str, str], Call]:
    """A call of each program on a mesh of these axes, with the states that the previous call left."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType[axes],))

    def put(value: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    x = put(np.ones(mesh.size, np.float32), P("x"))

    def fed_back(call: Any, reduce: str | None) -> Call:
        values = [put(np.full(size // 4, k, np.float32), P()) for k in range(count)]
        states = values if reduce is None else [sm.State(v, reduce=reduce) for v in values]

        def again() -> Any:
            nonlocal states
            result, states = call(states, x)
            return result

        return again

    def moved(value: jax.Array, x: jax.Array) -> jax.Array:
        return 0.9 * value + 0.1 * x.mean()

    def by_hand(values: Sequence[jax.Array], x: jax.Array) -> Any:
        return 2 * x, [jax.lax.pmean(moved(value, x), "x") for value in values]

    def step(states: Sequence[sm.State], x: jax.Array) -> Any:
        return 2 * x, [state.set(moved(state.value, x)) for state in states]

    specs: Any = {"mesh": mesh, "in_specs": (P(), P("x")), "out_specs": (P("x"), P())}
    hand = jax.jit(jax.shard_map(by_hand, **specs), donate_argnums=(0,) if donate else ())
    ours = sm.shard_map(step, **specs, donate="states" if donate else "none")
    return {(axes, "by hand"): fed_back(hand, None), (axes, "joined"): fed_back(ours, "mean")}


def measure(rounds: int, seconds: float, donate: bool) -> None:
    for count, size in CASES:
        calls = programs("Explicit", donate, count, size) | programs("Auto", donate, count, size)
        for call in [*calls.values()] * 5:
            timed(call)
        # All processes make the same number of calls.
        wall, _ = timed(calls["Explicit", "by hand"])
        turns = rounds * max(2, min(200, int(seconds / (wall + 1e-4))))
        if jax.process_count() > 1:
            turns = int(multihost_utils.broadcast_one_to_all(turns))
        times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
        for turn in range(turns):
            # In an order that changes.
            for name in [*calls][:: -1 if turn % 2 else 1]:
                times[name].append(timed(calls[name])[0])
        for axes in AXES if jax.process_index() == 0 else ():
            hand, joined = (1e3 * median(times[axes, name]) for name in ("by hand", "joined"))
            sizes = f"{jax.process_count()} | {jax.device_count()} | {count} | {size}"
            shown = f"{hand:.3g} | {joined:.3g} | {joined / hand:.3g}"
            print(f"| {axes} | {sizes} | {shown} |", flush=True)


def measure_models(
    models: Sequence[Model], kibibytes: Sequence[int], rounds: int, seconds: float
) -> None:
    for model in models:
        calls: dict[tuple[Axes, int], Call] = {}
        for axes in AXES:
            for limit in kibibytes:
                _joined.LARGE, _joined._BUCKET = limit * 2**10, 4 * limit * 2**10
                calls[axes, limit] = with_statemesh(Case(model, axes, jax.device_count(), 0)).step
                # The first call traces with these limits.
                jax.block_until_ready(calls[axes, limit]())
        for _ in range(2):
            wall = sum(timed(call)[0] for call in calls.values())
        turns = max(2, int(seconds / wall))
        if jax.process_count() > 1:
            turns = int(multihost_utils.broadcast_one_to_all(turns))
        times: list[dict[tuple[Axes, int], float]] = []
        for _ in range(rounds):
            of_round: dict[tuple[Axes, int], list[float]] = {name: [] for name in calls}
            for turn in range(turns):
                for name in [*calls][:: -1 if turn % 2 else 1]:
                    of_round[name].append(timed(calls[name])[0])
            times.append({name: median(of_call) for name, of_call in of_round.items()})
        for axes, limit in calls if jax.process_index() == 0 else ():
            of_call = [1e3 * of_round[axes, limit] for of_round in times]
            ratios = sorted(of_round[axes, limit] / of_round[axes, 0] for of_round in times)
            shown = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            sizes = f"{jax.process_count()} | {jax.device_count()} | {limit} KiB"
            print(f"| {model} | {axes} | {sizes} | {median(of_call):.3g} | {shown} |", flush=True)


def start(processes: int, devices: int, port: int) -> None:
    """Measure in so many processes, which share the devices."""
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    again = [sys.executable, *sys.orig_argv[1:], "--one"]
    running = [
        subprocess.Popen(
            [*again, str(k), str(processes), str(port)],
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
    parser.add_argument("--models", choices=get_args(Model), nargs="+")
    parser.add_argument("--kibibytes", type=int, nargs="+", default=[0, 64, 128, 256, 1024])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        sizes = "processes | devices | states | bytes of each"
        head = f"| axes | {sizes} | by hand, ms | joined, ms | ratio |\n|{' --- |' * 8}"
        if options.models:
            sizes = "processes | devices | joined below"
            head = f"| model | axes | {sizes} | ms | to one by one |\n|{' --- |' * 7}"
        print(head, flush=True)
        for processes in options.processes:
            start(processes, options.devices, free_port())
        return
    own, count, port = options.one
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(own))
    if options.models:
        measure_models(options.models, options.kibibytes, options.rounds, options.seconds)
    else:
        measure(options.rounds, options.seconds, options.donate)


if __name__ == "__main__":
    main()
