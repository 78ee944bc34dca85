"""The results of a random program: its outputs, and the states that it writes."""

import dataclasses
from collections.abc import Hashable

from hypothesis import strategies as st

from .maker import ELEMENTWISE, Maker
from .source import spec_text
from .values import FLOAT, INT, KEPT, Slot, Value


def outputs(maker: Maker) -> tuple[str, str]:
    """The expression of the outputs that are returned before the model, and their out specs."""
    found = [_output(maker) for _ in range(maker.draw(st.integers(1, 2)))]
    texts, specs = [text for text, _ in found], [spec for _, spec in found]
    if len(found) == 1:
        return texts[0], specs[0]
    return f"({', '.join(texts)})", f"({', '.join(specs)})"


def _output(maker: Maker) -> tuple[str, str]:
    value = maker.pool[-1] if not maker.flip() else maker.pick()
    if maker.portable:
        return value.text, maker.layout.spec(value.dims)
    text = value.text if value.dims or not value.varies else f"{value.text}[None]"
    entries: list[list[Hashable]] = [[] for _ in range(len(value.dims) or 1)]
    for name in maker.draw(st.permutations(maker.layout.ordered(value.varies))):
        maker.among(entries).append(name)
    return text, spec_text(tuple(names) for names in entries)


def written(maker: Maker) -> None:
    """Write most of the states of the model. States that are alike may change places."""
    news = {id(slot): _new(maker, slot) for slot in maker.tree.slots if slot is not maker.rng}
    continued = _continued(maker)
    for slot in maker.tree.slots:
        if slot is maker.rng:
            maker.lines.append(maker.tree.write(slot.path, "rng"))
            continue
        source = continued.get(id(slot), slot)
        new = news[id(source)]
        if slot.kind != "array":
            whole = maker.tree.read(source.path)
            new = f"{whole}.set({new})" if new else "" if source is slot else whole
        if new:
            maker.lines.append(maker.tree.write(slot.path, new))
    if continued and maker.tree.name == "new":
        maker.lines += maker.among(_PASSED)


# Transformations that the new model may go through. They know states by their places only.
_PASSED: list[list[str]] = [
    [],
    ["new = jax.tree.map(lambda leaf: leaf, new)"],
    ["new = jax.jit(lambda new: new)(new)"],
    ["new = jax.checkpoint(lambda new: new)(new)"],
    ["new = lax.cond(len(x) > 0, lambda new: new, lambda new: new, new)"],
]


def _continued(maker: Maker) -> dict[int, Slot]:
    """For each state that changes places, by identity, the state that takes its place."""
    found: dict[int, Slot] = {}
    left = [slot for slot in maker.tree.slots if slot.kind != "array" and slot.dtype in KEPT]
    while left:
        alike = [slot for slot in left if slot.is_like(left[0])]
        left = [slot for slot in left if not slot.is_like(left[0])]
        if len(alike) > 1 and maker.flip():
            found |= dict(zip(map(id, alike), [*alike[1:], alike[0]], strict=True))
    return found


def _new(maker: Maker, slot: Slot) -> str:
    """The expression of the new value of a slot; empty if it is not written."""
    if not slot.is_written:
        return ""
    if slot.moments:
        return _moments(maker, slot)
    # A matrix is written along its last axis.
    keep = slot.dims if slot.dims in ELEMENTWISE else slot.dims[-1]
    value = _without_type(maker, _small(maker, _candidate(maker, slot.dtype)))
    if slot.reduce in ("sum", "total"):
        value = maker.reduced(value, keep, "sum", collect=False)
        if slot.reduce == "sum":
            return f"{maker.old(slot)} + {value.on(slot.dims)}"
    elif slot.reduce is None:
        reduced = maker.reduced(value, keep, maker.reduction(value.dtype))
        value = _small(maker, _alike(maker, slot, reduced))
    else:
        # Sometimes the program reduces over shards itself, and the policy has nothing to do.
        collect = maker.flip(out_of=4)
        value = maker.reduced(value, keep, slot.reduce, collect=collect)
    return _with_old(maker, slot, value)


# Each gives back the integers that it is given, as values of which JAX's types do not say that they vary.
_LOSING = (
    "jnp.frexp(jnp.ldexp(jnp.float32(1), {a}))[1] - 1",
    "jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct({a}.shape, {a}.dtype), {a}, "
    'vmap_method="broadcast_all")',
)


def _without_type(maker: Maker, value: Value) -> Value:
    """The value, of which types may not say any more that it varies."""
    # Exponents are that small, and a kept integer is smaller.
    if value.dtype != INT or value.bound > 100 or not maker.flip(out_of=3):
        return value
    text = maker.among(_LOSING).format(a=value.text)
    return dataclasses.replace(value, text=maker.temporary(text))


def _alike(maker: Maker, slot: Slot, value: Value) -> Value:
    """The value, reduced to be the same on all shards that share one copy of the slot."""
    left = maker.layout.ordered(value.varies - slot.axes(maker.layout))
    if not left:
        return value
    op = "mean" if value.dtype == FLOAT else "max"
    return dataclasses.replace(value, text=maker.collected(op, value.text, left))


def _with_old(maker: Maker, slot: Slot, value: Value) -> str:
    """The value, or a combination of the old value and the new."""
    old, new = maker.old(slot), value.on(slot.dims)
    if maker.flip():
        if slot.reduce in ("max", "min"):
            return f"jnp.{slot.reduce}imum({old}, {new})"
        if slot.reduce != "total":
            return (
                f"0.9 * {old} + 0.1 * {new}"
                if slot.dtype == FLOAT
                else f"({old} + {new}) % 101 - 50"
            )
    if value.dims == slot.dims:
        return value.text
    return f"jnp.broadcast_to({new}, {old}.shape)"


def _candidate(maker: Maker, dtype: str) -> Value:
    found = maker.having(lambda value: value.dtype == dtype)
    if dtype == INT:
        return maker.among([Value("jnp.int32(1)", "", INT, frozenset(), 1, True), *found])
    if not found:
        whole = maker.pick()
        return dataclasses.replace(
            whole, text=maker.temporary(f"{whole.text} * 0.05"), dtype=FLOAT, bound=whole.bound / 20
        )
    return maker.among(found + found[-2:] * (len(found) // 2))


def _small(maker: Maker, value: Value) -> Value:
    """The value, damped if it is too large to be kept from call to call."""
    if value.bound <= KEPT[value.dtype]:
        return value
    text, bound = maker.damped(value.text, value.dtype)
    return dataclasses.replace(value, text=maker.temporary(text), bound=bound)


def _moments(maker: Maker, slot: Slot) -> str:
    """The moments of the rows of a value; empty if no value has rows."""
    rows = ("rw",) if slot.dims else ("r", "rw", "rh")
    found = maker.having(lambda value: value.dtype == FLOAT and value.dims in rows)
    if not found:
        return ""
    value = maker.reduced(_small(maker, maker.among(found)), "r" + slot.dims, "mean")
    text = value.text if value.text.isidentifier() else maker.temporary(value.text)
    mean = maker.temporary(f"{text}.mean(axis=0)")
    apart = f"jnp.square({text} - {mean}).sum(axis=0)"
    return f'{{"n": jnp.float32(len(x)), "mean": {mean}, "m2": {apart}}}'
