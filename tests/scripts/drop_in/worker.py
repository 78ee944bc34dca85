"""One part of a test file's tests, in its own process."""

import json
import re
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any

from absl import flags

from tests.scripts.drop_in.stand_in import load


def name(test: Any) -> str:
    """The name of a test, the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(test.id()))


class _Result(unittest.TestResult):
    """The outcome of each test: a word, and the exception."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.found[name(test)] = ("passed", "")

    def _failed(self, test: Any, error: Any) -> None:
        self.found[name(test)] = ("failed", "".join(traceback.format_exception(*error))[-6000:])

    def addFailure(self, test: Any, err: Any) -> None:
        self._failed(test, err)

    def addError(self, test: Any, err: Any) -> None:
        self._failed(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.found[name(test)] = ("skipped", reason)


def _tests(suite: Any) -> list[Any]:
    return [
        one for part in suite for one in (_tests(part) if hasattr(part, "__iter__") else [part])
    ]


def main(file: str, variant: str, part: str, parts: str, only: str) -> None:
    module, instead = load(Path(file), variant)
    sys.modules[module.__name__] = module
    flags.FLAGS(["tests"])
    tests = _tests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = _Result()
    for test in sorted(tests, key=name)[int(part) :: int(parts)]:
        if only in name(test):
            test.run(result)
    counts = {name: dict(one.count) for name, one in instead.items()}
    print("\n" + json.dumps({"found": result.found, "counts": counts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
