"""What the documentation must have: the words of every error, an example of each public name, short pages."""

import ast
import pathlib
import re
import types
from collections.abc import Iterator

import pytest

import statemesh as sm
from statemesh import checkpoint, testing
from tests.test_docs import PAGES, public


ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pages"
ERROR_MODULES = [
    *sorted((ROOT / "statemesh" / "_base" / "errors").glob("_[!_t]*.py")),  # without `_text.py`
    ROOT / "statemesh" / "checkpoint" / "_errors.py",
    ROOT / "statemesh" / "testing" / "_errors.py",
]
# The functions that make a message, and the position of its first words among their arguments.
MAKERS = {"error_listing": 1, "listed": 0, "kind": 0}


# The words of errors


def words(node: ast.AST) -> list[str]:
    """The fixed words of an expression, cut where something else is put in."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [piece for value in node.values for piece in words(value)]
    if isinstance(node, ast.BinOp):
        return [*words(node.left), *words(node.right)]
    return ["\0"]


def first_words(pieces: list[str]) -> str:
    """The longest run of fixed words in the first sentence of a message."""
    sentence = re.split(r"\. |\n", "".join(pieces))[0]
    runs = [plain(run) for run in sentence.split("\0")]
    return max(runs, key=lambda run: len(run.split())).strip(" :;,.(")


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


def texts(module: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The functions of a module that make errors, each with the first fixed words of its message."""
    for function in ast.parse(module.read_text()).body:
        if isinstance(function, ast.FunctionDef):
            for message in messages(function):
                # The words may be put into a variable first.
                put = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign)]
                named = put if isinstance(message, ast.Name) else [message]
                text = max((first_words(words(value)) for value in named), key=len, default="")
                yield f"{module.stem}.{function.name}", text


TEXTS = [text for module in ERROR_MODULES for text in texts(module)]


def test_every_error_has_its_words() -> None:
    found = dict(TEXTS)
    assert found["_leave.diverged"] == "shards wrote different values to states that keep one copy"
    assert found["_mesh.no_mesh"] == "no mesh: shard_map was given none, and none is set"
    assert found["_specs.not_a_spec"] == "not a spec"
    assert len(found) > 120


def test_every_error_is_found_by_its_words() -> None:
    shown = plain((DOCS / "error-texts.md").read_text())
    missing = [f"{function}: {text}" for function, text in TEXTS if text not in shown]
    assert not missing, "error-texts.md lacks the words of\n" + "\n".join(missing)


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
