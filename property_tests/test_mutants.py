"""The checks of the property tests fail on an engine that is broken on purpose."""

from collections.abc import Callable

import pytest

from .base.mutants import Mutant
from .lanes import mutants as lanes
from .losses import mutants as losses
from .plain import mutants as plain
from .test_fixed_examples import CHECKS


MUTANTS = {"plain": plain.MUTANTS, "lanes": lanes.MUTANTS, "losses": losses.MUTANTS}
# What a check may fail with. A mutant of the losses that cannot run (a `TypeError`) proves nothing.
FAILURES = (AssertionError, ValueError, pytest.fail.Exception)
CANNOT_RUN = {"plain": (TypeError, AttributeError), "lanes": (TypeError, AttributeError)}
# Which parts of the engine belong to which step of a call.
STEPS = {
    "partition": ("_partition", "_model._filters", "_model._random", "_model._lines", "_arguments"),
    "resolve": ("_resolve", "_call._spec_rules", "_call._axis_rules"),
    "call": ("_call._cache", "_call._per_shard", "_call._statics", "_axes", "_varying", "_base"),
    "leave": ("_leave", "_model._state"),
    "write back": ("_write_back",),
}


ALL = [
    pytest.param(design, mutant, id=f"{design}: {mutant.name}")
    for design, mutants in MUTANTS.items()
    for mutant in mutants
]


@pytest.mark.parametrize(("design", "mutant"), ALL)
def test_what_is_broken_is_there(design: str, mutant: Mutant) -> None:
    """A name that classes inherit from `object` or `type` would break nothing."""
    del design
    attribute = mutant.target.rpartition(".")[2]
    owners = mutant.owner.__mro__[:-1] if isinstance(mutant.owner, type) else [mutant.owner]
    assert any(attribute in vars(owner) for owner in owners)


@pytest.mark.slow
@pytest.mark.parametrize(("design", "mutant"), ALL)
def test_a_broken_engine_is_noticed(
    design: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    failures = (*FAILURES, *CANNOT_RUN.get(design, ()))
    assert any(fails(check, failures) for check in CHECKS[design].values())


def fails(check: Callable[[], None], failures: tuple[type[BaseException], ...]) -> bool:
    try:
        check()
    except failures:
        return True
    return False


def step_of(mutant: Mutant) -> str | None:
    module = getattr(mutant.owner, "__module__", mutant.target).removeprefix("statemesh.")
    return next((step for step, parts in STEPS.items() if module.startswith(parts)), None)


@pytest.mark.slow
def test_every_step_is_broken() -> None:
    steps = [step_of(mutant) for mutant in plain.MUTANTS]
    assert set(STEPS) <= set(steps)
    assert len([step for step in steps if step]) >= 25
