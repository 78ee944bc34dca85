"""Every mistake is refused in exactly the words of `texts.txt`, and a page has a heading for each."""

import functools
import re
import tempfile
from collections.abc import Callable

import pytest
from jax.sharding import AxisType

from tests.helpers import DOCS, default_kind

from . import calls, checkpoints, gradients, keywords, lanes, layers, states, table


pytestmark = pytest.mark.usefixtures("as_users_run_it")

MODULES = (states, calls, lanes, gradients, layers, checkpoints)
MISTAKES = {name: made for module in MODULES for name, made in module.MISTAKES.items()}
# Tables with a line for each mistake, which depend on no mesh.
TABLES: dict[str, Callable[[], str]] = {
    "forged checkpoints": checkpoints.forgeries,
    **{f"keywords of {n}": functools.partial(keywords.refusals, n) for n in keywords.USES},
}


@pytest.fixture(scope="module")
def known(pytestconfig: pytest.Config) -> dict[str, str]:
    if pytestconfig.getoption("update_errors"):
        pytest.skip("the file is written anew")
    return table.read()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_these_words(name: str, known: dict[str, str]) -> None:
    with default_kind(AxisType.Explicit):
        assert table.texts(MISTAKES[name]) == known[name]


# The words are the same on Auto axes, whose types say less.
@pytest.mark.slow
@pytest.mark.parametrize("name", calls.MISTAKES)
def test_a_mistake_on_auto_axes_is_refused_in_these_words(name: str, known: dict[str, str]) -> None:
    assert table.texts(MISTAKES[name]) == known[name]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_mistakes_has_these_words(name: str, known: dict[str, str]) -> None:
    assert TABLES[name]() == known[name]


def test_the_file_has_all_mistakes_and_no_others(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("update_errors"):
        with default_kind(AxisType.Explicit):
            texts = {name: table.texts(made) for name, made in MISTAKES.items()}
        table.FILE.write_text(
            table.written(texts | {name: said() for name, said in TABLES.items()})
        )
    assert list(table.read()) == [*MISTAKES, *TABLES]
    assert len(MISTAKES) == sum(len(module.MISTAKES) for module in MODULES)


def test_what_differs_elsewhere_is_left_out() -> None:
    text = f"{keywords.Thing!r} is in {tempfile.gettempdir()}/tmp1/a\n--------\nJAX says more."
    assert table.same_everywhere(text) == "<class 'tests.errors.keywords.Thing'> is in FOLDER/a"


# All that is public


def test_every_public_callable_is_tried() -> None:
    without = [name for names in keywords.WITHOUT for name in names.split()]
    assert sorted([*keywords.USES, *without]) == sorted(keywords.CALLABLES)


def test_every_value_that_is_said_to_be_accepted_is() -> None:
    tried = {
        key
        for name in keywords.USES
        for parameter in keywords.parameters(name)
        for key in (f"{name}.{parameter.name}", parameter.name)
    }
    assert set(keywords.ACCEPTED) <= tried


# The documentation


def words(text: str) -> list[str]:
    return re.findall(r"[\w'=()]+(?:\.[\w=()']+)*", text.replace("`", ""))


def pages() -> list[list[str]]:
    """The fixed words of the headings of errors: a list for each run that no ellipsis breaks."""
    files = [*DOCS.glob("pages/errors-*.md"), *DOCS.glob("pages/faq*.md")]
    lines = [line for file in files for line in file.read_text().splitlines() if line[:2] == "##"]
    return [words(run) for line in lines for run in line.lstrip("# ").split("…")]


def is_found(text: str, headings: list[list[str]]) -> bool:
    """Whether a heading has four words in a row of the text, or a whole run of three or more."""
    said = f" {' '.join(words(text))} "
    for run in headings:
        size = min(4, max(3, len(run)))
        if any(f" {' '.join(run[k : k + size])} " in said for k in range(len(run) - size + 1)):
            return True
    return False


def test_every_error_is_found_by_its_words() -> None:
    """The search of the documentation puts headings first."""
    headings = pages()
    said = [
        text
        for entry in table.read().values()
        for text in re.split(r"^(?:.*?(?: times|:) )?\w+Error: ", entry, flags=re.M)[1:]
    ]
    assert len(said) > 400
    missing = [text for text in said if not is_found(text, headings)]
    assert not missing, "No heading on a page of errors has the words of\n" + "\n".join(missing)
    assert not is_found("the moon is made of cheese, as everyone knows", headings)
