"""Compares programs whose states change positions with the loop over shards."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import statemesh as sm

from ..base.checks import at_home
from ..base.models import mesh_of
from ..programs import MeshShape
from ..trees import structure
from . import reference
from .cases import LANES, Given, Moves
from .mapped import mapped_of, model_of, parts_of


def check_moves(moves: Moves, given: Given, how: str) -> None:
    """Makes calls in a row, each with the model of the call before. The program is traced once.

    Where only a run can tell which state is continued, an error that names two of them is allowed.

    **Arguments:**

    - `how`: `'shard_map'`, `'jit'` (the same inside `jax.jit`), `'vmap2'`, `'pmap2'`, `'packed'` or
        `'unsharded'`.
    """
    traces: list[Any] = []
    mapped = mapped_of(moves, how, traces)
    calls: dict[str, Any] = {"jit": jax.jit(mapped), "unsharded": mapped.unsharded}
    call = calls.get(how, mapped)
    model = model_of(moves, given.states, [jnp.asarray(x) for x in given.arrays])
    if how == "packed":
        model = sm.pack(model, mesh_of(moves.mesh))
    states, arrays = given.states, given.arrays
    world = on_one_device(moves) if how == "unsharded" else moves
    for number, (x, on) in enumerate(given.calls):
        before = model
        try:
            _, model = call(model, _by_lanes(moves, x) if how in LANES else x, on)
        except sm.StatemeshError as error:
            if names_two(moves, str(error)):
                return
            raise
        if number == 0:
            once = len(traces)
        states, arrays = reference.run(world, states, arrays, x, on)
        assert structure(model) == structure(before)
        plain = model.unpack() if isinstance(model, sm.Packed) else model
        parts = parts_of(moves, plain)
        for k, want in enumerate((*states, *arrays)):
            got = parts[k].value if k < len(states) else parts[k]
            np.testing.assert_array_equal(got, want, f"call {number}: {moves.paths[k]}")
    # For `jax.jit` an array on a mesh has another type than an array on one device.
    assert how == "jit" or len(traces) == once, "traced again"


def check_arrays(moves: Moves, given: Given, home: str) -> None:
    """Arrays outside States have the layout of the out spec, and do not change with the arrays that went in.

    **Arguments:**

    - `home`: where the arrays lie that go in, one of `HOMES`.
    """
    mapped = mapped_of(moves, "shard_map", [])
    spec = PartitionSpec(moves.split) if moves.split_arrays else PartitionSpec()
    sharding = NamedSharding(mesh_of(moves.mesh), spec)
    gone = at_home(home, given.arrays, [sharding] * len(given.arrays))
    x, on = given.calls[0]
    _, model = mapped(model_of(moves, given.states, gone), x, on)
    states, arrays = reference.run(moves, given.states, given.arrays, x, on)
    parts = parts_of(moves, model)
    count = len(states)
    for k, (old, new) in enumerate(zip(gone, parts[count:], strict=True)):
        assert isinstance(new, jax.Array), moves.paths[count + k]
        assert new.sharding.is_equivalent_to(sharding, new.ndim), (new.sharding, sharding)
        kept = moves.arrays[k].adds is None and moves.sources[count + k] == count + k
        if kept and home == "placed" and not moves.wraps and not moves.style.startswith("map"):
            assert new is old, f"{moves.paths[count + k]} was copied"
    # There is no waiting here: like `jax.jit`, a call has its own copy of NumPy arrays.
    back = {id(x) for x in parts[count:]}
    for old in gone:
        if home == "host":
            old[...] = 99
        elif id(old) not in back:
            old.delete()
    for k, want in enumerate((*states, *arrays)):
        got = parts[k].value if k < count else parts[k]
        np.testing.assert_array_equal(got, want, moves.paths[k])


def names_two(moves: Moves, text: str) -> bool:
    """Whether an error names two states of which only a run can tell which one is continued."""
    return any(a in text and b in text for a, b in moves.unknown())


def on_one_device(moves: Moves) -> Moves:
    mesh = MeshShape((1,) * len(moves.mesh.sizes), moves.mesh.explicit)
    return dataclasses.replace(moves, mesh=mesh)


def _by_lanes(moves: Moves, x: Any) -> Any:
    return x.reshape(moves.mesh.sizes[0], -1)
