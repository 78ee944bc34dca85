"""Train a character transformer on a mesh of data x model, and then on one device.

    python docs/examples/text.py [--mesh 4x2] [--x64] [--steps N] [--seed N] [--out PATH.png]

Rows are split over the mesh axis "data", and attention heads and hidden units over "model". Each layer is
written once, for its shard. All matrices are split over "data" too (FSDP): a layer gathers its own when it
runs. Each device takes four rows at once. Parameters are float32, and layers compute in bfloat16. The script
exits with 1 if the two runs disagree.
"""

import argparse
import importlib.resources
import math
import os
import re
import sys
from typing import Any, NamedTuple


# Before JAX starts: a CPU simulates eight devices. A number that XLA_FLAGS has comes last and wins.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

import statemesh as sm


BATCH, MICROBATCH, CONTEXT = 32, 4, 32  # rows of a batch and of a microbatch, characters in a row
WIDTH, HEADS, HIDDEN, BLOCKS = 64, 8, 256, 1
OPTIMIZER = optax.adamw(6e-3)


def whole(layer: Any, dtype: Any) -> Any:
    """A layer as it runs. Its parameters are sent in the dtype in which it computes."""
    parameters = jax.tree.map(lambda x: x.astype(dtype), sm.trainable(layer))
    return sm.gather(eqx.combine(parameters, layer), "data")


def matrix(key: jax.Array, shape: tuple[int, ...], spec: P) -> sm.ParamState:
    return sm.ParamState(jax.random.normal(key, shape) * WIDTH**-0.5, spec=spec)


class Attention(sm.Module):
    """Causal attention with the heads that a shard holds."""

    qkv: sm.ParamState
    out: sm.ParamState
    reach: sm.BatchState

    def __init__(self, key: jax.Array) -> None:
        into, back = jax.random.split(key)
        size = WIDTH // HEADS
        self.qkv = matrix(into, (WIDTH, 3, HEADS, size), P(None, None, "model"))
        self.out = matrix(back, (HEADS, size, WIDTH), P("model"))
        # How far back each head looked, on average. Shards along "data" and microbatches are averaged.
        self.reach = sm.BatchState(jnp.zeros(HEADS), spec=P("model"), reduce="mean")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Attention"]:
        q, k, v = jnp.einsum("btw,wchs->cbhts", x, self.qkv.value)
        scores = jnp.einsum("bhts,bhus->bhtu", q, k) * q.shape[-1] ** -0.5
        distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
        weights = jax.nn.softmax(jnp.where(distance >= 0, scores.astype(float), -jnp.inf))
        y = jnp.einsum("bhtu,bhus,hsw->btw", weights.astype(x.dtype), v, self.out.value)
        reach = (weights * distance).sum(axis=-1).mean(axis=(0, 2))
        # Each shard has the sum over its own heads. The psum makes it the sum over all heads.
        return jax.lax.psum(y, "model"), self.replace(reach=reach)


class MLP(sm.Module):
    """Two linear maps with the hidden units that a shard holds between them."""

    up: sm.ParamState
    down: sm.ParamState
    mean: sm.BatchState

    def __init__(self, key: jax.Array) -> None:
        into, back = jax.random.split(key)
        self.up = matrix(into, (WIDTH, HIDDEN), P(None, "model"))
        self.down = matrix(back, (HIDDEN, WIDTH), P("model", None))
        # Each unit's running mean. It is split over "model", like the units.
        self.mean = sm.BatchState(jnp.zeros(HIDDEN), spec=P("model"), reduce="mean")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "MLP"]:
        units = jax.nn.silu(x @ self.up.value)
        mean = 0.95 * self.mean.value + 0.05 * units.mean(axis=(0, 1), dtype=float)
        return jax.lax.psum(units @ self.down.value, "model"), self.replace(mean=mean)


class Residual(sm.Module):
    """Normalise the input, apply the layer and add its output to the input."""

    norm: eqx.nn.LayerNorm
    layer: Attention | MLP
    dropout: sm.nn.Dropout

    def __init__(self, layer: Attention | MLP, key: jax.Array) -> None:
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.layer = layer
        # Each row of the global batch has its own mask, which is the same on a mesh of any shape.
        self.dropout = sm.nn.Dropout(0.1, key, axis_name="data")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Residual"]:
        y, layer = self.layer(jax.vmap(jax.vmap(self.norm))(x))
        y, dropout = self.dropout(y)
        return x + y, self.replace(layer=layer, dropout=dropout)


