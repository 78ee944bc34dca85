"""The types that have a name, and the small values that every step speaks of."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import numpy as np
from jax import Array as Array
from jax.sharding import AbstractMesh, Mesh
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
"""A JAX or NumPy array, traced or not, or one of which only the shape and dtype are known."""
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
    Reduce: TypeAlias = Literal["mean", "sum", "max", "min"] | Callable[..., PyTree] | None
    Donate: TypeAlias = Literal["none", "states", "all"]
    ReduceLoss: TypeAlias = Literal["mean", "sum"]
    Gathered: TypeAlias = Literal["varying", "invarying"]
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
    Fun = AnyMesh = Reduce = Donate = ReduceLoss = Gathered = Size = LaneName = DeviceList = Any
    Positions = AxisNames = SeveralAxes = Text = Name = Tags = Class = Keywords = Dtype = Any
Tree = TypeVar("Tree")
"""A tree that comes back with its type."""
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


def flat_names(names: AxisName | None) -> tuple[AxisName, ...]:
    """One axis name, a tuple of several, or none, as a tuple."""
    if names is None:
        return ()
    return names if isinstance(names, tuple) else (names,)


def is_axis_name(name: object) -> bool:
    """Whether collectives take it for the name of an axis. They take a number for the axis of an array."""
    if isinstance(name, Number | tuple) or not isinstance(name, Hashable):
        return False
    return name is not None and name != ""
