"""Every mistake is refused in exactly the words of `texts.txt`, and a page has a heading for each."""

import functools
from collections.abc import Callable

import pytest

from . import calls, checkpoints, gradients, keywords, lanes, layers, states, table


pytestmark = pytest.mark.usefixtures("as_users_run_it")

MODULES = (states, calls, lanes, gradients, layers, checkpoints)
ENTRIES: dict[str, Callable[[], str]] = {
    **{
        name: functools.partial(table.texts, mistakes)
        for module in MODULES
        for name, mistakes in module.MISTAKES.items()
    },
    "forged checkpoints": checkpoints.forgeries,
    **keywords.KEYWORDS,
}


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    return table.read()


@pytest.mark.usefixtures("each_kind")
@pytest.mark.parametrize("name", ENTRIES)
def test_the_text_is_exactly(name: str, known: dict[str, str], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("update_errors"):
        pytest.skip("the file is written anew")
    assert ENTRIES[name]() == known[name]


@pytest.mark.usefixtures("each_kind")
def test_the_file_has_all_mistakes_and_no_others(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("update_errors"):
        table.FILE.write_text(table.written({name: said() for name, said in ENTRIES.items()}))
    assert list(table.read()) == list(ENTRIES)
    assert len(ENTRIES) == sum(len(module.MISTAKES) for module in MODULES) + 1 + len(keywords.USES)
