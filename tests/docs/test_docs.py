"""The tests run all code that the documentation shows.

The kind of a fence in `README.md` or in a page of `docs/pages` says whether the fence runs:

- `python`: it runs. The fences of a page share one namespace, top to bottom.
- `pycon`: it is a session of `>>>` lines, which runs as a doctest in the same namespace.
- `py`, `sh` and `text`: it does not run. `py` shows code for another library, or a part of an example.

On the FAQ pages the fences before the first section run before each section. The heading of a section is a
part of an error's text. The first `python` fence under it must raise an error that contains the heading and
has the type that the section names. The later fences must run.

Every example in a docstring of the package runs as a doctest.
"""

import ast
import dataclasses
import doctest
import importlib
import itertools
import linecache
import os
import pathlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest

import statemesh as sm
from statemesh import checkpoint, testing


pytestmark = pytest.mark.slow


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
FAQS = sorted((ROOT / "docs" / "pages").glob("faq*.md"))
RUN = ("python", "pycon")
MODULES = sorted(m.name for m in pkgutil.walk_packages(sm.__path__, "statemesh."))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<source>.*?)^ *```$", re.M | re.S)
_HEADING = re.compile(r"^## (?P<ticks>`*) ?(?P<text>.*?) ?(?P=ticks)$", re.M)


@dataclasses.dataclass(frozen=True)
class Fence:
    """A fence that runs: its page, its line and its source."""

    page: str
    line: int
    kind: str
    source: str

    def run(self, namespace: dict[str, Any]) -> None:
        if self.kind == "python":
            # What shows the source of a line finds it in the page.
            lines = linecache.getlines(self.page)[: self.line]
            lines += ["\n"] * (self.line - len(lines)) + self.source.splitlines(keepends=True)
            linecache.cache[self.page] = (0, None, lines, self.page)
            # Empty lines in front, so that a traceback shows the page's own line.
            exec(compile("\n" * self.line + self.source, self.page, "exec"), namespace)
            return
        parsed = doctest.DocTestParser().get_doctest(
            self.source, namespace, f"line {self.line}", self.page, self.line
        )
        check(parsed)
        namespace.update(parsed.globs)


def fences(page: str, text: str, first_line: int = 0) -> list[Fence]:
    """The fences of a page that run."""
    found = []
    for match in _FENCE.finditer(text):
        if match["kind"] in RUN:
            line = first_line + text.count("\n", 0, match.start("source"))
            assert not match["indent"], f"{page}:{line}: a fence that is run must not be indented"
            found.append(Fence(page, line, match["kind"], match["source"]))
    return found


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a FAQ page: the error's text as its heading, the text below it, and its fences."""

    setup: Sequence[Fence]
    heading: str
    text: str
    fences: Sequence[Fence]


def sections(page: str, text: str) -> list[Section]:
    """The sections of a page, each with a heading of the second level."""
    heads = list(_HEADING.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    setup = fences(page, text[: heads[0].start()])
    found = []
    for head, end in zip(heads, ends, strict=True):
        body = text[head.end() : end]
        line = text.count("\n", 0, head.end())
        found.append(Section(setup, head["text"], body, fences(page, body, line)))
    return found


def check(test: doctest.DocTest) -> int:
    """Run one doctest and return the number of its examples."""
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)
    return result.attempted


def docstrings(module: str) -> Iterator[doctest.DocTest]:
    """The docstrings of a module that have examples."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return (test for test in finder.find(importlib.import_module(module)) if test.examples)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of a page. It is a module, because a class looks up the module that defines it."""
    assert jax.device_count() == 8
    # The pages set this variable. It is too late for this process, but processes that it starts use it.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


@pytest.mark.parametrize("page", [p for p in PAGES if p not in FAQS], ids=lambda p: p.name)
def test_page_runs(page: pathlib.Path, namespace: dict[str, Any]) -> None:
    for fence in fences(page.name, page.read_text()):
        fence.run(namespace)


FAQ_SECTIONS = [section for page in FAQS for section in sections(page.name, page.read_text())]


def test_pages_show_code() -> None:
    shown = {page.name for page in PAGES if fences(page.name, page.read_text())}
    assert shown >= {"README.md", "index.md", "coming-from-jax.md", "states.md", "randomness.md"}
    assert len(FAQ_SECTIONS) > 20


@pytest.mark.parametrize("section", FAQ_SECTIONS, ids=lambda section: section.heading)
def test_faq_heading_is_what_the_error_says(section: Section, namespace: dict[str, Any]) -> None:
    for fence in section.setup:
        fence.run(namespace)
    mistake, *corrected = section.fences
    with pytest.raises(
        (ValueError, TypeError, AttributeError), match=re.escape(section.heading)
    ) as raised:
        mistake.run(namespace)
    assert f"`{raised.type.__name__}`" in section.text
    for fence in corrected:
        fence.run(namespace)


def public(module: types.ModuleType) -> list[str]:
    """The public names of a module, except submodules."""
    names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def test_api_page_has_every_public_name() -> None:
    shown = re.findall(
        r"^::: statemesh\.(\S+)$", (ROOT / "docs" / "pages" / "api.md").read_text(), re.M
    )
    filters = [f"filters.{name}" for name in public(sm.filters)]
    layers = [f"nn.{name}" for name in public(sm.nn)]
    checks = [f"testing.{name}" for name in public(testing)]
    files = [f"checkpoint.{name}" for name in public(checkpoint)]
    expected = [*public(sm), *filters, *layers, *checks, *files, "legacy.shard_map"]
    assert sorted(shown) == sorted(expected)


def code(page: pathlib.Path) -> list[str]:
    """The `python` fences of a page."""
    found = fences(page.name, page.read_text())
    return [fence.source for fence in found if fence.kind == "python"]


# These pages run on any number of devices, or explain how to get more.
ANY_NUMBER = {"README.md", "index.md", "drop-in.md", "packing.md", "strategies.md", "testing.md"}
EIGHT = """\
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX starts
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_get_their_devices(page: pathlib.Path) -> None:
    shown = code(page)
    if shown and page.name not in ANY_NUMBER:
        assert shown[0].startswith(EIGHT)


OURS = {"equinox", "jax", "jaxtyping", "numpy", "statemesh"}
# A page that imports another package must show the command that installs it.
INSTALLED_BY = {
    "brainstate": "pip install brainstate",
    "flax": "pip install flax",
    "haiku": "pip install flax dm-haiku",
    "hypothesis": "pip install 'statemesh[testing]'",
    "optax": "pip install optax",
    "orbax": "pip install 'statemesh[checkpoint]'",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_the_packages_that_they_need(page: pathlib.Path) -> None:
    needed = set()
    for node in itertools.chain(*(ast.walk(ast.parse(source)) for source in code(page))):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add((node.module or "").split(".")[0])
    others = needed - OURS - sys.stdlib_module_names
    text = page.read_text()
    assert [name for name in sorted(others) if INSTALLED_BY[name] not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page: pathlib.Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    for test in docstrings(module):
        check(test)


def test_docstrings_have_examples() -> None:
    assert sum(len(test.examples) for test in itertools.chain(*map(docstrings, MODULES))) > 20