class Transformer(sm.Module):
    """The model. The arrays of its Equinox layers are parameters too."""

    characters: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    layers: tuple[Residual, ...]
    norm: eqx.nn.LayerNorm
    logits: eqx.nn.Linear
    dtype: Any = sm.field(static=True)

    def __init__(self, key: jax.Array, characters: int, dtype: Any) -> None:
        keys = iter(jax.random.split(key, 3 + 4 * BLOCKS))
        self.characters = eqx.nn.Embedding(characters, WIDTH, key=next(keys))
        self.positions = eqx.nn.Embedding(CONTEXT, WIDTH, key=next(keys))
        self.logits = eqx.nn.Linear(WIDTH, characters, key=next(keys))
        self.norm, self.dtype = eqx.nn.LayerNorm(WIDTH), dtype
        kinds = BLOCKS * (Attention, MLP)
        self.layers = tuple(Residual(kind(next(keys)), next(keys)) for kind in kinds)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, "Transformer"]:
        ends = self.characters, self.positions, self.norm, self.logits
        characters, positions, norm, output = whole(ends, self.dtype)
        x = jax.vmap(jax.vmap(characters))(text) + positions.weight[: text.shape[1]]
        layers = []
        for layer in self.layers:
            x, written = whole(layer, self.dtype)(x)
            layers.append(sm.scatter(written, layer))
        logits = jax.vmap(jax.vmap(lambda one: output(norm(one))))(x)
        return logits.astype(float), self.replace(layers=tuple(layers))


def loss_fn(model: Transformer, text: jax.Array) -> tuple[jax.Array, Transformer]:
    """The cross-entropy of each character, predicted from the earlier ones."""
    logits, model = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(), model


def step(model: Transformer, slots: Any, text: jax.Array) -> tuple[jax.Array, Transformer, Any]:
    # These are the rows of one shard. The more shards there are, the fewer microbatches each has.
    gradient = sm.value_and_grad(loss_fn, axis_name="data", microbatches=len(text) // MICROBATCH)
    (loss, model), grads = gradient(model, text)
    updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(model))
    return loss, eqx.apply_updates(model, updates), slots


def evaluate(model: Transformer, text: jax.Array) -> Any:
    loss, _ = loss_fn(eqx.nn.inference_mode(model), text)
    return jax.lax.pmean(loss, "data")


class Run(NamedTuple):
    model: Transformer
    slots: Any
    losses: list[float]
    held_out: float

    def compared(self) -> dict[str, Any]:
        keys = [rng.value for rng in sm.states(self.model, sm.RandomState).values()]
        return {
            "parameters": sm.trainable(self.model),
            "optimizer slots": self.slots,
            "means and reaches": sm.states(self.model, sm.BatchState),
            "RNG keys": list(map(jax.random.key_data, keys)),
            "losses": [*self.losses, self.held_out],
        }


def run(mesh: Mesh, model: Transformer, data: Any, steps: int, seed: int) -> Run:
    """Train on a mesh of one or of many devices. Only the mesh differs."""
    train, unseen = data
    step_on = sm.shard_map(step, mesh, in_specs=(None, None, P("data")), out_specs=P())
    evaluate_on = sm.shard_map(evaluate, mesh, in_specs=(None, P("data")), out_specs=P())

    # Gradients and slots are split like their parameters.
    model = sm.fsdp(model, mesh, "data")
    slots = OPTIMIZER.init(sm.trainable(model))
    losses: list[jax.Array] = []
    random = np.random.default_rng(seed)
    bar = tqdm(range(steps), "mesh of {data}x{model}".format(**mesh.shape), unit="step")
    for _ in bar:
        starts = random.integers(len(train) - CONTEXT, size=(BATCH, 1))
        loss, model, slots = step_on(model, slots, train[starts + np.arange(CONTEXT + 1)])
        losses.append(loss)
        late = losses[-8:][0]  # To format it waits: at most eight steps ahead of the devices.
        bar.set_postfix(loss=f"{late:.4f}", refresh=False)
    held_out = float(np.mean([float(evaluate_on(model, text)) for text in unseen]))
    return Run(model, slots, list(map(float, losses)), held_out)


