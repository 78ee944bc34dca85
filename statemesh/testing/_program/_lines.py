"""The line of the user's code that an equation comes from."""

import ast
import dataclasses
import functools
import itertools
import linecache
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..._base._libraries import OWN_FOLDER, is_library, shown
from ._jaxprs import Equation


# The check differentiates calls too.
_OF_CHECK = os.path.join(OWN_FOLDER, "testing") + os.sep
_REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True, order=True)
class SourceLine:
    """A line of source code.

    **Attributes:**

    - `file`, `number`: where it is.
    """

    file: str
    number: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.number}"


def line_of(eqn: Equation) -> SourceLine | None:
    """The innermost line of the user's among the calls that made an equation."""
    return next(lines_of(eqn), None)


def callers_of(eqn: Equation) -> tuple[SourceLine, ...]:
    """The lines of the user's around that line, the innermost first."""
    return tuple(lines_of(eqn))[1:]


def lines_of(eqn: Equation) -> Iterator[SourceLine]:
    """The lines of the user's among the calls that made an equation, the innermost first."""
    for frame in _frames(eqn):
        if not is_library(frame.file_name):
            yield SourceLine(frame.file_name, frame.line_num)


def line_of_gradient(eqn: Equation) -> SourceLine | None:
    """The user's line that asks for the derivative to which an equation belongs; `None` if the check does."""
    frames = itertools.dropwhile(lambda frame: frame.function_name != "vjp", _frames(eqn))
    for frame in frames:
        if frame.file_name.startswith(_OF_CHECK):
            return None
        if not is_library(frame.file_name):
            return SourceLine(frame.file_name, frame.line_num)
    return None


def uses_of(line: SourceLine) -> list[SourceLine]:
    """The later lines of the same function that read a variable which a line assigns."""
    around = _around(line)
    functions = [x for x in around if isinstance(x, _FUNCTIONS)]
    statements = [x for x in around if not hasattr(x, "body")]
    if not functions or not statements:
        return []
    mapped = {
        given
        for call in ast.walk(statements[-1])
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("map")
        for given in call.args
    }
    lambdas = {x for x in ast.walk(statements[-1]) if isinstance(x, ast.Lambda)} - mapped
    if any(x.lineno <= line.number <= (x.end_lineno or 0) for x in lambdas):
        # What a lambda makes is not what its statement assigns.
        return []
    assigned = _names(statements[-1:], ast.Store)
    end = statements[-1].end_lineno or line.number
    uses = {
        node.lineno
        for node in ast.walk(functions[-1])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in assigned
    }
    return [SourceLine(line.file, use) for use in sorted(uses) if use > end]


def definition_of_axes(line: SourceLine) -> SourceLine | None:
    """The line at the top of a file that assigns the axes of a collective, which only this line reads."""
    calls = [x for at in _around(line)[-1:] for x in ast.walk(at) if isinstance(x, ast.Call)]
    axes = {
        name.id
        for call in calls
        if ast.unparse(call.func).split(".")[-1] in _REDUCTIONS
        for given in (*call.args[1:], *(x.value for x in call.keywords))
        for name in ast.walk(given)
        if isinstance(name, ast.Name)
    }
    module = _module(line)
    read = [
        x.id for x in ast.walk(module) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)
    ]
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            assigned = axes & _names([statement], ast.Store)
            if any(read.count(name) == 1 for name in assigned):
                return SourceLine(line.file, statement.lineno)
    return None


def definitions_of_numbers(line: SourceLine) -> list[SourceLine]:
    """The lines before that compute something of numbers which a line reads by its name, the nearest first.

    They are in the same function, or in one around it. A length itself, such as `len(x)`, is none.
    """
    around = [x for x in _around(line) if isinstance(x, _FUNCTIONS)]
    nodes = dict.fromkeys(node for function in reversed(around) for node in ast.walk(function))
    names = [x for x in nodes if isinstance(x, ast.Name) and x.lineno == line.number]
    read, found = {x.id for x in names if isinstance(x.ctx, ast.Load)}, set[int]()
    for assign in nodes:
        if not isinstance(assign, ast.Assign):
            continue
        targets, values = [
            [*x.elts] if isinstance(x, ast.Tuple) else [x]
            for x in (assign.targets[-1], assign.value)
        ]
        for target, value in zip(targets, values, strict=False):
            is_computed = isinstance(value, ast.BinOp) and len(targets) == len(values)
            if is_computed and isinstance(target, ast.Name) and target.id in read:
                found.add(value.lineno)
    before = sorted((number for number in found if number < line.number), reverse=True)
    return [SourceLine(line.file, number) for number in before]


