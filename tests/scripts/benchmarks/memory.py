"""The memory of a process that updates a big state: by hand and with statemesh, donated or not, and packed.

    python tests/scripts/benchmarks/memory.py [--mebibytes 1024] [--devices 8]

Each way runs in its own process for each type of the mesh's axes, on Linux. The script prints the peak
memory in excess of the memory before the state was made, in units of the state: 1.00 is the state once.
"""

import argparse
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm


WAYS = (
    *("by hand", "by hand, donating", "statemesh", "statemesh, donating"),
    *("statemesh, packed", "statemesh, packed donating"),
)
AXES = ("Explicit", "Auto")


def step(state: Any, x: Any) -> Any:
    """Writes the state."""
    return x, state.set(0.9 * state.value + x.mean())


def made(way: str, mesh: Any, state: Any) -> tuple[Callable[..., Any], Any]:
    """A call and its first arguments."""
    name, _, how = way.partition(", ")
    if name == "by hand":
        fun = lambda value, x: (x, 0.9 * value + x.mean())
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return jax.jit(mapped, donate_argnums=(0,) if how else ()), state
    donate: Any = "states" if "donating" in how else "none"
    call = sm.shard_map(step, mesh, (None, P("x")), (P("x"), P()), donate=donate)
    model = sm.State(state, spec=P("x"))
    return call, sm.pack(model, mesh) if "packed" in how else model


def run(way: str, axes: str, mebibytes: int, devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("x",), (AxisType[axes],))
    split = NamedSharding(mesh, P("x"))
    x = jax.device_put(np.ones(devices, np.float32), split)
    small = jax.device_put(np.ones(devices, np.float32), split)
    call, model = made(way, mesh, small)
    jax.block_until_ready(call(model, x))
    del model, small
    before = resident("VmRSS")
    zeros = jax.jit(lambda: jnp.zeros(mebibytes * 2**18, jnp.float32), out_shardings=split)
    call, model = jax.block_until_ready(made(way, mesh, zeros()))
    making = resident("VmHWM")
    gc.collect()  # This makes JAX release the originals of its copies.
    Path("/proc/self/clear_refs").write_text("5")  # The peak is measured from here on.
    for _ in range(4):
        _, model = call(model, x)
        jax.block_until_ready(model)
    shown = [(peak - before) / mebibytes for peak in (making, resident("VmHWM"))]
    print(f"| {way} | {axes} | {shown[0]:.2f} | {shown[1]:.2f} |", flush=True)


def resident(what: str) -> float:
    """The mebibytes of this process in memory, now or at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--axes", choices=AXES)
    options = parser.parse_args()
    if options.way is not None:
        run(options.way, options.axes, options.mebibytes, options.devices)
        return
    print(
        f"| {options.mebibytes} MiB on {options.devices} devices | axes | while made | while updated |"
    )
    print("| --- | --- | --- | --- |", flush=True)
    flags = f"--xla_force_host_platform_device_count={options.devices}"
    for way, axes in itertools.product(WAYS, AXES):
        again = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--axes", axes]
        subprocess.run(again, env={**os.environ, "XLA_FLAGS": flags}, check=True)


if __name__ == "__main__":
    main()
