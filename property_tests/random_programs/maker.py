"""A random program while it is being drawn."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from .source import Leaf, Number, Numbers, axes_text
from .values import (
    FLOAT,
    INT,
    KEPT,
    LARGEST,
    Axes,
    Dims,
    Layout,
    Slot,
    Tree,
    Value,
    joined,
)


T = TypeVar("T")
# Kinds that enter and leave in the same way.
KINDS = (
    "State",
    "BatchState",
    "ParamState",
    "HiddenState",
    "ShortTermState",
    "NonBatchState",
    "LongTermState",
)
ELEMENTWISE = ("r", "rw", "", "w", "h", "rh")
# The source of the policies that are functions, by name.
POLICIES = {
    "total": """\
def total(old, new, axis_names):
    return lax.psum(new, axis_names)""",
    "merge_moments": """\
def merge_moments(old, new, axis_names):
    n = lax.psum(new["n"], axis_names)
    mean = lax.psum(new["n"] * new["mean"], axis_names) / n
    apart = new["n"] * (new["mean"] - mean) ** 2
    return {"n": n, "mean": mean, "m2": lax.psum(new["m2"] + apart, axis_names)}""",
}


class Maker:
    """Draws a program step by step. Each step uses the values of the steps before it.

    **Attributes:**

    - `pool`: the values that steps may use.
    - `lines`: the function's body.
    """

    def __init__(
        self,
        draw: st.DrawFn,
        layout: Layout,
        *,
        style: str = "dict",
        portable: bool = True,
        smooth: bool = False,
    ) -> None:
        self.draw = draw
        self.layout = layout
        self.portable = portable
        self.smooth = smooth
        self.tree = Tree(style)
        self.pool: list[Value] = []
        self.lines: list[str] = []
        self.rng: Slot | None = None
        # How often the random stream was drawn from so far.
        self.drawn = 0

    def choose(self, *of: str) -> str:
        return self.among(of)

    def among(self, found: Sequence[T]) -> T:
        one: T = self.draw(st.sampled_from(found))
        return one

    def flip(self, *, out_of: int = 2) -> bool:
        """True once in so many times; the simplest is False."""
        drawn: int = self.draw(st.integers(0, out_of - 1))
        return drawn == out_of - 1

    def some(self, names: Sequence[Hashable]) -> Axes:
        """One or more of these names, in any order."""
        order = self.draw(st.permutations(list(names)))
        return tuple(order[: self.draw(st.integers(1, len(order)))])

    def having(self, where: Callable[[Value], bool]) -> list[Value]:
        return [value for value in self.pool if where(value)]

    def pick(self, where: Callable[[Value], bool] = lambda value: True) -> Value:
        """One of the values that fit; there must be one. Half of the time it is a late one."""
        found = self.having(where)
        return self.among(found + found[-2:] * (len(found) // 2))

    def value(
        self,
        text: str,
        dims: Dims,
        dtype: str,
        varies: frozenset[Hashable],
        bound: Number,
        *,
        exact: bool = False,
    ) -> Value:
        """Give an expression a name, and add it to the pool."""
        if bound > LARGEST[dtype]:
            text, bound = self.damped(text, dtype)
            exact = exact and dtype == INT
        name = self.temporary(text)
        made = Value(name, dims, dtype, varies, bound, exact or dtype == INT)
        self.pool.append(made)
        return made

    def temporary(self, text: str) -> str:
        """A name for an expression."""
        number = sum(line.startswith("v") for line in self.lines) + 1
        self.lines.append(f"v{number} = {text}")
        return f"v{number}"

    def damped(self, text: str, dtype: str) -> tuple[str, Number]:
        """The expression made small, and its new bound."""
        if dtype == INT:
            text = f"({text})" if " " in text else text
            return f"{text} % 101 - 50", KEPT[INT]
        return f"jnp.{self.choose('tanh', 'sin')}({text})", 1.0

    def small(self, value: Value, most: Number) -> str:
        """The text of the value, made small where the value may be larger than `most`."""
        return value.text if value.bound <= most else self.damped(value.text, value.dtype)[0]

    def dtype(self) -> str:
        return FLOAT if self.smooth else self.choose(FLOAT, FLOAT, INT)

    def dims(self) -> Dims:
        return self.among(self.possible_dims())

    def possible_dims(self) -> list[Dims]:
        units = self.layout.sizes["h"] > 0
        found = [dims for dims in ELEMENTWISE if units or "h" not in dims]
        return [*found, "rh"] if self.layout.split["h"] else found

    # The model

    def slot(self, dims: Dims, dtype: str, *, kind: str | None = None) -> Slot:
        """A new State of the model, or an array."""
        split = self.layout.axes(dims)
        if kind is None:
            # Here an array outside a State is always replicated.
            kind = self.choose(*KINDS, *(() if split else ("array",)))
        slot = Slot((), kind, dims, dtype)
        if kind != "array" and dims in ELEMENTWISE:
            policies: list[str | None] = [None, "sum", "total"]
            policies += ["mean"] if dtype == FLOAT else []
            policies += [] if self.smooth else ["max", "min"]
            policies += ["merge_moments"] if dtype == FLOAT and dims in ("", "w") else []
            slot.reduce = self.among(policies)
            slot.moments = slot.reduce == "merge_moments"
            if not self.portable and not split and not slot.moments and self.flip():
                slot.per_shard = self.some(self.layout.all_axes)
        return self.placed(slot, "w" if len(dims) == 2 and dims not in ELEMENTWISE else "s")

    def twin(self) -> Slot | None:
        """A copy of a State of the model, if there is any."""
        held = [slot for slot in self.tree.slots if slot.kind != "array" and slot.dtype in KEPT]
        found = [slot for slot in held if slot.dims in ELEMENTWISE]
        return self.placed(dataclasses.replace(self.among(found)), "s") if found else None

    def placed(self, slot: Slot, letter: str) -> Slot:
        """Put a slot in the model: mostly at its top, else in a dictionary or a list inside."""
        name = f"{letter}{len(self.tree.slots)}"
        match self.draw(st.integers(0, 4)):
            case 3:
                slot.path = ("inner", name)
            case 4:
                slot.path = ("items", self.tree.count("items"))
            case _:
                slot.path = (name,)
        # All choices for a slot are drawn here, so that they shrink away together with the step that uses it.
        slot.is_written = self.draw(st.integers(0, 2)) > 0
        slot.values = [self.numbers(leaf) for leaf in slot.leaves(self.layout)]
        return self.tree.add(slot)

    def numbers(self, leaf: Leaf) -> Numbers:
        """Up to seven numbers. Seven divides no power of two, so that the parts of shards differ."""
        if leaf.dtype == "key":
            return (self.draw(st.integers(0, 2**31 - 1)),)
        most = int(KEPT[leaf.dtype])
        numbers: st.SearchStrategy[Number] = st.integers(-most, most)
        if leaf.dtype == FLOAT:
            numbers = st.integers(-100 * most, 100 * most).map(lambda k: k / 100)
        found = self.draw(st.lists(numbers, min_size=1, max_size=7 if leaf.shape else 1))
        return tuple(found if len(set(found)) > 1 else found[:1])

    def old(self, slot: Slot) -> str:
        """The value of a slot as it came in."""
        text = self.tree.read(slot.path)
        return text if slot.kind == "array" else f"{text}.value"

    def read(self, slot: Slot) -> Value:
        """The content of a slot, as a value with a known bound."""
        text = self.old(slot) + ('["mean"]' if slot.moments else "")
        bound, exact = KEPT[slot.dtype], slot.dtype == INT
        varies = slot.axes(self.layout)
        if slot.reduce in ("sum", "total"):
            text, bound = self.damped(text, slot.dtype)
            return self.value(text, slot.dims, slot.dtype, varies, bound, exact=exact)
        made = Value(text, slot.dims, slot.dtype, varies, bound, exact)
        if made not in self.pool:
            self.pool.append(made)
        return made

    # Reductions

    def reduced(self, value: Value, keep: Dims, op: str, *, collect: bool = True) -> Value:
        """A value reduced over all axes that are not in `keep`, and over the mesh axes that split them."""
        drop = [d for d in value.dims if d not in keep]
        if not drop:
            return value
        dims = "".join(d for d in value.dims if d in keep)
        # The last axis first, so that the numbers of the other axes stay valid.
        text = value.text
        for d in reversed(drop if dims else drop[:0]):
            text = f"{text}.{op}(axis={value.dims.index(d)})"
        text = text if dims else f"{text}.{op}()"
        varies, bound = value.varies, value.bound
        axes = tuple(a for d in drop for a in self.layout.split.get(d, ()) if a in varies)
        if collect and axes:
            varies -= frozenset(axes)
            text = self.collected(op, text, axes)
        if op == "sum":
            bound *= _product(self.layout.shape("".join(drop)))
        return Value(text, dims, value.dtype, varies, bound, value.exact and op in ("max", "min"))

    def collected(self, op: str, text: str, axes: Axes) -> str:
        """A reduction over shards, sometimes over one mesh axis after the other."""
        if len(axes) > 1 and self.flip():
            for name in axes:
                text = f"lax.p{op}({text}, {axes_text([name])})"
            return text
        return f"lax.p{op}({text}, {axes_text(axes)})"

    def reduction(self, dtype: str, *, smooth: bool = False) -> str:
        ops = ["sum"] + (["mean"] if dtype == FLOAT else [])
        return self.choose(*ops, *(() if self.smooth or smooth else ("max", "min")))

    def fitting(self, value: Value, other: Value) -> bool:
        """Whether two values broadcast."""
        dims = joined(value.dims, other.dims)
        return value.dtype == other.dtype and not ("w" in dims and "h" in dims)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
