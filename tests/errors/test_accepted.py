"""What stands next to a mistake and is right: it is accepted, and does what it says."""

import copy
import functools
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import testing
from tests.helpers import jnp, make_mesh

from . import gradients, layers, states
from .states import KEY


pytestmark = pytest.mark.usefixtures("as_users_run_it")
on_each_kind = pytest.mark.usefixtures("each_kind")

X = np.ones(8, np.float32)
ROWS = np.arange(8, dtype=np.float32)


def same(x: Any) -> Any:
    return x


def double(x: Any) -> Any:
    return 2 * x


def both(x: Any) -> Any:
    return 2 * x["a"]


def sharded(fun: Any = same, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(), P("x"), P("x"), **options)


def test_positions_in_every_form() -> None:
    for positions in (0, {0}, [-1], np.int32(0), np.array([0]), range(1)):
        mapped: Any = sm.pmap2(same, static_broadcasted_argnums=positions, axis_size=2)
        np.testing.assert_array_equal(mapped(3), [3, 3])


def test_any_object_names_the_lanes_of_vmap2_and_there_may_be_none() -> None:
    name = object()
    mapped = sm.vmap2(lambda x: jax.lax.psum(x, name), axis_name=name)
    np.testing.assert_array_equal(mapped(np.ones(3)), [3, 3, 3])
    assert sm.vmap2(lambda x: x.sum())(jnp.ones((0, 2))).shape == (0,)


def test_numbers_of_numpy_are_numbers() -> None:
    two: Any = np.int64(2)
    rng = sm.RandomState(KEY)
    assert rng.rows(two)[0].shape == rng.split(two)[0].shape == (2,)
    assert sm.nn.BatchNorm(np.int32(3)).running.value["mean"].shape == (3,)

    def scanned(**options: Any) -> Any:
        return sm.scan(lambda c, x: (c, 1), sm.State(0.0), **options)[1]

    assert [len(scanned(length=n)) for n in (0, np.int64(3))] == [0, 3]
    for unroll in (1, 3, True, False):
        assert len(scanned(xs=X, unroll=unroll)) == 8
    flag: Any = np.True_
    assert np.asarray(sharded(double, check_vma=flag, jit=flag)(X)).tolist() == [2] * 8


def test_settings_at_the_edge() -> None:
    momenta = [("BatchNorm.momentum", share) for share in (0, 1)]
    rest = ("BatchNorm.eps", 1), ("Dropout.rate", 0), ("EMA.decay", 0.5)
    for setting, value in (*momenta, *rest):
        layers.made(setting, value)


@pytest.mark.parametrize("run", [lambda fun: fun, jax.jit])
def test_a_negative_weight_of_an_array_is_not_ignored(run: Callable[..., Any]) -> None:
    def step(weight: Any) -> Any:
        _, average = sm.nn.Average(0.0)(1.0, weight=2)
        return average(4.0, weight=weight)[0]

    assert np.isnan(run(step)(jnp.float32(-1)))
    assert run(step)(jnp.float32(1)) == 2


def test_states_of_modules_that_are_nested_deeply() -> None:
    class Counter(sm.Module):
        count: Any = None
        inner: Any = None

        def init_state(self) -> "Counter":
            return self.replace(count=sm.State(0.0))

    model = Counter()
    for _ in range(300):
        model = Counter(inner=model)
    assert len(jax.tree.leaves(model.init_all_states())) == 301


def test_a_packed_model_is_copied_and_shown() -> None:
    packed = states.packed()
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        np.testing.assert_array_equal(again.unpack()["a"].value, np.ones(4))
    repr(jax.tree.map(lambda x: x[:2], packed))


def test_no_number_of_devices_leaves_the_environment_as_it_is() -> None:
    before = os.environ.get("XLA_FLAGS")
    for count in (0, -1, True, "8", 64):
        with pytest.raises((TypeError, sm.StatemeshError)):
            testing.set_devices(count)
        assert os.environ.get("XLA_FLAGS") == before


def test_a_path_that_keeps_its_values() -> None:
    options: Any = {"meshes": [{"x": 2}], "in_specs": P("x"), "out_specs": P("x")}
    testing.assert_equivalent(both, ({"a": X, "b": X},), keep="args[0]['a']", **options)


# Specs


@on_each_kind
def test_specs_that_place_something_or_say_what_holds_anyway() -> None:
    mesh, split = make_mesh(), P("x")
    state = sm.State(np.ones(8), reduce="sum")
    model = {"mean": sm.BatchState(np.zeros(8), reduce="mean"), "w": [sm.ParamState(np.ones(8))]}

    def mapped(in_specs: Any, out_specs: Any = None, fun: Any = None, **options: Any) -> Any:
        return sm.shard_map(fun or (lambda *args: None), mesh, in_specs, out_specs, **options)

    mapped(split)(state, X)
    mapped(split)({"state": state, "x": X})
    mapped((P(), split))(model, X)
    mapped((split, None), state_in_specs=split)(model, None)
    mapped((split,))(sm.State(np.ones(8), spec=split, reduce="sum"))
    mapped((split, None))({"name": "static"}, None)
    sm.place({"state": state, "x": X}, mesh, split)
    sm.place(model, mesh, split, state_specs=split)
    sides = (None, split)
    mapped(sides, split, lambda state, x: (x, state))(state, X)
    mapped(sides, (split, split), lambda s, x: (x, {"x": x, "state": s}))(state, X)
    own = sm.State(ROWS, spec=split)
    mapped(sides, (split, split), lambda own, x: (x, own.set(own.value + 1)))(own, X)
    mapped(sides, (split, None), lambda state, x: (x, state))(state, X)
    for what in ("state_in_specs", "state_out_specs"):
        for spec in (P(), sm.PerShard("x")):
            sharded(**{what: {sm.RandomState: spec}})


