"""The parts of `locate`: relations of values, operations by NumPy, lines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from statemesh.testing._emulate._control_flow import Frame
from statemesh.testing._emulate._one_device import NO_MESH
from statemesh.testing._emulate._stacked import Scope, Stacked
from statemesh.testing._locate._align import pairs
from statemesh.testing._locate._flat import flat
from statemesh.testing._locate._lines import is_library, line_of
from statemesh.testing._locate._quick import quick
from statemesh.testing._locate._relations import Relation, relation
from statemesh.testing._locate._values import Evaluator, as_numbers, on_all_shards


SCOPE = Scope({"a": 2, "b": 3})
WHOLE = np.random.default_rng(0).normal(size=(6, 4))
BY_B = np.stack(np.split(WHOLE, 3))


def related(x: Any, axes: tuple[str, ...], want: Any = WHOLE) -> Relation | None:
    return relation(Stacked(x, axes), want, SCOPE, 1.0, 0.0)


RELATIONS: dict[str, tuple[Any, tuple[str, ...], tuple[tuple[str, str, int], ...], float]] = {
    "the same array": (WHOLE, (), (), 1),
    "equal copies": (np.stack([WHOLE, WHOLE]), ("a",), (("a", "equal", 0),), 1),
    "parts of rows": (BY_B, ("b",), (("b", "parts", 0),), 1),
    "parts of columns": (np.stack(np.split(WHOLE, 2, 1)), ("a",), (("a", "parts", 1),), 1),
    "parts of both": (
        np.stack([np.stack(np.split(half, 3)) for half in np.split(WHOLE, 2, 1)]),
        ("a", "b"),
        (("b", "parts", 0), ("a", "parts", 1)),
        1,
    ),
    "a partial sum": (np.stack([WHOLE - 1, np.ones_like(WHOLE)]), ("a",), (("a", "sum", 0),), 1),
    "a mean": (np.stack([WHOLE - 1, WHOLE + 1]), ("a",), (("a", "mean", 0),), 1),
    "a maximum": (np.stack([WHOLE, WHOLE - 1]), ("a",), (("a", "max", 0),), 1),
    "a minimum": (np.stack([WHOLE, WHOLE + 1]), ("a",), (("a", "min", 0),), 1),
    "twice as much": (np.stack([2 * WHOLE] * 2), ("a",), (("a", "equal", 0),), 2),
    "parts, a third": (BY_B / 3, ("b",), (("b", "parts", 0),), 1 / 3),
    "inner parts": (
        np.stack(np.split(WHOLE.reshape(3, 2, 4), 2, 1)).reshape(2, 3, 4),
        ("a",),
        (("a", "parts", 0),),
        1,
    ),
    "parts passed on": (np.roll(BY_B, 1, 0), ("b",), (("b", "turned", 0),), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_relations(name: str) -> None:
    x, axes, kinds, factor = RELATIONS[name]
    found = related(x, axes)
    assert found is not None
    # Along the other axis of the mesh all shards have the same.
    assert tuple(kind for kind in found.kinds if kind[0] in axes) == kinds
    assert found.factor == factor


def test_what_is_not_related() -> None:
    assert related(WHOLE + 1e-3, ()) is None
    assert related(BY_B + np.eye(2, 4) / 1000, ("b",)) is None
    assert related(np.zeros((5, 4)), ()) is None
    assert related(np.where(WHOLE > 1, np.nan, WHOLE), ()) is None


def test_numbers_that_mask_hide_no_difference() -> None:
    masked = np.where(WHOLE > 0, WHOLE, -1e9)
    assert related(masked, (), masked) == Relation()
    assert related(np.where(WHOLE > 0, WHOLE + 1e-3, -1e9), (), masked) is None


X, Y = np.linspace(-2, 2, 12).reshape(3, 4), np.linspace(0.5, 3, 12).reshape(3, 4)
K = np.arange(12, dtype=np.int32).reshape(3, 4)
OPERATIONS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x, y: (x + y, x - y, x * y, x / y, jnp.maximum(x, y), x < y, -x), (X, Y)),
    (lambda k: (k + 1, k // 3, k % 5, k & 6, k ^ 3, ~k, k >= 4), (K,)),
    (lambda x: (jnp.exp(x), jnp.tanh(x), jax.nn.sigmoid(x), jnp.sign(x), x**3, x**-2), (X,)),
    (lambda y: (jnp.log(y), jnp.sqrt(y), jax.lax.rsqrt(y), y**1.5, jnp.log1p(y), jnp.expm1(y)), (Y,)),
    (lambda x: (x.sum(0), x.max(1), x.min(), (x > 0).any(), (x > -9).all(1)), (X,)),
    (lambda x: (x.T, x.reshape(2, 6), x[None], x[1:, ::2], jnp.flip(x, 1), x[:, 1]), (X,)),
    (lambda x, y: (x @ y.T, jnp.einsum("ij,ij->j", x, y), jnp.vecdot(x, y)), (X, Y)),
    (lambda x, y: (jnp.where(x > 0, x, y), jnp.concatenate([x, y], 1), y[:, None] + x), (X, Y)),
    (lambda x, y: (jnp.transpose(y[:, None] + x, (1, 2, 0)), jnp.stack([x, y])[0], *y), (X, Y)),
    (lambda k, x: (jax.lax.dynamic_slice(x, (k[0, 1], k[0, 2]), (2, 3)),), (K, X)),
    (lambda k, x: (jax.lax.dynamic_update_slice(x, 2 * x[:2, 1:3], (k[0, 0], k[1, 0])),), (K, X)),
    (lambda x: (x.cumsum(1), jax.lax.cumsum(x, 0, reverse=True), x.argmax(1), x.argmin(0)), (X,)),
    (lambda x: (jnp.clip(x, -1, 1), jnp.clip(x, x.min(), x + 1), jnp.clip(x, 0)), (X,)),
    (lambda k: (k.astype(jnp.float32), jnp.arange(4) + k, jnp.float32(7) * k), (K,)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_numpy_does_what_jax_does(number: int) -> None:
    fun, args = OPERATIONS[number]
    program = flat(jax.make_jaxpr(fun)(*[jnp.asarray(x) for x in args]), Scope())
    scope = Scope({"a": 2})
    with jax.enable_x64(True):
        evaluator = Evaluator(program, wide=True)
        # Each operand with and without a value for each shard.
        stacked = [Stacked(np.stack([x, x + 1]), ("a",)) for x in args]
        known = dict(zip(program.inputs, [stacked[0], *map(Stacked, args[1:])], strict=True))
        count = 0
        for step in program.steps:
            object.__setattr__(step, "scope", scope)
            values = [evaluator.operand(x, known) for x in step.operands]
            fast = quick(step, values, True)
            frame = Frame(scope, evaluator.no_differences)
            slow = evaluator._equation(step.eqn, values, frame)
            known.update(zip(step.results, slow, strict=True))
            for a, b in zip(fast or (), slow, strict=bool(fast)):
                assert a.axes == b.axes
                assert a.x.dtype == b.x.dtype
                np.testing.assert_allclose(as_numbers(a.x), as_numbers(b.x), rtol=1e-12)
                count += 1
    assert count >= 3


def test_numpy_gathers_what_jax_gathers() -> None:
    def fun(x: Any, y: Any) -> Any:
        gathered = (jax.lax.all_gather(z, "b", axis=1, tiled=True) for z in (x, y))
        scattered = jax.lax.psum_scatter(y, "b", scatter_dimension=1, tiled=True)
        return *gathered, jax.lax.all_gather(x, "a"), scattered, jax.lax.psum_scatter(x, "a")

    given = WHOLE[:4], np.tile(WHOLE, (1, 3))[:, :9]
    mesh = AbstractMesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P("a"), P(None, "b")), out_specs=P(), check_vma=False
    )
    program = flat(jax.make_jaxpr(mapped)(*given), Scope())
    count = 0
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        evaluator = Evaluator(program, wide=True)
        known = {x: Stacked(z) for x, z in zip(program.inputs, given, strict=True)}
        for step in program.steps:
            values = [evaluator.operand(x, known) for x in step.operands]
            evaluator.run_step(step, known)
            if step.kind != "run":
                continue
            frame = Frame(step.scope, evaluator.no_differences)
            slow = evaluator._equation(step.eqn, values, frame)
            fast = quick(step, values, True)
            assert fast is not None
            for a, b in zip(fast, slow, strict=True):
                x, y = (on_all_shards(value, step.scope) for value in (a, b))
                np.testing.assert_allclose(x, y, rtol=1e-12)
                count += 1
    assert count == 5


def test_lines_are_those_of_the_user() -> None:
    closed: Any = jax.make_jaxpr(lambda x: jax.nn.softmax(x) + 1)(X)
    lines = {line_of(eqn) for eqn in closed.jaxpr.eqns}
    assert {line.file for line in lines if line is not None} == {__file__}
    assert is_library(jax.__file__)
    assert is_library("<@beartype(f) at 0x1>")
    assert not is_library(__file__)


def test_steps_are_matched_around_those_of_one_program() -> None:
    def steps(count: int) -> Any:
        def fun(x: Any) -> Any:
            for _ in range(count):
                x = jnp.sin(x)
            return jnp.cos(x) * 2

        return flat(jax.make_jaxpr(fun)(1.0), Scope()).steps

    found = pairs(steps(3), steps(1))
    names = [(steps(3)[a].name, steps(1)[b].name) for a, b in found.items()]
    assert sorted(names) == [("cos", "cos"), ("mul", "mul"), ("sin", "sin")]
