"""What the README, the home page and the page on testing show first: code, and how its mistakes look."""

import re
import types
from typing import Any

import jax.numpy as jnp
import pytest

import statemesh as sm
from property_tests.planted.mistakes import mistakes
from statemesh.testing import assert_equivalent
from tests.docs.test_pages import README, fences, shown
from tests.docs.test_pages import namespace as namespace
from tests.helpers import DOCS


pytestmark = pytest.mark.slow

HOME = DOCS / "pages" / "index.md"


def test_the_readme_runs_and_shows_the_real_error_and_the_real_report(
    namespace: dict[str, Any],
) -> None:
    first, *others = fences(README.name, README.read_text())
    first.run(namespace)
    names = types.SimpleNamespace(**namespace)
    net = names.Net(sm.ParamState(jnp.ones(3)), sm.BatchState(jnp.zeros(3)))
    x = jnp.arange(48.0).reshape(16, 3)
    error, report = shown(README)
    with pytest.raises(sm.DivergedStateError) as raised:
        names.sharded(net, x)
    assert str(raised.value) == error.rstrip("\n")
    mended = net.replace(mean=net.mean.replace(reduce="mean"))
    with pytest.raises(AssertionError) as failed:
        assert_equivalent(names.sharded, (mended, x), meshes=[names.mesh])
    assert report in str(failed.value)
    text = README.read_text()
    screen = text[: text.index(report) + len(report)] + "```"
    assert len(screen.splitlines()) <= 30
    for fence in others:
        fence.run(namespace)


def test_the_home_page_begins_as_the_readme() -> None:
    one, other = (fences(page.name, page.read_text())[0] for page in (README, HOME))
    assert one.source == other.source
    line = 1 + other.source.splitlines().index("    y = (x - x.mean(0)) @ net.w.value")
    (error, report), (error_there, report_there) = shown(README), shown(HOME)
    assert error == error_there
    there = f"{HOME.name}:{other.line + line}:"
    assert re.sub(rf"{README.name}:\d+:", there, report) == report_there


def test_the_page_on_testing_begins_with_the_real_report() -> None:
    wanted = ("fsdp", "norm-of-a-mean")
    (mistake,) = (m for m in mistakes() if (m.model, m.name) == wanted)
    path, _ = mistake.where
    assert len(path.read_text().splitlines()) > 100
    with pytest.raises(AssertionError) as failed:
        mistake.case("float32").check()
    report = str(failed.value).replace(f"  # mistake: {mistake.name}", "")
    report = report.replace(str(path), "models_fsdp.py").replace(path.name, "models_fsdp.py")
    # Which lines come next depends on JAX's version.
    first, found, _ = shown(DOCS / "pages" / "testing.md")[0].partition(
        "  or, less likely, here:\n"
    )
    assert found and report.startswith(first + found)
