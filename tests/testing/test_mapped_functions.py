"""Functions that are mapped already, on other meshes; and keyword arguments."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_equivalent, emulate
from tests.helpers import counted, make_mesh


X = np.arange(8, dtype=np.float32)


def step(total: sm.State, x: Any, *, y: Any = 0, train: bool = False) -> Any:
    assert isinstance(train, bool)
    return x * (2 if train else 1) + y, total.set(total.value + jax.lax.psum(x.sum(), "x"))


def total() -> sm.State:
    return sm.State(0.0)


SPECS: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), P())}


def test_a_mapped_function_on_another_mesh() -> None:
    body, count = counted(step)
    mapped = sm.shard_map(body, make_mesh("8"), **SPECS, donate="all")
    other = mapped.on_mesh(make_mesh("2"))
    old = total()
    for _ in range(2):
        out, new = other(old, X)
        assert len(out.sharding.device_set) == 2 and new.value == 28 and old.value == 0
    assert other.__name__ == mapped.__name__ and count.times == 1
    out, new = emulate(mapped.on_mesh(AbstractMesh((8,), ("x",))), total(), X)
    np.testing.assert_array_equal(out, X)
    assert new.value == 28
    with pytest.raises(sm.SpecError, match="'x'"):
        mapped.on_mesh(jax.make_mesh((2,), ("data",)))


@pytest.mark.parametrize("transform", [sm.pmap2, sm.vmap2])
def test_lanes_have_no_mesh(transform: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        assert_equivalent(transform(total), (), meshes=[{"x": 2}])
    assert str(raised.value) == (
        f"total.on_mesh: {transform.__name__} maps over lanes, and not over a mesh with named axes. Give its "
        "function to shard_map."
    )


def test_specs_are_given_once() -> None:
    mapped = sm.shard_map(step, make_mesh("2"), **SPECS)
    with pytest.raises(TypeError) as raised:
        assert_equivalent(mapped, (total(), X), meshes=[{"x": 2}], in_specs=P(), check_vma=False)
    assert str(raised.value) == (
        "step is mapped already, with specs of its own: leave out in_specs, check_vma, or give the function "
        "that it was made from."
    )
    with pytest.raises(TypeError) as raised:
        assert_equivalent(step, (total(), X), meshes=[{"x": 2}])
    assert str(raised.value) == (
        "step is not mapped yet: give in_specs and out_specs, or the function that shard_map returns."
    )


def test_a_mapped_function_is_checked_on_other_meshes() -> None:
    mapped = sm.shard_map(step, make_mesh("8"), **SPECS)
    checked = assert_equivalent(mapped, (total(), X), meshes=[{"x": 2}, {"x": 4}], gradients=False)
    assert checked.agreed[:2] == ("on mesh x=2", "on mesh x=4")
    wrong = sm.shard_map(lambda x: x - x.mean(), make_mesh("8"), P("x"), P("x"))
    with pytest.raises(AssertionError, match="off by"):
        assert_equivalent(wrong, (X,), meshes=[{"x": 2}], gradients=False)


@pytest.mark.slow
def test_a_mapped_function_is_checked_on_its_own_mesh() -> None:
    checked = assert_equivalent(sm.shard_map(step, make_mesh("2"), **SPECS), (total(), X))
    assert checked.agreed[0] == "on mesh x=2"
    with pytest.raises(TypeError, match="meshes is None of type NoneType"):
        assert_equivalent(sm.shard_map(step, **SPECS), (total(), X))


def test_keyword_arguments_reach_the_function() -> None:
    kwargs = {"train": True, "y": np.float32(3)}
    options: Any = {"meshes": [{"x": 2}], "steps": 1, **SPECS}
    checked = assert_equivalent(step, (total(), X), kwargs=kwargs, **options)
    assert "the gradient by kwargs['y']" in checked.differentiated

    def forgetful(total: sm.State, x: Any, *, y: Any) -> Any:
        return x + y * jax.lax.axis_index("x"), total.set(total.value + jax.lax.psum(x.sum(), "x"))

    with pytest.raises(AssertionError, match="off by 3"):
        assert_equivalent(
            forgetful, (total(), X), kwargs={"y": np.float32(3)}, gradients=False, **options
        )


@pytest.mark.slow
def test_a_mesh_without_devices_is_emulated() -> None:
    mesh = AbstractMesh((64,), ("x",))
    rows = np.arange(64, dtype=np.float32)
    options: Any = {"meshes": [mesh], "gradients": False, "steps": 1}
    checked = assert_equivalent(step, (total(), rows), **options, **SPECS)
    assert checked.agreed[0] == "on mesh x=64" and "inside jit on mesh x=64" not in checked.agreed
    wrong = lambda x: x - jax.lax.pmean(x.mean(), "x") * (1 + 1e-3 * (jax.lax.axis_size("x") > 1))
    with pytest.raises(AssertionError, match="On mesh x=64, compared with"):
        assert_equivalent(wrong, (rows,), **options, in_specs=P("x"), out_specs=P("x"))
