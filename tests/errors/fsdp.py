"""Every mistake with split parameters that is refused, with its exact text."""

from collections.abc import Callable

from typing import Any

import equinox as eqx

import pytest

from jax.sharding import PartitionSpec as P

import statemesh as sm

from tests.helpers import Making, assert_says, jnp, make_mesh, mistakes_in

from tests.test_fsdp import KEY, only_states, values

MISTAKES: list[Any] = []

mistake = mistakes_in(MISTAKES)


def inside(fun: Callable[[Any], Any], model: Any, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (None,), P(), **options)(model)


def whole() -> Any:
    model = {"w": sm.ParamState(values(8)), "b": values(4)}
    return inside(lambda model: sm.gather(model, "x"), model)


def twice() -> Any:
    model = [sm.ParamState(values(8), spec=P("x"))]
    return inside(lambda model: sm.gather(sm.gather(model, "x"), "x"), model)


def replicated() -> Any:
    model = [sm.ParamState(values(8), spec=P("x"))]
    return inside(lambda model: sm.gather(model, "x"), model, state_in_specs=P())


def major() -> Any:
    model = [sm.ParamState(values(8), spec=P(("x", "y")))]
    return sm.shard_map(lambda m: sm.gather(m, "x"), make_mesh("4x2"), (None,), P())(model)


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_lanes_have_no_parts(transform: Any) -> None:
    model = sm.fsdp([values(8)], make_mesh("4"), "x", min_size=0)
    fun = lambda model, x: sm.gather(model, "x")[0] * x
    mapped = transform(fun, axis_name="x", in_axes=(None, 0))
    text = (
        "gather: 'x' is an axis of lanes, and specs split parameters over mesh axes only. Call the function "
        "by `sm.shard_map` on a mesh with an axis 'x'."
    )
    assert_says(lambda: mapped(model, values(4)), sm.StatemeshError, text)


def unbound() -> Any:
    model = sm.fsdp([values(8)], make_mesh("4"), "x", min_size=0)
    return inside(lambda model: sm.gather(model, "y"), model)


def not_gathered() -> Any:
    layer = sm.fsdp(eqx.nn.Linear(8, 4, key=KEY), make_mesh("4"), "x", min_size=0)
    return inside(lambda layer: layer(jnp.ones(8)), layer)


def other_structure() -> Any:
    model = sm.fsdp({"w": values(8), "b": values(4)}, make_mesh("4"), "x", min_size=0)
    return sm.scatter({"w": values(8)}, model)


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes(make: Making, error: type[Exception], text: str) -> None:
    assert_says(make, error, text)


@pytest.mark.parametrize(("count", "more"), [(1, ""), (10, ""), (80, "  - 70 more\n")])
def test_a_forgotten_gather_is_named(count: int, more: str) -> None:
    names = [f"w{k:02}" for k in range(count)]
    model = {name: sm.ParamState(values(8, 8)) for name in names}
    # Parameters that stay whole are not at fault.
    model |= {f"z{k:02}": sm.ParamState(values(8)) for k in range(count)}
    model = sm.fsdp(model, make_mesh("4"), "x", min_size=16)
    lines = "".join(
        f"  - model['{name}'] is float32[2,8], a part by its spec P('x', None)\n"
        for name in names[:10]
    )
    text = (
        "\n\nHint: each shard holds a part of these parameters:\n"
        f"{lines}{more}"
        "Make them whole before they are used, as parameters that fsdp has split are: "
        "`model = sm.gather(model, 'x')`."
    )

    def loss(model: Any) -> Any:
        for name in names:
            jnp.ones((4, 8)) @ model[name].value

    with pytest.raises(TypeError) as raised:
        inside(loss, model)
    assert str(raised.value).endswith(text)


def test_a_cast_model_that_is_returned_whole() -> None:
    model = {"w": sm.ParamState(jnp.ones((16, 64)), spec=P("x"))}

    def loss(model: Any, x: Any) -> Any:
        whole = sm.gather(model, "x")
        return jnp.square(x @ whole["w"].value).mean(), whole

    def step(model: Any, x: Any) -> Any:
        model = {"w": model["w"].replace(value=model["w"].value.astype(jnp.bfloat16))}
        return sm.value_and_grad(loss, axis_name="x")(model, x)[0]

    text = (
        "step: shards wrote different values to states that keep one copy:\n"
        "  - step(...)[1]['w']: ParamState(bfloat16[16,64]) varies over 'x' but leaves with P(), which keeps "
        "one copy\n"
        "Mend it in one of three ways:\n"
        "  1. reduce the value yourself: state.set(jax.lax.pmean(value, 'x'));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        "  3. keep one value per shard: State(value, spec=sm.PerShard('x')), or a spec that names 'x', as in "
        "state_out_specs.\n"
        "A parameter that `gather` made whole goes back to its parts, in its own dtype: return "
        "`sm.scatter(whole, model)`."
    )
    mapped = sm.shard_map(step, make_mesh("4"), (None, P("x")), P())
    assert_says(lambda: mapped(model, jnp.ones((8, 16))), sm.DivergedStateError, text)


@pytest.mark.parametrize(("count", "more"), [(10, None), (80, "  - 70 more")])
def test_many_states_that_differ(count: int, more: str | None) -> None:
    model = {f"s{k:02}": sm.State(0.0) for k in range(count)}

    def step(model: Any, x: Any) -> Any:
        return {name: state.set(x.sum()) for name, state in model.items()}

    on_mesh: Any = sm.shard_map(step, make_mesh("4"), (None, P("x")), P())
    for mapped in (on_mesh, sm.vmap2(step, in_axes=(None, 0))):
        with pytest.raises(sm.StatemeshError) as raised:
            mapped(model, jnp.arange(4.0))
        _, *items = [
            line for line in str(raised.value).splitlines() if "  - " in line or ":" in line
        ]
        listed = [line for line in items if line.startswith("  - ")]
        assert len([line for line in listed if "State(float32[])" in line]) == 10
        assert (listed[-1] == more) if more else "s09" in listed[-1]


def test_a_model_that_was_gathered_is_not_laid_out_as_its_parts() -> None:
    model = {"w": sm.ParamState(jnp.ones((16, 64)), spec=P("x"))}
    whole: Any = inside(lambda model: sm.gather(model, "x"), model)
    assert whole["w"].value.shape == (16, 64) and whole["w"].spec is None


MISTAKES: Mistakes = {
    "unknown axis": lambda: sm.fsdp(only_states(), make_mesh("4x2"), "data"),
    "negative size": lambda: sm.fsdp(only_states(), make_mesh("4"), "x", min_size=-1),
    "no parameters": lambda: sm.fsdp({"n": sm.State(1.0)}, make_mesh("4"), "x"),
    "packed": lambda: sm.fsdp(sm.pack(only_states(), make_mesh("4")), make_mesh("4"), "x"),
    "whole": whole,
    "twice": twice,
    "replicated": replicated,
    "major": major,
    "unbound": unbound,
    "not gathered": not_gathered,
    "other structure": other_structure,
}
