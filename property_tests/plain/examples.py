"""Fixed examples that together touch every part of the engine. Each is a check to call.

Each makes its mapping again, so that it runs the engine as a mutant has changed it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.arrays import Array, Values
from ..base.models import mesh_of
from ..picks import Pick, all_of, any_of, negated
from ..programs import (
    FLOAT,
    INT,
    Binary,
    Branch,
    Case,
    Collect,
    Fold,
    Gain,
    Index,
    Input,
    Leaf,
    MeshShape,
    Output,
    Read,
    Slot,
    Step,
    Unary,
    Write,
)
from ..trees import Layer, Pair
from . import streams
from .checks import check_program
from .gradients import check_gradient
from .laws import check_filter, check_partition, check_permutation, check_replace, check_set
from .mapped import mapping_of


XY = (("x", "y"),)
GRID = MeshShape((2, 2))
SCALAR, COUNT = Leaf(()), Leaf((), INT)


def filled(leaf: Leaf, mesh: MeshShape, start: int) -> Array:
    """An array of different numbers."""
    shape = leaf.global_shape(mesh)
    numbers = start + np.arange(int(np.prod(shape))).reshape(shape)
    return numbers.astype(np.int32) if leaf.dtype == INT else (numbers / 8).astype(np.float32)


def values_for(case: Case) -> Values:
    mesh = case.mesh
    slots = [
        [filled(leaf, mesh, 10 * k + 5 * n) for n, leaf in enumerate(slot.leaves)]
        for k, slot in enumerate(case.slots)
    ]
    calls = []
    for number, gain in enumerate([1.0, 1.0, -0.5]):
        inputs = [filled(leaf, mesh, 7 * number - 11) for leaf in case.inputs]
        calls.append((gain, inputs))
    return Values(slots, calls)


def case_of(
    mesh: MeshShape,
    inputs: tuple[Leaf, ...],
    slots: tuple[Slot, ...],
    steps: tuple[Step, ...],
    writes: tuple[Write, ...],
    outputs: tuple[Output, ...],
    *,
    tree: Branch | None = None,
    portable: bool = False,
    forget: bool = False,
) -> Case:
    tree = tree or Branch("dict", (Branch("layer", tuple(range(len(slots)))), "relu"))
    return Case(mesh, 1, inputs, slots, tree, steps, writes, outputs, portable, forget)


# Every policy, on a value that differs on every shard. One state is not written.
POLICIES = case_of(
    GRID,
    (Leaf((8,), FLOAT, XY),),
    (
        Slot("BatchState", (SCALAR,), "mean"),
        Slot("State", (SCALAR,), "sum"),
        Slot("State", (COUNT,), "max"),
        Slot("State", (COUNT,), "min"),
        Slot("LongTermState", (SCALAR,), "range"),
        Slot("HiddenState", (Leaf((8,), FLOAT, XY),)),
        Slot("ParamState", (Leaf((2,)),)),
    ),
    (
        Input(0),
        Fold("sum", 0, 0),
        Index(("x", "y")),
        Read(5),
        Binary("add", 0, 3),
        Gain(),
        Binary("sub", 4, 5),
    ),
    (
        Write(0, 0, 1),
        Write(1, 0, 1),
        Write(2, 0, 2),
        Write(3, 0, 2),
        Write(4, 0, 1),
        Write(5, 0, 4),
    ),
    (Output(6, XY), Output(1, XY)),
)

# A counter for each shard, axes in another order than the mesh has, and values that vary over one axis only.
PLACES = case_of(
    GRID,
    (Leaf((8,), FLOAT, (("y", "x"),)), Leaf((4,), FLOAT, (("x",),))),
    (
        Slot("State", (Leaf((), INT, per_shard=("y", "x")),)),
        Slot("State", (SCALAR,), "sum"),
        Slot("State", (Leaf((1,), FLOAT, per_shard=("x",)),)),
    ),
    (
        Input(0),
        Input(1),
        Read(0),
        Index(("x", "y")),
        Binary("add", 2, 3),
        Fold("mean", 1, 0),
        Read(2),
        Binary("add", 6, 5),
        Unary("tanh", 0),
    ),
    (Write(0, 0, 4), Write(1, 0, 5), Write(2, 0, 7)),
    (Output(8, (("y", "x"),)), Output(3, (("y", "x"),)), Output(7, (("x",),))),
)

# Two states that differ only in what `state_in_specs` says, and a state of two arrays with different specs.
DECLARED = case_of(
    GRID,
    (Leaf((4,), FLOAT, (("y",),)),),
    (
        Slot("State", (Leaf((4,), FLOAT, (("x",),)),), None, True),
        Slot("State", (Leaf((4,), FLOAT, (("y",),)),), None, True),
        Slot("State", (Leaf((4,), FLOAT, (("y",),)), SCALAR), "sum"),
    ),
    (
        Input(0),
        Read(0),
        Read(1),
        Unary("half", 1),
        Binary("sub", 2, 0),
        Fold("sum", 0, 0),
        Binary("sub", 1, 0),
    ),
    (Write(0, 0, 3), Write(1, 0, 4), Write(2, 0, 6), Write(2, 1, 5)),
    (Output(0, (("y",),)),),
)

# Paths of different lengths with the same end, and states whose origin `jax.tree.map` has removed.
ALIKE = case_of(
    MeshShape((4,), explicit=True),
    (Leaf((8,), FLOAT, (("x",),)),),
    tuple(Slot("State", (SCALAR,), "sum") for _ in range(3)),
    (Input(0), Fold("sum", 0, 0), Unary("neg", 1), Unary("half", 1)),
    (Write(0, 0, 1), Write(1, 0, 2), Write(2, 0, 3)),
    (Output(1, (("x",),)),),
    tree=Branch("list", (Branch("list", (0, 1)), 2)),
    forget=True,
)

# A program that computes the same on any number of shards.
PORTABLE = case_of(
    MeshShape((8,)),
    (Leaf((16,), FLOAT, (("x",),)),),
    (Slot("BatchState", (SCALAR,), "mean"), Slot("ParamState", (SCALAR,))),
    (
        Input(0),
        Read(1),
        Unary("half", 1),
        Binary("gate", 0, 2),
        Fold("mean", 3, 0),
        Fold("sum", 3, 0),
        Collect("sum", 5, ("x",)),
    ),
    (Write(0, 0, 4), Write(1, 0, 6)),
    (Output(3, (("x",),)), Output(6, ())),
    portable=True,
)


def program(case: Case, how: str = "eager") -> Callable[[], None]:
    return lambda: check_program(case, values_for(case), how=how, mapped=mapping_of(case))


def gradient() -> None:
    check_gradient(PORTABLE, values_for(PORTABLE), mapped=mapping_of(PORTABLE))


def branches() -> None:
    """A write in a branch that only some shards take is refused."""

    def fun(state: sm.State, x: jax.Array) -> Any:
        add = lambda state: state.set(state.value + 1)
        return jax.lax.cond(x.sum() > 3, add, lambda state: state, state)

    mesh = mesh_of(MeshShape((4,), explicit=True))
    specs = (PartitionSpec(), PartitionSpec("x"))
    with pytest.raises(sm.DivergedStateError):
        sm.shard_map(fun, mesh, specs, PartitionSpec())(sm.State(0.0), np.arange(4.0))


def random_streams() -> None:
    drawn: streams.Draws
    for drawn in ((streams.ROWS, streams.SPLIT, 2), ()):
        mapped = streams.mapping_of(GRID, ("y", "x"), drawn)
        streams.check_streams(GRID, ("y", "x"), drawn, 3, mapped=mapped)


def random_per_shard() -> None:
    mapped = streams.mapping_of(GRID, (), (streams.SPLIT,), ("y",))
    streams.check_per_shard(GRID, ("y",), (streams.SPLIT,), 3, mapped=mapped)


def laws() -> None:
    tree = {
        "p": Pair(sm.ParamState(1.0, tag="a"), [sm.BatchState({"m": 2.0, "n": 3}, tag=("a", "b"))]),
        "l": Layer([sm.HiddenState(jnp.ones(2)), 4.0, None, "relu"]),
        "r": sm.RandomState(jax.random.key(0), tag="b"),
    }
    a = Pick("a", lambda path, state: "a" in state.tag)
    b = Pick("b", lambda path, state: "b" in state.tag)
    kind = Pick(sm.LongTermState, lambda path, state: isinstance(state, sm.LongTermState))
    every = Pick(..., lambda path, state: True, True)
    both, either, neither = all_of([a, b]), any_of([a, b]), negated(any_of([a, b]))
    for picks in ([], [a, b], [b, a], [kind, every], [both, either, neither]):
        check_partition(tree, picks)
    check_permutation(tree, [both, neither], [1, 0])
    for pick in (a, b, kind, both, either, neither):
        check_filter(tree, pick)


def writes() -> None:
    state = sm.BatchState({"a": 1.0, "b": jnp.arange(3)}, name="s", tag="t", reduce="sum")
    first, second = ({"a": np.float32(k), "b": np.full(3, k, np.int32)} for k in (4, 5))
    check_set(state, first, second)
    check_replace(state, "new", "other", second)


def exchanged() -> None:
    """States that change places inside a transformation are merged with their own old values."""

    @jax.checkpoint
    def fun(pair: Any, x: jax.Array) -> Any:
        first, second = pair
        more = jax.tree.map(lambda value: value + 2 * x.sum(), first)
        return second.set(second.value + x.sum()), more

    pair = sm.State(1.0, reduce="sum"), sm.State(5.0, reduce="sum")
    specs = (PartitionSpec(), PartitionSpec("x"))
    call = sm.shard_map(fun, mesh_of(MeshShape((2,))), specs, PartitionSpec())
    second, first = call(pair, np.arange(4, dtype=np.float32))
    assert (float(first.value), float(second.value)) == (13.0, 11.0)


def gathered() -> None:
    """A value that all shards share counts once, even where JAX's types call it varying."""

    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(state.value + jax.lax.all_gather(x, "x").sum())

    specs = (PartitionSpec(), PartitionSpec("x"))
    call = sm.shard_map(fun, mesh_of(MeshShape((2,), explicit=True)), specs, PartitionSpec())
    total = call(sm.State(1.0, reduce="sum"), np.arange(4, dtype=np.float32))
    assert float(total.value) == 7.0


CHECKS: dict[str, Callable[[], None]] = {
    "laws": laws,
    "writes": writes,
    "policies": program(POLICIES),
    "places": program(PLACES),
    "declared": program(DECLARED),
    "alike": program(ALIKE),
    "portable inside jit": program(PORTABLE, "jit"),
    "portable unsharded": program(PORTABLE, "unsharded"),
    "exchanged": exchanged,
    "gathered": gathered,
    "gradient": gradient,
    "branches": branches,
    "streams": random_streams,
    "streams per shard": random_per_shard,
}
