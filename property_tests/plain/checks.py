"""Programs held against the reference, as plain checks."""

from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

import statemesh as sm

from ..base.arrays import Global, widen
from ..base.checks import assert_close, assert_kept, at_home, input_shardings, jitted
from ..base.models import arrays_of, mesh_of, model_of, partition_spec
from ..programs import Case, Leaf
from ..trees import Setting, structure
from . import reference
from .cases import Values
from .mapped import mapping


def check_program(
    case: Case,
    values: Values,
    *,
    how: str = "eager",
    home: str = "host",
    mapped: sm.StatefulMapping | None = None,
) -> None:
    """Calls in a row, the model fed back: results and states are what the reference says.

    **Arguments:**

    - `how`: `'eager'`, `'jit'` (the call stands inside `jax.jit`) or `'unsharded'`, for portable
        programs.
    - `home`: where the inputs lie.
    - `mapped`: the mapped program, if not the one that is kept for the case.
    """
    mapped = mapping(case) if mapped is None else mapped
    call: Callable[..., Any]
    match how:
        case "jit":
            call = jitted(mapped)
        case "unsharded":
            call = mapped.unsharded
        case _:
            call = mapped
    model = model_of(case, values.slots)
    world = [[Global(widen(x)) for x in leaves] for leaves in values.slots]
    for number, (gain, inputs) in enumerate(values.calls):
        given = at_home(home, inputs, input_shardings(case))
        if how == "eager" and number == 0:
            model = mapped.place(model, Setting(gain), *given)[0]
        before = model
        outputs, model = call(model, Setting(gain), *given)
        wanted, world = reference.run(case, gain, world, inputs)
        for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
            assert_close(got, want, f"call {number}, out{i}")
        assert structure(model) == structure(before)
        for k, arrays in enumerate(arrays_of(case, model)):
            for n, (got, want) in enumerate(zip(arrays, world[k], strict=True)):
                assert_close(got, want, f"call {number}, s{k}.{n}")
        if how == "eager":
            assert_laid_out(case, model)
            assert_kept(case, before, model)


def assert_laid_out(case: Case, model: Any) -> None:
    """Every state lies on the mesh as its placement says."""
    for slot, arrays in zip(case.slots, arrays_of(case, model), strict=True):
        for leaf, x in zip(slot.leaves, arrays, strict=True):
            assert x.sharding.is_equivalent_to(_sharding(case, leaf), x.ndim), (slot, x.sharding)


def _sharding(case: Case, leaf: Leaf) -> NamedSharding:
    spec = PartitionSpec(leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
    return NamedSharding(mesh_of(case.mesh), spec)
