"""Train a classifier of handwritten digits data-parallel on eight devices, and then on one device.

    python docs/examples/digits.py [--x64] [--steps N] [--seed N] [--out PATH.png]

Everything that a training step changes is a State: the parameters, the running statistics, the random
stream and the optimizer's slots. `step` is a pure function of them, written for one shard of the batch,
and `shard_map` runs it on a mesh of any size. The script exits with 1 if the two runs disagree.
"""

import argparse
import os
import sys
import time
from typing import Any, NamedTuple


# This simulates eight devices on a machine that has only a CPU; other platforms ignore the flag. It must
# be set before JAX starts. If XLA_FLAGS already has a number of devices, that number comes last and wins.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import statemesh as sm


BATCH, HELD_OUT, WIDTHS = 96, 360, (64, 256, 128)


class Block(sm.Module):
    """A linear map, batch normalisation, SiLU and dropout."""

    # There is no bias before the normalisation. It would cancel, and its gradient would be rounding error.
    weight: sm.ParamState
    norm: sm.nn.BatchNorm
    dropout: sm.nn.Dropout

    def __init__(self, key: jax.Array, n_in: int, n_out: int) -> None:
        ours, theirs = jax.random.split(key)
        self.weight = sm.ParamState(jax.random.normal(ours, (n_in, n_out)) * (2 / n_in) ** 0.5)
        # The statistics are those of the global batch, not of this shard's rows, and each global row has
        # its own mask. So sharding changes nothing.
        self.norm = sm.nn.BatchNorm(n_out, axis_name="data", momentum=0.95)
        self.dropout = sm.nn.Dropout(0.2, theirs, axis_name="data")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Block"]:
        x, norm = self.norm(x @ self.weight.value)
        # SiLU is smooth. At the kink of ReLU, rounding would decide the gradient.
        x, dropout = self.dropout(jax.nn.silu(x))
        return x, self.replace(norm=norm, dropout=dropout)


class Classifier(sm.Module):
    """Blocks, and a linear map to the ten digits."""

    blocks: tuple[Block, ...]
    weight: sm.ParamState
    bias: sm.ParamState

    def __init__(self, key: jax.Array) -> None:
        last, *keys = jax.random.split(key, len(WIDTHS))
        self.blocks = tuple(map(Block, keys, WIDTHS[:-1], WIDTHS[1:]))
        self.weight = sm.ParamState(jax.random.normal(last, (WIDTHS[-1], 10)) * WIDTHS[-1] ** -0.5)
        self.bias = sm.ParamState(jnp.zeros(10))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Classifier"]:
        blocks = []
        for block in self.blocks:
            x, block = block(x)
            blocks.append(block)
        return x @ self.weight.value + self.bias.value, self.replace(blocks=tuple(blocks))


class Training(sm.Module):
    """Everything that a step changes, and the optimizer, which is static."""

    model: Classifier
    slots: optax.OptState
    row_loss: sm.HiddenState
    optimizer: optax.GradientTransformation

    def __init__(self, key: jax.Array, steps: int) -> None:
        self.model = Classifier(key)
        self.optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
        self.slots = self.optimizer.init(sm.trainable(self.model))
        # The loss of each row of the latest batch is placed like the row.
        self.row_loss = sm.HiddenState(jnp.zeros(BATCH), spec=P("data"))


def loss_fn(model: Classifier, images: jax.Array, digits: jax.Array) -> Any:
    logits, model = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits)
    return (losses.mean(), losses), model


def step(training: Training, images: jax.Array, digits: jax.Array) -> tuple[jax.Array, Training]:
    gradient = sm.value_and_grad(loss_fn, axis_name="data", has_aux=True)
    ((loss, losses), model), grads = gradient(training.model, images, digits)
    updates, slots = training.optimizer.update(grads, training.slots)
    model = eqx.apply_updates(model, updates)
    return loss, training.replace(model=model, slots=slots, row_loss=losses)


