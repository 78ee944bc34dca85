"""Programs under `assert_equivalent`: which of their results it accuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from statemesh.testing import assert_equivalent
from statemesh.testing._equivalent import _report


def check(fun: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Check one call of a function of rows on two shards, unless the test asks for more."""
    given: dict[str, Any] = {
        "meshes": [{"x": 2}],
        "in_specs": P("x"),
        "out_specs": P(),
        "gradients": False,
        "steps": 1,
    }
    return assert_equivalent(fun, args, **{**given, **more})


def report(fun: Callable[..., Any], *args: Any, **more: Any) -> str:
    """The report of a check that must fail."""
    try:
        check(fun, *args, **more)
    except AssertionError as error:
        return str(error)
    raise AssertionError("the check passes")


def accused(fun: Callable[..., Any], *args: Any, **more: Any) -> set[str]:
    """The keys of the results that the first failed call names; empty where the check passes."""
    with pytest.MonkeyPatch.context() as patch:
        # A report lists the first few only.
        patch.setattr(_report, "MOST_RESULTS", 100)
        return _named(fun, *args, **more)


def _named(fun: Callable[..., Any], *args: Any, **more: Any) -> set[str]:
    try:
        check(fun, *args, **more)
    except AssertionError as error:
        return set(re.findall(r"^  - .*?\['(\w+)'\]", str(error), re.MULTILINE))
    return set()
