"""A mapped function as an object: its texts and signature. `docs/typed.py` has its types."""

import functools
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import statemesh as sm
from tests.helpers import make_mesh


def scaled(x: jax.Array, by: float = 2.0) -> jax.Array:
    """Scale it."""
    return x * by


scaled.author = "someone"  # type: ignore[attr-defined]
scaled.lower = "taken"  # type: ignore[attr-defined]

MAPPINGS: list[Any] = [
    sm.vmap2(scaled, in_axes=(0, None)),
    sm.pmap2(scaled, in_axes=(0, None)),
    sm.pmap2(scaled, static_broadcasted_argnums=1),
    sm.shard_map(scaled, make_mesh(), jax.P(), jax.P()),
]


@pytest.mark.parametrize("mapped", MAPPINGS, ids=["vmap2", "pmap2", "static", "shard_map"])
def test_it_has_what_the_function_has(mapped: Any) -> None:
    for name in ("__doc__", "__module__", "__name__", "__qualname__", "__annotations__", "author"):
        assert getattr(mapped, name) == getattr(scaled, name)
    assert inspect.getdoc(mapped) == "Scale it."
    assert inspect.signature(mapped) == inspect.signature(scaled)
    assert typing.get_type_hints(mapped) == typing.get_type_hints(scaled)
    # What JAX copies is the function's.
    jitted: Any = jax.jit(mapped)
    assert jitted.author == "someone"
    assert not hasattr(jitted, "unsharded")
    assert callable(mapped.lower)
    assert "lower" not in vars(jitted)


def test_it_shows_the_mesh_and_the_specs() -> None:
    specs = {sm.ParamState: P(), "counter": sm.PerShard("x")}
    shown = {
        sm.shard_map(scaled, make_mesh(), (P("x"), {"a": P()}), P("x"), state_in_specs=specs): (
            "shard_map(scaled, Mesh(x=8), in_specs=(P('x'), {'a': P()}), out_specs=P('x'), "
            "state_in_specs={ParamState: P(), 'counter': PerShard('x')})"
        ),
        sm.vmap2(scaled, in_axes=(0, None), axis_name="rows", state_in_axes=sm.BatchState): (
            "vmap2(scaled, in_axes=(0, None), out_axes=0, axis_name='rows', "
            "state_in_axes={0: BatchState})"
        ),
        sm.pmap2(scaled): "pmap2(scaled, in_axes=0, out_axes=0)",
    }
    for mapped, text in shown.items():
        assert repr(mapped) == text
    assert [mapped.mesh for mapped in shown] == [make_mesh(), None, None]
    many = repr(sm.shard_map(scaled, out_specs=[P()] * 100))
    assert many.startswith("shard_map(scaled, out_specs=[P(), P(), ") and many.endswith("...)")
    assert len(many) < 200


def test_it_can_wrap_and_be_wrapped() -> None:
    mapped: Any = sm.vmap2(scaled, in_axes=(0, None))

    @functools.wraps(mapped)
    def outer(*args: Any) -> Any:
        return mapped(*args)

    assert outer.__doc__ == "Scale it."
    assert inspect.signature(outer) == inspect.signature(scaled)

    def other(rows: Any, times: Any) -> Any:
        """Another."""

    functools.update_wrapper(mapped, other)
    assert mapped.__doc__ == "Another."
    assert mapped.__name__ == "other"
    assert inspect.signature(mapped) == inspect.signature(other)
    assert mapped(jnp.ones(2), 3.0).tolist() == [3.0, 3.0]
    mapped.note = "mine"
    assert mapped.note == "mine"


def test_the_class_and_what_is_no_function_keep_theirs() -> None:
    class Scale(sm.Module):
        weight: jax.Array

        def __call__(self, x: Any) -> Any:
            return self.weight * x

    mapped = sm.vmap2(Scale(jnp.ones(())))
    assert not hasattr(mapped, "weight")
    assert (mapped.__doc__ or "").startswith("A mapped function: ")
    assert (sm.StatefulMapping.__doc__ or "").startswith("A mapped function: ")


def test_a_state_can_be_subscripted() -> None:
    kind: Any = sm.BatchState

    class Layer(sm.Module):
        mean: kind[Float[Array, " n"]]

    layer = Layer(kind(jnp.zeros(3)))
    assert layer.replace(mean=1 + layer.mean.value).mean.value.tolist() == [1, 1, 1]
    made = kind[Float[Array, " n"]](1.0)
    assert type(made) is kind
    assert jax.tree.structure(made) == jax.tree.structure(kind(1.0))  # type: ignore[operator]
