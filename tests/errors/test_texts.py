"""Every mistake is refused in exactly the words of `texts.txt`."""

import functools
import tempfile
from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import default_kind, make_mesh

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


def test_an_error_of_many_leaves_has_at_most_25_lines() -> None:
    many = {f"s{i}": sm.State(np.ones(3)) for i in range(60)}
    arrays = {name: state.value for name, state in many.items()}
    mesh = make_mesh()
    step = lambda model, x: {name: s.set(s.value + x.sum()) for name, s in model.items()}
    for mistake in (
        lambda: sm.shard_map(step, mesh, (None, P("x")), P())(many, np.ones(8)),
        lambda: sm.shard_map(lambda x: x, mesh, P("x"), P())(arrays),
        lambda: sm.State(arrays).set({name: x[:2] for name, x in arrays.items()}),
        lambda: sm.combine(many, many),
        lambda: sm.partition(many, "cache"),
    ):
        lines = table.refusal(mistake).splitlines()
        assert 3 < len(lines) <= 25
        assert any(line.endswith(" more") for line in lines)


def test_what_differs_elsewhere_is_left_out() -> None:
    text = f"{keywords.Thing!r} is in {tempfile.gettempdir()}/tmp1/a\n--------\nJAX says more."
    assert table.same_everywhere(text) == "<class 'tests.errors.keywords.Thing'> is in FOLDER/a"


# All that is public


def test_every_public_callable_is_tried() -> None:
    without = " ".join(keywords.WITHOUT).split()
    assert sorted([*keywords.USES, *without]) == sorted(keywords.CALLABLES)


def test_every_value_that_is_said_to_be_accepted_is() -> None:
    tried = {
        key
        for name in keywords.USES
        for parameter in keywords.parameters(name)
        for key in (f"{name}.{parameter.name}", parameter.name)
    }
    assert set(keywords.ACCEPTED) <= tried
