"""The types and small values that every step uses: axis names, placements, the bases of State and Packed."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax import Array as Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import Sharding as Sharding
from jax.tree_util import PyTreeDef as PyTreeDef
from jax.typing import ArrayLike as ArrayLike
from jax.typing import DTypeLike as DTypeLike
from jaxtyping import PyTree as PyTree


AxisName: TypeAlias = Hashable
Axes: TypeAlias = frozenset[AxisName]
NO_AXES: Axes = frozenset()
Key: TypeAlias = Any
"""One step of a path, as JAX or the class of a user's own node makes it."""
KeyPath: TypeAlias = tuple[Key, ...]
Leaf: TypeAlias = Any
"""A leaf of a tree: an array, or any object that JAX does not take apart."""
ShapedArray: TypeAlias = Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
"""An array of JAX's or NumPy's, traced or not, or one of which only the shape and dtype are known."""
Reduce: TypeAlias = str | Callable[..., PyTree] | None
Filter: TypeAlias = Any
if TYPE_CHECKING:
    # With defaults, which `typing` has from Python 3.13 on.
    from typing_extensions import ParamSpec, TypeVar

    Params = ParamSpec("Params", default=...)
    Result = TypeVar("Result", default=Any, covariant=True)
    Value = TypeVar("Value", default=Any, covariant=True)
    Fun: TypeAlias = Callable[..., PyTree]
    FunOf: TypeAlias = Callable[Params, Result]
    AnyMesh: TypeAlias = Mesh | AbstractMesh
    Donate: TypeAlias = Literal["none", "states", "all"]
    ReduceLoss: TypeAlias = Literal["mean", "sum"]
    Size: TypeAlias = int
    LaneName: TypeAlias = Hashable
    DeviceList: TypeAlias = Sequence[jax.Device]
    Positions: TypeAlias = int | Iterable[int]
    AxisNames: TypeAlias = str | Iterable[AxisName]
    SeveralAxes: TypeAlias = AxisName | tuple[AxisName, ...] | None
    Text: TypeAlias = str | None
    Name: TypeAlias = str
    Tags: TypeAlias = str | Iterable[str] | None
    Class: TypeAlias = type
    Keywords: TypeAlias = dict[str, PyTree]
    Dtype: TypeAlias = DTypeLike
else:
    from typing import ParamSpec, TypeVar

    Params = ParamSpec("Params")
    Result = TypeVar("Result", covariant=True)
    Value = TypeVar("Value", covariant=True)

    class FunOf:
        """The type of a function, with its parameters in brackets. Only type checkers read them."""

        def __class_getitem__(cls, of: Any) -> Any:
            return Any

    # We check these arguments by hand: users get our messages, not those of a run-time type checker.
    Fun = AnyMesh = Donate = ReduceLoss = Size = LaneName = DeviceList = Any
    Positions = AxisNames = SeveralAxes = Text = Name = Tags = Class = Keywords = Dtype = Any
SpecTree: TypeAlias = PyTree
AxisTree: TypeAlias = PyTree
StateSpecs: TypeAlias = SpecTree | Mapping[Filter, SpecTree] | None
StateAxes: TypeAlias = Filter | Mapping[int | None, Filter] | None


UNNAMED: AxisName = "<lanes>"
UNNAMED_DEVICES: AxisName = "<devices>"
"""The names of lanes to which the user gave none, in a `vmap` and on devices."""


class Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "Missing"


MISSING: Any = Missing()
"""The default of a function argument: left out, the call is used as a decorator."""


NUMBERS: tuple[type, ...] = (bool, int, float, complex)
"""Python's numbers, by exact type: an `IntEnum` is a name, not a number."""


class PerShard:
    """A placement: one independent value per shard.

    Outside the mapped call the state's value has a leading axis as long as the named mesh axes
    together; inside, each shard sees its own entry without that axis. It stands wherever a
    state's spec may.

    **Arguments:**

    - `axis_names`: the mesh axes over which each shard has a value of its own, major to minor.

    **Raises:** `TypeError` when no axis is named.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.PerShard("data")
        PerShard('data')

        ```
    """

    __slots__ = ("axis_names",)

    axis_names: tuple[AxisName, ...]

    def __init__(self, *axis_names: AxisName) -> None:
        flat: list[AxisName] = []
        for name in axis_names:
            flat.extend(name if isinstance(name, tuple) else (name,))
        if not flat:
            raise TypeError("PerShard names no mesh axis. Write PerShard('data').")
        object.__setattr__(self, "axis_names", tuple(flat))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PerShard is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return PerShard, self.axis_names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerShard) and self.axis_names == other.axis_names

    def __hash__(self) -> int:
        return hash((PerShard, self.axis_names))

    def __repr__(self) -> str:
        return f"PerShard({', '.join(map(repr, self.axis_names))})"


class StateNode:
    """The base of `State`, by which modules below `State` recognize one."""

    __slots__ = ()

    def _one_line(self) -> str:
        raise NotImplementedError


