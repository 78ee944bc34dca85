"""`shard_map` where `jax.shard_map` stood: the same results, and with a State beside the arrays too."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .helpers import make_mesh


jnp: Any = jax.numpy
structure: Any = jax.tree.structure
Map = Callable[..., Any]

CASES: dict[str, Callable[[Map], Any]] = {}


def case(run: Callable[[Map], Any]) -> Callable[[Map], Any]:
    """What a user's code computes with a given `shard_map`."""
    CASES[run.__name__] = run
    return run


class Counter(sm.Module):
    count: sm.State


def beside_a_state(fun: Any = None, **options: Any) -> Any:
    """`shard_map` of the same function with a state that counts its calls, an argument and a result more."""
    if fun is None:
        return functools.partial(beside_a_state, **options)

    def step(model: Counter, *args: Any) -> Any:
        return fun(*args), model.replace(count=model.count.value + 1)

    in_specs = options.pop("in_specs", None)
    if in_specs is not None:
        options["in_specs"] = (None, *in_specs) if isinstance(in_specs, tuple) else in_specs
    out_specs = (options.pop("out_specs"), P())
    mapped = sm.shard_map(step, out_specs=out_specs, **options)

    def call(*args: Any) -> Any:
        result, model = mapped(Counter(sm.State(0)), *args)
        if not isinstance(model.count.value, jax.core.Tracer):
            assert model.count.value == 1
        return result

    return functools.update_wrapper(call, fun)


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) / 7


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
    if shard_map is beside_a_state:  # There the model takes an entry.
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
        # JAX's own keeps the mesh of its first call.
        mapped = shard_map(lambda x: lax.pmax(x, "x"), in_specs=(P("x"),), out_specs=P())
        with jax.set_mesh(make_mesh(name)):
            found.append(np.asarray(mapped(numbers(8))))
    return found


@case
def a_vmap_around(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x, y: x + lax.psum(y, "x"),
        mesh=make_mesh("2x2"),
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
    )
    return jax.vmap(mapped, in_axes=(0, None))(numbers(3, 4), numbers(4))


@case
def a_vmap_spread_over_a_mesh_axis(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: x + lax.psum(x, "x"), mesh=make_mesh("2x2"), in_specs=(P("x"),), out_specs=P("x")
    )
    return jax.jit(jax.vmap(mapped, spmd_axis_name="y"))(numbers(4, 4))


@case
def a_vmap_over_an_explicit_axis(shard_map: Map) -> Any:
    mesh = make_mesh("2x2", AxisType.Explicit)
    x = jax.device_put(numbers(4, 4), NamedSharding(mesh, P("x", "y")))
    mapped = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(P("y"),), out_specs=P("y"))
    return jax.jit(jax.vmap(mapped))(x)


@case
def a_closed_over_array(shard_map: Map) -> Any:
    w = numbers(3)
    return shard_map(lambda x: x * w, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))(
        numbers(8, 3)
    )


