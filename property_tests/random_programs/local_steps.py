"""Steps of a random program whose results depend on the number of shards."""

from collections.abc import Hashable

from .blocks import DRAWS, inner, keys, made, stream
from .maker import Maker
from .source import Number, axes_text
from .values import FLOAT, INT, LARGEST, Value


def varying(maker: Maker) -> tuple[Value, Hashable]:
    """A value that varies, and one of the mesh axes over which it does."""
    a = maker.pick(lambda value: bool(value.varies))
    return a, maker.among(maker.layout.ordered(a.varies))


def local_reduce(maker: Maker) -> None:
    """A reduction of the shard's own part."""
    a = maker.pick(lambda value: value.dims != "")
    keep = maker.choose(*[a.dims.replace(d, "") for d in a.dims])
    reduced = maker.reduced(a, keep, maker.reduction(a.dtype), collect=False)
    maker.value(reduced.text, keep, a.dtype, a.varies, reduced.bound)


def collective(maker: Maker) -> None:
    """A reduction over some of the mesh axes over which a value varies."""
    a = maker.pick(lambda value: bool(value.varies))
    axes = maker.some(maker.layout.ordered(a.varies))
    op = maker.reduction(a.dtype)
    bound = a.bound * (maker.layout.count(axes) if op == "sum" else 1)
    text = maker.collected(op, a.text, axes)
    maker.value(text, a.dims, a.dtype, a.varies - frozenset(axes), bound)


def axis_index(maker: Maker) -> None:
    axes = maker.some(maker.layout.all_axes)
    count = maker.layout.count(axes)
    maker.value(f"lax.axis_index({axes_text(axes)})", "", INT, frozenset(axes), count)


def axis_size(maker: Maker) -> None:
    a = maker.pick()
    name = maker.among(maker.layout.all_axes)
    text = f"{a.text} * lax.axis_size({axes_text([name])})"
    maker.value(text, a.dims, a.dtype, a.varies, a.bound * maker.layout.mesh[name])


def ppermute(maker: Maker) -> None:
    a, name = varying(maker)
    size = maker.layout.mesh[name]
    target = maker.among(("(k + 1)", "(k - 1)", "-k"))
    pairs = f"[(k, {target} % {size}) for k in range({size})]"
    if maker.flip(out_of=4):
        # The other shards get zeros.
        pairs = f"[({size - 1}, 0)]"
    text = f"lax.ppermute({a.text}, {axes_text([name])}, {pairs})"
    maker.value(text, a.dims, a.dtype, a.varies, a.bound)


def psum_scatter(maker: Maker) -> None:
    a, name = varying(maker)
    size = maker.layout.mesh[name]
    parts = f"[{a.text} * (k + 1) for k in range({size})]"
    if a.dims and maker.flip():
        text = f"lax.psum_scatter(jnp.concatenate({parts}), {axes_text([name])}, tiled=True)"
    else:
        text = f"lax.psum_scatter(jnp.stack({parts}), {axes_text([name])})"
    maker.value(*_damped(maker, text, a, a.bound * size * size))


def all_to_all(maker: Maker) -> None:
    a, name = varying(maker)
    size = maker.layout.mesh[name]
    parts = f"[{a.text} * (k + 1) for k in range({size})]"
    names, at = axes_text([name]), maker.among(range(size))
    if a.dims and maker.flip():
        whole = f"lax.all_to_all(jnp.concatenate({parts}), {names}, 0, 0, tiled=True)"
        text = f"{whole}.reshape({size}, *{a.text}.shape)[{at}]"
    else:
        text = f"lax.all_to_all(jnp.stack({parts}), {names}, 0, 0)[{at}]"
    maker.value(*_damped(maker, text, a, a.bound * size))


def all_gather_stacked(maker: Maker) -> None:
    """The value of one shard, or the sum over all."""
    a, name = varying(maker)
    which = maker.choose(f"[{maker.among(range(maker.layout.mesh[name]))}]", ".sum(axis=0)")
    bound = a.bound * (maker.layout.mesh[name] if "sum" in which else 1)
    text = f"lax.all_gather({a.text}, {axes_text([name])}){which}"
    maker.value(*_damped(maker, text, a, bound))


def _damped(
    maker: Maker, text: str, a: Value, bound: Number
) -> tuple[str, str, str, frozenset[Hashable], Number]:
    if bound > LARGEST[a.dtype]:
        text, bound = maker.damped(text, a.dtype)
    return text, a.dims, a.dtype, a.varies, bound


def own_draw(maker: Maker) -> None:
    """Random numbers that each shard draws by itself."""
    stream(maker)
    one = keys(maker)
    maker.lines.append(f"{one}, rng = rng.split()")
    a = maker.pick()
    shape = f"{a.text}.shape" if a.dims else "()"
    text, dtype, bound = maker.among([d for d in DRAWS if d[1] == FLOAT or not maker.smooth])
    varies = frozenset(maker.layout.all_axes)
    maker.value(text.format(key=one, shape=shape), a.dims, dtype, varies, bound)


def local_cond(maker: Maker) -> None:
    """Each shard takes its own branch."""
    a, name = varying(maker)
    branches = (
        f"lambda c: {inner(maker, a, together=False)}, lambda c: {inner(maker, a, together=False)}"
    )
    on = f"lax.axis_index({axes_text([name])}) % 2 == {maker.among((0, 1))}"
    made(maker, f"lax.cond({on}, {branches}, {a.text})", a)


def local_loop(maker: Maker) -> None:
    """Each shard makes its own number of rounds."""
    a, name = varying(maker)
    body = inner(maker, a, together=False)
    count = f"lax.axis_index({axes_text([name])}) % 3 + 1"
    made(maker, f"lax.fori_loop(0, {count}, lambda i, c: {body}, {a.text})", a)
