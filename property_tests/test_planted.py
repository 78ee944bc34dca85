"""The planted mistakes are what they claim to be. `locate` names the lines of one of each kind.

`assert_equivalent` is measured with all of them by hand: `python -m property_tests.planted.measure`.
"""

import pytest

from statemesh.testing import locate

from .planted.delicate import DELICATE
from .planted.lines import named, right_lines
from .planted.measure import Task, tasks
from .planted.mistakes import FOLDER, MODELS, Mistake, mistakes, one_of_each, right_case


def name_of(mistake: Mistake) -> str:
    return f"{mistake.model}-{mistake.name}"


def planted(model: str, name: str) -> Mistake:
    (found,) = (m for m in mistakes() if (m.model, m.name) == (model, name))
    return found


def test_there_are_many() -> None:
    every = tasks(["planted"], [])
    assert len(MODELS) >= 12
    assert len(mistakes()) >= 200
    assert {task.dtype for task in every} == {"float32", "bfloat16", "float16", "int32"}
    assert len(DELICATE) >= 40
    assert len({name_of(mistake) for mistake in mistakes()}) == len(mistakes())


@pytest.mark.parametrize("model", MODELS)
def test_a_mistake_is_one_line(model: str) -> None:
    """The file with a mistake is the model's file but for the line that carries the marker."""
    of_model = [mistake for mistake in mistakes() if mistake.model == model]
    assert of_model
    lines = (FOLDER / f"models_{model}.py").read_text().splitlines()
    # A marker that the parser overlooks would be a mistake that is never planted.
    assert sum("# mistake:" in line for line in lines) == len(of_model)
    for mistake in of_model:
        path, line = mistake.where
        mistaken = path.read_text()
        compile(mistaken, str(path), "exec")
        found = mistaken.splitlines()
        assert [k + 1 for k in range(len(lines)) if lines[k] != found[k]] == [line]
        assert len(found) == len(lines)
        assert mistake.code != lines[line - 1].strip()
