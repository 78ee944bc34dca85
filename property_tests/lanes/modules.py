"""Modules with states, plain arrays and numbers, passed through lanes again and again, and Maps in Maps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import statemesh as sm

from ..base.arrays import Array
from .cases import COUNTS, Axis


# The kinds of items in a Module, and what a lane does with them.
KINDS = ("array", "weak", "numpy", "number", "layer", "state")
WAYS = ("read", "each", "alike")
# How the function makes the model that it returns, and what surrounds the call.
RETURNS = ("replace", "tree_at", "gradient", "jit", "checkpoint", "loop")
AROUND = ("eager", "jit", "scan", "unsharded")
SHAPES = ((), (2,), (2, 3))
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing in a Module.

    **Attributes:**

    - `kind`: one of `KINDS`. A layer is an Equinox module with an array and a number. A state adds up what
        the lanes write.
    - `way`: whether it is only `'read'`, written with another value in `'each'` lane, or with one value in
        all lanes (`'alike'`).
    """

    kind: str
    way: str
    shape: tuple[int, ...]


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


class Bag(sm.Module):
    """Any items, and a parameter to differentiate."""

    items: Any
    weight: Any = None


class Scaled(eqx.Module):
    """An Equinox module without States."""

    weight: Any
    rate: Any
    act: Any


@st.composite
def items(draw: st.DrawFn, ways: Sequence[str]) -> Item:
    kind = draw(st.sampled_from(KINDS))
    way = draw(st.sampled_from(ways)) if kind in ("array", "numpy") else "read"
    return Item(kind, way, () if kind in ("weak", "number") else draw(st.sampled_from(SHAPES)))


@st.composite
def fed_back(draw: st.DrawFn) -> FedBack:
    around = draw(st.sampled_from(AROUND))
    # A value that is copied to every lane changes its shape, which the carry of a loop may not.
    ways = [way for way in WAYS if around != "scan" or way != "alike"]
    several = draw(st.lists(items(ways), min_size=1, max_size=3))
    return FedBack(
        draw(st.sampled_from(COUNTS)),
        tuple(several),
        draw(st.sampled_from([0, -1])),
        draw(st.sampled_from(RETURNS)),
        around,
    )


def check_fed_back(case: FedBack, transform: str, start: int = 1) -> None:
    """Checks that a model passed back call after call is what the loop over lanes gives, and never grows."""
    x = np.arange(1, case.count + 1, dtype=np.float32)
    plain = np.arange(2, dtype=np.float32)
    world = [_whole(item, start + k, case) for k, item in enumerate(case.items)]
    model = _model(case, world)
    axes = Bag([case.axis if item.way == "each" else None for item in case.items])
    mapped = getattr(sm, transform)(
        functools.partial(_call, case), in_axes=(axes, None, 0), out_axes=case.axis
    )
    if case.around == "scan":
        once = lambda model, _: (mapped(model, plain, x)[1], None)
        model, _ = jax.lax.scan(once, model, None, length=ROUNDS)
        for _ in range(ROUNDS):
            world = _after_call(case, world, x)
        _check_items(case, model, world)
        return
    call = {"jit": eqx.filter_jit(mapped), "unsharded": mapped.unsharded}.get(case.around, mapped)
    for number in range(ROUNDS):
        before = model
        out, model, copies = call(before, plain, x)
        wanted = [
            sum(_of_lane(o, i, w, case) for o, w in _pairs(case, world)) for i in range(case.count)
        ]
        np.testing.assert_array_equal(np.asarray(out), np.asarray(wanted, np.float32) * x)
        # Outside a Module the result is as in `jax.vmap`.
        np.testing.assert_array_equal(np.asarray(copies), np.stack([plain] * case.count, case.axis))
        world = _after_call(case, world, x)
        _check_items(case, model, world)
        if number and case.around == "eager":
            _check_kept(case, before, model)
        things = list(model.items)
        for k, item in enumerate(case.items):
            if item.way == "alike":
                # It has lanes now, so that it starts again.
                world[k] = np.take(world[k], 0, case.axis)
                things[k] = jnp.asarray(world[k])
        model = model.replace(items=things)


