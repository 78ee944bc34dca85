"""The tests run all code that the documentation shows, each piece once.

The kind of a fence in `README.md` or in a page of `docs/pages` says whether the fence runs:

- `python`: it runs. The fences of a page share one namespace, top to bottom.
- `pycon`: it is a session of `>>>` lines, which runs as a doctest in the same namespace.
- `py`, `sh` and `text`: it does not run. `py` shows code for another library, or a part of an example.

On the FAQ pages each section begins with what the fences before the first section made. The heading of a
section is a part of an error's text. The first `python` fence under it must raise an error that contains the
heading and has the type that the section names. The later fences must run.

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
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import statemesh as sm
from statemesh import checkpoint, testing
from tests.helpers import DOCS


README = DOCS.parent / "README.md"
PAGES = [README, *sorted((DOCS / "pages").glob("*.md"))]
FAQS = sorted((DOCS / "pages").glob("faq*.md"))
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
        parser = doctest.DocTestParser()
        name = f"line {self.line}"
        session = parser.get_doctest(self.source, namespace, name, self.page, self.line)
        assert not (report := failures(session)), report
        namespace.update(session.globs)


def fences(page: str, text: str, first_line: int = 0) -> list[Fence]:
    """The fences of a page that run."""
    found = []
    for match in _FENCE.finditer(text):
        if match["kind"] in ("python", "pycon"):
            line = first_line + text.count("\n", 0, match.start("source"))
            assert not match["indent"], f"{page}:{line}: a fence that is run must not be indented"
            found.append(Fence(page, line, match["kind"], match["source"]))
    return found


def shown(page: pathlib.Path, kind: str = "text") -> list[str]:
    """What stands in the fences of this kind on a page."""
    return [match["source"] for match in _FENCE.finditer(page.read_text()) if match["kind"] == kind]


def failures(test: doctest.DocTest) -> str:
    """Run one doctest: what it reports."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    return "".join(report)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of a page. It is a module, because a class looks up the module that defines it."""
    assert jax.device_count() == 8
    # The pages set this variable. It is too late for this process, but processes that it starts use it.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


@pytest.mark.slow
# `test_first_screen.py` runs the README.
@pytest.mark.parametrize("page", [p for p in PAGES[1:] if p not in FAQS], ids=lambda p: p.name)
def test_page_runs(page: pathlib.Path, namespace: dict[str, Any]) -> None:
    for fence in fences(page.name, page.read_text()):
        fence.run(namespace)
    if page.stem == "tutorial":
        picture = (DOCS / "pages" / "assets" / "tutorial.svg").read_text()
        assert namespace["picture"].svg == picture


def problem(heading: str, text: str, code: list[Fence], namespace: dict[str, Any]) -> str:
    """What is wrong with a section of a FAQ page; empty if nothing is."""
    mistake, *corrected = code
    try:
        mistake.run(namespace)
    except (ValueError, TypeError, AttributeError) as error:
        if heading not in str(error):
            return f"the error says {error}"
        if f"`{type(error).__name__}`" not in text:
            return f"the error is a {type(error).__name__}"
    else:
        return "there is no error"
    for fence in corrected:
        fence.run(namespace)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("page", FAQS, ids=lambda p: p.name)
def test_faq_heading_is_what_the_error_says(page: pathlib.Path, namespace: dict[str, Any]) -> None:
    text = page.read_text()
    heads = list(_HEADING.finditer(text))
    assert len(heads) > 5
    for fence in fences(page.name, text[: heads[0].start()]):
        fence.run(namespace)
    setup, problems = dict(namespace), {}
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        namespace.clear()
        namespace.update(setup)
        body, line = text[head.end() : end], text.count("\n", 0, head.end())
        code = fences(page.name, body, line)
        problems[head["text"]] = problem(head["text"], body, code, namespace)
    assert {heading: what for heading, what in problems.items() if what} == {}


def docstrings(module: str) -> Iterator[doctest.DocTest]:
    """The docstrings of a module that have examples."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return (test for test in finder.find(importlib.import_module(module)) if test.examples)


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted({name.split(".")[1] for name in MODULES}))
def test_docstring_examples(part: str) -> None:
    names = [name for name in MODULES if name.split(".")[1] == part]
    reports = [failures(test) for name in names for test in docstrings(name)]
    assert not any(reports), "".join(reports)


# Public names


def public(module: types.ModuleType) -> list[str]:
    """The public names of a module, except submodules."""
    names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def test_every_public_name_is_on_the_api_page_with_an_example() -> None:
    modules = {"": sm, "filters.": sm.filters, "nn.": sm.nn, "testing.": testing}
    modules["checkpoint."] = checkpoint
    names = [prefix + name for prefix, module in modules.items() for name in public(module)]
    names.append("legacy.shard_map")
    assert len(public(sm)) <= 49
    page = DOCS / "pages" / "api.md"
    listed = re.findall(r"^::: statemesh\.(\S+)$", page.read_text(), re.M)
    assert sorted(listed) == sorted(names)

    def has_example(name: str) -> bool:
        value: object = sm
        for part in name.split("."):
            value = getattr(value, part)
        used = re.compile(rf"\b(sm\.)?{re.escape(name)}\(")
        return ">>>" in (value.__doc__ or "") or any(map(used.search, shown(page, "pycon")))

    assert [n for n in [*names, "StatefulMapping.on_mesh"] if not has_example(n)] == []


# What pages must have


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


def packages(page: pathlib.Path) -> set[str]:
    """The packages that the code of a page imports, other than those that statemesh brings."""
    needed = set()
    for node in itertools.chain(*(ast.walk(ast.parse(source)) for source in code(page))):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add((node.module or "").split(".")[0])
    return needed - OURS - sys.stdlib_module_names


def lacks(page: pathlib.Path) -> Iterator[str]:
    """What is wrong with a page."""
    text, sources = page.read_text(), code(page)
    if sources and page.name not in ANY_NUMBER and not sources[0].startswith(EIGHT):
        yield "it does not begin with the lines that make eight devices"
    if text.count("\n") > 300:
        yield "it has more than 300 lines"
    for name in sorted(packages(page)):
        if INSTALLED_BY[name] not in text:
            yield f"it does not say how to install {name}"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
        if not (page.parent / link).exists():
            yield f"its link to {link} leads nowhere"


def test_pages_have_devices_packages_and_links() -> None:
    assert len(PAGES) > 40 and sum(map(bool, map(code, PAGES))) > 20
    assert {page.name: found for page in PAGES if (found := list(lacks(page)))} == {}
