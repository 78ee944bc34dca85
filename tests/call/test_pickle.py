"""Objects that can be copied, and objects that can be pickled."""

import copy
import operator
import pickle
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import filters
from statemesh._base._compat import tree_util


MESH = Mesh(np.array(jax.devices()), ("x",))
X = jnp.arange(8.0)


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


def both(value: Any) -> list[Any]:
    return [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize(
    "one",
    [
        filters.Any("a", sm.State),
        filters.All("a", ...),
        filters.Not(filters.Any(sm.ParamState, "a")),
        filters.OfType(sm.State),
        filters.WithTag("a"),
        filters.PathContains(0),
        filters.Everything(),
        filters.Nothing(),
    ],
    ids=repr,
)
def test_filters(one: Any) -> None:
    assert all(found == one and hash(found) == hash(one) for found in both(one))


def test_a_position_is_pickled_as_its_function_is() -> None:
    one = filters.Where(operator.attrgetter("count"))
    for found in both(one):
        assert list(sm.states(Counter(sm.State(1)), found)) == ["count"]


def test_models_and_maps_with_what_was_compiled() -> None:
    lanes = sm.Map(Counter(), 3, init_state_axes={0: filters.Any(...)}).init_all_states()
    _, after = lanes(jnp.arange(3))
    for found in both(after):
        assert tree_util.tree_structure(found) == tree_util.tree_structure(after)
        out, found = found(jnp.arange(3))
        assert out.tolist() == [1, 2, 3]
        assert found.module.count.value.tolist() == [2, 2, 2]


def test_a_mapped_function_of_a_module_is_pickled_by_its_name() -> None:
    assert all(found is step for found in both(step))
    method = Counter(sm.State(1)).doubled
    for found in both(method):
        assert found(X).tolist() == (2 * X).tolist()


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
            want = jax.tree.leaves(fun(*args))
            found = cloudpickle.loads(cloudpickle.dumps(fun))
            assert found is not fun
            for one, other in zip(jax.tree.leaves(found(*args)), want, strict=True):
                assert one.tolist() == other.tolist()
                assert one.sharding == other.sharding
            assert copy.deepcopy(fun) is fun


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