def read_text() -> tuple[int, Any]:
    """Read the descriptions of scikit-learn's data sets, as numbers of characters.

    Returns how many characters there are, the training text, and batches of held-out rows.
    """
    folder = importlib.resources.files("sklearn") / "datasets" / "descr"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".rst"))
    text = "".join((folder / name).read_text("utf-8") for name in names)
    characters, numbers = np.unique(list(text), return_inverse=True)
    size = CONTEXT + 1
    rows = numbers[: len(numbers) // size * size].astype(np.int32).reshape(-1, size)
    # Every tenth row is held out, so that both parts have text of each description.
    train, unseen = np.delete(rows, np.s_[::10], axis=0).ravel(), rows[::10]
    unseen = unseen[: len(unseen) // BATCH * BATCH].reshape(-1, BATCH, size)
    return len(characters), (train, unseen)


def by_counting_pairs(characters: int, train: Any, unseen: Any) -> float:
    """The held-out loss of the frequencies of pairs of characters in `train`."""
    pairs = np.full((characters, characters), 0.1)  # no pair is impossible
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    likely = (pairs / pairs.sum(axis=1, keepdims=True))[unseen[..., :-1], unseen[..., 1:]]
    return float(-np.log(likely).mean())


def difference(a: Any, b: Any) -> float:
    """The largest |a - b| in any array, relative to the largest |b| in it (or to 1 if that is 0)."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    both = [[np.asarray(x, np.float64) for x in pair] for pair in pairs]
    return float(np.max([np.abs(x - y).max() / (np.abs(y).max() or 1.0) for x, y in both]))


def compare(many: Run, one: Run, counted: float, x64: bool) -> list[str]:
    """Print two runs side by side and return the problems."""
    problems = []
    print(f"\n{'nats per character':24}{'sharded':>12}{'unsharded':>12}")
    print(f"{'held-out loss':24}{many.held_out:12.4f}{one.held_out:12.4f}")
    print(f"{'counting pairs':24}{counted:12.4f}")
    print(f"\nlargest relative difference in {'float64' if x64 else 'bfloat16'}")
    # Where rounding decides the sign of a gradient, Adam makes a whole step of it. The losses agree.
    loose = {"losses": 2.0**-7}  # the distance from 1 to the next number in bfloat16
    for name, value in many.compared().items():
        apart = difference(value, one.compared()[name])
        limit = 0.0 if name == "RNG keys" else 1e-9 if x64 else loose.get(name, np.inf)
        print(f"{name:24}{apart:12.1e}")
        if not apart <= limit:  # Written so that NaN is a problem too.
            problems.append(f"{name}: relative difference {apart:.1e} is above {limit:.0e}")
    if not (worse := max(many.held_out, one.held_out)) < counted:
        problems.append(f"held-out loss {worse:.4f} is not below {counted:.4f}, of counting pairs")
    return problems


def held(x: jax.Array, device: jax.Device) -> str:
    """The part of an array on one device, as a range for each split axis."""
    index = x.sharding.devices_indices_map(x.shape)[device]
    ranges = [(part.indices(n)[:2], n) for part, n in zip(index, x.shape, strict=True)]
    return ", ".join(":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in ranges)


def draw(many: Run, one: Run, mesh: Mesh, path: str) -> None:
    """Draw both loss curves, and the part of the first block that each device holds."""
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    curves, grid = figure.subplots(1, 2, width_ratios=(4, 7))
    curves.plot(one.losses, color="tab:orange", lw=4, alpha=0.5, label="unsharded")
    curves.plot(many.losses, color="black", lw=0.8, label="sharded")
    curves.set(title="Training loss", xlabel="step", ylabel="nats per character")
    curves.legend()

    names, texts, shades = [], [], []
    for name, state in sm.states(many).items():
        if re.search(r"(model|mu)\.layers\[[01]\]", name):
            names.append(f"{name}  ({type(state).__name__})")
            row = [held(state.value, device) for device in mesh.devices.flat]
            parts = list(dict.fromkeys(row))
            texts.append(row if len(parts) > 1 else ["all"] * len(row))
            shades.append([(len(parts) > 1) * (1 + parts.index(text) / len(parts)) for text in row])
    grid.imshow(shades, cmap="Oranges", vmax=4, aspect="auto")
    for (i, j), text in np.ndenumerate(texts):
        grid.text(j, i, text, ha="center", va="center", fontsize=8)
    grid.set_yticks(range(len(names)), names, fontsize=8)
    places = [f"data {i}\nmodel {j}" for i, j in np.ndindex(mesh.devices.shape)]
    grid.set_xticks(range(len(places)), places, fontsize=8)
    grid.set_title("What each device holds of the first block and of its slots")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on eight devices, and then on one.")
    parser.add_argument("--mesh", default="4x2", help="parts of the batch x parts of the model")
    parser.add_argument("--x64", action="store_true", help="float64; all values agree to 1e-9")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches, dropout")
    parser.add_argument("--out", default="text.png", help="path of the picture")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.x64)

    characters, data = read_text()
    dtype = jnp.float64 if options.x64 else jnp.bfloat16
    model = Transformer(jax.random.key(options.seed), characters, dtype)
    shape, names = tuple(map(int, options.mesh.split("x"))), ("data", "model")
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: math.prod(shape)])
    single = jax.make_mesh((1, 1), names, devices=jax.devices()[:1])
    many = run(mesh, model, data, options.steps, options.seed)
    one = run(single, model, data, options.steps, options.seed)
    problems = compare(many, one, by_counting_pairs(characters, *data), options.x64)
    draw(many, one, mesh, options.out)
    print(f"\nloss curves and layout of the states: {options.out}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
