"""What is said of mistakes: how it is found, and the file `texts.txt` that has every text.

`pytest tests/errors --update-errors` writes the file anew. Look at what changed before you commit it.
"""

import functools
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, TypeAlias

import jax


# A mistake is a call that must raise, or several of one kind.
Mistake: TypeAlias = Callable[[], Any]
Mistakes: TypeAlias = dict[str, Mistake | list[Mistake]]

FILE = pathlib.Path(__file__).parent / "texts.txt"
HEAD = """\
What statemesh says of every mistake, compared exactly. Written by `pytest tests/errors --update-errors`.
A mistake that is made in several ways has a text for each. Texts in a row that are the same stand there once.
"""


def each(make: Callable[[Any], Any], *values: Any) -> list[Mistake]:
    """The same mistake with several values."""
    return [functools.partial(make, value) for value in values]


def refusal(mistake: Mistake) -> str:
    """The type and the text of the error that a mistake raises."""
    try:
        result = mistake()
    except Exception as error:
        return same_everywhere(f"{type(error).__name__}: {error}")
    raise AssertionError(f"nothing was raised, but returned {result!r}")


def texts(mistakes: Mistake | list[Mistake]) -> str:
    """What is said of a mistake, as in the file."""
    several = mistakes if isinstance(mistakes, list) else [mistakes]
    rows = [(text, len(list(same))) for text, same in itertools.groupby(map(refusal, several))]
    return "\n".join(f"{count} times {text}" if count > 1 else text for text, count in rows)


def same_everywhere(text: str) -> str:
    """A text without what JAX adds, and without what another machine or run shows otherwise."""
    # JAX ends some of its errors with the address of a page, and some with a line, below which it says more.
    text = re.split(r"\nSee https:|\n-----", text)[0]
    text = re.sub(r"AbstractMesh\(.*?\.\.\.", "AbstractMesh(...)", text)
    # Temporary folders and addresses in memory, and what one kind of device is called.
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[\w-]+", "FOLDER", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    for device in jax.devices():
        text = text.replace(repr(device), f"device {device.id}")
    return text


def written(entries: dict[str, str]) -> str:
    """The file with these texts."""
    blocks = (
        f"{name}\n{re.sub('^', '    ', text, flags=re.M)}\n" for name, text in entries.items()
    )
    return HEAD + "\n" + "".join(blocks)


def read() -> dict[str, str]:
    """The texts of the file, by the names of the mistakes."""
    if not FILE.exists():
        return {}
    body = FILE.read_text().removeprefix(HEAD + "\n")
    found = re.findall(r"^(\S.*)\n((?:    .*\n)+)", body, re.M)
    return {name: re.sub("^    ", "", text, flags=re.M).removesuffix("\n") for name, text in found}
