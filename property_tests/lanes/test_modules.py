"""Random Modules pass through lanes again and again, and Maps of Maps draw random numbers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm

from ..base.arrays import Array
from ..base.settings import fewer
from ..plain.test_random import seeds
from .cases import COUNTS


pytestmark = pytest.mark.slow


# How the function makes the model that it returns, and what surrounds the call.
RETURNS = ("replace", "tree_at", "gradient", "jit", "checkpoint")
AROUND = ("eager", "jit", "scan", "unsharded")
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing in a Module.

    **Attributes:**

    - `kind`: a layer is an Equinox module with an array and a number. A state adds up what the lanes write.
    - `way`: whether an array is only `'read'`, written with another value in `'each'` lane, or with one value
        in all lanes (`'alike'`).
    """

    kind: str
    way: str
    shape: tuple[int, ...]


class Bag(sm.Module):
    """Any items, and a parameter to differentiate."""

    items: Any
    weight: Any = None


class Scaled(eqx.Module):
    """An Equinox module without States."""

    weight: Any
    rate: Any


@st.composite
def items(draw: st.DrawFn) -> Item:
    kind = draw(st.sampled_from(["array", "weak", "numpy", "number", "layer", "state"]))
    way = draw(st.sampled_from(["read", "each", "alike"])) if kind in ("array", "numpy") else "read"
    shape = () if kind in ("weak", "number") else draw(st.sampled_from([(), (2,), (2, 3)]))
    return Item(kind, way, shape)


@dataclasses.dataclass(frozen=True)
class FedBack:
    """A model and how it passes through lanes.

    **Attributes:**

    - `axis`: `out_axes`, one axis for the whole result.
    - `returns`, `around`: one of `RETURNS`, one of `AROUND`.
    """

    count: int
    items: tuple[Item, ...]
    axis: int
    returns: str
    around: str

    def start(self) -> list[Array]:
        """The value of each item, with an axis for the lanes where they differ."""
        each = [np.full(item.shape, 1 + k, np.float32) for k, item in enumerate(self.items)]
        return [
            np.stack([one + i for i in range(self.count)], self.axis) if item.way == "each" else one
            for item, one in zip(self.items, each, strict=True)
        ]

    def in_lane(self, item: Item, i: int, whole: Array) -> Array:
        return np.take(whole, i, self.axis) if item.way == "each" else whole

    def after(self, item: Item, old: Array, x: Array) -> Array:
        """The value after one call."""
        if item.kind == "state":
            return np.asarray(old + x.sum())
        if item.way == "read":
            return old
        added = x if item.way == "each" else np.ones(self.count)
        lanes = [self.in_lane(item, i, old) + added[i] for i in range(self.count)]
        return np.stack(lanes, self.axis).astype(np.float32)

    def model(self, world: Sequence[Array]) -> Bag:
        def one(item: Item, value: Array) -> Any:
            made: dict[str, Any] = {
                "number": lambda: float(value),
                "weak": lambda: jnp.asarray(float(value)),
                "numpy": lambda: value,
                "layer": lambda: Scaled(jnp.asarray(value), 1.0),
                "state": lambda: sm.State(value, reduce="sum"),
                "array": lambda: jnp.asarray(value),
            }
            return made[item.kind]()

        pairs = zip(self.items, world, strict=True)
        return Bag([one(*pair) for pair in pairs], sm.ParamState(1.0))


@st.composite
def fed_back(draw: st.DrawFn) -> FedBack:
    around = draw(st.sampled_from(AROUND))
    several = draw(st.lists(items(), min_size=1, max_size=3))
    # A value that is copied to every lane changes its shape, which the carry of a loop may not.
    several = [item for item in several if around != "scan" or item.way != "alike"]
    axis, returns = draw(st.sampled_from([0, -1])), draw(st.sampled_from(RETURNS))
    return FedBack(draw(st.sampled_from(COUNTS)), tuple(several), axis, returns, around)


def value_of(thing: Any) -> Any:
    if isinstance(thing, Scaled):
        return thing.weight * thing.rate
    return thing.value if sm.is_state(thing) else thing


def call(case: FedBack, model: Bag, plain: Any, x: Any) -> Any:
    def loss(model: Bag, x: Any) -> Any:
        total = sum((jnp.sum(value_of(thing)) for thing in model.items), jnp.float32(0))
        new = []
        for item, thing in zip(case.items, model.items, strict=True):
            assert jnp.shape(value_of(thing)) == item.shape
            if item.kind == "state":
                thing = thing.set(thing.value + x)
            elif item.way != "read":
                thing = thing + (x if item.way == "each" else 1)
            new.append(thing)
        if case.returns == "tree_at":
            return total * x * model.weight.value, eqx.tree_at(lambda m: m.items, model, new)
        return total * x * model.weight.value, model.replace(items=new)

    wrapped: dict[str, Any] = {"jit": eqx.filter_jit, "checkpoint": eqx.filter_checkpoint}
    if case.returns == "gradient":
        (out, model), _ = sm.value_and_grad(loss)(model, x)
    else:
        out, model = wrapped.get(case.returns, lambda fun: fun)(loss)(model, x)
    return out, model, plain


