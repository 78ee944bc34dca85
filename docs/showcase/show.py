"""Measures a showcase and writes its page: `python docs/showcase/show.py NAME`.

A showcase is a folder with four files. `original.py` is somebody else's program, `port.py` the same program
with statemesh, and `naive.py` what one would write in a hurry. `case.py` says how they are driven and what
the page tells. With `--pages` the pages are written anew from what was measured before.
"""

import argparse
import difflib
import html
import importlib.util
import json
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import statemesh as sm
from statemesh.testing import assert_equivalent, set_devices


HERE = pathlib.Path(__file__).parent
PAGES = HERE.parent / "pages" / "showcase"
SOURCES = "https://github.com/"


def names() -> list[str]:
    return sorted(file.parent.name for file in HERE.glob("*/case.py"))


def load(name: str, part: str) -> Any:
    """A file of a showcase as a module of its own."""
    spec: Any = importlib.util.spec_from_file_location(
        f"showcase_{name}_{part}", HERE / name / f"{part}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: Any, program: Any, steps: int) -> list[float]:
    """What the case measures after each step."""
    carry, curve = case.start(program), []
    for k in range(steps):
        carry = case.step(program, carry, case.batch(program, k))
        curve.append(float(case.measure(program, carry)))
    return curve


def mesh_of(sizes: dict[str, int], kind: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    axis_types = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def label(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def seconds(
    case: Any, program: Any, steps: int, mesh: jax.sharding.Mesh | None = None
) -> Iterator[float]:
    """How long each step takes, without what is measured; the first ones compile.

    **Arguments:**

    - `mesh`: over which each batch is split, and what a step carries to the next one if there is no batch.
    """
    carry = case.start(program)
    if mesh is not None and hasattr(case, "carried"):
        carry = placed(carry, case.carried(program, mesh.axis_names[0]), mesh)
    for k in range(steps + 2):
        batch = case.batch(program, k)
        if mesh is not None:
            batch = placed(batch, case.specs(batch, mesh.axis_names[0]), mesh)
        carry = jax.block_until_ready(carry)
        start = time.perf_counter()
        carry = jax.block_until_ready(case.step(program, carry, batch))
        if k > 1:
            yield time.perf_counter() - start


def placed(tree: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """A tree on a mesh by a prefix tree of specs."""
    is_spec = lambda node: isinstance(node, PartitionSpec)
    put = lambda spec, part: jax.device_put(part, NamedSharding(mesh, spec))
    return jax.tree.map(put, specs, tree, is_leaf=is_spec)


def ratio(case: Any, original: Any, port: Any, mesh: dict[str, int]) -> dict[str, float]:
    """Seconds of a step of the port and of the original, both on a mesh, and of the original on one device.

    The original runs under `jax.jit` with its batch, or its chains, split over the mesh by shardings. Steps
    are interleaved.
    """
    ported = seconds(case, port, case.TIMED)
    runs = {
        "one device": seconds(case, original, case.TIMED),
        "sharded": seconds(case, original, case.TIMED, mesh_of(mesh, AxisType.Auto)),
    }
    taken: dict[str, list[float]] = {name: [] for name in ("port", *runs)}
    for _ in range(case.TIMED):
        with jax.set_mesh(mesh_of(mesh)):
            taken["port"].append(next(ported))
        for name, times in runs.items():
            taken[name].append(next(times))
    return {name: statistics.median(times) for name, times in taken.items()}


def diff(before: str, after: str) -> tuple[int, int]:
    """How many lines go, and how many come."""
    _, _, *lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
    return sum(x.startswith("-") for x in lines), sum(x.startswith("+") for x in lines)


def code(name: str, part: str) -> str:
    """A program without the docstring that says where it comes from."""
    text = (HERE / name / f"{part}.py").read_text()
    return text.split('"""\n', 1)[1].lstrip("\n") if text.startswith('"""') else text


def measure(name: str) -> dict[str, Any]:
    case, original, port, naive = [
        load(name, part) for part in ("case", "original", "port", "naive")
    ]
    figures: dict[str, Any] = {"jax": jax.__version__, "meshes": {}}
    figures["original"] = run(case, original, case.STEPS)
    for sizes in case.MESHES:
        with jax.set_mesh(mesh_of(sizes)):
            figures["meshes"][label(sizes)] = run(case, port, case.STEPS)
    first = case.MESHES[0]
    with jax.set_mesh(mesh_of(first)):
        figures["naive"] = run(case, naive, case.STEPS)
        figures["refused"] = refusal(case, naive, name)
        explained = sm.explain(case.mapped(port), *case.arguments(port))
        figures["collectives"] = [
            [c.operation, c.cause, c.times]
            for c in explained.collectives
            if c.compiled != "removed"
        ]
    checked = assert_equivalent(case.mapped(port), case.arguments(port), **case.CHECK)
    figures["agreed"] = len(checked.agreed)
    figures["unjudged"] = sum(checked.unjudged.values())
    figures["report"] = report(case, naive)
    figures["seconds"] = ratio(case, original, port, first)
    return figures


def report(case: Any, program: Any) -> str:
    """What the check says of a program, or the call itself."""
    try:
        assert_equivalent(case.mapped(program), case.arguments(program), **case.CHECK)
    except (AssertionError, sm.StatemeshError) as error:
        return str(error).strip().replace(f"{pathlib.Path(program.__file__).parent}/", "")
    return ""


def refusal(case: Any, naive: Any, name: str) -> str:
    """What the first step of the naive port raises with the check of types on."""
    text = (HERE / name / "naive.py").read_text()
    if "check_vma=False" not in text:
        return ""
    checked = types.ModuleType(naive.__name__ + "_checked")
    exec(
        compile(text.replace("check_vma=False", "check_vma=True"), naive.__file__, "exec"),
        vars(checked),
    )
    try:
        case.step(checked, case.start(checked), case.batch(checked, 0))
    except Exception as error:  # What it is, is what is measured.
        return f"{type(error).__name__}: {error}".strip()
    return ""


def page(name: str, figures: dict[str, Any]) -> str:
    case = load(name, "case")
    gone, come = diff(code(name, "original"), code(name, "port"))
    naive_gone, naive_come = diff(code(name, "port"), code(name, "naive"))
    first = label(case.MESHES[0])
    seconds = figures["seconds"]
    rows = [
        ("the original, on one device", figures["original"][-1], 0.0),
        *(
            (f"the port on {key}", curve[-1], off(curve, figures["original"]))
            for key, curve in figures["meshes"].items()
        ),
        (
            f"the naive port on {first}",
            figures["naive"][-1],
            off(figures["naive"], figures["original"]),
        ),
    ]
    table = "\n".join(f"| {what} | {last:.6g} | {far:.1e} |" for what, last, far in rows)
    relative = (
        f"{seconds['port'] / seconds['sharded']:.2f} times as long as the original\nunder `jax.jit` with "
        f"shardings, and {seconds['port'] / seconds['one device']:.2f} times as long as on one device"
    )
    sent = {}
    for operation, cause, times in figures["collectives"]:
        sent[operation, cause] = sent.get((operation, cause), 0) + times
    collectives = "\n".join(
        f"| {operation} | {cause} | {times:g} |" for (operation, cause), times in sent.items()
    )
    source = f"{SOURCES}{case.REPOSITORY}/blob/{case.COMMIT}/{case.PATH}"
    return f"""# {case.TITLE}

{case.WHAT.strip()}

The original is [{case.PATH}]({source}) of {case.PROJECT} ({case.LICENCE}).
{case.ADAPTED.strip()}

## What changes

{gone} lines go and {come} come. {case.CHANGES.strip()}

{panes(code(name, "original"), code(name, "port"), "the original", "with statemesh")}

## What it gives

![{case.MEASURE} after each step]({name}.svg)

{case.MEASURE}, after {case.STEPS} steps; and the largest difference from the original after any step,
relative to the original's largest value:

| | {case.MEASURE.lower()} | off by |
| --- | --- | --- |
{table}

`assert_equivalent` passes: {figures["agreed"]} comparisons, {figures["unjudged"]} numbers not judged.

A step of the port takes {relative}
(on {first}, simulated by 2 cores, where no mesh can be faster than one device). In a call devices exchange

| collective | because of | times |
| --- | --- | --- |
{collectives}

## The naive port

{case.NAIVE.strip()} It differs from the port in {naive_gone} lines that go and {naive_come} that come:

{panes(code(name, "port"), code(name, "naive"), "the port", "the naive port")}

Nothing fails. `assert_equivalent` says:

```text
{figures["report"]}
```
{refused(figures["refused"])}"""


def refused(error: str) -> str:
    if not error:
        return ""
    return f"""
Without `check_vma=False` the first call is refused:

```text
{error}
```
"""


def index() -> str:
    """The page that lists all showcases."""
    rows = []
    for name in names():
        case, figures = load(name, "case"), json.loads((HERE / name / "figures.json").read_text())
        gone, come = diff(code(name, "original"), code(name, "port"))
        first_line = figures["report"].splitlines()[0].replace("|", "\\|")
        rows.append(
            f"| [{case.TITLE}](showcase/{name}.md) | {max(gone, come)} | {farthest(figures):.0e} | "
            f"{off(figures['naive'], figures['original']):.0e} | {first_line} |"
        )
    body = "\n".join(rows)
    return f"""# Programs of others

{len(rows)} public programs with state, sharded. Each page has the program and its port side by side, the
curves on one device and on meshes, what the call exchanges and takes, and a naive port with what
silently goes wrong in it.

*Lines* are those that the port changes or adds. *Off by* is the largest difference from the original, on
any of the meshes and after any step, relative to the original's largest value; then the same of the
naive port on 8 devices. The last column is the first line of what `assert_equivalent` says of the naive
port.

| program | lines | off by | naive off by | the check on the naive port |
| --- | --- | --- | --- | --- |
{body}

The programs and the script that measures them are in the folder `docs/showcase` of the repository.
"""


def off(curve: Sequence[float], wanted: Sequence[float]) -> float:
    return float(np.max(np.abs(np.subtract(curve, wanted))) / np.max(np.abs(wanted)))


def farthest(figures: dict[str, Any]) -> float:
    """By how much the port is off on the worst of the meshes."""
    return max(off(curve, figures["original"]) for curve in figures["meshes"].values())


def panes(before: str, after: str, left: str, right: str) -> str:
    """Both texts side by side, where they differ."""
    a, b = before.splitlines(), after.splitlines()
    rows = []
    for group in difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(2):
        if rows:
            rows.append('<tr class="gap"><td>⋯</td><td>⋯</td></tr>')
        for tag, i, k, m, n in group:
            for at in range(max(k - i, n - m)):
                cells = [
                    cell(a, i + at, k, tag != "equal", "goes"),
                    cell(b, m + at, n, tag != "equal", "comes"),
                ]
                rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return f'<table class="panes">\n<tr><th>{left}</th><th>{right}</th></tr>\n{body}\n</table>'


def cell(lines: Sequence[str], at: int, end: int, differs: bool, kind: str) -> str:
    if at >= end:
        return "<td></td>"
    text = html.escape(lines[at]).replace("*", "&#42;").replace("_", "&#95;")
    text = text.replace("`", "&#96;").replace("[", "&#91;") or "&nbsp;"
    return (
        f'<td class="{kind}"><pre>{text}</pre></td>' if differs else f"<td><pre>{text}</pre></td>"
    )


def draw(name: str, figures: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name
    from matplotlib import pyplot as plt

    case = load(name, "case")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    steps = np.arange(1, case.STEPS + 1)
    axes.plot(
        steps,
        figures["original"],
        color="black",
        linewidth=4,
        alpha=0.3,
        label="original, one device",
    )
    for key, curve in figures["meshes"].items():
        axes.plot(steps, curve, linewidth=1.2, label=f"port, {key}")
    axes.plot(steps, figures["naive"], color="tab:red", linestyle="--", label="naive port")
    axes.set_xlabel("step")
    axes.set_ylabel(case.MEASURE)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    parser.add_argument("names", nargs="*", help="all if left out")
    options = parser.parse_args()
    set_devices(8)
    PAGES.mkdir(exist_ok=True)
    for name in options.names or names():
        file = HERE / name / "figures.json"
        if not options.pages:
            figures = measure(name)
            file.write_text(json.dumps(figures, indent=1))
        figures = json.loads(file.read_text())
        draw(name, figures)
        (PAGES / f"{name}.md").write_text(page(name, figures))
    (PAGES.parent / "showcase.md").write_text(index())


if __name__ == "__main__":
    main()
