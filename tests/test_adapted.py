"""What a check is given, as it takes it."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import emulate
from statemesh.testing._equivalent._adapted import (
    WithKeywords,
    adapted,
    as_abstract,
    check_specs,
    is_abstract,
    is_mapped,
    remapped,
)

from .helpers import counted, make_mesh


X = np.arange(8, dtype=np.float32)


def step(total: sm.State, x: Any, *, y: Any = 0, train: bool = False) -> Any:
    assert isinstance(train, bool)
    return x * (2 if train else 1) + y, total.set(total.value + jax.lax.psum(x.sum(), "x"))


def total() -> sm.State:
    return sm.State(0.0)


SPECS: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), P())}


# Keyword arguments


def test_without_keywords_all_stays_as_it_is() -> None:
    args, specs = (total(), X), (None, P("x"))
    found = adapted(step, args, {}, specs)
    assert found.fun is step and found.args is args and found.in_specs is specs


@pytest.mark.parametrize("name", ["1", "4"])
def test_keywords_become_the_last_argument(name: str) -> None:
    kwargs = {"train": True, "y": np.float32(3)}
    found = adapted(step, (total(), X), kwargs, SPECS["in_specs"])
    mapped = sm.shard_map(found.fun, make_mesh(name), found.in_specs, SPECS["out_specs"])
    out, new = mapped(*found.args)
    want = sm.shard_map(step, make_mesh(name), **SPECS)(total(), X, **kwargs)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(out, 2 * X + 3)
    assert new.value == want[1].value == 28
    given = jax.tree.leaves(((total(), X), kwargs))
    assert all(
        a is b or a == b for a, b in zip(jax.tree.leaves(found.args)[2:], given[2:], strict=True)
    )


def test_specs_of_keywords() -> None:
    assert adapted(step, (1, 2), {"y": 3}, P("x")).in_specs == (P("x"), P("x"), None)
    assert adapted(step, (1, 2), {"y": 3}, None).in_specs == (None, None, None)
    assert adapted(step, (1, 2), {"y": 3}, [P(), P("x")]).in_specs == (P(), P("x"), None)


def test_one_function_with_keywords_compiles_once() -> None:
    assert WithKeywords(step) == WithKeywords(step) and hash(WithKeywords(step)) is not None
    assert WithKeywords(step) != WithKeywords(total)


def test_messages_name_arguments_as_the_function_does() -> None:
    found = adapted(step, (total(), X[:7]), {"train": True}, SPECS["in_specs"])
    mapped = sm.shard_map(found.fun, make_mesh("4"), found.in_specs, SPECS["out_specs"])
    with pytest.raises(sm.SpecError, match=r"'step': arrays do not fit .*\n  - x: float32"):
        mapped(*found.args)


# Functions that are mapped already


def test_mapped_function_on_another_mesh() -> None:
    body, count = counted(step)
    mapped = sm.shard_map(body, make_mesh("8"), **SPECS, donate="all")
    assert is_mapped(mapped) and not is_mapped(step)
    other = remapped(mapped, make_mesh("2"))
    old = total()
    for _ in range(2):
        out, new = other(old, X)
        assert len(out.sharding.device_set) == 2 and new.value == 28 and old.value == 0
    assert other.__name__ == mapped.__name__ and count.times == 1


def test_mapped_function_on_an_abstract_mesh_is_emulated() -> None:
    mapped = sm.shard_map(step, make_mesh("2"), **SPECS)
    out, new = emulate(remapped(mapped, as_abstract({"x": 8})), total(), X)
    np.testing.assert_array_equal(out, X)
    assert new.value == 28


def test_mapped_method_keeps_its_module() -> None:
    class Net(sm.Module):
        w: sm.State

        def __call__(self, x: Any) -> Any:
            return self.w.value * jax.lax.psum(x.sum(), "x")

        run = sm.shard_map(__call__, make_mesh("8"), (None, P("x")), P())

    assert remapped(Net(sm.State(2.0)).run, make_mesh("2"))(X) == 56


def test_mesh_without_the_axes_of_the_specs() -> None:
    mapped = sm.shard_map(step, make_mesh("2"), **SPECS)
    with pytest.raises(sm.SpecError, match="'x'"):
        remapped(mapped, jax.make_mesh((2,), ("data",)))


@pytest.mark.parametrize("transform", [sm.pmap2, sm.vmap2])
def test_lanes_have_no_mesh(transform: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        remapped(transform(total), make_mesh("2"))
    assert str(raised.value) == (
        f"total.on_mesh: {transform.__name__} maps over lanes, and not over a mesh with named axes. Give its "
        "function to shard_map."
    )


def test_specs_are_given_once() -> None:
    mapped = sm.shard_map(step, make_mesh("2"), **SPECS)
    check_specs(step, {"in_specs": None, "out_specs": P()})
    check_specs(mapped, {"in_specs": None, "check_vma": None})
    with pytest.raises(TypeError) as raised:
        check_specs(mapped, {"in_specs": P(), "out_specs": None, "check_vma": False})
    assert str(raised.value) == (
        "step is mapped already, with specs of its own: leave out in_specs, check_vma, or give the function "
        "that it was made from."
    )
    with pytest.raises(TypeError) as raised:
        check_specs(step, {})
    assert str(raised.value) == (
        "step is not mapped yet: give in_specs and out_specs, or the function that shard_map returns."
    )


# Meshes without devices


def test_abstract_meshes() -> None:
    mesh = AbstractMesh((64, 4), ("data", "model"))
    assert is_abstract(mesh) and not is_abstract(make_mesh("2")) and not is_abstract({"x": 2})
    assert as_abstract(mesh) is mesh
    assert as_abstract({"data": 64, "model": 4}) == mesh
    explicit = as_abstract(make_mesh("2", AxisType.Explicit))
    assert is_abstract(explicit) and explicit.axis_types == (AxisType.Explicit,)
    with pytest.raises(TypeError, match=r"^meshes: 3 is a int"):
        as_abstract(3)
