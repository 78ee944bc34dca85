"""Steps of a random program that mean the same on any mesh: arithmetic, reductions, gathers."""

from collections.abc import Callable, Sequence

from .maker import Maker
from .source import Number, axes_text
from .values import FLOAT, INT, KEPT, LARGEST, Axes, Dims, Slot, Value, joined


# An expression of `a`, and the bound of the result from the bound of `a`.
SMOOTH: Sequence[tuple[str, Callable[[Number], Number]]] = (
    ("jnp.tanh({a})", lambda b: 1.0),
    ("{a} * 0.5", lambda b: b / 2),
    ("-{a}", lambda b: b),
    ("jnp.sin({a})", lambda b: 1.0),
    ("jnp.cos({a})", lambda b: 1.0),
    ("1 - {a}", lambda b: b + 1),
    ("jax.nn.sigmoid({a})", lambda b: 1.0),
    ("{a} / (1 + {a} ** 2)", lambda b: 0.5),
    ("jnp.exp(-jnp.square({a}))", lambda b: 1.0),
)
# Of exact operands these are exact.
ROUGH: Sequence[tuple[str, Callable[[Number], Number]]] = (
    ("jnp.abs({a})", lambda b: b),
    ("jnp.maximum({a}, 0)", lambda b: b),
    ("jnp.clip({a}, -1, 1)", lambda b: 1.0),
    ("jnp.where({a} > 0, {a}, -2 * {a})", lambda b: 2 * b),
)
INTEGER: Sequence[tuple[str, Callable[[Number], Number]]] = (
    ("-{a}", lambda b: b),
    ("jnp.abs({a})", lambda b: b),
    ("{a} % 7", lambda b: 6),
    ("{a} // 2", lambda b: b),
    ("2 * {a} + 1", lambda b: 2 * b + 1),
    ("{a} ^ 5", lambda b: b + 8),
    ("jnp.where({a} > 3, {a}, -{a})", lambda b: b),
    ("({a} > 0).astype(jnp.int32)", lambda b: 1),
)
# The same for two operands.
PAIRS_SMOOTH: Sequence[tuple[str, Callable[[Number, Number], Number]]] = (
    ("{a} + {b}", lambda a, b: a + b),
    ("{a} - {b}", lambda a, b: a - b),
    ("{a} * {b}", lambda a, b: a * b),
    ("jnp.tanh({a}) * {b}", lambda a, b: b),
    ("{a} / (1 + {b} ** 2)", lambda a, b: a),
)
PAIRS_ROUGH: Sequence[tuple[str, Callable[[Number, Number], Number]]] = (
    ("jnp.maximum({a}, {b})", max),
    ("jnp.minimum({a}, {b})", max),
)
PAIRS_INTEGER: Sequence[tuple[str, Callable[[Number, Number], Number]]] = (
    ("{a} + {b}", lambda a, b: a + b),
    ("{a} - {b}", lambda a, b: a + b),
    ("{a} * {b}", lambda a, b: a * b),
    ("jnp.maximum({a}, {b})", max),
    ("jnp.minimum({a}, {b})", max),
    ("jnp.where({a} > {b}, {a}, 3)", lambda a, b: a + 3),
)


def unary(maker: Maker) -> None:
    a = maker.pick()
    if a.dtype == INT:
        text, bound = maker.among(INTEGER)
        exact = True
    else:
        text, bound = maker.among(SMOOTH if maker.smooth else [*SMOOTH, *ROUGH])
        exact = a.exact and (text, bound) in ROUGH
    maker.value(text.format(a=a.text), a.dims, a.dtype, a.varies, bound(a.bound), exact=exact)


def binary(maker: Maker) -> None:
    a = maker.pick()
    b = maker.pick(lambda other: maker.fitting(a, other))
    rough = not maker.smooth
    pairs = PAIRS_INTEGER if a.dtype == INT else [*PAIRS_SMOOTH, *(PAIRS_ROUGH if rough else ())]
    fits = [(text, bound) for text, bound in pairs if bound(a.bound, b.bound) <= LARGEST[a.dtype]]
    text, bound = maker.among(fits or pairs[:2])
    dims = joined(a.dims, b.dims)
    made = text.format(a=a.on(dims), b=b.on(dims))
    maker.value(made, dims, a.dtype, a.varies | b.varies, bound(a.bound, b.bound))


def to_float(maker: Maker) -> None:
    a = maker.pick(lambda value: value.dtype == INT)
    # Multiples of a quarter are exact.
    maker.value(f"{a.text} % 13 * 0.25", a.dims, FLOAT, a.varies, 3.0, exact=True)


def to_int(maker: Maker) -> None:
    """Only of exact floats: a rounded one could become another integer on another mesh."""
    a = maker.pick(lambda value: value.dtype == FLOAT and value.exact)
    text = maker.choose(
        f"({a.text} > 0.5).astype(jnp.int32)", f"jnp.round({a.text}).astype(jnp.int32)"
    )
    maker.value(text, a.dims, INT, a.varies, a.bound + 1)


def read(maker: Maker) -> None:
    """Add a State to the model and read it."""
    maker.read(maker.slot(maker.dims(), maker.dtype()))


