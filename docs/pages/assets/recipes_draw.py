"""How the pictures of the recipes are drawn.

Columns are devices. A row is an array or what moves. Of an array that is split, a device holds the dark part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias


LEFT, WIDTH, ROW, HEAD = 226, 124, 30, 44
STYLE = """text{font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#222}
.m{text-anchor:middle}.s{font-size:11px;fill:#555}.d{fill:#f1f2f8}.o{fill:#3f51b5}.w{fill:#e08a2e}.e{fill:#d5d8e8}
.g{fill:none;stroke:#777;stroke-dasharray:4 3}.l{stroke:#b0344d;stroke-width:1.8;fill:none}.c{fill:#b0344d}"""
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
    'orient="auto"><path d="M0 0L8 4L0 8z" class="c"/></marker></defs>'
)
Groups: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Array:
    """An array, and for each device of how many parts it holds which one. One part is the whole."""

    label: str
    held: Sequence[tuple[int, int]]

    height = ROW

    def svg(self, y: float) -> list[str]:
        out = [text(LEFT - 14, y + 20, self.label, anchor="end")]
        for device, (parts, own) in enumerate(self.held):
            width = (WIDTH - 24) / parts
            for part in range(parts):
                kind = "w" if parts == 1 else "o" if part == own else "e"
                x = LEFT + device * WIDTH + 12 + part * width
                out.append(rect(x, y + 8, width - 2, ROW - 14, kind))
        return out


@dataclass(frozen=True)
class Sum:
    """A collective of groups of devices: a sum, a gather, or a scatter."""

    label: str
    groups: Groups

    @property
    def height(self) -> float:
        return ROW + 9 * (len(self.levels()) - 1)

    def levels(self) -> list[list[Sequence[int]]]:
        """Groups that overlap get lines of their own."""
        levels: list[list[Sequence[int]]] = []
        for group in self.groups:
            for level in levels:
                if all(group[0] > other[-1] or group[-1] < other[0] for other in level):
                    level.append(group)
                    break
            else:
                levels.append([group])
        return levels

    def svg(self, y: float) -> list[str]:
        out = [text(LEFT - 14, y + 20, self.label, anchor="end")]
        for k, level in enumerate(self.levels()):
            at = y + 15 + 9 * k
            for group in level:
                out.append(line(middle(group[0]), at, middle(group[-1]), at))
                out += [f'<circle cx="{middle(i):g}" cy="{at:g}" r="4" class="c"/>' for i in group]
        return out


@dataclass(frozen=True)
class Send:
    """Arrows from device to device."""

    label: str
    pairs: Groups

    height = ROW + 10

    def svg(self, y: float) -> list[str]:
        out = [text(LEFT - 14, y + 24, self.label, anchor="end")]
        for start, end in self.pairs:
            # What goes back takes a way of its own.
            if end < start:
                a, b = middle(start) + 8, middle(end) - 8
                path = f"M{a:g} {y + 16:g}v16H{b:g}v-15"
            else:
                path = f"M{middle(start) + 8:g} {y + 14:g}H{middle(end) - 8:g}"
            out.append(f'<path d="{path}" class="l" marker-end="url(#a)"/>')
        return out


@dataclass(frozen=True)
class Exchange:
    """Every device sends something to every other."""

    label: str
    devices: int

    height = ROW + 14

    def svg(self, y: float) -> list[str]:
        out = [text(LEFT - 14, y + 26, self.label, anchor="end")]
        every = [(i, j) for i in range(self.devices) for j in range(self.devices)]
        return out + [line(middle(i), y + 5, middle(j), y + 38, arrow=True) for i, j in every]


@dataclass(frozen=True)
class Ticks:
    """Which microbatch each stage of a pipeline works on at each tick. Nothing stands for a bubble."""

    label: str
    stages: int
    microbatches: int

    @property
    def height(self) -> float:
        return 22 * self.stages + 14

    def svg(self, y: float) -> list[str]:
        out = [text(LEFT - 14, y + 20, self.label, anchor="end")]
        width = self.stages * WIDTH / (self.microbatches + self.stages - 1)
        for stage in range(self.stages):
            top = y + 8 + 22 * stage
            for tick in range(self.microbatches + self.stages - 1):
                x, number = LEFT + tick * width, tick - stage
                busy = 0 <= number < self.microbatches
                out.append(rect(x + 1, top, width - 2, 19, "d" if busy else "g"))
                out += [text(x + width / 2, top + 14, str(number), "m s")] * busy
        return out


Part: TypeAlias = Array | Sum | Send | Exchange | Ticks


def middle(device: int) -> float:
    return LEFT + (device + 0.5) * WIDTH


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    more = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{width:g}" height="{height:g}" rx="3"'
    return f'<rect x="{x:g}" y="{y:g}" {size} class="{kind}"/>'


def line(x: float, y: float, to_x: float, to_y: float, arrow: bool = False) -> str:
    end = ' marker-end="url(#a)"' * arrow
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="l"{end}/>'


def picture(
    title: str, devices: Sequence[str], rows: Sequence[Part], processes: dict[str, Sequence[int]]
) -> str:
    """One picture. `processes` has the devices of each process, where there are several."""
    top = HEAD + 24 * bool(processes)
    arrays = top + sum(row.height for row in rows if isinstance(row, Array))
    width, height = LEFT + WIDTH * len(devices) + 16, top + sum(row.height for row in rows) + 14
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>{ARROW}",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fff"/>',
    ]
    for i, name in enumerate(devices):
        out.append(rect(LEFT + i * WIDTH + 4, top - 34, WIDTH - 8, arrays - top + 40, "d"))
        out.append(text(middle(i), top - 14, name, "m"))
    for name, own in processes.items():
        x, size = LEFT + own[0] * WIDTH + 1, WIDTH * len(own) - 2
        out.append(rect(x, top - 56, size, arrays - top + 65, "g"))
        out.append(text(x + size / 2, top - 41, name, "m s"))
    y: float = top
    for row in rows:
        out += row.svg(y + 4 * (not isinstance(row, Array)))
        y += row.height
    return "\n".join([*out, "</svg>", ""])
