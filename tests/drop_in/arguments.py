"""Arguments, results, specs and meshes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm

from ..helpers import make_mesh
from ._case import Map, beside_a_state, case, jnp, numbers


@case
def a_tree_in_and_out(shard_map: Map) -> Any:
    def fun(tree: Any, y: Any) -> Any:
        return {"sum": tree["a"] + y, "both": (tree["b"][0], lax.psum(y, "x"))}

    mapped = shard_map(
        fun,
        mesh=make_mesh(),
        in_specs=(P("x"), P("x")),
        out_specs={"sum": P("x"), "both": (P("x"), P())},
    )
    return mapped({"a": numbers(8, 2), "b": [numbers(8)]}, numbers(8, 2))


@case
def as_a_decorator(shard_map: Map) -> Any:
    over: Any = shard_map(mesh=make_mesh("4x2"), in_specs=P("x", "y"), out_specs=P("x", "y"))
    decorate: Callable[[Any], Any] = over

    @decorate
    def fun(x: Any) -> Any:
        return x * lax.axis_index("x") + lax.axis_index("y")

    return fun(numbers(8, 4))


@case
def inferred_specs(shard_map: Map) -> Any:
    mesh = make_mesh("8", AxisType.Explicit)
    x = jax.device_put(numbers(8, 2), NamedSharding(mesh, P("x")))
    return jax.jit(shard_map(lambda x: 2 * x, mesh=mesh, out_specs=P("x")))(x)


@case
def inferred_specs_of_some_axes(shard_map: Map) -> Any:
    mesh = make_mesh("4x2", AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(numbers(8, 4), P(("x", "y")))
        return jax.jit(shard_map(lambda x: x**2, out_specs=P("x"), axis_names={"x"}))(x)


@case
def an_argument_that_is_no_array(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda how, x: how["fun"](x) + how["by"],
        mesh=make_mesh(),
        in_specs=(None, P("x")),
        out_specs=P("x"),
    )
    return mapped({"fun": jnp.sin, "by": 2}, numbers(16))


@case
def no_spec_for_any_argument(shard_map: Map) -> Any:
    return shard_map(lambda x: x + 1, mesh=make_mesh(), in_specs=(None,), out_specs=P())(3.0)


@case
def a_single_spec_for_all(shard_map: Map) -> Any:
    if shard_map is beside_a_state:  # With a state, the model needs an entry.
        shard_map = sm.shard_map
    return shard_map(jnp.add, mesh=make_mesh(), in_specs=P("x"), out_specs=P("x"))(
        numbers(8), numbers(8)
    )


@case
def axes_left_to_the_compiler(shard_map: Map) -> Any:
    mesh = make_mesh("4x2")
    x = jax.device_put(numbers(8, 4), NamedSharding(mesh, P("x", "y")))
    mapped = shard_map(
        lambda x: x - lax.pmean(x, "x"),
        mesh=mesh,
        in_specs=(P("x"),),
        out_specs=P("x"),
        axis_names={"x"},
    )
    return jax.jit(mapped)(x)


@case
def explicit_axes_left_as_they_are(shard_map: Map) -> Any:
    mesh = make_mesh("4x2", AxisType.Explicit)
    x = jax.device_put(numbers(8, 4), NamedSharding(mesh, P("x", "y")))

    def fun(x: Any) -> Any:
        assert jax.typeof(x).sharding.spec == P(None, "y")
        return x * 2

    options: Any = {"in_specs": (P("x", None),), "out_specs": P("x", None), "axis_names": {"x"}}
    return jax.jit(shard_map(fun, mesh=mesh, **options))(x)


@case
def nested_over_another_axis(shard_map: Map) -> Any:
    mesh = make_mesh("4x2")

    def inner(x: Any) -> Any:
        return lax.psum(x, "y")

    def outer(x: Any) -> Any:
        mapped = shard_map(inner, in_specs=(P(None, "y"),), out_specs=P(), axis_names={"y"})
        return mapped(x) + lax.axis_index("x")

    with jax.set_mesh(mesh):
        mapped = shard_map(outer, in_specs=(P("x"),), out_specs=P("x"), axis_names={"x"})
        return jax.jit(mapped)(numbers(8, 4))


@case
def an_abstract_mesh_under_a_trace(shard_map: Map) -> Any:
    mesh = make_mesh()
    x = jax.device_put(numbers(8), NamedSharding(mesh, P("x")))
    mapped = shard_map(
        lambda x: x[::-1], mesh=mesh.abstract_mesh, in_specs=(P("x"),), out_specs=P("x")
    )
    return jax.jit(mapped)(x)


@case
def an_abstract_mesh_with_arrays_on_devices(shard_map: Map) -> Any:
    mesh = make_mesh()
    x = jax.device_put(numbers(8), NamedSharding(mesh, P("x")))
    mapped = shard_map(
        lambda x: x + 1, mesh=mesh.abstract_mesh, in_specs=(P("x"),), out_specs=P("x")
    )
    return mapped(x)


@case
def a_mesh_of_the_context(shard_map: Map) -> Any:
    found = []
    for name in ("8", "4"):
        # JAX's own function keeps the mesh of its first call.
        mapped = shard_map(lambda x: lax.pmax(x, "x"), in_specs=(P("x"),), out_specs=P())
        with jax.set_mesh(make_mesh(name)):
            found.append(np.asarray(mapped(numbers(8))))
    return found


@case
def a_closed_over_array(shard_map: Map) -> Any:
    w = numbers(3)
    return shard_map(lambda x: x * w, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))(
        numbers(8, 3)
    )


@case
def a_reference(shard_map: Map) -> Any:
    mesh = make_mesh("2")
    ref = jax.new_ref(jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("x"))))

    def fun(ref: Any) -> None:
        ref[...] += lax.axis_index("x").astype(float)

    jax.jit(shard_map(fun, mesh=mesh, in_specs=(P("x"),), out_specs=None))(ref)
    return ref[...]


@case
def random_keys(shard_map: Map) -> Any:
    keys = jax.random.split(jax.random.key(0), 8)
    mapped = shard_map(
        lambda keys: (jax.vmap(jax.random.normal)(keys), keys),
        mesh=make_mesh(),
        in_specs=(P("x"),),
        out_specs=P("x"),
    )
    drawn, keys = mapped(keys)
    return drawn, jax.random.key_data(keys)


@case
def zero_size_arrays(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x, y: (x, y + x.sum()),
        mesh=make_mesh(),
        in_specs=(P("x"), P()),
        out_specs=(P("x"), P("x")),
    )
    return mapped(jnp.zeros((0, 3)), numbers(2))


@case
def zero_arguments(shard_map: Map) -> Any:
    return shard_map(
        lambda: lax.axis_index("x").reshape(1), mesh=make_mesh(), in_specs=(), out_specs=P("x")
    )()


@case
def a_partial(shard_map: Map) -> Any:
    mapped = shard_map(
        functools.partial(jnp.add, numbers(2)),
        mesh=make_mesh(),
        in_specs=(P("x"),),
        out_specs=P("x"),
    )
    return mapped(numbers(16))


@dataclasses.dataclass
class Scaled:
    by: float

    def apply(self, x: Any) -> Any:
        return self.by * x


@case
def a_bound_method(shard_map: Map) -> Any:
    fun = Scaled(3.0).apply
    return shard_map(fun, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))(numbers(8))


@case
def unchecked(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: lax.all_gather(x, "x", tiled=True),
        mesh=make_mesh(),
        in_specs=(P("x"),),
        out_specs=P(),
        check_vma=False,
    )
    return mapped(numbers(8))


@case
def sums_that_are_still_to_be_added_up(shard_map: Map) -> Any:
    mesh = make_mesh("4", AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(numbers(8), P("x"))
        part = shard_map(
            lambda x: lax.pcast(x, "x", to="unreduced"),
            in_specs=(P("x"),),
            out_specs=P(unreduced={"x"}),
        )
        whole = shard_map(lambda x: lax.psum(x, "x"), in_specs=(P(unreduced={"x"}),), out_specs=P())
        return jax.jit(lambda x: whole(part(x)))(x)
