"""Plain JAX with flat tuples of arrays: the least that a call can cost, with and without donation."""

import functools
from typing import Any

import jax

from tests.scripts.benchmarks.peers._case import Case, Made, by_hand, result_spec


def make(case: Case, donate: bool = False) -> Made:
    def program(*arrays: jax.Array) -> Any:
        result, new = by_hand(case, arrays[: -len(case.inputs)], *arrays[-len(case.inputs) :])
        return (result, *new)

    split = case.split.spec
    mapped = jax.shard_map(
        program,
        mesh=case.mesh,
        in_specs=(*[case.state_spec] * case.states, *[split] * len(case.inputs)),
        out_specs=(result_spec(case), *[case.state_spec] * case.states),
    )
    call: Any = jax.jit(mapped, donate_argnums=range(case.states) if donate else ())
    arrays: list[jax.Array] = case.placed()

    def step() -> Any:
        nonlocal arrays
        result, *arrays = call(*arrays, *case.inputs)
        return result

    return Made(step, lambda: arrays[0], lambda: call.lower(*arrays, *case.inputs))


donating = functools.partial(make, donate=True)
