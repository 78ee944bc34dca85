"""Mutants of the package, made from its syntax trees."""

import ast
import copy
import dataclasses
import hashlib
import math
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator


_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# Any call with these arguments swapped fails at once, or stays the same. Neither would prove anything.
_FAILING = {"isinstance", "issubclass", "map", "filter", "getattr", "hasattr", "setattr"}
_NOT_SWAPPED = _FAILING | {"max", "min", "math.gcd"}
# Of `zip`, where the lengths never differ; and of `astype`, which may copy or not.
_WITHOUT_EFFECT = {"strict", "copy"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of the package.

    **Attributes:**

    - `file`: relative to the package's folder.
    - `line`, `last`: the lines that the changed code takes.
    - `kind`: of the change.
    - `by_hand`: whether it is of the list in `by_hand.py`.
    - `old`, `new`: the code.
    - `begin`, `end`: the place of `old` in the file's bytes.
    """

    file: str
    line: int
    last: int
    kind: str
    old: str
    new: str
    begin: int
    end: int
    by_hand: bool = False

    @property
    def package(self) -> str:
        """The folder that the file stands in; of a file at the top, the file."""
        if self.by_hand:
            return "by hand"
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def key(self) -> str:
        """The change without its line, so that it stays the same where other lines come and go."""
        old, new = (" ".join(code.split()) for code in (self.old, self.new))
        return f"{self.file} {self.kind}: {old} -> {new}"

    def apply(self, folder: pathlib.Path) -> None:
        """Change the file in a copy of the package."""
        path = folder / self.file
        source = path.read_bytes()
        assert source[self.begin : self.end].decode() == self.old
        path.write_bytes(source[: self.begin] + self.new.encode() + source[self.end :])


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The changes of one node: the kind of each, and the node that takes its place."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            new.ops = [_COMPARED[type(operator)]()]
            yield "comparison", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
            yield "and, or", new
        case ast.UnaryOp(op=ast.Not()):
            yield "not", new.operand
        case ast.BinOp() if type(new.op) in _COMPUTED:
            new.op = _COMPUTED[type(new.op)]()
            yield "operator", new
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not new.value)
        case ast.Constant(value=int(number)):
            yield "constant", ast.Constant(number + 1)
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield "branches", new
        case ast.Call(args=[first, second, *rest]) if not (
            ast.unparse(new.func) in _NOT_SWAPPED
            or any(isinstance(x, ast.Starred) for x in (first, second))
            or ast.unparse(first) == ast.unparse(second)
        ):
            new.args = [second, first, *rest]
            yield "swapped arguments", new
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield "dropped call", ast.Pass()
        case ast.Raise():
            yield "dropped raise", ast.Pass()
        case ast.Break():
            yield "break", ast.Continue()
        case ast.Continue():
            yield "continue", ast.Break()


def _tested(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions of a node, each of which is turned around."""
    match node:
        case ast.If() | ast.While():
            yield node.test
        case ast.comprehension():
            yield from node.ifs


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run: no annotations, decorators, names of types, docstrings."""
    skipped: list[object] = []
    match tree:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            skipped = [*tree.decorator_list, getattr(tree, "returns", None)]
        case ast.arg() | ast.AnnAssign():
            skipped = [tree.annotation]
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return
        case ast.JoinedStr():
            return
        case ast.Call(func=ast.Name(id="TypeVar" | "cast")):
            return
        case ast.keyword(arg=name) if name in _WITHOUT_EFFECT:
            return
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not any(child is x for x in skipped):
            yield from _nodes(child)


def of_file(folder: pathlib.Path, path: pathlib.Path) -> list[Mutant]:
    """All mutants of one file."""
    source = path.read_bytes()
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def mutant(kind: str, node: ast.expr | ast.stmt, new: ast.AST) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new))
        # The lines that follow keep their numbers.
        below = "\n" * (node.end_lineno - node.lineno - text.count("\n"))
        text = f"({text}{below})" if isinstance(node, ast.expr) else text + below
        old = source[begin:end].decode()
        file = str(path.relative_to(folder))
        return Mutant(file, node.lineno, node.end_lineno, kind, old, text, begin, end)

    mutants: list[Mutant] = []
    for node in _nodes(ast.parse(source)):
        for test in _tested(node):
            mutants.append(mutant("condition", test, ast.UnaryOp(ast.Not(), test)))
        if isinstance(node, ast.expr | ast.stmt):
            mutants += [mutant(kind, node, new) for kind, new in changes(node)]
    return mutants


def sample(folder: pathlib.Path, seed: int, count: int) -> list[Mutant]:
    """Some `count` mutants of a package, of each of its parts as many as its lines of code are worth.

    Where the code changes, most of the sample stays: which lines are drawn depends on their text only.
    """
    drawn: dict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        rows = path.read_text().splitlines()
        by_line: dict[int, list[Mutant]] = defaultdict(list)
        for mutant in of_file(folder, path):
            by_line[mutant.line].append(mutant)
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        seen: Counter[str] = Counter()
        for number, mutants in sorted(by_line.items()):
            text = rows[number - 1].strip()
            seen[text] += 1
            place = f"{seed} {path.relative_to(folder)} {text} {seen[text]}"
            rank = hashlib.sha256(place.encode()).hexdigest()
            drawn[part].append((rank, mutants[int(rank, 16) % len(mutants)]))
    total = sum(map(len, drawn.values()))
    sampled: dict[str, Mutant] = {}
    for ranked in drawn.values():
        ranked.sort(key=lambda pair: pair[0])
        for _, mutant in ranked[: math.ceil(count * len(ranked) / total)]:
            sampled[mutant.key] = mutant
    return list(sampled.values())
