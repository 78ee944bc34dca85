"""What the generator knows of the values in a random program, and of its model."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from .source import Leaf, Number, Numbers, axes_text, spec_text


Axes: TypeAlias = tuple[Hashable, ...]
# The axes of an array: "r" for rows, "w" for a few columns, "h" for hidden units.
Dims: TypeAlias = str

FLOAT, INT = "float32", "int32"
# Floats stay within a few units, so that tolerances mean something; integers far inside 32 bits.
LARGEST = {FLOAT: 16.0, INT: 2.0**20}
# States, which are kept from call to call, stay smaller.
KEPT = {FLOAT: 4.0, INT: 50.0}


@dataclasses.dataclass(frozen=True)
class Value:
    """An expression in the function of one shard.

    **Attributes:**

    - `text`: a name, or an expression that needs no parentheses.
    - `dims`: its axes.
    - `dtype`: `FLOAT` or `INT`.
    - `varies`: the mesh axes over which it varies, by the types of JAX. In a portable program these are the
        mesh axes that split its axes.
    - `bound`: the largest possible absolute value.
    - `exact`: whether it is the same to the last bit on every mesh.
    """

    text: str
    dims: Dims
    dtype: str
    varies: frozenset[Hashable]
    bound: Number
    exact: bool = False

    def on(self, dims: Dims) -> str:
        """The expression, shaped so that it broadcasts against arrays with these axes."""
        return f"{self.text}[:, None]" if self.dims == "r" and len(dims) == 2 else self.text


def joined(*dims: Dims) -> Dims:
    """The axes of the result of broadcasting."""
    return "".join(d for d in "rwh" if any(d in one for one in dims))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of axes, and the mesh axes that split them.

    **Attributes:**

    - `mesh`: the sizes of the mesh axes.
    - `split`: the mesh axes that split rows and hidden units, major to minor.
    - `sizes`: the sizes of the axes of whole arrays.
    """

    mesh: Mapping[Hashable, int]
    split: Mapping[str, Axes]
    sizes: Mapping[str, int]

    @property
    def all_axes(self) -> Axes:
        return tuple(self.mesh)

    def count(self, names: Axes) -> int:
        return math.prod(self.mesh[name] for name in names)

    def axes(self, dims: Dims) -> frozenset[Hashable]:
        """The mesh axes that split these."""
        return frozenset(name for d in dims for name in self.split.get(d, ()))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(self.sizes[d] for d in dims)

    def spec(self, dims: Dims) -> str:
        return spec_text(self.split.get(d, ()) for d in dims)

    def ordered(self, names: frozenset[Hashable]) -> Axes:
        return tuple(name for name in self.mesh if name in names)


@dataclasses.dataclass
class Slot:
    """A State of the model, or with `kind="array"` an array outside any State.

    **Attributes:**

    - `path`: the keys that lead to it.
    - `dims`, `dtype`: the axes and the dtype of the value of a shard.
    - `per_shard`: the mesh axes of a `PerShard` placement.
    - `moments`: whether it holds a count, and a mean and a sum of squares with axes `dims`.
    - `values`: the numbers that fill its arrays.
    """

    path: tuple[str | int, ...]
    kind: str
    dims: Dims
    dtype: str
    reduce: str | None = None
    per_shard: Axes = ()
    moments: bool = False
    is_written: bool = False
    values: list[Numbers] = dataclasses.field(default_factory=list)

    def is_like(self, other: "Slot") -> bool:
        """Whether the two differ in nothing but path and values."""
        own = (self.kind, self.dims, self.dtype, self.reduce, self.per_shard)
        return own == (other.kind, other.dims, other.dtype, other.reduce, other.per_shard)

    def leaves(self, layout: Layout) -> list[Leaf]:
        outer = (layout.count(self.per_shard),) if self.per_shard else ()
        shape = (*outer, *(() if self.dtype == "key" else layout.shape(self.dims)))
        leaf = Leaf(shape, self.dtype)
        return [Leaf((), FLOAT), leaf, leaf] if self.moments else [leaf]

    def axes(self, layout: Layout) -> frozenset[Hashable]:
        """The mesh axes along which shards hold different values."""
        return layout.axes(self.dims) | frozenset(self.per_shard)

    def text(self, layout: Layout, first: int) -> str:
        """The expression that makes it from leaves whose numbers begin with `first`."""
        value = f"$v{first}"
        if self.kind == "array":
            return f"jnp.asarray({value})"
        if self.moments:
            value = f'{{"n": $v{first}, "mean": $v{first + 1}, "m2": $v{first + 2}}}'
        options = [value]
        if self.per_shard:
            options.append(f"spec=sm.PerShard({', '.join(axes_text([n]) for n in self.per_shard)})")
        elif layout.axes(self.dims):
            options.append(f"spec={layout.spec(self.dims)}")
        if self.reduce is not None:
            named = self.reduce in ("mean", "max", "min", "sum")
            options.append(f'reduce="{self.reduce}"' if named else f"reduce={self.reduce}")
        return f"sm.{self.kind}({', '.join(options)})"


