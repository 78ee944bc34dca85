"""The planted mistakes: which there are, where each is, and a model that has it.

Under a line of a model stands what a mistaken author would have written in its place:

    total = lax.psum(x.sum(0), "data")
    # mistake: total-of-a-shard (dropped psum)
    #     total = x.sum(0)

A line `#     unseen: reason` says why comparing with one device cannot find the mistake, and
`#     dtypes: float16` in which dtypes it is one.
"""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Collection, Iterator

from .case import Case


FOLDER = pathlib.Path(__file__).parent
MODELS = tuple(sorted(path.stem.removeprefix("models_") for path in FOLDER.glob("models_*.py")))
# Models whose reports nobody looked at while the search for the line was worked on: their rates are honest.
NEVER_FITTED = ("flows", "spikes")

_MARKER = re.compile(r" *# mistake: (?P<name>[a-z0-9-]+) \((?P<kind>[^)]+)\)")
_BELOW = re.compile(r" *#     (?:(?P<key>unseen|dtypes): )?(?P<text>.+)")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One line that is other than it should be.

    **Attributes:**

    - `line`: the number of the line, in the model's file and in the file that has the mistake.
    - `code`: what stands there by mistake.
    - `dtypes`: the dtypes in which the check is measured with it.
    - `unseen`: why no comparison with one device can find it; empty for all others.
    """

    model: str
    name: str
    kind: str
    line: int
    code: str
    dtypes: tuple[str, ...]
    unseen: str

    @property
    def detectable(self) -> bool:
        return not self.unseen

    @property
    def instead_of(self) -> str:
        """What should stand there."""
        return _path(self.model).read_text().splitlines()[self.line - 1].strip()

    @property
    def where(self) -> tuple[pathlib.Path, int]:
        """The file with the mistake, and the line that carries its marker."""
        path = _written(self)
        marked = [
            number
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.endswith(f"  # mistake: {self.name}")
        ]
        assert marked == [self.line]
        return path, self.line

    def case(self, dtype: str) -> Case:
        """The model with this mistake."""
        made: Case = _loaded(self).case(dtype)
        return made


def right_case(model: str, dtype: str) -> Case:
    """The model without mistakes."""
    made: Case = _module(model).case(dtype)
    return made


def dtypes_of(model: str) -> tuple[str, ...]:
    """The dtypes that a model is written for, the widest first."""
    found: tuple[str, ...] = _module(model).DTYPES
    return found


@functools.cache
def mistakes() -> tuple[Mistake, ...]:
    """All that are planted, in the order of the files."""
    return tuple(found for model in MODELS for found in _mistakes_in(model))


def one_of_each(models: Collection[str]) -> list[Mistake]:
    """One mistake of each kind that can be found, taken from these models in turn."""
    by_kind: dict[str, list[Mistake]] = {}
    for mistake in mistakes():
        if mistake.detectable and mistake.model in models:
            by_kind.setdefault(mistake.kind, []).append(mistake)
    taken: list[Mistake] = []
    for those in by_kind.values():
        count = collections.Counter(mistake.model for mistake in taken)
        taken.append(min(those, key=lambda mistake: count[mistake.model]))
    return taken


def _module(model: str) -> types.ModuleType:
    return importlib.import_module(f".models_{model}", __package__)


def _path(model: str) -> pathlib.Path:
    return FOLDER / f"models_{model}.py"


def _mistakes_in(model: str) -> Iterator[Mistake]:
    lines = _path(model).read_text().splitlines()
    line = position = 0
    for number, text in enumerate(lines, 1):
        found = _MARKER.fullmatch(text)
        if found:
            below = _below(lines[number:])
            given = tuple(below.get("dtypes", "").split())
            yield Mistake(
                model=model,
                line=line,
                code=below["code"],
                dtypes=given or _dtypes(model, position),
                unseen=below.get("unseen", ""),
                **found.groupdict(),
            )
            position += 1
        elif text.strip() and not text.lstrip().startswith("#"):
            line = number


def _below(lines: list[str]) -> dict[str, str]:
    """The lines that belong to a marker, by what they are."""
    found = {}
    for text in lines:
        match = _BELOW.fullmatch(text)
        if not match:
            break
        found[match["key"] or "code"] = match["text"]
    return found


def _dtypes(model: str, position: int) -> tuple[str, ...]:
    """The widest for every mistake, and the others in turn: fixed before anything is measured."""
    widest, *narrow = dtypes_of(model)
    turn = {0: narrow[:1], 1: narrow[1:2], 2: narrow[:1], 3: []}[position % 4]
    return (widest, *turn)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="planted-")


@functools.cache
def _written(mistake: Mistake) -> pathlib.Path:
    """The model's file with the mistake in it, so that whoever looks a line up finds the mistaken one."""
    lines = _path(mistake.model).read_text().splitlines()
    right = lines[mistake.line - 1]
    indent = right[: len(right) - len(right.lstrip())]
    lines[mistake.line - 1] = f"{indent}{mistake.code}  # mistake: {mistake.name}"
    path = pathlib.Path(_folder().name, f"{mistake.model}__{mistake.name.replace('-', '_')}.py")
    path.write_text("\n".join(lines) + "\n")
    return path


@functools.cache
def _loaded(mistake: Mistake) -> types.ModuleType:
    path = _written(mistake)
    name = f"{__package__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
