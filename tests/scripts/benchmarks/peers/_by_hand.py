"""Plain JAX, the least that a call can cost: flat tuples of arrays, given up or not, or mutable arrays."""

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


def in_references(case: Case) -> Made:
    """Each state is a reference, an argument that the mapped function writes in place."""

    def program(refs: list[Any], *inputs: jax.Array) -> Any:
        result, new = by_hand(case, [ref[...] for ref in refs], *inputs)
        for ref, value in zip(refs, new, strict=True):
            ref[...] = value
        return result

    in_specs = (case.state_spec, *[case.split.spec] * len(case.inputs))
    specs: Any = {"mesh": case.mesh, "in_specs": in_specs, "out_specs": result_spec(case)}
    call = jax.jit(jax.shard_map(program, **specs))
    refs = [jax.new_ref(value) for value in case.placed()]
    lower = lambda: call.lower(refs, *case.inputs)
    return Made(lambda: call(refs, *case.inputs), lambda: refs[0][...], lower)
