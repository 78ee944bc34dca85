"""Save in each of six layouts, and go on in each: the models of the examples. By hand:

    python -m tests.scripts.pairs_of_layouts [--models digits text] [--layouts 1 2 4 8 4x2 2p] [--steps 20]

After as many steps again, each ordered pair must be where a run is that was not interrupted. Keys, masks and
counters must be equal, and floats, which have 64 bits, to 1e-9.
"""

import argparse
import functools
import importlib
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import statemesh as sm
import tests.compiling  # noqa: F401
from statemesh import checkpoint
from tests.processes import COUNT, ROOT, free_port, run_together


# Batches are split over "data". Two processes with two devices each are the last layout.
LAYOUTS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "4x2": (4, 2), "2p": (2, 2)}
LIMIT = 1e-9
PATIENCE = 1200


def example(name: str) -> Any:
    folder = str(ROOT / "docs" / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


class Digits:
    """The classifier of handwritten digits, with its optimizer."""

    def __init__(self) -> None:
        self.code = example("digits")

    def make(self, steps: int, _: Mesh) -> Any:
        return self.code.Training(jax.random.key(0), steps)

    def batch(self, step: int) -> list[Any]:
        draw, rows = np.random.default_rng(step), self.code.BATCH
        return [draw.random((rows, 64)), draw.integers(10, size=rows)]

    def step(self, training: Any, images: Any, digits: Any) -> Any:
        return self.code.step(training, images, digits)[1]

    def masks(self, training: Any, images: Any, _: Any) -> Any:
        return self.code.masks(training.model, images)


class Text:
    """The transformer, whose parameters are split over both axes, with its optimizer."""

    characters = 20

    def __init__(self) -> None:
        self.code = example("text")

    def make(self, _: int, mesh: Mesh) -> Any:
        model = self.code.Transformer(jax.random.key(0), self.characters, np.float64)
        model = sm.fsdp(model, mesh, "data")
        return model, self.code.OPTIMIZER.init(sm.trainable(model))

    def batch(self, step: int) -> list[Any]:
        shape = self.code.BATCH, self.code.CONTEXT + 1
        return [np.random.default_rng(step).integers(self.characters, size=shape)]

    def step(self, training: Any, text: Any) -> Any:
        return self.code.step(*training, text)[1:]

    def masks(self, training: Any, text: Any) -> Any:
        rng: Any = next(iter(sm.states(training[0], sm.RandomState).values()))
        keys, _ = rng.rows(len(text), "data")
        return jax.vmap(jax.random.bernoulli)(keys)


MODELS: dict[str, type[Any]] = {"digits": Digits, "text": Text}


class Runs:
    """The runs of one model in one layout, which write what they reach as files in a folder."""

    def __init__(self, model: str, layout: str, folder: pathlib.Path, steps: int) -> None:
        self.model, self.layout, self.folder, self.steps = MODELS[model](), layout, folder, steps
        shape = LAYOUTS[layout]
        devices = jax.devices()[: shape[0] * shape[1]]
        self.mesh = Mesh(np.array(devices).reshape(shape), ("data", "model"))

        # Made once: another optimizer is another static leaf, and compiles anew.
        self.made = self.model.make(2 * steps, self.mesh)

    @functools.cached_property
    def mapped(self) -> list[Any]:
        batch = [P("data")] * len(self.model.batch(0))
        step = sm.shard_map(self.model.step, self.mesh, (None, *batch), out_specs=P())
        masks = sm.shard_map(self.model.masks, self.mesh, (None, *batch), out_specs=P("data"))
        return [step, masks]

    def train(self, training: Any, first: int) -> Any:
        for k in range(first, first + self.steps):
            training = jax.block_until_ready(self.mapped[0](training, *self.model.batch(k)))
        return training

    def write(self, name: str, training: Any) -> None:
        """Write all arrays of a training, and the masks that its next step would draw."""
        masks = self.mapped[1](training, *self.model.batch(0))
        flat, _ = jax.tree_util.tree_flatten_with_path((training, masks))
        found = {jax.tree_util.keystr(keys): whole(x) for keys, x in flat if eqx.is_array(x)}
        if jax.process_index() == 0:
            np.savez(self.folder / f"{name}.npz", **found)

    def save(self) -> None:
        """Save halfway, and go on."""
        training = self.train(sm.place(self.made, self.mesh), 0)
        checkpoint.save(self.folder / self.layout, training)
        self.write(f"half {self.layout}", training)
        self.write(f"whole {self.layout}", self.train(training, self.steps))

    def load(self, source: str) -> None:
        """Go on from what another layout has saved."""
        like = eqx.filter_eval_shape(lambda: self.made)
        training = checkpoint.load(self.folder / source, like, self.mesh)
        self.write(f"half {source} to {self.layout}", training)
        self.write(f"whole {source} to {self.layout}", self.train(training, self.steps))


def whole(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def check(folder: pathlib.Path, source: str, target: str) -> float:
    """Compare what a pair has reached with runs that were not interrupted, on its meshes.

    **Returns:** the largest difference of floats, relative to the largest in their array.
    """
    pair = f"{source} to {target}"
    assert difference(folder, f"half {source}", f"half {pair}") == 0
    apart = [difference(folder, f"whole {layout}", f"whole {pair}") for layout in (source, target)]
    # Where nothing but the interruption is different, so must be nothing.
    assert max(apart) <= (LIMIT if source != target else 0), (pair, apart)
    return max(apart)


def difference(folder: pathlib.Path, expected: str, found: str) -> float:
    with np.load(folder / f"{expected}.npz") as one, np.load(folder / f"{found}.npz") as other:
        assert one.keys() == other.keys()
        apart = [0.0]
        for name, x in one.items():
            y = other[name]
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            if np.issubdtype(x.dtype, np.floating):
                apart.append(float(np.max(np.abs(x - y)) / (np.max(np.abs(x)) or 1.0)))
            else:
                np.testing.assert_array_equal(x, y, f"{found}: {name}")
    return float(np.max(apart))


def run(model: str, layouts: Sequence[str], steps: int, folder: pathlib.Path) -> float:
    """Save in all layouts, go on in all, and compare."""
    alone = [Runs(model, name, folder, steps) for name in layouts if name != "2p"]
    for runs in tqdm(alone, f"{model}: save"):
        runs.save()
    if "2p" in layouts:
        port = str(free_port())
        module = [sys.executable, "-m", "tests.scripts.pairs_of_layouts", "--models", model]
        rest = ["--layouts", *layouts, "--steps", str(steps), "--process", str(folder), port]
        commands = [[*module, *rest, str(i)] for i in range(COUNT)]
        run_together(commands, folder, 2, PATIENCE)
    for runs, source in tqdm(list(itertools.product(alone, layouts)), f"{model}: load"):
        runs.load(source)
    return max(check(folder, *pair) for pair in itertools.product(layouts, repeat=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Save in each layout, and go on in each.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=20, help="before and after saving")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.process is not None:
        place, port, index = options.process
        jax.distributed.initialize(f"localhost:{port}", COUNT, int(index))
        runs = Runs(options.models[0], "2p", pathlib.Path(place), options.steps)
        runs.save()
        for source in options.layouts:
            runs.load(source)
        return
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            apart = run(model, options.layouts, options.steps, pathlib.Path(folder))
        pairs = len(options.layouts) ** 2
        print(f"{model}: {pairs} of {pairs} pairs agree; floats are apart by at most {apart:.1e}")


if __name__ == "__main__":
    main()
