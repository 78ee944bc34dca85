"""The behaviour of JAX that statemesh relies on. A test fails here if JAX changes it."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._call import _program
from statemesh._call._program import LikeBefore, Refused
from statemesh._jax import _compat as compat
from statemesh._jax import _explicit as explicit
from statemesh._jax import _jaxprs as jaxprs
from statemesh._jax._dataflow import shard_map_equation
from tests.helpers import counted, make_mesh


def test_out_specs_are_read_after_the_function_was_traced() -> None:
    specs: list[Any] = []

    def body(x: jax.Array) -> list[jax.Array]:
        specs[:] = [P("x"), P()]
        return [x, jax.lax.psum(x, "x")]

    f = jax.shard_map(body, mesh=make_mesh(), in_specs=P("x"), out_specs=specs)
    x = np.ones(8, np.float32)
    for run, given in ((f, x), (jax.jit(f), x), (jax.vmap(f), x[None])):
        specs.clear()
        split, whole = run(jnp.asarray(given))
        assert split.shape[-1] == 8 and whole.shape[-1] == 1


def test_types_say_what_varies_but_not_that_a_cond_does_with_its_predicate() -> None:
    # If the last of it fails, `hidden_axes` and the warnings in the docs can go.
    def body(x: Any, y: Any) -> Any:
        chosen = jax.lax.cond(x[0] > 3, lambda y: y + 1, lambda y: y, y)
        for value in (x, x[0] > 3, x + y):
            assert compat.varying(value) == {"x"}
        for value in (y, jax.lax.psum(x, "x"), chosen):
            assert compat.varying(value) == frozenset()
        return chosen

    mapped = jax.shard_map(body, mesh=make_mesh(), in_specs=(P("x"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(8.0), jnp.zeros(1)), [0.0])


def test_each_argument_has_a_tracer_of_its_own() -> None:
    def body(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        assert x is not y
        return [x, y]

    mapped = jax.shard_map(body, mesh=make_mesh(), in_specs=P("x"), out_specs=P("x"))
    same = jnp.ones(8)
    for run in (mapped, jax.jit(mapped)):
        np.testing.assert_array_equal(run(same, same)[1], same)


def test_where_we_are() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: Any) -> Any:
        seen.append((compat.current_trace(()) is compat.TOP_LEVEL, compat.under_jit()))
        return x * 1.0

    look(1.0)
    jax.jit(look)(1.0)
    jax.grad(look)(1.0)
    jax.vmap(look)(jnp.ones(2))
    jax.make_jaxpr(jax.grad(look))(1.0)
    assert seen == [(True, False), (False, True), (False, False), (False, False), (False, True)]


def test_bound_axis_names() -> None:
    def look(x: Any) -> Any:
        assert compat.bound_axis_names() == ("lanes",)
        return x

    assert compat.bound_axis_names() == ()
    jax.vmap(look, axis_name="lanes")(jnp.ones(2))


def test_one_trace_serves_two_kinds_of_donation() -> None:
    fun, count = counted(lambda x, y: (x + 1, y))
    x = jnp.ones(3)
    jax.jit(fun).trace(x, x)
    jax.jit(fun, donate_argnums=0)(jnp.ones(3), x)
    assert count.times == 1


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_typed_by_explicit_axes(kind: Any) -> None:
    mesh = make_mesh("8", kind)
    x = jax.device_put(np.ones(8), NamedSharding(mesh, P("x")))
    assert explicit.is_explicitly_typed(x) == (kind == AxisType.Explicit)
    assert not explicit.is_explicitly_typed(np.ones(8))
    assert not explicit.has_explicit_axes(explicit.auto_twin(mesh))


def test_references_are_typed_as_what_they_refer_to() -> None:
    mesh, specs = make_mesh("8", AxisType.Explicit), list[Any]()
    with jax.set_mesh(mesh):
        ref = jax.new_ref(jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x"))))
        assert explicit.type_of(ref).sharding.spec == P("x")
        jax.jit(lambda ref: specs.append(explicit.type_of(ref).sharding.spec))(ref)
    assert specs == [P("x")]
    assert explicit.type_of("x") is None


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arguments_are_told_with_their_sharding_if_it_is_in_their_type(kind: Any) -> None:
    split = NamedSharding(make_mesh("8", kind), P("x"))
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=split))
    plain = jax.jit(lambda x: x).lower(np.ones(8, np.float32))
    shown = explicit.unless_explicit(lowered.args_info[0][0])
    assert (shown == plain.args_info[0][0]) == (kind == AxisType.Auto)


def test_what_an_eager_vmap_traces() -> None:
    found: list[bool] = []

    def look(x: Any) -> Any:
        found.append(compat.is_batched(x))
        return x

    x = jnp.ones((2, 3))
    jax.vmap(look)(x)
    jax.vmap(lambda x: jax.vjp(look, x)[1](x))(x)
    jax.vmap(lambda x: jax.jvp(look, (x,), (x,)))(x)
    jax.vjp(look, x)
    jax.jit(look)(x)
    look(x)
    assert found == [True, True, True, False, False, False]


def test_the_values_inside_tracers() -> None:
    concrete: list[Any] = []
    recorded: list[Any] = []

    def look(x: Any) -> Any:
        concrete.append(compat.concrete_value(x))
        return x

    x = jnp.ones((2, 3))
    jax.vmap(lambda row: jax.jvp(look, (row,), (row,)))(x)
    jax.vjp(look, x)
    look(x)
    assert all(value is x for value in concrete)

    def look_inside(x: Any) -> Any:
        y = jnp.sin(x)
        jax.vmap(lambda row: recorded.append((compat.recorded_value(row), y)))(y)
        return y

    jax.make_jaxpr(look_inside)(x)
    assert recorded[0][0] is recorded[0][1]


def test_a_call_of_a_custom_vmap_function_holds_its_rule() -> None:
    @jax.custom_batching.custom_vmap
    def call(x: Any) -> Any:
        return x + 1

    call.def_vmap(jaxprs.Rule(lambda size, batched, x: (x, True), joined_over=frozenset("x")))
    first, second = jax.make_jaxpr(lambda x: call(x) * 2)(1.0).eqns
    assert jaxprs.rule_of(first).joined_over == {"x"}
    assert not jaxprs.rule_of(second).joined_over


def test_control_flow_is_recognized() -> None:
    def body(c: Any, x: jax.Array) -> Any:
        c = jax.lax.cond(c > 0, lambda c: c + 1, lambda c: c, c)
        _, c = jax.lax.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] * c), (0, c))
        (c, _), each = jax.lax.scan(
            lambda v, y: ((v[0] + y * c, v[1] * 2), y * 2), (c, c), jnp.ones(3)
        )
        return jax.jit(jnp.sin)(c), each.sum()

    mapped = jax.shard_map(body, mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=P())
    traced = jax.jit(mapped).trace(jnp.float32(1), jnp.ones(8))
    equation = shard_map_equation(traced.jaxpr)
    assert equation is not None
    mapped_body = equation.params["jaxpr"]
    found = [jaxprs.control_flow(eqn) for eqn in mapped_body.eqns]
    kinds = {flow[0]: flow for flow in found if flow is not None}
    assert set(kinds) == {"cond", "while", "scan", "call"}
    assert len(kinds["cond"][1]) == 2
    _, cond, step, cond_consts, body_consts = kinds["while"]
    assert len(cond.invars) - cond_consts == len(step.invars) - body_consts == len(step.outvars)
    _, step, consts, carry = kinds["scan"]
    assert (consts, carry, len(step.invars), len(step.outvars)) == (1, 2, 4, 3)


DELETED = """
from statemesh.testing import set_devices
set_devices(8)
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
call = jax.jit(lambda x: x + 1)
jax.block_until_ready(call(x))
jax.block_until_ready(jax.jit(lambda x: x * 2, donate_argnums=0)(x))
try:
    call(x)
