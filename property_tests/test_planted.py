"""The planted mistakes are what they claim to be. Some of them are found, and some right programs pass.

All of them are run by hand: `python -m property_tests.planted.measure`.
"""

import pytest

from .planted.delicate import DELICATE
from .planted.measure import Task, tasks
from .planted.mistakes import FOLDER, MODELS, Mistake, mistakes


QUICK = (Task("planted", "counts", "own-count-included", "int32"),)
# Of several kinds one.
SLOW = (
    Task("planted", "fsdp", "norm-of-a-mean", "float32"),
    Task("planted", "counts", "row-not-offset", "int32"),
    Task("planted", "features", "sum-where-one-device", "float32"),
    Task("planted", "scaling", "finite-on-this-shard", "float32"),
    Task("planted", "fsdp", "bias-summed-again", "float32"),
    Task("planted", "cache", "highest-of-a-shard", "bfloat16"),
    Task("planted", "features", "best-of-a-shard", "float32"),
    Task("planted", "features", "extremes-of-a-shard", "float16"),
    Task("planted", "fsdp", "ema-of-the-neighbour", "float32"),
    Task("planted", "replay", "spread-of-each-shard", "float32"),
    Task("planted", "scaling", "finite-somewhere", "float32"),
)
PASSES = (
    "bias-before-a-norm-with-adam",
    "cosine-of-equal-vectors",
    "extremes-in-states",
    "guarded-zero-by-zero",
    "logistic-map",
    "one-minus-a-unit-vector",
    "rounds-until-it-converges",
    "softmax-with-an-infinite-mask",
    "threshold-at-a-mean-of-equal-numbers",
    "top-of-equal-scores",
)


def name_of(mistake: Mistake) -> str:
    return f"{mistake.model}-{mistake.name}"


def planted(task: Task) -> Mistake:
    (found,) = (m for m in mistakes() if (m.model, m.name) == (task.model, task.name))
    return found


def test_there_are_many() -> None:
    every = tasks(["planted"], [])
    assert len(MODELS) >= 8
    assert len(mistakes()) >= 80
    assert len(every) >= 120
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


@pytest.mark.parametrize("task", QUICK, ids=lambda task: f"{task.model}-{task.name}")
def test_mistakes_are_found(task: Task) -> None:
    with pytest.raises(AssertionError, match="do not agree"):
        planted(task).case(task.dtype).check()


@pytest.mark.slow
@pytest.mark.parametrize("task", SLOW, ids=lambda task: f"{task.model}-{task.name}")
def test_more_mistakes_are_found(task: Task) -> None:
    with pytest.raises(AssertionError, match="do not agree"):
        planted(task).case(task.dtype).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.filterwarnings("default")
def test_right_programs_pass(name: str) -> None:
    """A warning that something cannot be judged is no alarm."""
    DELICATE[name].case(DELICATE[name].dtypes[0]).check()
