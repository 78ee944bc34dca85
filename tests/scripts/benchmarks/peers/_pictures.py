"""The measurements as pictures."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from tests.scripts.benchmarks.peers._peers import FLOOR
from tests.scripts.benchmarks.peers._run import Row


matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "statemesh"


# The programs and the libraries of the small picture, with what they are called there.
PANELS = {
    "sharded": "100 states, split over the devices",
    "reduced": "100 states, with their means",
    "training": "a step of gradient descent",
}
SHOWN = {
    FLOOR: "by hand",
    "Equinox module, jax.jit": "Equinox, jax.jit",
    "flax.nnx, nnx.jit": "flax.nnx, nnx.jit",
    "statemesh": "statemesh",
    "statemesh, packed": "statemesh, packed",
}
# The type of axes that `jax.make_mesh` makes.
AXES = "Explicit"
OURS, OTHERS = "#3b6fb6", "#b8bec7"


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def picture(rows: Sequence[Row], file: Path) -> None:
    """Draw wall time by number of states, on the number of devices with the most such measurements."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    split = [row for row in rows if (row.kind, row.axes) == ("sharded", AXES)]
    sizes = Counter(devices for devices, _ in {(row.devices, row.states) for row in split})
    most = max(sizes, key=lambda devices: (sizes[devices], devices))
    chosen = [row for row in split if row.devices == most]
    for peer in dict.fromkeys(row.peer for row in chosen):
        points = [(row.states, 1e3 * row.wall) for row in chosen if row.peer == peer and row.wall]
        if points:
            style = "-o" if "statemesh" in peer else "--o" if peer == FLOOR else ":."
            axes.loglog(*zip(*points, strict=True), style, label=peer, linewidth=1.5, markersize=4)
    axes.set_xlabel("states, each split over the devices")
    axes.set_ylabel("milliseconds a call")
    axes.set_title(f"A call that writes every state, on {most} devices")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    _save(figure, file)


def small_picture(rows: Sequence[Row], file: Path) -> None:
    """Draw wall time on 8 devices of three programs, with few libraries, as bars."""
    walls = {
        (row.kind, row.peer): 1e3 * row.wall
        for row in rows
        if row.wall and row.axes == AXES and row.devices == 8
        if row.states == {"training": 10}.get(row.kind, 100)
    }
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 2), sharey=True, layout="constrained")
    for axes, (kind, title) in zip(panels, PANELS.items(), strict=True):
        shown = [(name, walls[kind, peer]) for peer, name in SHOWN.items() if (kind, peer) in walls]
        names, times = [name for name, _ in shown], [time for _, time in shown]
        colors = [OURS if "statemesh" in name else OTHERS for name in names]
        bars = axes.barh(names, times, color=colors)
        axes.bar_label(bars, [f"{time:.1f}" for time in times], padding=3, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.margins(x=0.15)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False, labelsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("milliseconds a call, on 8 simulated devices", fontsize=8)
    _save(figure, file)
