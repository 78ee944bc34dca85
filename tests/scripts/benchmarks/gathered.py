"""Split parameters that are gathered layer by layer: by hand one by one, and by `gather`, joined or not.

    python -m tests.scripts.benchmarks.gathered [--devices 8] [--rounds 5] [--kibibytes 0 64 1024 1048576]

The program takes the gradients of a transformer of the width of `_models.py`. Each layer is gathered when it
runs, and by `jax.checkpoint` once more on the way back. `gather` joins the arrays of a layer that are smaller
than each number of KiB. One run calls all programs in turn and waits for each result. It prints the median
time of a step, the median and the range over the rounds of its ratio to the program by hand, and the
temporaries of the compiled program by XLA's account.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import _fsdp
from tests.scripts.benchmarks.peers._case import Axes, Case, timed
from tests.scripts.benchmarks.peers._models import HEADS, LAYERS, TOKENS, WIDTH


Layer = dict[str, Any]


def layers() -> list[Layer]:
    numbers = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (numbers.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return [
        {"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH), "scale": normal(WIDTH)}
        | {"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH), "bias": normal(WIDTH)}
        for _ in range(LAYERS)
    ]


def loss(model: list[Layer], x: jax.Array, whole: Callable[[Layer], Layer]) -> jax.Array:
    rows, tokens, _ = x.shape

    @jax.checkpoint
    def apply(h: jax.Array, layer: Layer) -> jax.Array:
        p = whole(layer)
        qkv = (h * p["scale"] @ p["qkv"]).reshape(rows, tokens, 3 * HEADS, WIDTH // HEADS)
        q, key, v = jnp.split(qkv, 3, axis=2)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, key) / WIDTH)
        read = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, tokens, WIDTH)
        h = h + read @ p["out"]
        return h + jax.nn.relu(h + p["bias"]) @ p["up"] @ p["down"]

    for layer in model:
        x = apply(x, layer)
    return jnp.square(x).mean()


class Program(NamedTuple):
    """A call, its arguments, and the bytes of temporaries of the compiled program."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    temporaries: int


def programs(axes: Axes, kibibytes: list[int]) -> dict[str, Program]:
    case = Case("transformer", axes, jax.device_count(), 0)
    model = sm.place(sm.fsdp(layers(), case.mesh, "x", min_size=0), case.mesh)
    x = np.random.default_rng(1).normal(size=(2 * jax.device_count(), TOKENS, WIDTH))
    x = jax.device_put(x.astype(np.float32), case.split)
    split = case.split.spec
    specs = jax.tree.map(lambda state: state.spec, model, is_leaf=sm.is_state)
    parts = jax.tree.map(lambda state: state.value, model, is_leaf=sm.is_state)

    def gathered(layer: Layer, specs: Layer) -> Layer:
        axis = {name: list(spec).index("x") for name, spec in specs.items()}
        return {
            name: jax.lax.all_gather(part, "x", axis=axis[name], tiled=True)
            for name, part in layer.items()
        }

    def by_hand(model: list[Layer], x: jax.Array) -> Any:
        whole = lambda layer: gathered(layer, specs[0])
        value, grads = jax.value_and_grad(loss)(model, x, whole)
        grads = jax.tree.map(lambda g: g / jax.lax.axis_size("x"), grads)
        return jax.lax.pmean(value, "x"), grads

    def step(model: Any, x: jax.Array) -> Any:
        def loss_fn(model: Any, x: jax.Array) -> Any:
            values = lambda layer: sm.gather(layer, "x")
            return loss(model, x, values), model

        (value, _), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x)
        return value, grads

    mapped = jax.shard_map(by_hand, mesh=case.mesh, in_specs=(specs, split), out_specs=(P(), specs))
    compiled = jax.jit(mapped).lower(parts, x).compile()
    found = {"by hand": Program(compiled, (parts, x), temporaries(compiled))}
    for limit in kibibytes:
        vars(_fsdp)["LARGE"] = limit * 2**10
        ours = sm.shard_map(step, case.mesh, (None, split), P())
        held = temporaries(ours.lower(model, x).compile())
        # The first call traces with this limit too.
        jax.block_until_ready(ours(model, x))
        found[f"{limit} KiB"] = Program(ours, (model, x), held)
    return found


def temporaries(compiled: Any) -> int:
    held: int = compiled.memory_analysis().temp_size_in_bytes
    return held


def measure(kibibytes: list[int], rounds: int, seconds: float) -> None:
    for axes in get_args(Axes):
        found = programs(axes, kibibytes)
        calls = {name: partial(program.call, *program.args) for name, program in found.items()}
        for _ in range(2):
            wall = sum(timed(call)[0] for call in calls.values())
        turns = max(2, int(seconds / wall))
        times: list[dict[str, float]] = []
        for _ in range(rounds):
            of_round: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(turns):
                for name in [*calls][:: -1 if turn % 2 else 1]:
                    of_round[name].append(timed(calls[name])[0])
            times.append({name: median(of_call) for name, of_call in of_round.items()})
        for name, program in found.items():
            ratios = sorted(of_round[name] / of_round["by hand"] for of_round in times)
            wall = 1e3 * median(of_round[name] for of_round in times)
            shown = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            held = program.temporaries / 2**20
            print(f"| {axes} | {name} | {wall:.3g} | {shown} | {held:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--kibibytes", type=int, nargs="+", default=[0, 64, 256, 1024, 2**20])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.kibibytes, options.rounds, options.seconds)
        return
    print(f"| axes | joined below | ms | to hand | temporaries, MiB |\n|{' --- |' * 5}", flush=True)
    flags = f"--xla_force_host_platform_device_count={options.devices}"
    again = [sys.executable, *sys.orig_argv[1:], "--one"]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run(again, env=environment, check=True)


if __name__ == "__main__":
    main()
