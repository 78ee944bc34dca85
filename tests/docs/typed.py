"""The types that a type checker sees for mapped functions and states. mypy checks this file; it never runs.

`# type: ignore` marks each expected error. Strict mypy reports a mark that is not needed.
"""

from typing import Any, assert_type

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import statemesh as sm
from statemesh import checkpoint, legacy


def step(x: jax.Array, count: sm.BatchState, scale: float = 1.0) -> tuple[jax.Array, sm.BatchState]:
    return scale * x, count


def check_calls(mesh: Mesh, x: jax.Array, count: sm.BatchState) -> None:
    mapped = sm.shard_map(step, mesh, P("x"), P("x"))
    assert_type(mapped(x, count), tuple[jax.Array, sm.BatchState])
    assert_type(mapped(x, count, scale=2.0), tuple[jax.Array, sm.BatchState])
    assert_type(mapped.unsharded(x, count), tuple[jax.Array, sm.BatchState])
    mapped(x)  # type: ignore[call-arg]
    mapped(x, count, size=2.0)  # type: ignore[call-arg]
    mapped(x, "count")  # type: ignore[arg-type]
    mapped.place(x)  # type: ignore[call-arg]
    mapped.unsharded(x)  # type: ignore[call-arg]

    assert_type(sm.vmap2(step)(x, count), tuple[jax.Array, sm.BatchState])
    assert_type(sm.pmap2(step, "i")(x, count), tuple[jax.Array, sm.BatchState])
    assert_type(legacy.shard_map(step, mesh, P(), P())(x, count), tuple[jax.Array, sm.BatchState])
    sm.vmap2(step)(x)  # type: ignore[call-arg]
    sm.pmap2(step, "i")(x)  # type: ignore[call-arg]
    legacy.shard_map(step, mesh, P(), P())(x)  # type: ignore[call-arg]


@sm.shard_map(in_specs=P("x"), out_specs=P("x"))
def by_spec(x: jax.Array) -> jax.Array:
    return x


@sm.vmap2(axis_name="i")
def by_lane(x: jax.Array) -> jax.Array:
    return x


@sm.pmap2(axis_name="i")
def by_device(x: jax.Array) -> jax.Array:
    return x


@sm.pmap2
def bare(x: jax.Array) -> jax.Array:
    return x


def check_decorators(x: jax.Array) -> None:
    assert_type(by_spec(x), jax.Array)
    assert_type(by_lane(x), jax.Array)
    assert_type(by_device(x), jax.Array)
    assert_type(bare(x), jax.Array)
    by_spec()  # type: ignore[call-arg]
    by_lane()  # type: ignore[call-arg]
    by_device()  # type: ignore[call-arg]
    bare()  # type: ignore[call-arg]


class Layer(sm.Module):
    mean: sm.BatchState[Float[Array, " n"]]
    count: sm.State

    @sm.shard_map(in_specs=(None, P("x")), out_specs=P("x"))
    def step(self, x: jax.Array) -> tuple[jax.Array, "Layer"]:
        return x - self.mean.value, self.replace(count=self.count.value + 1)

    @sm.vmap2(in_axes=(None, 0))
    def each(self, x: jax.Array, scale: float) -> jax.Array:
        return scale * x


def check_methods(layer: Layer, x: jax.Array) -> None:
    assert_type(layer.step(x), tuple[jax.Array, Layer])
    assert_type(layer.each(x, 2.0), jax.Array)
    assert_type(Layer.each(layer, x, 2.0), jax.Array)
    layer.step()  # type: ignore[call-arg]
    layer.each(x, scale="2")  # type: ignore[arg-type]


def loss(layer: Layer, x: jax.Array) -> tuple[jax.Array, Layer]:
    return x.sum(), layer


def check_gradients(layer: Layer, x: jax.Array) -> None:
    step = sm.value_and_grad(loss, axis_name="x")
    assert_type(step(layer, x), tuple[tuple[jax.Array, Layer], Any])
    assert_type(sm.grad(loss)(layer, x), tuple[Any, Any])
    step(layer)  # type: ignore[call-arg]
    sm.grad(loss)(x, layer)  # type: ignore[arg-type]


def check_what_comes_back_as_it_was(layer: Layer, x: jax.Array, mesh: Mesh) -> None:
    assert_type(sm.pmean(x, "x"), jax.Array)
    assert_type(sm.psum({"a": x}, ("x", "y")), dict[str, jax.Array])
    assert_type(sm.all_gather(x, "x", tiled=True, to="invarying"), jax.Array)
    assert_type(sm.gather(sm.fsdp(layer, mesh, "x"), "x"), Layer)
    assert_type(sm.scatter(layer, layer), Layer)
    assert_type(sm.trainable(layer), Layer)
    assert_type(checkpoint.load("folder", layer), Layer)
    assert_type(checkpoint.Checkpoints("folder").load(layer, mesh=mesh), Layer)
    sm.all_gather(x, "x", to="reduced")  # type: ignore[arg-type]
    sm.State(0.0, reduce="avg")  # type: ignore[arg-type]


class Tally(sm.State[Any]):
    __slots__ = ()

    def leave(self, old: "Tally | None", axis_names: tuple[Any, ...]) -> sm.State:
        return self if old is None else old


class Wider(sm.State):
    __slots__ = ()

    def leave(self, old: sm.State | None, axis_names: tuple[Any, ...]) -> sm.State:
        return self


def check_states(layer: Layer) -> None:
    assert_type(layer.mean.value, Array)
    assert_type(layer.mean.set(0.0).value, Array)
    assert_type(layer.mean.set(0.0), sm.BatchState[Array])
    assert_type(layer.count.value, Any)
    state = sm.State(0)
    assert_type(state.value, Any)
    held: sm.ParamState[Array] = sm.ParamState(0.0)
    layer.mean.value.nonsense()  # type: ignore[attr-defined]
    Layer(held, state)  # type: ignore[arg-type]