def predict(model: Classifier, images: jax.Array) -> jax.Array:
    logits, _ = eqx.nn.inference_mode(model)(images)
    return jnp.argmax(logits, axis=-1)


def masks(model: Classifier, images: jax.Array) -> list[jax.Array]:
    """The dropout masks that a step would draw for these images."""
    ones = [jnp.ones((len(images), width)) for width in WIDTHS[1:]]
    return [block.dropout(x)[0] > 0 for block, x in zip(model.blocks, ones, strict=True)]


class Run(NamedTuple):
    training: Training
    losses: list[float]
    predicted: Any
    masks: list[Any]
    steps_per_second: float

    def compared(self) -> dict[str, Any]:
        return {
            "parameters": sm.states(self.training.model, sm.ParamState),
            "running statistics": sm.states(self.training, sm.BatchState),
            "RNG keys": [
                jax.random.key_data(block.dropout.rng.key) for block in self.training.model.blocks
            ],
            "optimizer slots": self.training.slots,
            "loss of each last row": self.training.row_loss,
            "loss of each step": self.losses,
        }


def run(mesh: Mesh, training: Training, data: list[Any], steps: int, seed: int) -> Run:
    """Train on a mesh of one or of many devices. Only the mesh differs."""
    step_on = sm.shard_map(step, mesh, in_specs=(None, P("data"), P("data")), out_specs=P())
    predict_on = sm.shard_map(predict, mesh, in_specs=(None, P("data")), out_specs=P("data"))
    masks_on = sm.shard_map(masks, mesh, in_specs=(None, P("data")), out_specs=P("data"))

    train_images, test_images, train_digits, _ = data
    drawn = masks_on(training.model, train_images[:BATCH])
    losses: list[jax.Array] = []
    started, shuffle = 0.0, np.random.default_rng(seed)
    bar = tqdm(range(steps), f"mesh of {mesh.size}", unit="step", mininterval=0.5)
    for _ in bar:
        rows = shuffle.choice(len(train_digits), BATCH, replace=False)
        loss, training = step_on(training, train_images[rows], train_digits[rows])
        if not losses:
            started = time.perf_counter()  # Everything is compiled now.
        losses.append(loss)
        late = losses[-8:][0]  # To format it waits: at most eight steps ahead of the devices.
        bar.set_postfix(loss=f"{late:.4f}", refresh=False)
    jax.block_until_ready(training)
    per_second = (steps - 1) / (time.perf_counter() - started)
    drawn += masks_on(training.model, train_images[:BATCH])
    predicted = np.asarray(predict_on(training.model, test_images))
    return Run(training, list(map(float, losses)), predicted, jax.device_get(drawn), per_second)


def difference(a: Any, b: Any) -> float:
    """The largest |a - b| in any array, relative to the largest |b| in it (or to 1 if that is 0)."""
    worst = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst.append(np.abs(x - y).max() / (np.abs(y).max() or 1.0))
    return float(np.max(worst))


def compare(many: Run, one: Run, digits: Any, x64: bool) -> list[str]:
    """Print two runs side by side and return the problems."""
    problems = []
    accuracies = [float(np.mean(run.predicted == digits)) for run in (many, one)]
    print(f"\n{'':24}{'sharded':>12}{'unsharded':>12}")
    print(f"{'held-out accuracy':24}{accuracies[0]:12.4f}{accuracies[1]:12.4f}")
    print(f"{'steps per second':24}{many.steps_per_second:12.1f}{one.steps_per_second:12.1f}")
    if jax.default_backend() == "cpu":
        print("(simulated devices share one machine's cores: more of them are not faster)")
    print(f"\nlargest relative difference in float{64 if x64 else 32}")
    for name, value in many.compared().items():
        apart = difference(value, one.compared()[name])
        print(f"{name:24}{apart:12.1e}")
        limit = 0.0 if name == "RNG keys" else 1e-9 if x64 else np.inf
        if not apart <= limit:  # Written so that NaN is a problem too.
            problems.append(f"{name}: relative difference {apart:.1e} is above {limit:.0e}")
    same = all(map(np.array_equal, many.masks, one.masks))
    print(f"dropout masks: {'bit-identical' if same else 'different'}, sharded and unsharded")
    if not same:
        problems.append("the dropout masks differ")
    if accuracies[0] != accuracies[1]:
        problems.append(f"the accuracies differ: {accuracies[0]:.4f} and {accuracies[1]:.4f}")
    if min(accuracies) < 0.97:
        problems.append(f"held-out accuracy {min(accuracies):.4f} is below 0.97")
    return problems


