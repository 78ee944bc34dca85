"""Steps of a random program that are control flow, or draw random numbers."""

import re

from .maker import Maker
from .source import axes_text
from .steps import predicate
from .values import FLOAT, INT, KEPT, Slot, Value, joined


def inner(maker: Maker, value: Value, *, together: bool = True) -> str:
    """The body of a branch or a loop: an expression of `c` that keeps the bound of `value` in every round.

    **Arguments:**

    - `value`: the first value of `c`.
    - `together`: whether all shards run the body, so that it may contain collectives.
    """
    c = Value("c", value.dims, value.dtype, value.varies, value.bound)
    kinds = ["elementwise", "elementwise"]
    others = maker.having(
        lambda other: (
            maker.fitting(value, other)
            and joined(value.dims, other.dims) == value.dims
            and other.varies <= value.varies
        )
    )
    kinds += ["other"] if others else []
    axes = [d for d in value.dims if value.varies.issuperset(maker.layout.split.get(d, ()))]
    kinds += ["collective"] if axes and together else []
    match maker.choose(*kinds):
        case "other":
            other = maker.among(others).on(value.dims)
        case "collective":
            kept = value.dims.replace(maker.choose(*axes), "")
            reduced = maker.reduced(c, kept, "sum" if value.dtype == INT else "mean")
            other = reduced.on(value.dims)
        case _:
            other = ""
    if value.dtype == INT:
        texts = ("(c + {b}) % 101 - 50", "(3 * c - {b}) % 101 - 50")
        return maker.among(texts).format(b=other or "1")
    if not other:
        return maker.among(("jnp.tanh(c)", "c * 0.5", "jnp.sin(c + 1)"))
    return maker.among(("jnp.tanh(c + {b})", "jnp.sin(c * {b})", "jnp.cos(c - {b})")).format(
        b=other
    )


def made(maker: Maker, text: str, like: Value) -> None:
    maker.value(text, like.dims, like.dtype, like.varies, max(like.bound, KEPT[like.dtype]))


def cond(maker: Maker) -> None:
    a, on = maker.pick(), predicate(maker)
    branches = f"lambda c: {inner(maker, a)}, lambda c: {inner(maker, a)}"
    made(maker, f"lax.cond({on.text} % 2 == 0, {branches}, {a.text})", a)


def switch(maker: Maker) -> None:
    a, on = maker.pick(), predicate(maker)
    branches = ", ".join(f"lambda c: {inner(maker, a)}" for _ in range(3))
    made(maker, f"lax.switch({on.text} % 3, [{branches}], {a.text})", a)


def fori_loop(maker: Maker) -> None:
    a = maker.pick()
    count = str(maker.among((2, 3)))
    if not maker.smooth and maker.flip():
        # A number of rounds that is not known when the loop is traced.
        count = f"{predicate(maker).text} % 4"
    made(maker, f"lax.fori_loop(0, {count}, lambda i, c: {inner(maker, a)}, {a.text})", a)


def while_loop(maker: Maker) -> None:
    a = maker.pick()
    count = "3" if maker.flip() else f"{predicate(maker).text} % 4"
    body = re.sub(r"\bc\b", "s[1]", inner(maker, a))
    going, step = f"lambda s: s[0] < {count}", f"lambda s: (s[0] + 1, {body})"
    made(maker, f"lax.while_loop({going}, {step}, (0, {a.text}))[1]", a)


def scan(maker: Maker) -> None:
    """A scan over a few numbers, or over columns. The result is its last carry, or a stacked output."""
    a = maker.pick()
    columns = maker.having(
        lambda v: v.dims == a.dims + "w" and v.dtype == a.dtype and v.varies <= a.varies
    )
    over = "jnp.arange(1, 4)"
    if columns and maker.flip():
        over = f"{maker.among(columns).text}.T"
    more = "c + k" if a.dtype == INT else "jnp.sin(c + 0.5 * k)"
    if a.dtype == INT:
        more = f"({more}) % 101 - 50"
    body = inner(maker, a)
    if maker.flip():
        stacked = "max" if a.dtype == INT else "mean"
        text = f"lax.scan(lambda c, k: ({body}, {more}), {a.text}, {over})[1].{stacked}(axis=0)"
        if a.dtype == FLOAT and over.endswith(".T"):
            text = f"lax.scan(lambda c, k: ({body}, {more}), {a.text}, {over})[1][-1]"
    else:
        text = f"lax.scan(lambda c, k: ((lambda c: {body})({more}), None), {a.text}, {over})[0]"
    made(maker, text, a)