except (RuntimeError, ValueError) as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_deleted_buffers_are_refused_or_crash() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DELETED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode == 0) == compat.REFUSES_DELETED
    assert ("refused:" in ended.stdout) == compat.REFUSES_DELETED


def test_arguments_are_flattened_again_before_a_call_unlike_others() -> None:
    traces: list[None] = []

    @jax.jit
    def call(x: Any, like_before: Any) -> Any:
        traces.append(None)
        return x + 1

    x, any_call = jnp.ones(4), _program.ANY_CALL
    call(x, any_call)
    others = [jnp.ones(5), jnp.ones(4, jnp.int32), np.ones(4, np.float32), 1.0]
    others += [jax.device_put(x, jax.devices()[1]), jnp.asarray(1.0)]
    for seen in (False, True):
        if seen:
            # Here there is a trace already, and the call would run with it.
            jax.jit(lambda x: call(x, any_call)).trace(others[0])
        call(x, LikeBefore())
        for other in others:
            with pytest.raises(Refused):
                call(other, LikeBefore())
    assert len(traces) == 2
    with pytest.raises(Refused):
        jax.grad(lambda x: call(x, LikeBefore()).sum())(x)
    for other in others:
        assert float(call(other, any_call).sum()) == np.size(other) * 2


def test_a_traced_value_knows_what_made_it() -> None:
    found: list[Any] = []

    def body(x: Any) -> Any:
        y, z = jax.jit(lambda x: (x + 1, x))(x)
        found.extend([compat.made_by(x), compat.made_by(z)])
        assert compat.made_by(z)[0].invars[0] is x  # type: ignore[index]
        return y + z

    jax.make_jaxpr(body)(1.0)
    assert found[0] is None and found[1][1] == 1
    assert compat.made_by(jnp.ones(2)) is compat.made_by(1.0) is None