def _pairs(case: FedBack, world: Sequence[Array]) -> list[tuple[Item, Array]]:
    return list(zip(case.items, world, strict=True))


def _whole(item: Item, value: int, case: FedBack) -> Array:
    """The item's value, with an axis for the lanes where they differ."""
    one = np.full(item.shape, value, np.float32)
    return np.stack([one + i for i in range(case.count)], case.axis) if item.way == "each" else one


def _of_lane(item: Item, i: int, whole: Array, case: FedBack) -> float:
    return float((np.take(whole, i, case.axis) if item.way == "each" else whole).sum())


def _after_call(case: FedBack, world: Sequence[Array], x: Array) -> list[Array]:
    return [_after(item, old, x, case) for item, old in _pairs(case, world)]


def _after(item: Item, old: Array, x: Array, case: FedBack) -> Array:
    """The value after one call."""
    if item.kind == "state":
        return np.asarray(old + x.sum())
    if item.way == "each":
        lanes = np.moveaxis(old, case.axis, 0)
        return np.stack([one + x[i] for i, one in enumerate(lanes)], case.axis)
    return np.stack([old + 1] * case.count, case.axis) if item.way == "alike" else old


def _model(case: FedBack, world: Sequence[Array]) -> Bag:
    def one(item: Item, value: Array) -> Any:
        match item.kind:
            case "number":
                return float(value)
            case "weak":
                return jnp.asarray(float(value))
            case "numpy":
                return value
            case "layer":
                # The carry of a loop has arrays only.
                return Scaled(jnp.asarray(value), 1.0, None if case.around == "scan" else jnp.abs)
            case "state":
                return sm.State(value, reduce="sum")
        return jnp.asarray(value)

    return Bag([one(*pair) for pair in _pairs(case, world)], sm.ParamState(1.0))


def _value(thing: Any) -> Any:
    if isinstance(thing, Scaled):
        return thing.weight * thing.rate
    return thing.value if sm.is_state(thing) else thing


def _call(case: FedBack, model: Bag, plain: Any, x: Any) -> Any:
    def loss(model: Bag, x: Any) -> Any:
        total = sum(jnp.sum(_value(thing)) for thing in model.items)
        new = []
        for item, thing in zip(case.items, model.items, strict=True):
            assert jnp.shape(_value(thing)) == item.shape
            if item.kind == "state":
                thing = thing.set(thing.value + x)
            elif item.way != "read":
                thing = thing + (x if item.way == "each" else 1)
            new.append(thing)
        if case.returns == "tree_at":
            return total * x * model.weight.value, eqx.tree_at(lambda m: m.items, model, new)
        return total * x * model.weight.value, model.replace(items=new)

    if case.returns == "gradient":
        (out, model), _ = sm.value_and_grad(loss)(model, x)
    else:
        out, model = _around(case.returns, loss)(model, x)
    return out, model, plain


def _around(what: str, loss: Any) -> Any:
    """`loss` inside a transformation, which also returns the model."""

    def loop(model: Bag, x: Any) -> Any:
        arrays, rest = eqx.partition(model, eqx.is_array)

        def once(arrays: Any, _: None) -> Any:
            out, new = loss(eqx.combine(arrays, rest), x)
            return eqx.filter(new, eqx.is_array), out

        arrays, (out,) = jax.lax.scan(once, arrays, None, length=1)
        return out, eqx.combine(arrays, rest)

    wrapped: dict[str, Any] = {"jit": eqx.filter_jit, "checkpoint": eqx.filter_checkpoint}
    return loop if what == "loop" else wrapped.get(what, lambda fun: fun)(loss)


