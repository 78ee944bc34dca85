"""Programs held against the reference, as plain checks."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import statemesh as sm

from ..programs import Case, Leaf
from ..trees import Setting, structure
from . import reference
from .cases import Values
from .mapped import arrays_of, mapping, mesh_of, model_of, partition_spec
from .reference import EPS, Array, Global


HOMES = ("host", "device", "another", "placed")


def at_home(home: str, case: Case, inputs: Sequence[Array]) -> list[Any]:
    """Inputs as a caller may hold them."""
    match home:
        case "host":
            return list(inputs)
        case "device":
            return [jnp.asarray(x) for x in inputs]
        case "another":
            return [jax.device_put(x, jax.devices()[3]) for x in inputs]
        case _:
            mesh = mesh_of(case.mesh)
            specs = [partition_spec(leaf.spec) for leaf in case.inputs]
            pairs = zip(inputs, specs, strict=True)
            return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


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
    world = [[Global(reference.widen(x)) for x in leaves] for leaves in values.slots]
    for number, (gain, inputs) in enumerate(values.calls):
        given = at_home(home, case, inputs)
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


def jitted(mapped: sm.StatefulMapping) -> Callable[..., Any]:
    """The mapped program as part of a bigger compiled one."""

    def call(*args: Any) -> Any:
        arrays, statics = eqx.partition(args, eqx.is_array)
        kept: list[Any] = []

        @jax.jit
        def compiled(arrays: Any) -> Any:
            result, rest = eqx.partition(mapped(*eqx.combine(arrays, statics)), eqx.is_array)
            kept[:] = [rest]
            return result

        result = compiled(arrays)
        return eqx.combine(result, kept[0])

    return call


def assert_close(got: Any, want: Global, what: str) -> None:
    """Integers are equal; floats are as far apart as the reference's own bound says, no further."""
    x = np.asarray(got)
    assert x.shape == want.value.shape, what
    if np.issubdtype(want.value.dtype, np.integer):
        assert x.dtype == np.int32, what
        np.testing.assert_array_equal(x, want.value, what)
        return
    assert x.dtype == np.float32, what
    # XLA may flush a result that is too small to be normal.
    least = float(np.finfo(np.float32).tiny)
    np.testing.assert_allclose(x, want.value, rtol=EPS, atol=want.error + least, err_msg=what)


def assert_laid_out(case: Case, model: Any) -> None:
    """Every state lies on the mesh as its placement says."""
    for slot, arrays in zip(case.slots, arrays_of(case, model), strict=True):
        for leaf, x in zip(slot.leaves, arrays, strict=True):
            assert x.sharding.is_equivalent_to(_sharding(case, leaf), x.ndim), (slot, x.sharding)


def _sharding(case: Case, leaf: Leaf) -> NamedSharding:
    spec = PartitionSpec(leaf.per_shard) if leaf.per_shard else partition_spec(leaf.spec)
    return NamedSharding(mesh_of(case.mesh), spec)


def assert_kept(case: Case, before: Any, after: Any) -> None:
    """What was not written is the array that went in."""
    written = case.written()
    pairs = zip(arrays_of(case, before), arrays_of(case, after), strict=True)
    for k, (old, new) in enumerate(pairs):
        if k not in written:
            assert all(a is b for a, b in zip(old, new, strict=True)), f"s{k} was copied"
