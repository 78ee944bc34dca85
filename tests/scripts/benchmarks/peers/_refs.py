"""JAX's mutable arrays: each state is a reference, an argument that the mapped function writes in place."""

from typing import Any

import jax

from tests.scripts.benchmarks.peers._case import Case, Made, by_hand, result_spec


def make(case: Case) -> Made:
    def program(refs: list[Any], *inputs: jax.Array) -> Any:
        result, new = by_hand(case, [ref[...] for ref in refs], *inputs)
        for ref, value in zip(refs, new, strict=True):
            ref[...] = value
        return result

    call = jax.jit(
        jax.shard_map(
            program,
            mesh=case.mesh,
            in_specs=(case.state_spec, *[case.split.spec] * len(case.inputs)),
            out_specs=result_spec(case),
        )
    )
    refs = [jax.new_ref(value) for value in case.placed()]
    return Made(
        lambda: call(refs, *case.inputs),
        lambda: refs[0][...],
        lambda: call.lower(refs, *case.inputs),
    )
