"""One part of a test file's tests, in its own process."""

import json
import re
import sys
import unittest
from pathlib import Path
from typing import Any

from absl import flags

from tests.scripts.drop_in.stand_in import load


def name(test: Any) -> str:
    """The name of a test, or of the test that a subtest is of, the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(getattr(test, "test_case", test).id()))


def tests_of(suite: Any) -> list[Any]:
    if not isinstance(suite, unittest.TestSuite):
        return [suite]
    return [test for part in suite for test in tests_of(part)]


def main(file: str, variant: str, part: str, parts: str, only: str) -> None:
    module, counts = load(Path(file), variant)
    sys.modules[module.__name__] = module
    flags.FLAGS(["tests"])
    tests = sorted(tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)), key=name)
    chosen = [test for test in tests[int(part) :: int(parts)] if only in name(test)]
    result = unittest.TestResult()
    for test in chosen:
        test.run(result)
    # The outcome of each test: a word, and the exception or the reason.
    found = {name(test): ("passed", "") for test in chosen}
    found |= {name(test): ("skipped", reason) for test, reason in result.skipped}
    failed = [*result.failures, *result.errors]
    found |= {name(test): ("failed", text[-6000:]) for test, text in failed}
    print("\n" + json.dumps({"found": found, "counts": counts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