def checkpoint(maker: Maker) -> None:
    a = maker.pick()
    made(maker, f"jax.checkpoint(lambda c: {inner(maker, a)})({a.text})", a)


def jit(maker: Maker) -> None:
    a = maker.pick()
    made(maker, f"jax.jit(lambda c: {inner(maker, a)})({a.text})", a)


def vmap(maker: Maker) -> None:
    """A function of one row, mapped over the rows."""
    a = maker.pick(lambda value: value.dims in ("r", "rw") and value.dtype == FLOAT)
    body = "c / (1 + jnp.sum(c**2))" if a.dims == "rw" else "jnp.sin(c) * c"
    maker.value(f"jax.vmap(lambda c: {body})({a.text})", a.dims, FLOAT, a.varies, a.bound)


# Random numbers


def stream(maker: Maker) -> Slot:
    """The model's random stream."""
    if maker.rng is None:
        slot = Slot((), "RandomState", "", "key")
        if not maker.portable and maker.flip(out_of=4):
            slot.per_shard = maker.some(maker.layout.all_axes)
        maker.rng = maker.placed(slot, "rng")
        maker.lines.append(f"rng = {maker.tree.read(maker.rng.path)}")
    return maker.rng


def keys(maker: Maker) -> str:
    """The name for the next keys that are drawn."""
    maker.drawn += 1
    return f"key{maker.drawn}"


DRAWS = (
    ("jax.random.uniform({key}, {shape})", FLOAT, 1.0),
    ("jax.random.normal({key}, {shape})", FLOAT, 6.0),
    ("jax.random.bernoulli({key}, 0.7, {shape}).astype(jnp.float32)", FLOAT, 1.0),
    ("jax.random.randint({key}, {shape}, -9, 9)", INT, 9.0),
)


def rows(maker: Maker) -> None:
    """Random numbers for each row, the same on any mesh."""
    slot, axes = stream(maker), maker.layout.split["r"]
    several, name = keys(maker), axes_text(axes) if axes else ""
    maker.lines.append(f"{several}, rng = rng.rows({', '.join(filter(None, ['len(x)', name]))})")
    dims, width = maker.among((("r", "()"), ("rw", f"({maker.layout.sizes['w']},)")))
    text, dtype, bound = maker.among([d for d in DRAWS if d[1] == FLOAT or not maker.smooth])
    drawn = text.format(key="key", shape=width)
    varies = maker.layout.axes("r") | frozenset(slot.per_shard)
    maker.value(f"jax.vmap(lambda key: {drawn})({several})", dims, dtype, varies, bound)


def first_draw(maker: Maker) -> None:
    """A number that the first shard draws, as the unsharded run does, and that all shards get."""
    stream(maker)
    one, axes = keys(maker), axes_text(maker.layout.all_axes)
    maker.lines.append(f"{one}, rng = rng.split()")
    number = f"jnp.where(lax.axis_index({axes}) == 0, jax.random.uniform({one}), 0)"
    maker.value(f"lax.psum({number}, {axes})", "", FLOAT, frozenset(), 1.0)


def unused_draw(maker: Maker) -> None:
    """A draw that is not used, sometimes in a loop."""
    stream(maker)
    if maker.flip():
        maker.lines.append("rng = lax.fori_loop(0, 2, lambda i, rng: rng.split()[1], rng)")
    else:
        maker.lines.append(f"_, rng = rng.split({maker.choose('', '2')})")