def is_same_function(line: SourceLine, other: SourceLine) -> bool:
    return _function(line) is _function(other)


def is_wrapper(line: SourceLine) -> bool:
    """Whether a line is all that a function does."""
    function = _function(line)
    if function is None:
        return False
    body = _body(function)
    return len(body) == 1 and isinstance(body[0], ast.Return)


def returned_as_is(line: SourceLine) -> SourceLine | None:
    """The line of a function, called by its name on a line, that does nothing but return a parameter."""
    called = {
        x.func.id
        for at in _around(line)[-1:]
        for x in ast.walk(at)
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)
    }
    for function in ast.walk(_module(line)):
        if isinstance(function, ast.FunctionDef) and function.name in called:
            body = _body(function)
            given = {x.arg for x in function.args.args}
            last = body[0] if len(body) == 1 else None
            value = last.value if isinstance(last, ast.Return) else None
            if isinstance(value, ast.Name) and value.id in given:
                return SourceLine(line.file, value.lineno)
    return None


def loops_around(line: SourceLine) -> dict[SourceLine, int]:
    """The loops around a line, by the lines where they begin, and in which statement of each body it is."""
    found = {}
    for loop in _around(line):
        if isinstance(loop, ast.For | ast.While):
            number = sum(statement.lineno <= line.number for statement in loop.body) - 1
            if number >= 0:
                found[SourceLine(line.file, loop.lineno)] = number
    return found


def returns(line: SourceLine) -> bool:
    """Whether a line is that of a `return`."""
    return any(isinstance(x, ast.Return) for x in _around(line))


def renames(line: SourceLine, use: SourceLine) -> bool:
    """Whether a later line returns a variable that a line assigns, or assigns it, as it is.

    A variable that is made from itself, as a model that is updated, is returned as a matter of course.
    """
    statements = [x for x in _around(line) if not hasattr(x, "body")][-1:]
    assigned = _names(statements, ast.Store) - _names(statements, ast.Load)
    for statement in _around(use)[-1:]:
        if isinstance(statement, ast.Return | ast.Assign):
            value = statement.value
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            return any(isinstance(x, ast.Name) and x.id in assigned for x in parts)
    return False


def _names(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    """The names of the variables that statements assign, or read."""
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _around(line: SourceLine) -> list[ast.stmt]:
    """The statements that a line is a part of, the innermost last."""
    return [
        node
        for node in ast.walk(_module(line))
        if isinstance(node, ast.stmt) and node.lineno <= line.number <= (node.end_lineno or 0)
    ]


def _function(line: SourceLine) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function that a line is a part of."""
    return next((x for x in reversed(_around(line)) if isinstance(x, _FUNCTIONS)), None)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def _module(line: SourceLine) -> ast.Module:
    """The file of a line."""
    return _parsed("".join(linecache.getlines(line.file)))


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.Module:
    """The syntax tree of a file; an empty one where it is none of Python's, as in a notebook."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def frames_below(eqn: Equation) -> list[str]:
    """The names of the functions that the user's line called, down to the equation."""
    inner = itertools.takewhile(lambda frame: is_library(frame.file_name), _frames(eqn))
    return [frame.function_name for frame in inner][::-1]


def _frames(eqn: Equation) -> Sequence[Any]:
    """The Python frames in which an equation was traced, the innermost first."""
    traceback: Any = eqn.source_info.traceback
    return traceback.frames if traceback is not None else ()


def by_statemesh(eqn: Equation) -> bool:
    """Whether code of statemesh stands between the user's line and an equation."""
    # Our own folder counts as a library's.
    files = itertools.takewhile(is_library, (frame.file_name for frame in _frames(eqn)))
    return any(file.startswith(OWN_FOLDER) for file in files)


def is_transposed(eqn: Equation) -> bool:
    """Whether an equation belongs to the backward pass: its line is that of the forward equation."""
    return "transpose(" in str(eqn.source_info.name_stack)
