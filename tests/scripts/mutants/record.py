"""A pytest plugin: what each test costs, and which lines of the package it runs.

`python -m pytest -m "" -p tests.scripts.mutants.record` writes a line for each test to files in
`.mutants/`, one for each process. A test that fails is left out, because it would kill every mutant.
It needs Python 3.12.
"""

import json
import os
import pathlib
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, TextIO

import pytest


ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / ".mutants"
_PACKAGE = str(ROOT / "statemesh") + "/"
_TOOL = sys.monitoring.COVERAGE_ID

_lines: set[tuple[str, int]] = set()


def _started(code: CodeType, _offset: int) -> Any:
    if code.co_filename.startswith(_PACKAGE):
        sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
    return sys.monitoring.DISABLE


def _ran(code: CodeType, line: int) -> Any:
    _lines.add((code.co_filename[len(_PACKAGE) :], line))
    return sys.monitoring.DISABLE


def by_file(lines: set[tuple[str, int]]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for file, line in sorted(lines):
        numbers.setdefault(file, []).append(line)
    return numbers


class Recorder:
    def __init__(self, file: TextIO) -> None:
        self.file = file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _lines.clear()
        sys.monitoring.restart_events()
        begin, failed = sum(os.times()[:4]), item.session.testsfailed
        try:
            return (yield)
        finally:
            # Of this process and of those that it has waited for.
            cost = sum(os.times()[:4]) - begin
            slow = item.get_closest_marker("slow") is not None
            lines = by_file(_lines)
            row = {"id": item.nodeid, "seconds": round(cost, 2), "slow": slow, "lines": lines}
            if item.session.testsfailed == failed:
                self.file.write(json.dumps(row) + "\n")
                self.file.flush()


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    if worker == "main" and config.getoption("numprocesses", 0):
        return
    FOLDER.mkdir(exist_ok=True)
    config.pluginmanager.register(Recorder((FOLDER / f"tests-{worker}.jsonl").open("w")))


def pytest_unconfigure() -> None:
    sys.monitoring.set_events(_TOOL, 0)
    sys.monitoring.free_tool_id(_TOOL)


# The package is imported by the conftest files, before pytest configures its plugins.
sys.monitoring.use_tool_id(_TOOL, "lines of tests")
sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, _started)
sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, _ran)
sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)
