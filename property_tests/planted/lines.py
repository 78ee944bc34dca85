"""Which lines are right for a mistake, and which ones a report names."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence

from .mistakes import Mistake


# The lines of a report that name a place, and its cause.
_PLACE = re.compile(r"^ +(?P<file>/\S+\.py):(?P<line>\d+): ")
_SPECS = re.compile(r"^ +(?P<which>(?:in|out)_specs) of ")
_OF_STATES = re.compile(r"^ +the (?P<which>write policy|spec) of ")
_WORDS = {"write policy": "reduce=", "spec": "spec="}
_CAUSE = re.compile(r" Tried: .* at \S+\.py:(?P<lines>\d+(?: or \d+)*), all results are right\.$")
_HERE = "being those of one device here:"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.While)


@functools.cache
def right_lines(mistake: Mistake) -> frozenset[int]:
    """The line of the mistake, and the one that first uses what it makes."""
    path, line = mistake.where
    return frozenset((line, *_first_use(ast.parse(path.read_text()), line)))


def _first_use(module: ast.Module, line: int) -> list[int]:
    """The first line after this one, in the same function, that reads a variable assigned there.

    At the end of a loop that is the first one in its next round.
    """
    within = [node for node in ast.walk(module) if _spans(node, line)]
    assigned = {
        target.id
        for node in within
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in _targets(node)
    }
    functions = [node for node in within if isinstance(node, _FUNCTIONS)]
    if not functions or not assigned:
        return []
    uses = sorted(
        node.lineno
        for node in ast.walk(functions[-1])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in assigned
    )
    # A statement that has no statements in it.
    simple = [n for n in within if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    end = max(node.end_lineno or line for node in simple)
    after = [use for use in uses if use > end]
    for loop in reversed([node for node in within if isinstance(node, _LOOPS)]):
        last = loop.end_lineno or line
        again = [use for use in uses if loop.lineno <= use <= end]
        after = [use for use in after if use <= last] or again or after
    return after[:1]


def _spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[ast.Name]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                yield inner


def named(report: str, mistake: Mistake) -> list[int]:
    """The lines of the mistaken file that a report names first, the likeliest first; 0 for any other place.

    A spec or a write policy is the line of the mistake where the mistake is a spec or a policy.
    """
    path, line = mistake.where
    found = []
    for text in _first_places(report.splitlines()):
        if place := _PLACE.match(text):
            # Each process writes the file into a folder of its own.
            is_there = place["file"].endswith(f"/{path.name}")
            found.append(int(place["line"]) if is_there else 0)
        if spec := _SPECS.match(text):
            is_there = mistake.code.startswith(spec["which"])
            # Or the specs of a step have a name.
            is_there |= spec["which"] == "in_specs" and _is_shared_spec(mistake)
            found.append(line if is_there else 0)
        if of_state := _OF_STATES.match(text):
            # The mistake may be that there is none.
            texts = mistake.code, mistake.instead_of
            is_there = any("State(" in x and _WORDS[of_state["which"]] in x for x in texts)
            # Or a spec that states share.
            is_there |= of_state["which"] == "spec" and _is_shared_spec(mistake)
            found.append(line if is_there else 0)
    return found


def _is_shared_spec(mistake: Mistake) -> bool:
    return (
        mistake.kind == "wrong spec"
        and "State(" not in mistake.code
        and "_specs" not in mistake.code
    )


def cause(report: str) -> set[int]:
    """The lines of which a report says what puts all right."""
    found = [_CAUSE.search(text) for text in _first_places(report.splitlines())]
    return {int(line) for match in found if match for line in match["lines"].split(" or ")}


def _first_places(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a report that belong to its first list of places."""
    starts = [k for k, text in enumerate(lines) if text.endswith(_HERE)]
    for text in lines[starts[0] + 1 :] if starts else ():
        if not text.startswith("  ") and text.strip() != "or, less likely, here:":
            return
        if text.endswith(_HERE):
            return
        yield text