@case
def a_closed_over_tracer(shard_map: Map) -> Any:
    def loss(w: Any, x: Any) -> Any:
        mapped = shard_map(lambda x: x * w, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
        return mapped(x).sum()

    return jax.jit(jax.value_and_grad(loss))(numbers(3), numbers(8, 3))


@case
def a_gradient_outside(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda w, x: jnp.sin(x * w), mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=P("x")
    )
    return jax.grad(lambda w, x: mapped(w, x).sum(), (0, 1))(numbers(3), numbers(8, 3))


@case
def a_gradient_inside(shard_map: Map) -> Any:
    def fun(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: lax.psum((x * w).sum(), "x"))(w)

    return shard_map(fun, mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=P())(
        numbers(3), numbers(8, 3)
    )


@case
def forward_and_backward(shard_map: Map) -> Any:
    mapped = shard_map(jnp.cos, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    x = numbers(8)
    return jax.jvp(mapped, (x,), (x,)), jax.jit(jax.hessian(lambda x: mapped(x).sum()))(x)


@case
def integers_have_no_gradient(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda n, x: x * n, mesh=make_mesh(), in_specs=(P("x"), P("x")), out_specs=P("x")
    )
    n = jnp.arange(8)
    made = jax.grad(lambda n, x: mapped(n, x).sum(), (0, 1), allow_int=True)(n, numbers(8))
    assert made[0].dtype == jax.dtypes.float0 and made[0].shape == (8,)
    return made[1]


@case
def a_custom_jvp(shard_map: Map) -> Any:
    @jax.custom_jvp
    def cube(x: Any) -> Any:
        return x**3

    cube.defjvps(lambda t, _, x: 100 * t * x)
    mapped = shard_map(cube, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def a_custom_vjp(shard_map: Map) -> Any:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return 2 * x

    double.defvjp(lambda x: (2 * x, x), lambda x, g: (g * x,))
    mapped = shard_map(double, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def remat_outside(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: jnp.sin(jnp.sin(x)), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")
    )
    return jax.grad(lambda x: jax.checkpoint(mapped)(x).sum())(numbers(8))


@case
def remat_inside(shard_map: Map) -> Any:
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    mapped = shard_map(inner, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def a_callback(shard_map: Map) -> Any:
    def fun(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x) + 1, shape, x)

    return jax.jit(shard_map(fun, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")))(
        numbers(8)
    )


@case
def an_effect(shard_map: Map) -> Any:
    seen: list[float] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x[0])), x)
        return x

    result = jax.jit(shard_map(fun, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")))(
        numbers(8)
    )
    jax.effects_barrier()
    return result, np.sort(np.array(seen))


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
def a_scan_and_a_cond(shard_map: Map) -> Any:
    def fun(x: Any) -> Any:
        total, parts = lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like(x[0]), x)
        return lax.cond(lax.axis_index("x") > 1, lambda: parts + total, lambda: parts)

    return shard_map(fun, mesh=make_mesh("4"), in_specs=(P("x"),), out_specs=P("x"))(numbers(8, 2))


@case
def around_it_a_scan(shard_map: Map) -> Any:
    mapped = shard_map(lambda x: 2 * x, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return lax.scan(lambda c, _: (mapped(c), c.sum()), numbers(8), length=3)


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


@case
def shapes_only(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: x.astype(int), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")
    )
    made = jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, 2), np.float32))
    return np.zeros(made.shape, made.dtype)


@case
def exported(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: lax.psum(x, "x"), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P()
    )
    x = jax.device_put(numbers(8), NamedSharding(make_mesh(), P("x")))
    return jax.jit(export.export(jax.jit(mapped))(x).call)(x)


@case
def in_double_precision(shard_map: Map) -> Any:
    with jax.enable_x64(True):
        mapped = shard_map(lambda x: x / 3, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
        result = mapped(np.arange(8.0))
        assert result.dtype == np.float64
        return np.asarray(result)


@case
def without_jit(shard_map: Map) -> Any:
    with jax.disable_jit():
        mapped = shard_map(
            lambda x: x + 1, mesh=make_mesh("2"), in_specs=(P("x"),), out_specs=P("x")
        )
        return mapped(numbers(4))


@contextlib.contextmanager
def debugging_nans() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


@case
def nans_are_found(shard_map: Map) -> Any:
    mapped = shard_map(jnp.log, mesh=make_mesh("2"), in_specs=(P("x"),), out_specs=P("x"))
    with debugging_nans():
        fine = mapped(numbers(4) + 1)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(mapped(-numbers(4)))
    return fine


@functools.cache
def expected(name: str) -> Any:
    return CASES[name](jax.shard_map)


def specs(tree: Any) -> list[Any]:
    """Where its arrays lie."""
    return [
        x.sharding.is_fully_replicated for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)
    ]


@pytest.mark.parametrize("name", CASES)
def test_as_with_jax(name: str) -> None:
    found = CASES[name](sm.shard_map)
    close(found, expected(name))
    assert specs(found) == specs(expected(name))


@pytest.mark.parametrize("name", CASES)
def test_with_a_state_beside(name: str) -> None:
    close(CASES[name](beside_a_state), expected(name))


@pytest.mark.parametrize("name", CASES)
def test_not_compiled(name: str) -> None:
    close(CASES[name](functools.partial(sm.shard_map, jit=False)), expected(name))


def close(found: Any, wanted: Any) -> None:
    assert structure(found) == structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-6)