@on_each_kind
def test_a_state_whose_structure_is_replaced_leaves_the_way_it_entered() -> None:
    def written(change: Callable[[Any], Any], state: sm.State, **options: Any) -> Any:
        step = lambda state, x: state.replace(value=change(state.value + x.sum()))
        return sm.shard_map(step, make_mesh(), (None, P("x")), None, **options)(state, X)

    new = written(lambda value: (value, {"b": 2 * value}), sm.State(1.0, reduce="mean"))
    assert jax.tree.map(float, new.value) == (2.0, {"b": 4.0})
    state = sm.State(np.arange(16.0, dtype=np.float32))
    new = written(lambda value: (value, value), state, state_in_specs=P("x"), donate="states")
    for x in new.value:
        np.testing.assert_array_equal(x, np.arange(16) + 1)
        assert x.sharding.spec == P("x")
    pair = lambda s, x: s.replace(value=(s.value, x))
    step = sm.vmap2(pair, in_axes=(None, 0), state_in_axes=...)
    np.testing.assert_array_equal(step(sm.State(X), 3 * X).value, [X, 3 * X])


@on_each_kind
def test_a_model_that_was_gathered_is_not_laid_out_as_its_parts() -> None:
    model = {"w": sm.ParamState(jnp.ones((16, 64)), spec=P("x"))}
    gather = sm.shard_map(lambda model: sm.gather(model, "x"), make_mesh("4"), (None,), P())
    whole: Any = gather(model)
    assert whole["w"].value.shape == (16, 64) and whole["w"].spec is None


# Names of axes: one, a tuple of one, a tuple of several


@pytest.mark.slow
@on_each_kind
def test_a_tuple_names_one_axis_or_several() -> None:
    """Several are named major to minor, as in the spec that splits the rows."""

    def run(names: Any, mesh: str, spec: Any, but: tuple[str, ...] = ()) -> Any:
        used = {name: use for name, use in layers.NAMED.items() if name not in but}

        def fun(x: Any) -> Any:
            results = {name: use(names, x) for name, use in used.items()}
            return results | {"rows": jax.random.uniform(results["rows"])}

        return layers.on_shards(fun, make_mesh(mesh), P(spec))

    alone = run("x", "8", "x")
    jax.tree.map(np.testing.assert_array_equal, alone, run(("x",), "8", "x"))
    both = run(("x", "y"), "4x2", ("x", "y"), ("gather", "KVCache"))
    for name, result in both.items():
        np.testing.assert_allclose(alone[name], result, rtol=1e-6, atol=1e-7, err_msg=name)


# Gradients


@on_each_kind
@pytest.mark.parametrize(("axis_name", "check_vma"), [("x", False), (("x", "y"), True)])
def test_parameters_gathered_have_the_gradient_of_one_loss(axis_name: Any, check_vma: bool) -> None:
    # Of the mean of 16 squares, 4 of them of each parameter.
    assert gradients.of_gathered(axis_name, check_vma).tolist() == [0.5] * 4


@on_each_kind
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_that_exchange_nothing_have_losses_of_their_own(check_vma: bool) -> None:
    def own(model: Any, x: Any) -> Any:
        return jnp.sum(x) * jnp.sum(model["w"].value ** 2), model

    def step(model: Any, x: Any) -> Any:
        return sm.grad(own)(model, x)[0]["w"].value

    model = {"w": sm.ParamState(jnp.arange(4.0), spec=P("x"))}
    mapped = sm.shard_map(step, make_mesh("2"), (P(), P()), P("x"), check_vma=check_vma)
    assert mapped(model, jnp.ones(3)).tolist() == [0, 6, 12, 18]


# Mapped functions


@on_each_kind
@pytest.mark.parametrize("make", [sharded, sm.pmap2, sm.vmap2])
def test_a_mapping_does_not_change(make: Any) -> None:
    mapped: Any = make(double)
    transform = sm.shard_map if make is sharded else make
    options = [*inspect.signature(transform).parameters, "lower", "explain", "place", "on_mesh"]
    for name in options:
        with pytest.raises(AttributeError, match=rf"double\.{name} cannot be set"):
            setattr(mapped, name, None)
    # Like a function it takes attributes, and what `functools.wraps` sets.
    mapped.note = "mine"
    functools.update_wrapper(mapped, both)
    assert (mapped.note, mapped.__name__) == ("mine", "both")
    np.testing.assert_array_equal(mapped(X), 2 * X)