def held(state: sm.State, device: jax.Device) -> str:
    """The part of a state's arrays that one device holds, or "whole"."""
    parts = set()
    for x in jax.tree.leaves(state.value):
        index = x.sharding.devices_indices_map(x.shape)[device]
        ranges = [part.indices(n)[:2] for part, n in zip(index, x.shape, strict=True)]
        if ranges != [(0, n) for n in x.shape]:
            parts.add(", ".join(f"{start}:{stop}" for start, stop in ranges))
    return "; ".join(sorted(parts)) or "whole"


def draw(many: Run, one: Run, mesh: Mesh, path: str) -> None:
    """Draw both loss curves, and the part of every state that each device holds."""
    figure = Figure(figsize=(14, 5.5), layout="constrained")
    curves, grid = figure.subplots(1, 2, width_ratios=(4, 6))
    curves.semilogy(one.losses, color="tab:orange", lw=4, alpha=0.5, label="unsharded")
    curves.semilogy(many.losses, color="black", lw=0.8, label=f"sharded, mesh of {mesh.size}")
    curves.set(title="Training loss", xlabel="step", ylabel="cross-entropy of the batch")
    curves.legend()

    devices, states = list(mesh.devices.flat), sm.states(many.training)
    texts = [[held(state, device) for device in devices] for state in states.values()]
    blue, oranges = matplotlib.colormaps["Blues"](0.25), matplotlib.colormaps["Oranges"]
    colours = [
        [blue if t == "whole" else oranges(0.15 + 0.5 * row.index(t) / len(row)) for t in row]
        for row in texts
    ]
    grid.pcolormesh(colours, edgecolors="white", linewidth=2)
    grid.invert_yaxis()
    for (i, j), text in np.ndenumerate(texts):
        grid.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8)
    names = [f"{path}  ({type(state).__name__})" for path, state in states.items()]
    grid.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=8)
    grid.set_xticks(np.arange(len(devices)) + 0.5, [device.id for device in devices])
    grid.tick_params(length=0)
    grid.set(title="What each device holds: all of a state, or its own rows", xlabel="device")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on eight devices, and then on one.")
    parser.add_argument("--x64", action="store_true", help="float64; all values agree to 1e-9")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights, batches, dropout")
    parser.add_argument("--out", default="digits.png", help="path of the picture")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.x64)

    digits = load_digits()
    # The pixels go from 0 to 1 and are not centred, so pixels that never have ink stay 0. Any other
    # constant would act as a bias before the normalisation.
    images = (digits.data / 16).astype(np.float64 if options.x64 else np.float32)
    labels, seed = digits.target.astype(np.int32), options.seed
    data = train_test_split(images, labels, test_size=HELD_OUT, stratify=labels, random_state=seed)
    training = Training(jax.random.key(seed), options.steps)
    devices = jax.devices()
    size = max(n for n in (1, 2, 4, 8) if n <= len(devices))  # a size that divides the batch
    mesh = jax.make_mesh((size,), ("data",), devices=devices[:size])
    single = jax.make_mesh((1,), ("data",), devices=devices[:1])

    many = run(mesh, training, data, options.steps, seed)
    one = run(single, training, data, options.steps, seed)
    problems = compare(many, one, data[-1], options.x64)
    draw(many, one, mesh, options.out)
    print(f"\nloss curves and layout of the states: {options.out}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
