"""Settings that layers refuse when they are made, with the exact texts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import assert_says, jnp


KEY = jax.random.key(0)


def layers(argument: str, value: Any) -> Any:
    """The layer with this setting, by the name `layer.setting`."""
    name, setting = argument.split(".")
    required: dict[str, dict[str, Any]] = {
        "BatchNorm": {"size": 3},
        "Dropout": {"rate": 0.5, "key": KEY},
        "EMA": {"model": jnp.ones(2)},
        "GRUCell": {"input_size": 3, "hidden_size": 4, "key": KEY},
        "KVCache": {"capacity": 4, "heads": 1, "dim": 2},
    }
    return getattr(sm.nn, name)(**{**required[name], setting: value})


NAN = float("nan")
SHARE, RATE, DECAY = "None or from 0 to 1", "at least 0 and below 1", "above 0 and below 1"
SIZE = "a positive int"
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("BatchNorm.size", (0, -3, 2.0, True, None, "3"), SIZE),
    ("BatchNorm.momentum", (-0.1, 1.5, NAN, "0.9", True), SHARE),
    ("BatchNorm.eps", (0, -1, NAN, float("inf"), None, "1e-5"), "above 0 and finite"),
    ("BatchNorm.channel_axis", (1.0, None, (0,)), "an int"),
    ("Dropout.rate", (-0.1, 1, 2, NAN, None, "0.5", False), RATE),
    ("Dropout.row_axis", (0.0, (0,), "data"), "an int, or None for one row"),
    ("EMA.decay", (0, 1, -1, NAN, None, "0.9"), DECAY),
    ("GRUCell.input_size", (0, -3, 2.0, None), SIZE),
    ("GRUCell.hidden_size", (0, -3, 2.0, None), SIZE),
    ("KVCache.capacity", (0, -4, 4.0, None), SIZE),
    ("KVCache.heads", (0, -1, None), SIZE),
    ("KVCache.dim", (0, -2, 2.0), SIZE),
]


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [(argument, value, expected) for argument, values, expected in REFUSED for value in values],
)
def test_refused(argument: str, value: Any, expected: str) -> None:
    name, setting = argument.split(".")
    text = f"{name}: {setting}={value!r}, but it must be {expected}."
    assert_says(lambda: layers(argument, value), sm.StatemeshError, text)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("BatchNorm.size", np.int32(3)),
        ("BatchNorm.momentum", 0),
        ("BatchNorm.momentum", 1),
        ("BatchNorm.eps", 1),
        ("Dropout.rate", 0),
        ("EMA.decay", 0.5),
    ],
)
def test_accepted(argument: str, value: Any) -> None:
    layers(argument, value)


@pytest.mark.parametrize("value", [0, -2, 1.0])
def test_a_cell_refuses_other_batch_sizes(value: Any) -> None:
    text = f"GRUCell: batch_size={value!r}, but it must be a positive int."
    cell = sm.nn.GRUCell(3, 4, key=KEY)
    assert_says(lambda: cell.init_state(batch_size=value), sm.StatemeshError, text)


@pytest.mark.parametrize("weight", [-1, -0.5, NAN, np.float32(-1), "1", True])
def test_a_weight_that_is_no_weight_is_refused(weight: Any) -> None:
    text = f"Average: weight={weight!r}, but it must be a number, 0 or more."
    average = sm.nn.Average(0.0)
    assert_says(lambda: average(1.0, weight=weight), sm.StatemeshError, text)


@pytest.mark.parametrize("run", [lambda fun: fun, jax.jit])
def test_a_negative_weight_of_an_array_is_not_ignored(run: Callable[..., Any]) -> None:
    def step(weight: Any) -> Any:
        _, average = sm.nn.Average(0.0)(1.0, weight=2)
        return average(4.0, weight=weight)[0]

    assert np.isnan(run(step)(jnp.float32(-1)))
    assert run(step)(jnp.float32(1)) == 2
