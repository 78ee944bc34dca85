"""What the site must have: the words of every error in a heading, and pages that fit a phone."""

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

import pytest

from property_tests.planted.table import FIRST, LAST, put, with_tables
from tests.helpers import DOCS


ROOT = DOCS.parent
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
# Modules whose functions make errors, and the calls of theirs whose argument here begins a message.
ERRORS = [
    *(p for p in (ROOT / "statemesh").rglob("*.py") if "testing" not in p.parts),
    # Reports of failed checks and of budgets have pages of their own.
    *(
        p
        for p in (ROOT / "statemesh" / "testing").rglob("*.py")
        if p.name != "_report.py" and "budget" not in p.name
    ),
]
MAKERS = {"error_listing": 1, "listed": 0, "kind": 0}


def plain(text: str) -> str:
    """A text without backticks, in one line."""
    return " ".join(text.replace("`", "").split())


def words(node: ast.AST, variables: dict[str, ast.expr]) -> str:
    """The fixed words of an expression, and a mark for whatever a call puts between them."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(words(value, variables) for value in node.values)
        case ast.FormattedValue():
            return words(node.value, variables)
        case ast.BinOp():
            return words(node.left, variables) + words(node.right, variables)
        case ast.Name() if node.id in variables:
            return words(variables[node.id], {})
    return "\0"


def searched(message: str) -> list[str]:
    """What a reader may search for: up to eight words of each longer clause of a message's first sentence."""
    clauses = re.split(r"\0|[,:;] ", re.split(r"\. |\n", message)[0])
    short = [" ".join(plain(clause).split()[:8]).strip(" :;,.(") for clause in clauses]
    longest = max(clauses, key=len)
    return [
        one
        for one, clause in zip(short, clauses, strict=True)
        if clause == longest or one.count(" ") > 2
    ]


def messages(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function gives to the makers of messages as the first words."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func).split(".")[-1], call.args) for call in calls]
    at = [
        (maker, args[position])
        for maker, args in named
        if (position := 0 if maker.endswith("Error") else MAKERS.get(maker, 99)) < len(args)
    ]
    # A list inside a message says how to mend it.
    return [first for maker, first in at if maker != "listed" or {m for m, _ in at} == {"listed"}]


@pytest.mark.slow
def test_every_error_is_found_by_its_words() -> None:
    """The search puts headings first. Each error has its words in one, here or on the pages of questions."""
    pages = [*(DOCS / "pages").glob("errors-*.md"), *(DOCS / "pages").glob("faq*.md")]
    rows = [row for page in pages for row in page.read_text().splitlines()]
    headings = [plain(row) for row in rows if row.startswith("##")]
    count, missing = 0, []
    for module in ERRORS:
        for function in ast.walk(ast.parse(module.read_text())):
            # An attribute that is missing or cannot be set is said in the words of Python.
            if not isinstance(function, ast.FunctionDef) or function.name.endswith("attr__"):
                continue
            assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            variables = {ast.unparse(node.targets[0]): node.value for node in assigned}
            for message in messages(function):
                wanted = searched(words(message, variables))
                count += 1
                if not any(part in heading for part in wanted for heading in headings):
                    missing.append(f"{module.stem}.{function.name}: {wanted}")
    assert count > 200 and missing == []


def test_the_tables_of_every_case_have_a_page_of_their_own(tmp_path: pathlib.Path) -> None:
    for name in ("what-the-check-finds.md", "what-the-check-finds-cases.md"):
        (tmp_path / name).write_text(with_tables(f"before\n{FIRST}\n{LAST}\nafter\n", "old"))
    put(tmp_path, "### Counts\n\nmany\n\n### Every one\n\none\n")
    counts, cases = (path.read_text() for path in sorted(tmp_path.iterdir(), reverse=True))
    assert "many" in counts and "### Every" not in counts and "old" not in counts
    assert "### Every one" in cases and "many" not in cases and cases.endswith("after\n")


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
    for searched_for in ("no mesh: shard_map was given none", "has no hidden value yet"):
        assert any(searched_for in title for title in titles)


@pytest.mark.slow
def test_signatures_are_what_users_write(site: pathlib.Path) -> None:
    text = html.unescape(re.sub(r"<[^>]*>", "", (site / "api.html").read_text()))
    shown = re.findall(r"^\w+\(\n(?:    .*\n)+\)$", text, re.MULTILINE)
    assert "State(\n    value, *, name=None, tag=None, spec=None, reduce=None\n)" in shown
    assert any("    in_specs=...,\n    out_specs=...,\n" in signature for signature in shown)
    private = [signature for signature in shown if re.search(r"[A-Z]{5}|\b_", signature)]
    assert len(shown) > 30 and private == []


# What readers type, and the page that they look for.
QUERIES = {
    "any-library": ("pcast", "check_vma", "while_loop", "diffrax"),
    "api": ("RetracedWarning", "global_norm", "hypothesis", "legacy.shard_map"),
    "checkpoints": ("orbax", "another mesh"),
    "coming-from-equinox": ("filter_vmap", "eqx.Module"),
    "coming-from-flax": ("StateAxes", "tensor parallel", "nnx.Rngs"),
    "errors-calls": ("is not a filter",),
    "faq-states": ("PRNGKey",),
    "fsdp": ("first_axis", "min_size"),
    "glossary": (
        *(
            "DDP",
            "DistributedDataParallel",
            "SyncBN",
            "gradient accumulation",
            "ZeRO",
            "MoE",
            "KV cache",
        ),
        *(
            "inference_mode",
            "resume",
            "multi-host",
            "GSPMD",
            "remat",
            "recompilation",
            "out of memory",
        ),
        *("LSTM", "Megatron", "pvary", "gradient clipping", "split_rngs"),
        *("SplitArray", "AveragedWeights"),
    ),
    "faq": ("Mesh for all inputs should be equal",),
    "layers": ("batchnorm", "dropout", "equinox.nn.inference_mode", "metrics"),
    "leaving-pmap": ("jax.pmap", "replicate"),
    "microbatches": ("memory",),
    "randomness": ("fold_in",),
    "recipes": ("mixed precision", "bfloat16"),
    "recipes-models": ("ring attention", "ensemble"),
    "several-machines": ("slurm", "distributed.initialize", "kubernetes", "mpirun"),
    "specs-and-filters": ("set_mesh",),
}


@pytest.mark.slow
def test_the_search_leads_to_the_page(site: pathlib.Path) -> None:
    """A section is found that has all words of the query at the beginnings of its own."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])

    def split(text: str) -> list[str]:
        bare = html.unescape(re.sub(r"<[^>]*>", " ", text))
        return [word for word in separator.split(bare.lower()) if word]

    found: dict[str, list[set[str]]] = {}
    for section in index["docs"]:
        page = section["location"].split(".html")[0]
        found.setdefault(page, []).append({*split(section["title"]), *split(section["text"])})
    missed = [
        f"{query}: {page}"
        for page, queries in QUERIES.items()
        for query in queries
        if not any(
            all(any(word.startswith(part) for word in words) for part in split(query))
            for words in found[page]
        )
    ]
    assert sum(map(len, QUERIES.values())) >= 40 and missed == []


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

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", "--virtual-time-budget=600000", "--dump-dom"]
    serve = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/probe.htm"
        try:
            seen = subprocess.run(
                [*command, address], capture_output=True, text=True, check=True, timeout=300
            ).stdout
        finally:
            server.shutdown()
    assert json.loads(html.unescape(seen.split("SEEN")[1])) == []