# Every example compiles several programs.
@fewer(1 / 3)
@given(case=fed_back(), transform=st.sampled_from(["vmap2", "pmap2"]))
def test_a_model_is_fed_back_for_ever(case: FedBack, transform: str) -> None:
    """It is what the loop over lanes gives, and never grows."""
    x = np.arange(1, case.count + 1, dtype=np.float32)
    plain = np.arange(2, dtype=np.float32)
    world = case.start()
    model = case.model(world)
    axes = Bag([case.axis if item.way == "each" else None for item in case.items])
    mapped = getattr(sm, transform)(
        functools.partial(call, case), in_axes=(axes, None, 0), out_axes=case.axis
    )
    if case.around == "scan":
        once = lambda model, _: (mapped(model, plain, x)[1], None)
        model, _ = jax.lax.scan(once, model, None, length=ROUNDS)
        for _ in range(ROUNDS):
            world = [case.after(*pair, x) for pair in zip(case.items, world, strict=True)]
        assert_items(case, model, world)
        return
    ways = {"jit": eqx.filter_jit(mapped), "unsharded": mapped.unsharded}
    for number in range(ROUNDS):
        before = model
        out, model, copies = ways.get(case.around, mapped)(before, plain, x)
        pairs = list(zip(case.items, world, strict=True))
        lanes = [sum(case.in_lane(o, i, w).sum() for o, w in pairs) for i in range(case.count)]
        np.testing.assert_array_equal(np.asarray(out), np.asarray(lanes, np.float32) * x)
        # Outside a Module the result is as in `jax.vmap`.
        np.testing.assert_array_equal(np.asarray(copies), np.stack([plain] * case.count, case.axis))
        world = [case.after(*pair, x) for pair in pairs]
        assert_items(case, model, world)
        for item, old, new in zip(case.items, before.items, model.items, strict=True):
            if item.way == "read" and number and case.around == "eager":
                # What was not written is the very array that went in.
                kept = item.kind not in ("layer", "state", "number")
                assert new is old if kept else True
                assert new.weight is old.weight if item.kind == "layer" else True
        things = list(model.items)
        for k, item in enumerate(case.items):
            if item.way == "alike":
                # It has lanes now, so that it starts again.
                world[k] = np.take(world[k], 0, case.axis)
                things[k] = jnp.asarray(world[k])
        model = model.replace(items=things)


def assert_items(case: FedBack, model: Bag, world: Sequence[Array]) -> None:
    for item, thing, want in zip(case.items, model.items, world, strict=True):
        np.testing.assert_array_equal(np.asarray(value_of(thing)), want)
        assert type(thing) is float or item.kind != "number" or case.around == "scan"
        assert item.kind != "layer" or thing.weight.shape == item.shape


class Noise(sm.Module):
    """Makes its stream in `init_state`, and draws one number in a call."""

    rng: Any = None
    seen: Any = None

    def init_state(self, seed: int) -> "Noise":
        rng = sm.RandomState(jax.random.key(seed))
        return self.replace(rng=rng, seen=sm.ShortTermState(0))

    def update(self, x: Any) -> Any:
        key, rng = self.rng.split()
        return jax.random.bits(key) ^ x, self.replace(rng=rng, seen=self.seen.value + 1)


def nested(sizes: Sequence[int], axes: Sequence[int], seed: int, outermost: str) -> Any:
    """Maps of Maps of `Noise`. The first size is that of the innermost."""
    made: Any = Noise()
    for i, (size, axis) in enumerate(zip(sizes, axes, strict=True)):
        behavior = outermost if i == len(sizes) - 1 else "vmap"
        made = sm.Map(made, size, init_state_axes={axis: ...}, behavior=behavior)
    return made.init_all_states(seed=seed)


def innermost(maps: Any, axes: Sequence[int]) -> tuple[Any, Noise]:
    """The keys of all lanes, with the axis of the outermost lanes first, and the module that has them."""
    while isinstance(maps, sm.Map):
        maps = maps.module
    keys = maps.rng.key
    # The outermost axis was inserted last, so that it is removed first.
    for i, axis in enumerate(axes[::-1]):
        keys = jnp.moveaxis(keys, axis if axis < 0 else axis + i, i)
    return keys, maps


@fewer(1 / 8)
@given(data=st.data(), seed=seeds, outermost=st.sampled_from(["vmap", "pmap"]))
def test_maps_in_maps_draw_their_own(data: st.DataObject, seed: int, outermost: str) -> None:
    """Each lane of each Map has its own stream, and draws what `Noise` draws with that key."""
    depth = data.draw(st.integers(2, 3), "depth")
    sizes = [data.draw(st.integers(1, 3), "size") for _ in range(depth)]
    axes = [data.draw(st.sampled_from([0, -1]), "axis") for _ in range(depth)]
    maps = nested(sizes, axes, seed, outermost)
    keys, _ = innermost(maps, axes)
    assert keys.shape == tuple(sizes[::-1])
    seen = [keys]
    separate = {at: sm.RandomState(keys[at]) for at in np.ndindex(keys.shape)}
    for number in range(2):
        out, maps = maps(np.zeros(keys.shape, np.uint32))
        left, module = innermost(maps, axes)
        np.testing.assert_array_equal(np.asarray(module.seen.value), number + 1)
        for at, rng in separate.items():
            key, separate[at] = rng.split()
            assert np.asarray(out)[at] == np.asarray(jax.random.bits(key))
            assert left[at] == separate[at].key
        seen.append(left)
    # No two lanes or calls share a key.
    every = np.stack([np.asarray(jax.random.key_data(one)).reshape(-1, 2) for one in seen])
    assert len(np.unique(every.reshape(-1, 2), axis=0)) == every.size // 2
    # With fewer lanes, the first lanes have the same keys. The first of all has the key that was given.
    few = [data.draw(st.integers(1, size), "fewer") for size in sizes]
    first, _ = innermost(nested(few, axes, seed, "vmap"), axes)
    assert (first == keys[tuple(slice(size) for size in few[::-1])]).all()
    assert keys[(0,) * depth] == jax.random.key(seed)
