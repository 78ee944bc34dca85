"""`Module`: copies with changed fields, and the protocol that makes states."""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm


structure: Any = jax.tree.structure


class Norm(sm.Module):
    mean: sm.BatchState | None
    scale: jax.Array
    name: str = sm.field(static=True, default="norm")
    momentum: float = 0.9

    def __call__(self, x: jax.Array) -> Any:
        assert self.mean is not None
        return self.scale * (x - self.mean.value)

    def init_state(self, *, size: int, dtype: Any = np.float32) -> "Norm":
        return self.replace(mean=sm.BatchState(np.zeros(size, dtype), name=self.name))


class Counter(sm.Module):
    count: sm.State
    made: list[str] = sm.field(static=True, default_factory=list)

    def init_state(self, **kwargs: Any) -> "Counter":
        return self.replace(count=len(kwargs), made=[*self.made, *sorted(kwargs)])


class Plain(eqx.Module):
    """Somebody else's module that contains one of ours."""

    inner: Norm
    act: Any = operator.neg


class Net(sm.Module):
    norms: list[Norm]
    table: dict[str, Any]
    plain: Plain
    total: sm.State | None = None

    def init_state(self, *, size: int) -> "Net":
        # The inner modules already have their states.
        widths = [norm.mean.value.size for norm in self.norms if norm.mean is not None]
        return self.replace(total=sm.State(sum(widths) + size))


def make_norm(**fields: Any) -> Norm:
    return Norm(sm.BatchState(np.zeros(2), tag="t"), jnp.ones(2), **fields)


def make_net() -> Net:
    bare = Norm(None, jnp.ones(2))
    return Net([bare, bare.replace(name="other")], {"c": Counter(sm.State(0)), "n": 1}, Plain(bare))


def test_a_module_is_equinox_s() -> None:
    assert issubclass(sm.Module, eqx.Module)
    assert sm.field is eqx.field
    norm = make_norm()
    with pytest.raises(AttributeError):
        norm.momentum = 1.0
    np.testing.assert_array_equal(eqx.filter_jit(norm)(jnp.ones(2)), 1)


def test_replace_returns_a_copy() -> None:
    old = make_norm()
    new = old.replace(scale=jnp.zeros(2), momentum=0.5)
    assert type(new) is Norm
    assert (new.momentum, old.momentum) == (0.5, 0.9)
    np.testing.assert_array_equal(new.scale, 0)
    np.testing.assert_array_equal(old.scale, 1)
    assert new.mean is old.mean
    assert new.name == old.name
    same = old.replace()
    assert same is not old
    assert structure(same) == structure(old)


def test_replace_writes_states_with_set() -> None:
    old = make_norm()
    new = old.replace(mean=np.ones(2, np.float32))
    assert isinstance(new.mean, sm.BatchState)
    assert new.mean.tag == {"t"}
    np.testing.assert_array_equal(new.mean.value, 1)
    weak = old.replace(mean=jnp.zeros(2) + 1.0).mean
    assert weak is not None and weak.value.dtype == np.float32
    for bad in (np.ones(3, np.float32), np.ones(2, np.int32), {"a": 1.0}, None):
        with pytest.raises((sm.StructureError, TypeError)):
            old.replace(mean=bad)
    with pytest.raises(TypeError, match="array"):
        old.replace(mean="text")


def test_replace_checks_only_what_is_no_state_in_the_place_of_one() -> None:
    other = sm.State(np.zeros((3, 3)))
    assert make_norm().replace(mean=other).mean is other
    changed: Any = make_net().replace(norms=3, table=[sm.State(0)])
    assert changed.norms == 3
    # A list of states is not a State.
    assert changed.replace(table=1).table == 1


def test_replace_keeps_what_the_constructor_computed() -> None:
    class Made(sm.Module):
        double: int
        state: sm.State

        def __init__(self, half: int) -> None:
            self.double = 2 * half
            self.state = sm.State(half)

    new = Made(3).replace(state=5)
    assert (new.double, int(new.state.value)) == (6, 5)


def test_init_all_states() -> None:
    net = make_net()
    made = net.init_all_states(size=3, dtype=np.float16)
    for norm, name in (
        (made.norms[0], "norm"),
        (made.norms[1], "other"),
        (made.plain.inner, "norm"),
    ):
        assert norm.mean is not None
        assert (norm.mean.value.shape, norm.mean.value.dtype) == ((3,), np.float16)
        assert norm.mean.name == name
    # `**kwargs` takes all arguments, and a signature only those that it names. Outer modules come last.
    assert made.table["c"].made == ["dtype", "size"]
    assert int(made.table["c"].count.value) == 2
    assert made.total is not None and int(made.total.value) == 3 + 3 + 3
    assert (made.table["n"], made.plain.act) == (1, operator.neg)
    # The module that was given has not changed.
    assert net.total is None and net.norms[0].mean is None


def test_init_all_states_calls_each_module_once() -> None:
    calls = []

    class Named(sm.Module):
        name: str
        inner: Any = None

        def init_state(self) -> "Named":
            calls.append(self.name)
            return self

    Named("a", [Named("b", Named("c")), {"d": Named("d")}, (Named("e"), None)]).init_all_states()
    assert calls == ["c", "b", "d", "e", "a"]


def test_init_arguments_that_are_missing_are_refused() -> None:
    with pytest.raises(TypeError, match="size"):
        make_net().init_all_states()
