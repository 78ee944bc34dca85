"""Whether training runs have the same bits on every number of devices and processes, and what that costs.

python -m tests.scripts.same_bits --steps 200 --out docs/pages/assets/same-bits.svg
python -m tests.scripts.same_bits --cost

The models are those of `docs/examples`: the classifier of digits, with batch normalisation and dropout, and
the transformer of characters, in bfloat16. Each run takes a process of its own, or two. What a step costs is
measured on the transformer of the benchmarks too, with and without blocks in turn.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from ..helpers import module_at
from ..processes import free_port, run_together
from .benchmarks.peers._case import Case, timed
from .benchmarks.peers._training import with_statemesh


EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"
BLOCKS, COUNTS = 8, (1, 2, 4, 8)
# In place of a number of blocks: both ways in turn, to measure the cost.
WITH_AND_WITHOUT = -1
SPECS: dict[str, Any] = {"in_specs": (None, None, P("data")), "out_specs": P()}


def digits(blocks: int | None) -> tuple[Any, Any, Any, Any]:
    """The model, its loss, the optimizer, and a function that gives the rows of each step."""
    module = module_at(EXAMPLES / "digits.py")
    model = module.Classifier(jax.random.key(0))
    # Each block has statistics of its own: those of all rows would depend on what other shards run.
    axis_name = "data" if blocks is None else None
    layers = [
        block.replace(norm=sm.nn.BatchNorm(width, axis_name=axis_name, momentum=0.95))
        for block, width in zip(model.blocks, module.WIDTHS[1:], strict=True)
    ]
    images, numbers = module.load_digits(return_X_y=True)
    rows = np.concatenate([images / 16, numbers[:, None]], 1).astype(np.float32)

    def loss_fn(model: Any, rows: Any) -> Any:
        logits, model = model(rows[:, :64])
        wanted = rows[:, 64].astype(int)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        return losses.mean(), model

    def batch(turn: int) -> Any:
        return rows[np.random.default_rng(turn).choice(len(rows), module.BATCH, replace=False)]

    return model.replace(blocks=tuple(layers)), loss_fn, optax.adam(3e-3), batch


def text(blocks: int | None) -> tuple[Any, Any, Any, Any]:
    module = module_at(EXAMPLES / "text.py")
    # All parameters are whole here, so that layers neither gather nor scatter.
    module.whole = lambda layer, dtype: eqx.combine(
        jax.tree.map(lambda x: x.astype(dtype), sm.trainable(layer)), layer
    )
    module.sm = type(
        "Door", (), {**vars(sm), "scatter": lambda written, layer: like(written, layer)}
    )
    characters, (train, _) = module.read_text()
    model = module.Transformer(jax.random.key(0), characters, jnp.bfloat16)

    def like(written: Any, layer: Any) -> Any:
        """The layer with what was written, and with its parameters in their own dtype."""
        return eqx.combine(sm.trainable(layer), written)

    def batch(turn: int) -> Any:
        starts = np.random.default_rng(turn).integers(
            len(train) - module.CONTEXT, size=(module.BATCH, 1)
        )
        return train[starts + np.arange(module.CONTEXT + 1)]

    return model, module.loss_fn, module.OPTIMIZER, batch


MODELS = {"digits": digits, "text": text}


def prepared(name: str, count: int, blocks: int | None) -> tuple[Any, Any, Any, Any]:
    """A step of training on so many devices, its model and slots, and the rows of each step."""
    model, loss_fn, optimizer, batch = MODELS[name](blocks)
    # The axis "model" of the transformer's own layers has one device.
    devices = np.array(jax.devices()[:count]).reshape(count, 1)
    mesh = jax.sharding.Mesh(
        devices, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )

    def step(model: Any, slots: Any, rows: Any) -> Any:
        gradient = sm.value_and_grad(loss_fn, axis_name="data", blocks=blocks)
        (loss, model), grads = gradient(model, rows)
        updates, slots = optimizer.update(grads, slots, sm.trainable(model))
        return loss, eqx.apply_updates(model, updates), slots

    slots = optimizer.init(sm.trainable(model))
    return sm.shard_map(step, mesh, **SPECS), model, slots, batch


def train(name: str, count: int, blocks: int | None, steps: int) -> dict[str, Any]:
    """The losses of a training run on so many devices, and a digest of all that it leaves."""
    mapped, model, slots, batch = prepared(name, count, blocks)
    losses, times = [], []
    for turn in range(steps):
        rows = batch(turn)
        started = time.perf_counter()
        loss, model, slots = jax.block_until_ready(mapped(model, slots, rows))
        times.append(time.perf_counter() - started)
        losses.append(np.asarray(loss.addressable_shards[0].data))
    digest = hashlib.sha256()
    for x in jax.tree.leaves((model, slots)):
        if eqx.is_array(x):
            x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            part = x.addressable_shards[0].data if isinstance(x, jax.Array) else x
            digest.update(np.ascontiguousarray(part).tobytes())
    return {
        "losses": [float(x) for x in losses],
        "bits": hashlib.sha256(b"".join(x.tobytes() for x in losses)).hexdigest()[:16],
        "model": digest.hexdigest()[:16],
        "milliseconds": 1e3 * float(np.median(times[steps // 10 :])),
    }


def cost(name: str, count: int, steps: int) -> dict[str, float]:
    """What a step takes in milliseconds with `psum` and with blocks, called in turn, and their ratio."""
    calls: dict[int | None, Any] = {}
    for blocks in (None, BLOCKS):
        if name == "transformer":
            calls[blocks] = with_statemesh(Case(name, "Explicit", count, 0), blocks).step
        else:
            mapped, model, slots, batch = prepared(name, count, blocks)
            calls[blocks] = functools.partial(mapped, model, slots, batch(0))
    times: dict[int | None, list[float]] = {blocks: [] for blocks in calls}
    for turn in range(steps + 3):
        for blocks in list(calls)[:: -1 if turn % 2 else 1]:
            seconds, _ = timed(calls[blocks])
            times[blocks].append(1e3 * seconds)
    # The first calls compile.
    plain, blocked = (np.array(times[blocks][3:]) for blocks in (None, BLOCKS))
    return {
        "psum": float(np.median(plain)),
        "blocks": float(np.median(blocked)),
        "ratio": float(np.median(blocked / plain)),
    }


def in_processes(name: str, count: int, blocks: int | None, steps: int, processes: int) -> Any:
    """The result of a run in new processes, which have `count` devices together."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "result.json"
        run = [sys.executable, "-m", "tests.scripts.same_bits", "--one", name, str(count)]
        run += [str(blocks or 0), str(steps), str(out)]
        port = str(free_port())
        each = [[*run, str(process), port] for process in range(processes)]
        commands = each if processes > 1 else [run]
        # XLA optimizes as much as it does for users.
        run_together(commands, pathlib.Path(folder), count // processes, 1200, optimization=3)
        return json.loads(out.read_text())


def one(options: list[str]) -> None:
    name, count, blocks, steps, out, *process = options
    if process:
        number, port = process
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    if int(blocks) == WITH_AND_WITHOUT:
        result = cost(name, int(count), int(steps))
    else:
        result = train(name, int(count), int(blocks) or None, int(steps))
    if not process or process[0] == "0":
        pathlib.Path(out).write_text(json.dumps(result))


def draw(runs: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(MODELS))
    for axis, name in zip(axes, MODELS, strict=True):
        for how, label in ((None, "psum"), (BLOCKS, f"blocks={BLOCKS}")):
            first, last = (np.array(runs[f"{name} {how} {n} 1"]["losses"]) for n in (1, 8))
            axis.plot(np.abs(last - first), label=label, lw=1)
        axis.set(title=name, xlabel="step", ylabel="|loss on 8 devices - loss on 1|")
        axis.set_yscale("symlog", linthresh=1e-7)
        axis.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--one", nargs="+")
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    if options.cost:
        for name in (*MODELS, "transformer"):
            for count in COUNTS:
                result = in_processes(name, count, WITH_AND_WITHOUT, 40, 1)
                print(
                    f"{name:11} {count} devices",
                    *(f"{k} {v:.2f}" for k, v in result.items()),
                    flush=True,
                )
        return
    runs: dict[str, Any] = {}
    equal = True
    for name in MODELS:
        for blocks in (None, BLOCKS):
            for count, processes in (*((n, 1) for n in COUNTS), (4, 2), (8, 2)):
                result = in_processes(name, count, blocks, options.steps, processes)
                runs[f"{name} {blocks} {count} {processes}"] = result
                first = runs[f"{name} {blocks} 1 1"]
                pairs = zip(result["losses"], first["losses"], strict=True)
                same = sum(a == b for a, b in pairs)
                model = result["model"] == first["model"]
                equal &= blocks is None or (model and result["bits"] == first["bits"])
                print(
                    f"{name:7} blocks={blocks} {count} devices in {processes} process(es): {same} of "
                    f"{options.steps} losses, model and slots {'equal' if model else 'differ'}; "
                    f"{result['milliseconds']:.1f} ms a step",
                    flush=True,
                )
    if options.out:
        draw(runs, options.out)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