def parameter(maker: Maker, dims: Dims) -> Slot:
    """A matrix."""
    for slot in maker.tree.slots:
        if slot.dims == dims and maker.flip():
            return slot
    return maker.slot(dims, FLOAT, kind="ParamState")


def matmul(maker: Maker) -> None:
    """With a matrix that is whole, or split over the mesh axes of hidden units."""
    a = maker.pick(lambda value: value.dtype == FLOAT and value.dims in ("rw", "w", "rh", "h"))
    units = maker.layout.sizes["h"] > 0
    to = maker.choose("w", *("h" * 2 if units else "")) if "w" in a.dims else "w"
    slot = parameter(maker, a.dims[-1] + to)
    text = f"{a.text} @ {maker.old(slot)}"
    varies = a.varies | slot.axes(maker.layout)
    axes = maker.layout.split.get(a.dims[-1], ())
    if axes and to != "h":
        # Each shard has multiplied by its own units only.
        text, varies = maker.collected("sum", text, axes), varies - frozenset(axes)
    size = maker.layout.sizes[a.dims[-1]]
    maker.value(text, a.dims[:-1] + to, FLOAT, varies, a.bound * KEPT[FLOAT] * size)


def reduce(maker: Maker) -> None:
    """Over rows, columns or hidden units, with the collective that it needs."""
    a = maker.pick(lambda value: value.dims != "")
    keep = maker.choose(*[a.dims.replace(d, "") for d in a.dims])
    op = maker.reduction(a.dtype)
    made = maker.reduced(a, keep, op)
    maker.value(made.text, made.dims, a.dtype, made.varies, made.bound, exact=made.exact)


def softmax(maker: Maker) -> None:
    a = maker.pick(lambda value: value.dtype == FLOAT and value.dims in ("w", "rw"))
    text = f"jax.nn.softmax({maker.small(a, KEPT[FLOAT])}, axis=-1)"
    maker.value(text, a.dims, FLOAT, a.varies, 1.0)


def row_numbers(maker: Maker) -> None:
    """The numbers of the rows in the whole array."""
    maker.value(global_rows(maker), "r", INT, maker.layout.axes("r"), maker.layout.sizes["r"])


def global_rows(maker: Maker) -> str:
    axes = maker.layout.split["r"]
    if not axes:
        return "jnp.arange(len(x))"
    return f"lax.axis_index({axes_text(axes)}) * len(x) + jnp.arange(len(x))"


def gathered(maker: Maker, value: Value) -> bool:
    """Whether a value has an axis that can be gathered."""
    return any(_axes(maker, value, d) for d in value.dims)


def _axes(maker: Maker, value: Value, d: str) -> Axes:
    """The mesh axes along which shards have different parts of an axis."""
    axes = maker.layout.split.get(d, ())
    return axes if value.varies.issuperset(axes) else ()


def all_gather(maker: Maker) -> None:
    """Rows of other shards, or a row that all shards get."""
    a = maker.pick(lambda value: gathered(maker, value))
    d = maker.choose(*[d for d in a.dims if _axes(maker, a, d)])
    axis, axes = a.dims.index(d), maker.layout.split[d]
    names = axes_text(axes)
    where = f", axis={axis}" if axis else ""
    if d == "r" and maker.flip():
        # The next row, which the next shard holds where this shard ends.
        rows = f"({global_rows(maker)} + 1) % {maker.layout.sizes['r']}"
        text = f"lax.all_gather({a.text}, {names}, tiled=True)[{rows}]"
        maker.value(text, a.dims, a.dtype, a.varies, a.bound, exact=a.exact)
        return
    at = maker.among(range(maker.layout.sizes[d]))
    index = f"[:, {at}]" if axis else f"[{at}]"
    dims, varies = a.dims.replace(d, ""), a.varies - frozenset(axes)
    if maker.flip():
        text = f'lax.all_gather({a.text}, {names}{where}, tiled=True, to="invarying"){index}'
    else:
        # The same on all shards, which the types do not know.
        op = "mean" if a.dtype == FLOAT else "max"
        text = maker.collected(
            op, f"lax.all_gather({a.text}, {names}{where}, tiled=True){index}", axes
        )
    maker.value(text, dims, a.dtype, varies, a.bound)


def predicate(maker: Maker) -> Value:
    """An integer that is the same on all shards, and free of rounding."""
    layout = maker.layout
    if not maker.smooth:
        integers = maker.having(lambda value: value.dtype == INT)
        if not integers:
            maker.read(maker.slot("", INT, kind="State"))
        a = maker.pick(lambda value: value.dtype == INT)
        made = maker.reduced(a, "", "max")
        left = layout.ordered(made.varies)
        text = maker.collected("max", made.text, left) if left else made.text
        return Value(text, "", INT, made.varies - frozenset(left), a.bound)
    # A maximum over shards has no derivative.
    text, axes = "jnp.round(lax.stop_gradient(x).max())", layout.split["r"]
    text = maker.collected("max", text, axes) if axes else text
    return Value(f"{text}.astype(jnp.int32)", "", INT, frozenset(), KEPT[FLOAT] + 1)
