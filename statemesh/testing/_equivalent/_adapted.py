"""What a check is given, as it takes it: positional arguments, a function that is not mapped yet, a mesh."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import statemesh as sm

from .. import _errors as errors
from .._types import Fun, PyTree


AnyMesh: TypeAlias = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class WithKeywords:
    """A function whose keyword arguments come in a dictionary, as its last positional argument.

    Two of the same function are equal, so that what is compiled for one is used for the other.
    """

    fun: Fun

    def __call__(self, *args: PyTree) -> PyTree:
        *given, kwargs = args
        return self.fun(*given, **kwargs)

    @property
    def __name__(self) -> str:
        return str(getattr(self.fun, "__name__", type(self.fun).__name__))

    @property
    def __signature__(self) -> inspect.Signature | None:
        """The positional parameters of the function, by which messages name them, and `kwargs`."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        try:
            found = [
                x.replace(kind=kind, default=x.empty)
                for x in inspect.signature(self.fun).parameters.values()
                if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):
            return None
        return inspect.Signature([*found, inspect.Parameter("kwargs", kind)])


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A function of positional arguments only.

    **Attributes:**

    - `fun`: the function.
    - `args`: its arguments. Those by keyword are a dictionary, which is the last one.
    - `in_specs`: its in specs.
    """

    fun: Fun
    args: tuple[PyTree, ...]
    in_specs: PyTree


def adapted(
    fun: Fun, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], in_specs: PyTree
) -> Adapted:
    """A function and its arguments as positional ones.

    Keyword arguments keep what they mean in `shard_map`: arrays are replicated, and Python numbers and other
    values are static. The number of each leaf of `(args, kwargs)` stays the same.

    **Arguments:**

    - `fun`: a function that is not mapped yet.
    - `in_specs`: as for `shard_map`.

    **Returns:** the same function, arguments and specs if there are no keyword arguments.
    """
    if not kwargs:
        return Adapted(fun, args, in_specs)
    # One spec for all stands for as many as there are arguments.
    one = in_specs is None or isinstance(in_specs, PartitionSpec)
    specs = (in_specs,) * len(args) if one else tuple(in_specs)
    return Adapted(WithKeywords(fun), (*args, dict(kwargs)), (*specs, None))


def is_mapped(fun: Fun) -> bool:
    """Whether a function is what `shard_map`, `pmap2` or `vmap2` returned."""
    return isinstance(fun, sm.StatefulMapping)


def remapped(fun: sm.StatefulMapping, mesh: AnyMesh) -> sm.StatefulMapping:
    """A function that is mapped already, with its own specs on another mesh.

    **Raises:** `StatemeshError` for what `pmap2` and `vmap2` return, which have no mesh of named axes.
    """
    return fun.on_mesh(mesh)


def check_specs(fun: Fun, given: Mapping[str, Any]) -> None:
    """Refuse specs beside a function that has its own, and a function without any.

    **Arguments:**

    - `given`: the arguments that are part of a mapping, by name; `None` for one that is not given.

    **Raises:** `TypeError` that names them.
    """
    if is_mapped(fun):
        if several := [name for name, value in given.items() if value is not None]:
            raise errors.specs_given_twice(getattr(fun, "__name__", "fun"), several)
    elif missing := [name for name in ("in_specs", "out_specs") if given.get(name, ...) is ...]:
        raise errors.specs_missing(getattr(fun, "__name__", type(fun).__name__), missing)


def is_abstract(mesh: object) -> bool:
    """Whether a mesh has no devices, so that a call can only be emulated."""
    return isinstance(mesh, AbstractMesh)


def as_abstract(mesh: object) -> AbstractMesh:
    """A mesh, or the sizes of its axes, without devices. Its axes keep their types, or are Auto."""
    if isinstance(mesh, AbstractMesh):
        return mesh
    if isinstance(mesh, Mesh):
        bare: AbstractMesh = mesh.abstract_mesh
        return bare
    if not isinstance(mesh, Mapping):
        raise errors.not_a_mesh(mesh)
    return AbstractMesh(tuple(mesh.values()), tuple(mesh))