def is_state(node: object) -> bool:
    """Whether `node` is a `State` (of any kind).

    **Arguments:**

    - `node`: anything.

    **Returns:** a `bool`; of use as an `is_leaf`.
    """
    return isinstance(node, StateNode)


class PackedNode:
    """The base of `Packed`, by which modules below `Packed` recognize one."""

    __slots__ = ()

    buffers: tuple[Leaf, ...]

    def unpack(self) -> PyTree:
        raise NotImplementedError


def is_packed(node: object) -> bool:
    return isinstance(node, PackedNode)


def is_state_or_packed(node: object) -> bool:
    return isinstance(node, StateNode | PackedNode)


def unpacked(tree: PyTree) -> PyTree:
    """The tree with every `Packed` replaced by its model. A tree without any is returned itself."""
    if not any(map(is_packed, jax.tree.leaves(tree, is_leaf=is_state_or_packed))):
        return tree
    one = lambda node: node.unpack() if isinstance(node, PackedNode) else node
    return jax.tree.map(one, tree, is_leaf=is_state_or_packed)


@jax.tree_util.register_static
class Removed:
    """Stands where `partition` took a leaf away.

    It is a node without leaves, so that tree functions pass over it. `None` would not do, because models hold
    it as a value.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Removed)

    def __hash__(self) -> int:
        return hash(Removed)

    def __repr__(self) -> str:
        return "Removed"


REMOVED = Removed()


def is_removed(node: object) -> bool:
    return isinstance(node, Removed)


@runtime_checkable
class Placement(Protocol):
    """The placement of one leaf: on a mesh, or over lanes. Hashable.

    **Attributes:**

    - `axis`: the array axis that is removed inside the call; `None` if none is.
    - `axis_names`: the mapped axes over which instances have different parts of the leaf.
    - `axes`: for each entry of the spec, the mapped axes that split this array axis.
    - `spec`, `written`: the spec in its shortest spelling, and as it was written.
    """

    @property
    def spec(self) -> SpecTree: ...

    @property
    def written(self) -> SpecTree: ...

    @property
    def axis(self) -> int | None: ...

    @property
    def axis_names(self) -> frozenset[AxisName]: ...

    @property
    def axes(self) -> tuple[tuple[AxisName, ...], ...]: ...

    def take(self, part: Leaf) -> Leaf:
        """An instance's part of the leaf, as the function sees it."""

    def put(self, value: Leaf) -> Leaf:
        """An instance's part of the leaf, of the value that the function returned."""


def is_spec(node: object) -> bool:
    """Whether `node` is a spec. `None` is one: it means "not sharded"."""
    return node is None or isinstance(node, PartitionSpec | PerShard)


def is_axis(node: object) -> bool:
    """Whether `node` is the axis of an array, as in `in_axes`. `None` is one: it means "not mapped"."""
    return node is None or type(node) is int


def spec_axes(spec: PartitionSpec) -> tuple[tuple[AxisName, ...], ...]:
    """The mesh axes of each array axis, trailing unsharded axes dropped."""
    entries = list(written_axes(spec))
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def written_axes(spec: PartitionSpec) -> tuple[tuple[AxisName, ...], ...]:
    """The mesh axes of each array axis that `spec` has an entry for."""
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in spec.partitions)


def mentioned(spec: PartitionSpec) -> frozenset[AxisName]:
    """Every mesh axis that `spec` names: those that split an array axis, and those it is unreduced over."""
    return frozenset(name for names in spec_axes(spec) for name in names) | spec.unreduced


def only(spec: PartitionSpec, names: Axes) -> PartitionSpec:
    """`spec` without all other mesh axes, in its shortest spelling."""
    return canonical(restricted(spec, names))


def restricted(spec: PartitionSpec, names: Axes) -> PartitionSpec:
    """`spec` without all other mesh axes, with as many entries as it has."""
    kept = [tuple(name for name in axis if name in names) for axis in written_axes(spec)]
    entries = tuple(_shortest(axis) for axis in kept)
    unreduced, reduced = spec.unreduced & names, spec.reduced & names
    if (
        unreduced == spec.unreduced
    ):  # `update` also keeps the kind of reduction, which newer releases have.
        whole: PartitionSpec = spec.update(partitions=entries, reduced=reduced)
        return whole
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """The shortest spelling of `spec`, the one that compiled outputs carry."""
    shortest: PartitionSpec = spec.update(partitions=tuple(map(_shortest, spec_axes(spec))))
    return shortest


def _shortest(names: tuple[AxisName, ...]) -> AxisName | tuple[AxisName, ...] | None:
    return None if not names else names[0] if len(names) == 1 else names


def flat_names(names: AxisName | None) -> tuple[AxisName, ...]:
    """One axis name, a tuple of several, or none, as a tuple."""
    if names is None:
        return ()
    return names if isinstance(names, tuple) else (names,)
