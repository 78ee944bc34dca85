"""The tests of the check fail on a check that is broken on purpose."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from statemesh.testing import UntestedWarning
from statemesh.testing._emulate._noise import Noisy
from statemesh.testing._equivalent import (
    _assert_equivalent,
    _chain,
    _check,
    _judge,
    _mismatch,
    _programs,
)
from statemesh.testing._equivalent._feedback import FeedBack
from statemesh.testing._equivalent._judge import Judge
from statemesh.testing._equivalent._subject import Subject

from . import test_check_calls as calls
from . import test_check_delicate as delicate
from . import test_check_form as form
from . import test_check_rounding as rounding
from . import test_check_values as values


pytestmark = pytest.mark.slow


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def without(number: int) -> Any:
    return tuple(one for k, one in enumerate(_check._OTHERS) if k != number)


def nan_agrees(a: Any, b: Any) -> Any:
    return np.nan_to_num(_chain.distances(a, b), posinf=0.0)


_ALLOWED = _judge._allowed


def of_the_largest(*args: Any) -> Any:
    allowed = _ALLOWED(*args)
    return np.full_like(allowed, allowed.max(initial=0))


# What is replaced and by what; and a test that notices.
MUTANTS: dict[str, tuple[dict[Any, dict[str, Any]], Callable[[], object]]] = {
    "no noise": (
        {Noisy: {"_off": lambda self, x, *args, **options: x}},
        lambda: delicate.test_delicate_results_are_not_accused("float32"),
    ),
    "no comparison in double precision": (
        {Judge: {"double": always([])}},
        rounding.test_it_is_compared_in_bfloat16_too,
    ),
    "no comparison in own dtypes": (
        {Judge: {"own": always([])}},
        rounding.test_a_narrow_dtype_on_the_mesh_only_is_found,
    ),
    "rounding explains a thousand times as much": (
        {_judge: {"_FACTOR": {"double": 8e3, "own": 4e3}}},
        rounding.test_what_rounding_explains_is_not_much_more_than_what_it_does,
    ),
    "one allowance for all numbers of an array": (
        {_judge: {"_allowed": of_the_largest}},
        rounding.test_a_number_that_cancels_does_not_loosen_those_beside_it,
    ),
    "nothing is unclear": (
        {_judge: {"_CLEAR": np.inf}},
        rounding.test_numbers_of_which_rounding_leaves_nothing_are_named,
    ),
    "a tolerance for what no float is in": (
        {Subject: {"exact": frozenset()}},
        rounding.test_a_tolerance_is_relative_to_the_numbers,
    ),
    "NaN and infinities agree with all": (
        {_judge: {"distances": nan_agrees}, _mismatch: {"distances": nan_agrees}},
        values.test_nan_and_infinities_agree_only_in_the_same_places,
    ),
    "no generic values": (
        {_check: {"_OTHERS": without(0)}},
        lambda: values.test_equal_numbers_do_not_hide_mistakes(1),
    ),
    "no large values": (
        {_check: {"_OTHERS": without(1)}},
        values.test_an_overflow_of_float16_on_the_mesh_is_found,
    ),
    "no NaN": (
        {_check: {"_OTHERS": without(2)}},
        values.test_a_shard_that_does_not_hear_of_nan_elsewhere_is_found,
    ),
    "nothing is fed back": (
        {FeedBack: {"apply": lambda self, args, kwargs, result: (args, kwargs)}},
        lambda: calls.test_what_is_carried_is_found_wherever_it_stands("x, model"),
    ),
    "copies are not compared": (
        {_chain.Chain: {"broken": always([])}, _check.Check: {"_unequal_copies": always([])}},
        calls.test_copies_that_differ_are_found_on_every_mesh,
    ),
    "nothing is untested": (
        {Subject: {"untested": always([])}},
        calls.test_a_state_that_no_call_changes_is_named,
    ),
    "forms are not compared": (
        {Subject: {"other_form": always([])}},
        form.test_dtypes_weak_types_and_static_results_are_compared,
    ),
    "a function depends on its arguments only": (
        {_assert_equivalent: {"environment": always("nothing")}},
        form.test_a_value_that_was_closed_over_and_changed_is_seen,
    ),
}


@pytest.fixture(autouse=True)
def programs_are_compiled_anew() -> Iterator[None]:
    _programs._cached.cache_clear()
    yield
    _programs._cached.cache_clear()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_check_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, test = MUTANTS[mutant]
    for owner, attributes in replaced.items():
        for name, value in attributes.items():
            assert hasattr(owner, name)
            monkeypatch.setattr(owner, name, value)
    with pytest.raises((AssertionError, pytest.fail.Exception, UntestedWarning)):
        test()
