"""The cost of a data-parallel training step, compared with the same step written by hand.

    python tests/benchmarks/training.py [--devices 8 1] [--layers 1 10 100] [--rounds 1]

Gradient descent trains a perceptron of equally wide layers, on meshes of Explicit and of Auto axes, and
keeps the old parameters or donates them. One run calls all these steps in turn, in an order that changes
every time, and waits for each result. It prints the median wall time of a call, the time of the first call
(trace and compile), and the number of all-reduces in the compiled programs.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm


WIDTH, ROWS, RATE = 16, 64, 0.01


class Layer(sm.Module):
    weight: sm.ParamState
    bias: sm.ParamState


class Perceptron(sm.Module):
    layers: list[Layer]


def forward(weights: Sequence[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for weight, bias in weights:
        x = jnp.tanh(x @ weight + bias)
    return x


def step_by_hand(params: Any, x: jax.Array, y: jax.Array) -> Any:
    own = jax.lax.pcast(params, "data", to="varying")
    loss, grads = jax.value_and_grad(lambda p: ((forward(p, x) - y) ** 2).mean())(own)
    loss, grads = jax.lax.pmean((loss, grads), "data")
    return loss, jax.tree.map(lambda p, g: p + -RATE * g, params, grads)


def loss_fn(model: Perceptron, x: jax.Array, y: jax.Array) -> Any:
    weights = [(layer.weight.value, layer.bias.value) for layer in model.layers]
    return ((forward(weights, x) - y) ** 2).mean(), model


def step(model: Perceptron, x: jax.Array, y: jax.Array) -> Any:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="data")(model, x, y)
    return loss, eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, grads))


def programs(mesh: Mesh, donate: bool, count: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """The step by hand and the step with statemesh, each with its arguments."""
    split = P("data")
    mapped = jax.shard_map(step_by_hand, mesh=mesh, in_specs=(P(), split, split), out_specs=P())
    hand = jax.jit(mapped, donate_argnums=(0,) if donate else ())
    gives: Any = "states" if donate else "none"
    mine = sm.shard_map(step, mesh, (None, split, split), P(), donate=gives)
    numbers = np.random.default_rng(0)
    params = [
        (numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4, np.zeros(WIDTH, np.float32))
        for _ in range(count)
    ]
    # Each program has its own arrays, which it may give up.
    params, ours = (jax.device_put(params, NamedSharding(mesh, P())) for _ in range(2))
    batch = numbers.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    x, y = (jax.device_put(rows, NamedSharding(mesh, split)) for rows in batch)
    model = Perceptron([Layer(*map(sm.ParamState, pair)) for pair in ours])
    return [(hand, (params, x, y)), (mine, mine.place(model, x, y))]


def timed(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
    start = time.perf_counter()
    loss, after = call(*args)
    jax.block_until_ready(loss)
    return time.perf_counter() - start, (after, *args[1:])


def measure(devices: int, count: int) -> None:
    """Print a row for each type of axes, keeping and donating."""
    rows = list(itertools.product((AxisType.Explicit, AxisType.Auto), (False, True)))
    firsts: list[list[float]] = [[] for _ in range(2 * len(rows))]
    for i in range(3):
        calls, args = [], []
        for axes, donate in rows:
            mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(axes,))
            for call, first in programs(mesh, donate, count):
                calls.append(call)
                args.append(first)
        for k in range(len(calls))[:: -1 if i % 2 else 1]:
            seconds, args[k] = timed(calls[k], args[k])
            firsts[k].append(seconds)
    reduces = [
        (call.lower(*own).compile().as_text() or "").count(" all-reduce(")
        for call, own in zip(calls, args, strict=True)
    ]
    times: list[list[float]] = [[] for _ in calls]
    for i in range(max(60, 3000 // (count + 10))):
        for k in range(len(calls))[:: -1 if i % 2 else 1]:
            seconds, args[k] = timed(calls[k], args[k])
            times[k].append(seconds)
    walls = [statistics.median(column[5:]) * 1e6 for column in times]
    starts = [statistics.median(column) for column in firsts]
    for k, (axes, donate) in enumerate(rows):
        hand, ours = 2 * k, 2 * k + 1
        print(
            f"| {axes.name}{', donating' if donate else ''} | {devices} | {count} "
            f"| {walls[hand]:.0f} | {walls[ours]:.0f} | {walls[ours] / walls[hand]:.3f} "
            f"| {starts[hand]:.2f} | {starts[ours]:.2f} | {starts[ours] / starts[hand]:.2f} "
            f"| {reduces[hand]} | {reduces[ours]} |",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"JAX {jax.__version__}, {os.cpu_count()} cores; medians, microseconds (first: seconds)\n"
    )
    print("| axes | devices | layers | hand | ours | ratio | first hand | ours | ratio ", end="")
    print("| all-reduces hand | ours |")
    print("| " + "--- | " * 11)
    for _ in range(options.rounds):
        for devices in options.devices:
            for count in options.layers:
                measure(devices, count)


if __name__ == "__main__":
    main()
