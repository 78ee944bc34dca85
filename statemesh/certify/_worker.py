"""A process that runs some rows: `python -m statemesh.certify._worker TASK FILE NAMES...`."""

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import pathlib
import sys
import warnings
from typing import Any

from ._cells import MODES
from ._programs import program
from ._rows import LIBRARIES, functions, primitives, rows
from ._run import run


def main(task: str, file: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    if task == "run":
        found = certified(names)
    else:
        found = {
            "jax": importlib.metadata.version("jax"),
            "names": [*functions(), *LIBRARIES],
            "primitives": sorted(primitives()),
        }
    pathlib.Path(file).write_text(json.dumps(found))


def certified(names: tuple[str, ...]) -> dict[str, Any]:
    """What came of these rows, and the programs of what is wrong."""
    called, untried = rows(names)
    found = {}
    outcomes, reached = run(called, MODES)
    for name, cells in outcomes.items():
        judged, confirmed = [], []
        for cell in cells:
            if cell.outcome == "wrong":
                text = program(called[name], cell)
                if confirms(text):
                    confirmed.append((dataclasses.asdict(cell), text))
                else:
                    cell = dataclasses.replace(cell, outcome="unconfirmed")
            judged.append(dataclasses.asdict(cell))
        found[name] = {"line": called[name].line, "cells": judged, "programs": confirmed}
    return {"rows": found, "untried": untried, "primitives": sorted(reached)}


def confirms(text: str) -> bool:
    """Whether a program's assertion fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(text, "<program>", "exec"), {})
        except AssertionError:
            return True
        except Exception as error:  # It fails in another way, and confirms nothing.
            print(f"{error!r} in\n{text}", file=sys.stderr)
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