def _check_items(case: FedBack, model: Bag, world: Sequence[Array]) -> None:
    for item, thing, want in zip(case.items, model.items, world, strict=True):
        np.testing.assert_array_equal(np.asarray(_value(thing)), want)
        if item.kind == "number" and case.around != "scan":
            assert type(thing) is float
        if item.kind == "layer":
            assert thing.weight.shape == item.shape and jnp.shape(thing.rate) == ()


def _check_kept(case: FedBack, before: Bag, after: Bag) -> None:
    """What was not written is the very array that went in."""
    for item, old, new in zip(case.items, before.items, after.items, strict=True):
        if item.way == "read" and item.kind in ("array", "weak", "numpy"):
            assert new is old
        if item.kind == "layer":
            assert new.weight is old.weight


class Noise(sm.Module):
    """Makes its stream in `init_state`, and draws one number in a call."""

    rng: Any = None
    seen: Any = None

    def init_state(self, seed: int) -> "Noise":
        rng = sm.RandomState(jax.random.key(seed))
        return self.replace(rng=rng, seen=sm.ShortTermState(0))

    def update(self, x: Any) -> Any:
        key, rng = self.rng.split()
        drawn = jax.random.bits(key) ^ x
        return drawn, self.replace(rng=rng, seen=self.seen.value + 1)


def nested_noise(sizes: Sequence[int], axes: Sequence[Axis], seed: int, outermost: str) -> Any:
    """Maps of Maps of `Noise`. The first size is that of the innermost."""
    made: Any = Noise()
    for i, (size, axis) in enumerate(zip(sizes, axes, strict=True)):
        behavior = outermost if i == len(sizes) - 1 else "vmap"
        made = sm.Map(made, size, init_state_axes={axis: ...}, behavior=behavior)
    return made.init_all_states(seed=seed)


def check_nested_maps(
    sizes: Sequence[int], fewer: Sequence[int], axes: Sequence[Axis], seed: int, outermost: str
) -> None:
    """Checks that each lane of each Map has its own stream, and draws what `Noise` draws with that key."""
    maps = nested_noise(sizes, axes, seed, outermost)
    keys = _lanes_first(_innermost(maps).rng.key, axes)
    assert keys.shape == tuple(sizes[::-1])
    x = np.zeros(keys.shape, np.uint32)
    seen: list[Array] = [_bits(keys)]
    separate = {at: sm.RandomState(keys[at]) for at in np.ndindex(keys.shape)}
    for number in range(2):
        out, maps = maps(x)
        for at, rng in separate.items():
            key, separate[at] = rng.split()
            assert np.asarray(out)[at] == np.asarray(jax.random.bits(key))
        module = _innermost(maps)
        left = _lanes_first(module.rng.key, axes)
        seen.append(_bits(left))
        np.testing.assert_array_equal(np.asarray(module.seen.value), number + 1)
        for at, rng in separate.items():
            assert left[at] == rng.key
    # No two lanes or calls share a key.
    every = np.concatenate(seen)
    assert len(np.unique(every, axis=0)) == len(every)
    # With fewer lanes, the first lanes have the same keys. The first of all has the key that was given.
    first = _innermost(nested_noise(fewer, axes, seed, "vmap")).rng.key
    same = keys[tuple(slice(size) for size in fewer[::-1])]
    np.testing.assert_array_equal(_bits(_lanes_first(first, axes)), _bits(same))
    assert keys[(0,) * len(sizes)] == jax.random.key(seed)


def _innermost(maps: Any) -> Any:
    while isinstance(maps, sm.Map):
        maps = maps.module
    return maps


def _bits(keys: Any) -> Array:
    data = np.asarray(jax.random.key_data(keys))
    return data.reshape(-1, data.shape[-1])


def _lanes_first(keys: Any, axes: Sequence[Axis]) -> Any:
    """Keys with the axis of the outermost lanes first."""
    # The outermost axis was inserted last, so that it is removed first.
    for i, axis in enumerate(axes[::-1]):
        assert axis is not None
        keys = jnp.moveaxis(keys, axis if axis < 0 else axis + i, i)
    return keys
