"""brainstate: the mapped function closes over the states, and runs eagerly and under brainstate's own jit."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from tests.scripts.benchmarks.peers._case import RATE, Case, Made, by_hand, loss, result_spec


brainstate: Any = importlib.import_module("brainstate")


class Unit(brainstate.nn.Module):  # type: ignore[misc]
    """A module with a state and a child module."""

    def __init__(self, values: list[jax.Array]) -> None:
        super().__init__()
        self.state = brainstate.State(values[0])
        self.below = Unit(values[1:]) if len(values) > 1 else None

    def states(self) -> list[Any]:
        return [self.state, *([] if self.below is None else self.below.states())]


def _states(case: Case) -> Callable[[], list[Any]]:
    """Find the states of nested modules, as the mapped function does."""
    if case.kind == "deep":
        found: Callable[[], list[Any]] = Unit(case.placed()).states
        return found
    of = brainstate.ParamState if case.kind == "training" else brainstate.State
    flat = [of(value) for value in case.placed()]
    return lambda: flat


def _computed(case: Case, values: list[jax.Array], *inputs: jax.Array) -> Any:
    """The computation of one device: the result to wait for, and the states."""
    if case.kind != "training":
        return by_hand(case, values, *inputs)

    # The function is also traced once outside `jax.shard_map`, to find its states. There `by_hand`
    # cannot mark the weights as varying, so this program differentiates the mean loss.
    def mean_loss(values: list[jax.Array]) -> Any:
        return jax.lax.pmean(loss(values, *inputs), "x")

    found, grads = jax.value_and_grad(mean_loss)(values)
    return found, [v - RATE * g for v, g in zip(values, grads, strict=True)]


def eager(case: Case, jit: Callable[..., Any] | None = None) -> Made:
    states = _states(case)

    def program(*inputs: jax.Array) -> Any:
        own = states()
        result, new = _computed(case, [state.value for state in own], *inputs)
        for state, value in zip(own, new, strict=True):
            state.value = value
        return result

    call = brainstate.transform.shard_map(
        program,
        case.mesh,
        in_specs=(case.split.spec,) * len(case.inputs),
        out_specs=result_spec(case),
        state_in_specs=case.state_spec,
        state_out_specs=case.state_spec,
    )
    call = call if jit is None else jit(call)
    lower = None if jit is None else lambda: call.lower(*case.inputs)
    return Made(lambda: call(*case.inputs), lambda: states()[0].value, lower)


under_jit = functools.partial(eager, jit=brainstate.transform.jit)
