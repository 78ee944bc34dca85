"""Code written for `jax.shard_map`, with one function for each of its features."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import make_mesh


jnp: Any = jax.numpy
Map = Callable[..., Any]

CASES: dict[str, Callable[[Map], Any]] = {}
# Most meshes are Auto: on these axes JAX refuses arrays that do not lie as their specs say.
EXPLICIT = AxisType.Explicit
ROWS = P("x")


def case(run: Callable[[Map], Any]) -> Callable[[Map], Any]:
    """User code that computes with a given `shard_map`."""
    CASES[run.__name__] = run
    return run


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) / 7


def over(
    shard_map: Map, fun: Any, in_specs: Any = ROWS, out_specs: Any = ROWS, mesh: str = "8"
) -> Any:
    """The map of a function over an Auto mesh, by rows where no specs are given."""
    return shard_map(fun, mesh=make_mesh(mesh), in_specs=in_specs, out_specs=out_specs)


def placed(mesh: Mesh, spec: P, *shape: int) -> Any:
    return jax.device_put(numbers(*shape), NamedSharding(mesh, spec))


# Arguments, results, specs and meshes


@case
def a_tree_in_and_out(shard_map: Map) -> Any:
    def fun(tree: Any, y: Any) -> Any:
        return {"sum": tree["a"] + y, "both": (tree["b"][0], lax.psum(y, "x"))}

    mapped = over(shard_map, fun, (ROWS, ROWS), {"sum": ROWS, "both": (ROWS, P())})
    return mapped({"a": numbers(8, 2), "b": [numbers(8)]}, numbers(8, 2))


@case
def as_a_decorator(shard_map: Map) -> Any:
    decorator: Any = shard_map(mesh=make_mesh("4x2"), in_specs=P("x", "y"), out_specs=P("x", "y"))
    decorate: Callable[[Any], Any] = decorator

    @decorate
    def fun(x: Any) -> Any:
        return x * lax.axis_index("x") + lax.axis_index("y")

    return fun(numbers(8, 4))


@case
def inferred_specs_of_some_axes(shard_map: Map) -> Any:
    with jax.set_mesh(make_mesh("4x2", EXPLICIT)):
        x = jax.device_put(numbers(8, 4), P(("x", "y")))
        return jax.jit(shard_map(lambda x: x**2, out_specs=ROWS, axis_names={"x"}))(x)


@case
def an_argument_that_is_no_array(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda how, x: how["fun"](x) + how["by"], (None, ROWS))
    return mapped({"fun": jnp.sin, "by": 2}, numbers(16))


@case
def a_single_spec_for_all(shard_map: Map) -> Any:
    return over(shard_map, jnp.add)(numbers(8), numbers(8))


@case
def axes_left_to_the_compiler(shard_map: Map) -> Any:
    mesh, fun = make_mesh("4x2", AxisType.Auto), lambda x: x - lax.pmean(x, "x")
    mapped = shard_map(fun, mesh=mesh, in_specs=(ROWS,), out_specs=ROWS, axis_names={"x"})
    return jax.jit(mapped)(placed(mesh, P("x", "y"), 8, 4))


@case
def explicit_axes_left_as_they_are(shard_map: Map) -> Any:
    mesh = make_mesh("4x2", EXPLICIT)

    def fun(x: Any) -> Any:
        assert jax.typeof(x).sharding.spec == P(None, "y")
        return x * 2

    options: Any = {"in_specs": (P("x", None),), "out_specs": P("x", None), "axis_names": {"x"}}
    return jax.jit(shard_map(fun, mesh=mesh, **options))(placed(mesh, P("x", "y"), 8, 4))


@case
def nested_over_another_axis(shard_map: Map) -> Any:
    def inner(x: Any) -> Any:
        return lax.psum(x, "y")

    def outer(x: Any) -> Any:
        mapped = shard_map(inner, in_specs=(P(None, "y"),), out_specs=P(), axis_names={"y"})
        return mapped(x) + lax.axis_index("x")

    with jax.set_mesh(make_mesh("4x2", AxisType.Auto)):
        mapped = shard_map(outer, in_specs=(ROWS,), out_specs=ROWS, axis_names={"x"})
        return jax.jit(mapped)(numbers(8, 4))


@case
def an_abstract_mesh(shard_map: Map) -> Any:
    mesh, specs = make_mesh(), {"in_specs": (ROWS,), "out_specs": ROWS}
    x, options = placed(mesh, ROWS, 8), {"mesh": mesh.abstract_mesh, **specs}
    under_a_trace = jax.jit(shard_map(lambda x: x[::-1], **options))
    return under_a_trace(x), shard_map(lambda x: x + 1, **options)(x)


@case
def a_mesh_of_the_context(shard_map: Map) -> Any:
    results = []
    for name in ("8", "4"):
        # JAX's own function keeps the mesh of its first call.
        mapped = shard_map(lambda x: lax.pmax(x, "x"), in_specs=(ROWS,), out_specs=P())
        with jax.set_mesh(make_mesh(name)):
            results.append(np.asarray(mapped(numbers(8))))
    return results


@case
def a_reference(shard_map: Map) -> Any:
    ref = jax.new_ref(jax.device_put(jnp.zeros(4), NamedSharding(make_mesh("2"), ROWS)))

    def fun(ref: Any) -> None:
        ref[...] += lax.axis_index("x").astype(float)

    jax.jit(over(shard_map, fun, (ROWS,), None, "2"))(ref)
    return ref[...]


@case
def random_keys(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda keys: (jax.vmap(jax.random.normal)(keys), keys))
    drawn, keys = mapped(jax.random.split(jax.random.key(0), 8))
    return drawn, jax.random.key_data(keys)


@case
def zero_size_arrays(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda x, y: (x, y + x.sum()), (ROWS, P()), (ROWS, ROWS))
    return mapped(jnp.zeros((0, 3)), numbers(2))


@case
def zero_arguments(shard_map: Map) -> Any:
    return over(shard_map, lambda: lax.axis_index("x").reshape(1), ())()


@dataclasses.dataclass
class Scaled:
    by: float

    def apply(self, x: Any) -> Any:
        return self.by * x


@case
def a_partial_and_a_bound_method(shard_map: Map) -> Any:
    added = over(shard_map, functools.partial(jnp.add, numbers(1)))
    return added(numbers(8)), over(shard_map, Scaled(3.0).apply)(numbers(8))


@case
def unchecked(shard_map: Map) -> Any:
    fun, specs = (
        lambda x: lax.all_gather(x, "x", tiled=True),
        {"in_specs": (ROWS,), "out_specs": P()},
    )
    return shard_map(fun, mesh=make_mesh(), **specs, check_vma=False)(numbers(8))


@case
def sums_that_are_still_to_be_added_up(shard_map: Map) -> Any:
    with jax.set_mesh(make_mesh("4", EXPLICIT)):
        x, sums = jax.device_put(numbers(8), ROWS), P(unreduced={"x"})
        cast = lambda x: lax.pcast(x, "x", to="unreduced")
        part = shard_map(cast, in_specs=(ROWS,), out_specs=sums)
        whole = shard_map(lambda x: lax.psum(x, "x"), in_specs=(sums,), out_specs=P())
        return jax.jit(lambda x: whole(part(x)))(x)


# Transformations around a map and inside it


@case
def a_vmap_spread_over_a_mesh_axis(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda x: x + lax.psum(x, "x"), mesh="2x2")
    return jax.jit(jax.vmap(mapped, spmd_axis_name="y"))(numbers(4, 4))


@case
def a_vmap_over_an_explicit_axis(shard_map: Map) -> Any:
    mesh = make_mesh("2x2", EXPLICIT)
    x = placed(mesh, P("x", "y"), 4, 4)
    mapped = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(P("y"),), out_specs=P("y"))
    return jax.jit(jax.vmap(mapped))(x), jax.vmap(mapped)(x)


@case
def a_derivative_in_a_vmap_over_an_explicit_axis(shard_map: Map) -> Any:
    mesh = make_mesh("2x2", EXPLICIT)
    x = placed(mesh, P(None, "y"), 4, 4)
    mapped = shard_map(lambda x: x * x, mesh=mesh, in_specs=(P("y"),), out_specs=P("y"))
    return jax.vmap(lambda x: jax.vjp(mapped, x)[1](x))(x)


@case
def a_closed_over_tracer(shard_map: Map) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return over(shard_map, lambda x: x * w)(x).sum()

    return jax.jit(jax.value_and_grad(loss))(numbers(3), numbers(8, 3))


@case
def forward_and_backward(shard_map: Map) -> Any:
    mapped, x = over(shard_map, jnp.cos), numbers(8)
    return jax.jvp(mapped, (x,), (x,)), jax.jit(jax.hessian(lambda x: mapped(x).sum()))(x)


@case
def integers_have_no_gradient(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda n, x: x * n)
    derivative = jax.grad(lambda n, x: mapped(n, x).sum(), (0, 1), allow_int=True)
    of_integers, of_floats = derivative(jnp.arange(8), numbers(8))
    assert of_integers.dtype == jax.dtypes.float0 and of_integers.shape == (8,)
    return of_floats


@case
def an_effect(shard_map: Map) -> Any:
    seen: list[float] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x[0])), x)
        return x

    result = jax.jit(over(shard_map, fun))(numbers(8))
    jax.effects_barrier()
    return result, np.sort(np.array(seen))


# JAX's settings and stages


@case
def shapes_only(shard_map: Map) -> Any:
    mapped = over(shard_map, lambda x: x.astype(int))
    shape = jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, 2), np.float32))
    return np.zeros(shape.shape, shape.dtype)


@case
def exported(shard_map: Map) -> Any:
    mapped, x = (
        over(shard_map, lambda x: lax.psum(x, "x"), out_specs=P()),
        placed(make_mesh(), ROWS, 8),
    )
    return jax.jit(export.export(jax.jit(mapped))(x).call)(x)


@case
def in_double_precision(shard_map: Map) -> Any:
    with jax.enable_x64(True):
        result = over(shard_map, lambda x: x / 3)(np.arange(8.0))
        assert result.dtype == np.float64
        return np.asarray(result)


@case
def without_jit(shard_map: Map) -> Any:
    with jax.disable_jit():
        return over(shard_map, lambda x: x + 1, mesh="2")(numbers(4))


@case
def nans_are_found(shard_map: Map) -> Any:
    mapped = over(shard_map, jnp.log, mesh="2")
    with jax.debug_nans(True):
        fine = mapped(numbers(4) + 1)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(mapped(-numbers(4)))
    return fine
