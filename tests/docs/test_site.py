"""What the documentation must have: the words of every error, an example of each public name, short pages."""

import ast
import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator

import pytest

import statemesh as sm
from property_tests.planted.table import FIRST, LAST, put, with_tables
from statemesh import checkpoint, testing
from tests.test_docs import PAGES, public


ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pages"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
ERROR_MODULES = [
    *sorted((ROOT / "statemesh" / "_base" / "errors").glob("_[!_t]*.py")),  # without `_text.py`
    ROOT / "statemesh" / "checkpoint" / "_errors.py",
    ROOT / "statemesh" / "testing" / "_errors.py",
]
# The functions that make a message, and the position of its first words among their arguments.
MAKERS = {"error_listing": 1, "listed": 0, "kind": 0}


# The words of errors


def words(node: ast.AST, variables: dict[str, ast.expr]) -> list[str]:
    """The fixed words of an expression, and a mark for whatever a call puts between them."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [piece for value in node.values for piece in words(value, variables)]
    if isinstance(node, ast.FormattedValue):
        return words(node.value, variables)
    if isinstance(node, ast.BinOp):
        return [*words(node.left, variables), *words(node.right, variables)]
    if isinstance(node, ast.Name) and node.id in variables:
        return words(variables[node.id], {})
    return ["\0"]


def runs(pieces: list[str]) -> list[str]:
    """What a reader may search for: the clauses of a message's first sentence, up to eight words of each."""
    sentence = re.split(r"\. |\n", "".join(pieces))[0]
    clauses = [plain(clause).split()[:8] for clause in re.split(r"\0|[,:;] ", sentence)]
    return [" ".join(clause).strip(" :;,.(") for clause in sorted(clauses, key=len, reverse=True)]


def plain(text: str) -> str:
    """A text without backticks, in one line."""
    return " ".join(text.replace("`", "").split())


def messages(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function gives to the makers of messages as the first words."""
    found = []
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            maker = ast.unparse(call.func).split(".")[-1]
            position = 0 if maker.endswith("Error") else MAKERS.get(maker, len(call.args))
            if position < len(call.args):
                found.append((maker, call.args[position]))
    # A list inside a message says how to mend it.
    makers = {maker for maker, _ in found}
    yield from (first for maker, first in found if makers == {"listed"} or maker != "listed")


def texts(module: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The functions of a module that make errors, each with what a reader may search for."""
    for function in ast.parse(module.read_text()).body:
        if isinstance(function, ast.FunctionDef):
            variables = {
                ast.unparse(node.targets[0]): node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
            }
            for message in messages(function):
                longest, *others = runs(words(message, variables))
                yield (
                    f"{module.stem}.{function.name}",
                    [longest, *(run for run in others if run.count(" ") > 2)],
                )


TEXTS = [text for module in ERROR_MODULES for text in texts(module)]


def test_the_words_of_an_error() -> None:
    found = dict(TEXTS)
    assert found["_leave.diverged"] == ["shards wrote different values to states that keep"]
    assert found["_mesh.no_mesh"] == ["shard_map was given none", "and none is set"]
    assert found["_grad.nothing_to_differentiate"][0].startswith("the model has no ParamState")
    assert found["_call.unbound_axis"] == ["the axes mapped over are", "no axis is called"]
    assert len(found) > 120


def test_every_error_is_found_by_its_words() -> None:
    """The search puts headings first. Each error has its words in one, here or on the pages of questions."""
    pages = [*DOCS.glob("errors-*.md"), *DOCS.glob("faq*.md")]
    headings = [
        plain(line) for page in pages for line in page.read_text().splitlines() if line[:2] == "##"
    ]
    missing = [
        f"{function}: {found[0]}"
        for function, found in TEXTS
        if not any(run in heading for run in found for heading in headings)
    ]
    assert not missing, "No heading on a page of errors has the words of\n" + "\n".join(missing)


# Public names


MODULES: dict[str, types.ModuleType] = {
    "": sm,
    "filters.": sm.filters,
    "nn.": sm.nn,
    "testing.": testing,
    "checkpoint.": checkpoint,
}
NAMES = [prefix + name for prefix, module in MODULES.items() for name in public(module)]


def test_the_door_is_narrow() -> None:
    assert len(public(sm)) <= 48


@pytest.mark.parametrize("name", [*NAMES, "legacy.shard_map", "StatefulMapping.on_mesh"])
def test_every_public_name_has_an_example(name: str) -> None:
    """An example in the docstring, or one beside the entry on the page of all names."""
    value: object = sm
    for part in name.split("."):
        value = getattr(value, part)
    fences = re.findall(r"^```pycon\n(.*?)^```$", (DOCS / "api.md").read_text(), re.M | re.S)
    used = re.compile(rf"\b(sm\.)?{re.escape(name)}\(")
    assert ">>>" in (value.__doc__ or "") or any(used.search(fence) for fence in fences)


# Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_at_most_300_lines(page: pathlib.Path) -> None:
    assert page.read_text().count("\n") <= 300


def test_the_tables_of_every_case_have_a_page_of_their_own(tmp_path: pathlib.Path) -> None:
    for name in ("what-the-check-finds.md", "what-the-check-finds-cases.md"):
        (tmp_path / name).write_text(with_tables(f"before\n{FIRST}\n{LAST}\nafter\n", "old"))
    put(tmp_path, "### Counts\n\nmany\n\n### Every one\n\none\n")
    counts, cases = (path.read_text() for path in sorted(tmp_path.iterdir(), reverse=True))
    assert "many" in counts and "### Every" not in counts and "old" not in counts
    assert "### Every one" in cases and "many" not in cases and cases.endswith("after\n")


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*command, "-f", "docs/mkdocs.yml", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
def test_the_search_has_the_words_of_errors(site: pathlib.Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = [plain(html.unescape(re.sub(r"<[^>]*>", "", one["title"]))) for one in index["docs"]]
    for found in (
        "no mesh: shard_map was given none",
        "has no hidden value yet",
        "the list is empty",
    ):
        assert any(found in title for title in titles)


# Shows each page, without its scripts, in frames of both widths, and writes down which are wider than these.
PROBE = """
<body><script>
const wide = [];
const seen = PAGES.flatMap(page => [1280, 390].map(async width => {
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-same-origin";
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  // Without scripts a long title is wider than the header above.
  const main = frame.contentDocument.querySelector("main");
  if (main?.clientWidth !== width || !main.querySelector("h1")) wide.push(`${page} is not shown`);
  else if (main.scrollWidth > width) wide.push(`${page} at ${width}: ${main.scrollWidth}`);
}));
Promise.all(seen).then(() => document.body.textContent = "SEEN" + JSON.stringify(wide) + "SEEN");
</script></body>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_no_page_scrolls_sideways(site: pathlib.Path) -> None:
    pages = sorted(page.name for page in site.glob("*.html"))
    (site / "probe.htm").write_text(PROBE.replace("PAGES", json.dumps(pages)))
    assert look_at(site, "probe.htm") == []


def look_at(site: pathlib.Path, page: str) -> list[str]:
    """What a page of the site has written down, once a browser has run its script."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--virtual-time-budget=600000", "--dump-dom"]
    serve = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            shown = subprocess.run(
                [*command, f"http://127.0.0.1:{server.server_port}/{page}"],
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            ).stdout
        finally:
            server.shutdown()
    found: list[str] = json.loads(html.unescape(shown.split("SEEN")[1]))
    return found
