"""Wherever axis names are taken, each may be named once, in any order; one that is repeated is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import meshes


def inside(use: Callable[[Any, Any], Any]) -> Callable[[Mesh, Any], Any]:
    """Something that shards do with these names and their own part of an array."""

    def make(mesh: Mesh, names: Any) -> Any:
        step = lambda x: jnp.sum(jnp.asarray(use(names, x), jnp.float32))[None]
        rows = P(mesh.axis_names)
        call = sm.shard_map(step, mesh, (rows,), rows, check_vma=False)
        return jax.eval_shape(call, np.ones((8, 4), np.float32))

    return make


def gradient(names: Any, x: Any) -> Any:
    loss = lambda w, x: ((w * x).mean(), w)
    return sm.value_and_grad(loss, axis_name=names)(jnp.ones(4), x)[1]


def rows(names: Any, x: Any) -> Any:
    keys, _ = sm.RandomState(jax.random.key(0)).rows(len(x), names)
    return jax.vmap(jax.random.uniform)(keys)


PLACES: dict[str, Callable[[Mesh, Any], Any]] = {
    "axis_index": inside(lambda names, x: sm.axis_index(names)),
    "axis_size": inside(lambda names, x: sm.axis_size(names)),
    "all_gather": inside(lambda names, x: sm.all_gather(x, names)),
    "psum": inside(lambda names, x: sm.psum(x, names)),
    "pmean": inside(lambda names, x: sm.pmean(x, names)),
    "pmax": inside(lambda names, x: sm.pmax(x, names)),
    "rows": inside(rows),
    "value_and_grad": inside(gradient),
    "BatchNorm": inside(lambda names, x: sm.nn.BatchNorm(4, axis_name=names)(x)[0]),
    "fsdp": lambda mesh, names: sm.fsdp({"w": sm.ParamState(jnp.ones((8, 8)))}, mesh, names),
    "axis_names": lambda mesh, names: sm.shard_map(jnp.sin, mesh, P(), P(), axis_names=names),
}


@given(st.data(), meshes(), st.sampled_from(list(PLACES)))
def test_a_repeated_name_is_refused(data: st.DataObject, mesh: Mesh, place: str) -> None:
    names = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True), "names")
    PLACES[place](mesh, tuple(names))
    again = data.draw(st.sampled_from(names), "the repeated one")
    names.insert(data.draw(st.integers(0, len(names)), "where"), again)
    with pytest.raises(sm.StatemeshError):
        PLACES[place](mesh, tuple(names))
