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
from ._rows import LIBRARIES, Row, functions, rows
from ._run import Judged, run


def main(task: str, file: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    found = {"names": [*functions(), *LIBRARIES]} if task == "names" else certified(names)
    pathlib.Path(file).write_text(json.dumps(found))


def certified(names: tuple[str, ...]) -> dict[str, Any]:
    """What came of these rows."""
    called, untried = rows(names)
    found = {}
    for name, judged in run(called, MODES).items():
        row = called[name]
        cells = [shown(row, cell) for cell in judged]
        found[name] = {"name": name, "line": row.line, "cells": cells}
    versions = {
        package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "statemesh")
    }
    return {"rows": found, "untried": untried, "versions": versions}


def shown(row: Row, judged: Judged) -> dict[str, str]:
    """A cell as the file has it; a wrong one with its program, which has to confirm it."""
    cell = dataclasses.asdict(judged)
    if judged.outcome == "wrong":
        text = program(row, judged)
        if confirms(text):
            cell["program"] = text
        else:
            cell |= {"outcome": "unconfirmed", "text": text}
    return cell


def confirms(text: str) -> bool:
    """Whether a program's assertion fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(text, "<program>", "exec"), {})
        except AssertionError:
            return True
        except Exception as error:
            print(text, file=sys.stderr)
            print(repr(error), file=sys.stderr)
            return False
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
