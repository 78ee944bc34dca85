"""Objects that can be copied, and objects that can be pickled."""

import operator
import pickle
from copy import copy as shallow
from copy import deepcopy
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import filters


MESH = jax.make_mesh((8,), ("x",))
X = jnp.arange(8.0)
structure: Any = jax.tree.structure


class Counter(sm.Module):
    count: sm.State | None = None
    which: Any = sm.field(static=True, default=filters.Not("still"))

    def init_state(self) -> "Counter":
        return self.replace(count=sm.ShortTermState(0))

    def update(self, x: Any) -> Any:
        assert self.count is not None
        return x + 1, self.replace(count=self.count.value + 1)

    @sm.shard_map(mesh=MESH, in_specs=(None, P("x")), out_specs=P("x"))
    def doubled(self, x: Any) -> Any:
        return 2 * x


@sm.shard_map(mesh=MESH, in_specs=(None, P("x")), out_specs=(P("x"), P()))
def step(count: Any, x: Any) -> Any:
    return x + count.value, count.set(count.value + 1)


def copies(value: Any) -> list[Any]:
    return [shallow(value), deepcopy(value), pickle.loads(pickle.dumps(value))]


def test_filters() -> None:
    for chosen in (
        filters.Any("a", sm.State),
        filters.All("a", ...),
        filters.Not(filters.Any(sm.ParamState, "a")),
        filters.OfType(sm.State),
        filters.WithTag("a"),
        filters.PathContains(0),
        filters.Everything(),
        filters.Nothing(),
    ):
        assert all(copy == chosen and hash(copy) == hash(chosen) for copy in copies(chosen))
    # A position is pickled as its function is.
    for copy in copies(filters.Where(operator.attrgetter("count"))):
        assert list(sm.states(Counter(sm.State(1)), copy)) == ["count"]


def test_models_and_maps_with_what_was_compiled() -> None:
    lanes = sm.Map(Counter(), 3, init_state_axes={0: filters.Any(...)}).init_all_states()
    _, after = lanes(jnp.arange(3))
    for copy in copies(after):
        assert structure(copy) == structure(after)
        out, twice = copy(jnp.arange(3))
        assert out.tolist() == [1, 2, 3]
        assert twice.module.count.value.tolist() == [2, 2, 2]


def test_a_mapped_function_of_a_module_is_pickled_by_its_name() -> None:
    assert all(copy is step for copy in copies(step))
    for copy in copies(Counter(sm.State(1)).doubled):
        assert copy(X).tolist() == (2 * X).tolist()


def mapped(devices: Any) -> list[Any]:
    """Mapped functions with the arguments of their calls."""
    count, lanes = sm.State(1.0, reduce="mean"), {"axis_name": "i", "devices": devices}
    static = sm.pmap2(lambda x, n: x + n, static_broadcasted_argnums=1, **lanes)
    specs = (None, P("x")), (P("x"), P())
    return [
        (sm.shard_map(lambda n, x: (x + n.value, n), MESH, *specs), (count, X)),
        (sm.shard_map(lambda n, x: (x + n.value, n), None, *specs), (count, X)),
        (sm.shard_map(lambda n, x: (x + n.value, n), MESH.abstract_mesh, *specs), (count, X)),
        (sm.pmap2(lambda x: x + 1, **lanes), (X,)),
        (sm.vmap2(lambda x: x + 1), (X,)),
        (static, (X, 1)),
    ]


def test_a_mapped_function_of_no_module_by_value() -> None:
    # The second function needs a mesh that is set.
    with jax.set_mesh(MESH):
        for fun, args in mapped(jax.devices()[::-1]):
            loaded = cloudpickle.loads(cloudpickle.dumps(fun))
            assert loaded is not fun
            for x, y in zip(*(jax.tree.leaves(f(*args)) for f in (loaded, fun)), strict=True):
                assert x.tolist() == y.tolist()
                assert x.sharding == y.sharding
            assert deepcopy(fun) is fun


def loss_fn(w: sm.ParamState, x: Any) -> Any:
    return (w.value * x).sum(), w


def test_what_takes_gradients_is_pickled_as_what_it_was_made_of() -> None:
    args = sm.ParamState(2.0), X
    for made in (sm.value_and_grad(loss_fn, wrt=sm.ParamState), sm.grad(loss_fn)):
        again = pickle.loads(pickle.dumps(made))
        assert again is not made and repr(again) == repr(made)
        assert shallow(made) is deepcopy(made) is made
        for x, y in zip(*(jax.tree.leaves(f(*args)) for f in (again, made)), strict=True):
            assert x.tolist() == y.tolist()


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [cloudpickle.dumps(mapped(jax.devices())[k][0]) for k in (0, 3)]
    few = jax.devices()[:6]
    monkeypatch.setattr(jax, "devices", lambda platform: few)
    for data in stored:
        with pytest.raises(sm.StatemeshError) as info:
            cloudpickle.loads(data)
        assert str(info.value) == (
            "This was pickled with cpu devices numbered [6, 7], but this process has [0, 1, 2, 3, 4, 5]. "
            "Make the mesh here and map the function over it; or leave the mesh out, and set it with "
            "jax.set_mesh(mesh)."
        )
