"""Draw the pictures of the recipes: `python docs/pages/assets/recipes_pictures.py [FOLDER]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from recipes_draw import Array, Exchange, Part, Send, Sum, Ticks, picture


def whole(label: str, devices: int = 4) -> Array:
    return Array(label, [(1, 0)] * devices)


def split(label: str, *own: int) -> Array:
    return Array(label, [(max(own) + 1, i) for i in own])


ALL = [range(4)]
DATA, MODEL = (
    [(0, 2), (1, 3)],
    [(0, 1), (2, 3)],
)  # the devices that a collective over this axis joins
LINE = [f"data {i}" for i in range(4)]
GRID = [f"data {i}, model {j}" for i in range(2) for j in range(2)]
ROWS = split("rows of the batch", 0, 1, 2, 3)
GRID_ROWS = split("rows of the batch", 0, 0, 1, 1)
GRID_ARRAYS = [
    split("first matrix: its columns", 0, 1, 0, 1),
    split("second: its rows", 0, 1, 0, 1),
]
GRADIENTS = Sum("sum: gradients and loss", ALL)
# For each recipe its title, its devices, and what lies on them and moves.
PICTURES: dict[str, tuple[str, list[str], list[Part]]] = {
    "data_parallel": (
        "Data parallel: rows are split, all else is whole on each device",
        LINE,
        [ROWS, whole("parameters, slots, statistics"), Sum("sums: statistics", ALL), GRADIENTS],
    ),
    "fsdp": (
        "FSDP: parameters are split, and each layer is whole only while it runs",
        LINE,
        [
            ROWS,
            split("parameters, slots, gradients", 0, 1, 2, 3),
            whole("one layer, while it runs"),
            Sum("gather: that layer, twice", ALL),
            Sum("scatter: its gradients", ALL),
        ],
    ),
    "tensor_parallel": (
        "Tensor parallel: hidden units are split over model, rows over data",
        GRID,
        [
            GRID_ROWS,
            *GRID_ARRAYS,
            whole("bias of the outputs"),
            Sum("sum over model: outputs", MODEL),
            Sum("sums over data: gradients", DATA),
        ],
    ),
    "mixed_precision": (
        "Mixed precision: all devices decide alike, for they see the same sum",
        LINE,
        [
            ROWS,
            whole("parameters, slots: float32"),
            whole("what computes: float16"),
            whole("scale of the loss"),
            Sum("sum: scaled gradients and loss", ALL),
        ],
    ),
    "clipping": (
        "Clipping: squares of split gradients are summed over model",
        GRID,
        [
            GRID_ROWS,
            *GRID_ARRAYS,
            whole("bias of the outputs"),
            Sum("sum over model: outputs", MODEL),
            Sum("sums over data: gradients", DATA),
            Sum("sum over model: squares", MODEL),
        ],
    ),
    "ensemble": (
        "Ensemble: one member on each device",
        [f"member {i}" for i in range(4)],
        [
            split("weights and keys", 0, 1, 2, 3),
            whole("rows"),
            Sum("to predict: mean and spread", ALL),
        ],
    ),
    "recurrent": (
        "Recurrent: hidden values stay on the device of their rows",
        LINE,
        [
            split("streams", 0, 1, 2, 3),
            split("hidden values", 0, 1, 2, 3),
            whole("weights"),
            GRADIENTS,
        ],
    ),
    "ring_attention": (
        "Ring attention: keys and values go once around the ring",
        [f"seq {i}" for i in range(4)],
        [
            split("sequence, queries", 0, 1, 2, 3),
            split("keys and values, at first", 0, 1, 2, 3),
            whole("weights"),
            Send("ppermute: keys and values", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            GRADIENTS,
        ],
    ),
    "experts": (
        "Experts: tokens go to the device of their expert and back",
        LINE,
        [
            ROWS,
            split("experts", 0, 1, 2, 3),
            whole("gate"),
            Exchange("all_to_all: tokens, and back", 4),
            Sum("sums: gradients, loss, seats", ALL),
        ],
    ),
    "pipeline": (
        "Pipeline: microbatches flow from stage to stage",
        [f"stage {i}" for i in range(4)],
        [
            split("layers", 0, 1, 2, 3),
            Send("ppermute: a microbatch", [(0, 1), (1, 2), (2, 3)]),
            Sum("sum: loss", ALL),
            Ticks("microbatch at each tick", 4, 6),
        ],
    ),
    "processes": (
        "Several processes: each has rows of its own",
        LINE,
        [split("file that is read", 0, 0, 1, 1), ROWS, whole("parameters, slots"), GRADIENTS],
    ),
    "elastic": (
        "A lost process: the one that is left goes on from the checkpoint",
        ["data 0", "data 1", "data 2", "data 3", "data 0", "data 1"],
        [
            Array("rows of the batch", [*((4, i) for i in range(4)), (2, 0), (2, 1)]),
            whole("parameters, slots, keys", 6),
            Sum("sum: gradients and loss", [range(4), range(4, 6)]),
            Send("checkpoint", [(3, 4)]),
        ],
    ),
}
PROCESSES: dict[str, dict[str, Sequence[int]]] = {
    "processes": {"process 0": range(2), "process 1": range(2, 4)},
    "elastic": {
        "process 0": range(2),
        "process 1, killed": range(2, 4),
        "a new process": range(4, 6),
    },
}


def draw(folder: Path) -> list[Path]:
    """Write all pictures."""
    files = []
    for name, about in PICTURES.items():
        files.append(folder / f"recipes-{name}.svg")
        files[-1].write_text(picture(*about, PROCESSES.get(name, {})), encoding="utf-8")
    return files


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
