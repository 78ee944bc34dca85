"""Programs under `assert_equivalent`: which of their results it accuses."""

import re
from collections.abc import Callable, Collection
from typing import Any

from jax.sharding import PartitionSpec as P

from statemesh.testing import Checked, assert_equivalent


def check(fun: Callable[..., Any], *args: Any, **more: Any) -> Checked:
    """Check one call of a function of rows on two shards, unless the test asks for more."""
    options: dict[str, Any] = {
        "meshes": [{"x": 2}],
        "in_specs": P("x"),
        "out_specs": P(),
        "gradients": False,
        "steps": 1,
    }
    return assert_equivalent(fun, args, **{**options, **more})


def report(fun: Callable[..., Any], *args: Any, **more: Any) -> str:
    """The report of a check that must fail."""
    try:
        check(fun, *args, **more)
    except AssertionError as error:
        return str(error)
    raise AssertionError("the check passes")


def assert_accused(keys: Collection[str], fun: Callable[..., Any], *args: Any, **more: Any) -> str:
    """Assert that of a dictionary of results just those under these keys are off; give the report."""
    text = report(fun, *args, **more)
    # A report names the first results, and counts the others.
    named = re.findall(r"^  - .*?\['(\w+)'\]", text, re.MULTILINE)
    others = re.search(r"^  and (\d+) more\.$", text, re.MULTILINE)
    assert set(named) <= set(keys)
    assert len(named) + (int(others[1]) if others else 0) == len(keys)
    check(fun, *args, **more, leave_out=[f"['{key}']" for key in keys])
    return text