class Tree:
    """The model: a dictionary or a module, with a dictionary and a list inside."""

    def __init__(self, style: str) -> None:
        self.style = style
        # The variable that holds the newest model: a write makes a new one from it.
        self.name = "model"
        self.slots: list[Slot] = []

    def add(self, slot: Slot) -> Slot:
        self.slots.append(slot)
        return slot

    def count(self, group: str) -> int:
        """The number of slots in a group of the model."""
        return sum(slot.path[0] == group and len(slot.path) == 2 for slot in self.slots)

    def read(self, path: Sequence[str | int], of: str = "model") -> str:
        """The expression for the node at a path."""
        first, *rest = path
        text = f"{of}.{first}" if self.style == "module" else f'{of}["{first}"]'
        return text + "".join(f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in rest)

    def write(self, path: Sequence[str | int], new: str) -> str:
        """The statement that puts a new node at a path."""
        top, *rest = path
        before, self.name = self.name, "new"
        if rest and isinstance(rest[0], str):
            new = f'{{**{self.read([top], before)}, "{rest[0]}": {new}}}'
        elif rest:
            items = [self.read([top, k], before) for k in range(self.count(str(top)))]
            new = f"[{', '.join([*items[: int(rest[0])], new, *items[int(rest[0]) + 1 :]])}]"
        if self.style == "module":
            return f"new = {before}.replace({top}={new})"
        return f'new = {{**{before}, "{top}": {new}}}'

    def text(self, layout: Layout) -> tuple[str, list[Leaf]]:
        """The expression that makes the model, and the arrays of the model."""
        leaves: list[Leaf] = []
        parts: dict[str, str | dict[str, str] | list[str]] = {}
        for slot in self.slots:
            made = slot.text(layout, len(leaves))
            leaves += slot.leaves(layout)
            top = str(slot.path[0])
            if len(slot.path) == 1:
                parts[top] = made
            elif isinstance(slot.path[1], str):
                inner = parts.setdefault(top, {})
                assert isinstance(inner, dict)
                inner[slot.path[1]] = made
            else:
                items = parts.setdefault(top, [])
                assert isinstance(items, list)
                items.append(made)
        texts = {top: _container(part) for top, part in parts.items()}
        if self.style == "module":
            return f"Model({', '.join(f'{k}={v}' for k, v in texts.items())})", leaves
        return _container(texts), leaves

    def definition(self) -> list[str]:
        """The source of the class of the module."""
        if self.style != "module":
            return []
        fields: dict[str, str] = {}
        for slot in self.slots:
            kind = "jax.Array" if slot.kind == "array" else f"sm.{slot.kind}"
            if len(slot.path) == 2:
                kind = "dict" if isinstance(slot.path[1], str) else "list"
            fields[str(slot.path[0])] = kind
        lines = [f"    {name}: {kind}" for name, kind in fields.items()]
        return ["class Model(sm.Module):", *(lines or ["    pass"])]


def _container(part: str | dict[str, str] | list[str]) -> str:
    if isinstance(part, dict):
        inner = ", ".join(f'"{key}": {text}' for key, text in part.items())
        return f"{{{inner}}}"
    return f"[{', '.join(part)}]" if isinstance(part, list) else part
