"""No call keeps an object alive that was passed to it and that later calls cannot be compared with."""

import gc
import weakref
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def returned(thing: Any, x: Any) -> Any:
    return {"thing": thing, "y": x + 1}


def mapped(donate: Any) -> Any:
    return sm.shard_map(returned, make_mesh("4"), P(), P(), donate=donate)


@pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")
@pytest.mark.parametrize("donate", ["none", "states", "lanes"])
def test_a_returned_object_that_cannot_be_hashed_is_freed(donate: str) -> None:
    call = sm.vmap2(returned, in_axes=(None, 0)) if donate == "lanes" else mapped(donate)
    for _ in range(2):
        thing = Unhashable()
        result = call(thing, jnp.zeros(4))
        assert result["thing"] is thing
        alive = weakref.ref(thing)
        del thing, result
        gc.collect()
        assert alive() is None


@pytest.mark.filterwarnings("ignore::statemesh.RetracedWarning")
def test_a_stage_knows_the_objects_that_it_was_lowered_with() -> None:
    thing = Unhashable()
    lowered = mapped("none").lower(thing, jnp.zeros(4))
    assert lowered.out_info["thing"] is thing
    assert lowered.out_info["y"].shape == (4,)
    assert lowered.out_tree == jax.tree.structure(returned(thing, 0))
