"""The planted mistakes are what they claim to be, and are named. No right program is accused.

`assert_equivalent` is measured with all of them by hand: `python -m property_tests.planted.measure`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax.sharding import AbstractMesh

import statemesh as sm
from statemesh.testing import arrays, locate
from statemesh.testing._program._stacked import MappedAxes
from statemesh.testing._program._trace import trace
from tests.testing.by_numpy import compare_by_numpy

from .deep import Tally, check, drawn
from .planted.case import Case
from .planted.delicate import DELICATE
from .planted.lines import named, right_lines
from .planted.measure import Task, tasks
from .planted.mistakes import (
    FOLDER,
    MODELS,
    Mistake,
    dtypes_of,
    mistakes,
    one_of_each,
    right_case,
)
from .planted.models_rows import ROWS, WIDTH
from .programs import FLOAT


# Their steps are small. Of each large model one mistake is located here, if any; all by hand.
CHEAP = ("counts", "features", "fsdp", "rows", "scaling")
LARGE = ("cache", "cnn", "experts", "layers", "parallel_mlp", "pipeline", "replay", "ring")
OF_LARGE_MODELS = {
    "cache-written-on-every-shard",
    "cnn-mean-of-variances",
    "layers-largest-of-a-shard",
    "parallel_mlp-heads-not-summed",
    "pipeline-last-stage-is-the-first",
    "replay-mean-of-means",
    "ring-last-of-each-part",
}
# Mistakes that the arguments of the model do not show, or that `locate` names no line for; the page
# "What the check finds" lists all of these.
UNNAMED = {
    "features-products-by-the-shards",
    "features-rows-of-a-weak-type",
    "fsdp-clipped-by-the-own-norm",
    "scaling-averaged-before-unscaling",
    "scaling-finite-on-this-shard",
}


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


def mapped(case: Case) -> Any:
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))
    return sm.shard_map(case.fun, mesh, case.in_specs, case.out_specs, check_vma=case.check_vma)


NAMED = [
    mistake
    for mistake in one_of_each((*CHEAP, *LARGE))
    if (mistake.model in CHEAP and name_of(mistake) not in UNNAMED)
    or name_of(mistake) in OF_LARGE_MODELS
]


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, id=name_of(m), marks=[pytest.mark.slow] * (m.model not in CHEAP))
        for m in NAMED
    ],
)
def test_the_line_of_each_kind_is_named(mistake: Mistake) -> None:
    case = mistake.case(mistake.dtypes[0])
    found = locate(mapped(case), *case.args)
    assert found is not None
    assert right_lines(mistake) & set(named(f"{found}", mistake))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["counts", "fsdp", "scaling"])
def test_in_right_models_no_line_is_named(model: str) -> None:
    case = right_case(model, "int32" if model == "counts" else "float32")
    assert locate(mapped(case), *case.args) is None


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_numpy_computes_what_the_replay_computes(model: str) -> None:
    case = right_case(model, dtypes_of(model)[0])
    leaves, treedef = jax.tree.flatten((case.args, {}))
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
    closed = trace(mapped(case), treedef, arrays).closed
    given = [x for x in arrays if isinstance(x, jax.Array)]
    assert len(compare_by_numpy(closed, given, MappedAxes(), wide=True)) > 10


# What `locate` alone does not see: values that the check changes, narrow dtypes, another form, promises.
CHECKED = (
    Task("planted", "counts", "own-count-included", "int32"),
    Task("planted", "features", "rows-of-a-weak-type", "float32"),
    Task("planted", "features", "products-by-the-shards", "float32"),
    Task("planted", "scaling", "finite-on-this-shard", "float32"),
)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, id=task.name, marks=[pytest.mark.slow] * (task.model != "counts"))
        for task in CHECKED
    ],
)
def test_mistakes_are_found(task: Task) -> None:
    with pytest.raises(AssertionError, match="do not agree"):
        planted(task.model, task.name).case(task.dtype).check()


# Programs that cancel, jump at thresholds or learn from rounding.
RIGHT = {
    "bias-before-a-norm-with-adam": "float32",
    "cosine-of-equal-vectors": "bfloat16",
    "floor-at-a-whole-number": "float32",
    "guarded-zero-by-zero": "float32",
    "one-minus-a-unit-vector": "bfloat16",
    "rounds-until-it-converges": "float32",
    "sign-of-what-is-zero": "float32",
    "softmax-with-an-infinite-mask": "float32",
    "threshold-at-a-mean-of-equal-numbers": "bfloat16",
    "top-of-equal-scores": "float32",
    "top-of-nearly-equal-sums": "bfloat16",
    "two-formulas-of-a-variance": "float32",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), RIGHT.items())
@pytest.mark.filterwarnings("default")
def test_right_programs_pass(name: str, dtype: str) -> None:
    """A warning that something cannot be judged is no alarm."""
    checked = DELICATE[name].case(dtype).check()
    if name == "bias-before-a-norm-with-adam":
        # The gradient of the bias is rounding and nothing else.
        assert any("bias" in path for path in checked.unjudged)
        assert not any("[1].weights" in path for path in checked.unjudged)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "seed"), [("float32", 102), ("bfloat16", 110)])
@pytest.mark.filterwarnings("default")
def test_a_derivative_of_the_root_of_what_cancels_accuses_nobody(dtype: str, seed: int) -> None:
    """For these rows the gradient of the bias is zero in a narrow dtype, and so in no run with noise."""
    case = DELICATE["bias-before-a-norm-with-adam"].case(dtype)
    model, x = case.args
    rows = np.random.default_rng(seed).normal(size=x.shape)
    dataclasses.replace(case, args=(model, jnp.asarray(rows, dtype)), steps=3).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "total-averaged", "noise-alike"])
def test_inside_of_given(name: str | None) -> None:
    """Right code passes, and mistakes are named."""
    mistake = planted("rows", name) if name else None
    case = mistake.case("float32") if mistake else right_case("rows", "float32")
    reports = []

    @settings(max_examples=1, derandomize=True, database=None)
    @given(arrays(shape=(ROWS, WIDTH)))
    @example(np.zeros((ROWS, WIDTH), np.float32))  # To which Hypothesis shrinks.
    def call(x: Any) -> None:
        try:
            dataclasses.replace(case, args=(case.args[0], x)).check()
        except AssertionError as error:
            reports.append(str(error))

    call()
    if mistake is None:
        assert not reports
    else:
        lines = right_lines(mistake)
        assert reports and all(lines & set(named(report, mistake)) for report in reports)


@pytest.mark.parametrize(
    ("number", "dtype", "gradients", "count"),
    [
        # Two devices, on Auto axes and on Explicit ones.
        (3, FLOAT, False, 3),
        pytest.param(8, "bfloat16", False, 5, marks=pytest.mark.slow),
        pytest.param(8, FLOAT, True, 2, marks=pytest.mark.slow),
    ],
)
def test_no_random_program_is_accused(
    number: int, dtype: str, count: int, *, gradients: bool
) -> None:
    """`deep.py` checks thousands, by hand."""
    tally = Tally()
    check(drawn(number, smooth=gradients, count=count), dtype, tally, gradients=gradients)
    assert not tally.alarms
    assert tally.checks