def test_what_a_root_expands_to_is_known() -> None:
    """The replay of `statemesh.testing` expands what newer versions of JAX expand when they compile."""
    root = lambda x: jax.lax.custom_root(
        lambda y: y - x, 0.0, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
    )
    (eqn,) = jax.make_jaxpr(root)(3.0).eqns
    if eqn.primitive.name == "custom_jvp_call":  # JAX 0.10
        return
    assert (eqn.primitive.name, list(eqn.params)) == ("call_hi_primitive", ["_prim"])
    values = [getattr(operand, "val", 3.0) for operand in eqn.invars]
    operands = jax.tree.unflatten(eqn.params["_prim"].in_tree, values)
    assert jax.tree.leaves(eqn.params["_prim"].expand(*operands)) == [3.0]


def test_the_type_of_a_lowered_argument_has_its_sharding() -> None:
    mesh = jax.make_mesh((8,), ("x",))
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.P("x")))
    (info,), _ = jax.jit(lambda x: x).lower(x).args_info
    kind = compat.argument_type(info)
    assert kind.shape == (8,) and kind.sharding.spec == jax.P("x")
    bare = compat.with_argument_type(info, kind.update(sharding=None))
    assert bare.shape == info.shape and bare.donated == info.donated
    assert compat.argument_type(bare).sharding.spec == jax.P(None)


def test_the_equations_that_are_being_recorded_are_known() -> None:
    names: list[list[str]] = []

    def recorded(x: Any) -> Any:
        y = jnp.sin(x)
        names.append([eqn.primitive.name for eqn in compat.recorded_equations()])
        return y * 2

    jax.make_jaxpr(recorded)(1.0)
    jax.make_jaxpr(jax.grad(recorded))(1.0)
    assert names[0] == ["sin"]
    assert "cos" in names[1] and "sin" in names[1]
    assert compat.recorded_equations() == []


def test_what_is_computed_while_tracing_fails_where_a_mesh_is_set() -> None:
    # If JAX computes it, `in_shards` can go.
    def body(x: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            three = jnp.asarray(np.array(3))
            assert three == 3
        return x * three

    f = jax.shard_map(body, in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(make_mesh()):
        x = jax.device_put(jnp.arange(8.0), P("x"))
        with pytest.raises(AssertionError):
            jax.jit(f)(x)
        for check_vma in (True, False):
            mapped = sm.shard_map(body, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
            np.testing.assert_array_equal(mapped(x), 3 * np.arange(8.0))
            np.testing.assert_array_equal(jax.jit(mapped)(x), 3 * np.arange(8.0))
            grads = jax.grad(lambda x, mapped=mapped: mapped(x).sum())(x)
            np.testing.assert_array_equal(grads, 3 * np.ones(8))
