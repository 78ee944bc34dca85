"""What the result of a function can depend on besides its arguments, as a key for caches."""

import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

import statemesh as sm

from .._static_keys import is_hashable, static_key
from .._types import PyTree
from ._feedback import is_key


# An environment of more objects, or an array of more bytes, is not compared.
_MOST_OBJECTS = 20_000
_MOST_BYTES = 2**27
# Up to this size the numbers of an array of JAX are compared, so that an equal one made anew is the same.
_SMALL = 2**12


def environment(*values: Any) -> Hashable | None:
    """A key that is equal in two calls only if functions compute the same from the same arguments.

    It holds the code, the defaults, what is closed over, and the globals that the code names, and what these
    hold in turn. Of modules of the standard library and of installed packages it is assumed that their
    globals stay. Classes of the user's own count with their methods.

    **Arguments:**

    - `values`: functions. Classes, modules and other objects are taken apart in the same way.

    **Returns:** a key; `None` where it cannot be known, such as for an iterator or a tracer.
    """
    walk = _Walk()
    try:
        for value in values:
            walk.add(value)
    except _Unknown:
        return None
    return tuple(walk.found)


def held_by(args: PyTree) -> list[Any]:
    """What of arguments an environment holds too: the classes of their nodes, and functions in them."""
    found: dict[type, None] = {}

    def is_leaf(node: Any) -> bool:
        found[type(node)] = None
        return False

    functions = [x for x in jax.tree.leaves(args, is_leaf=is_leaf) if callable(x)]
    return [cls for cls in found if not _is_installed(cls.__module__)] + functions


class _Unknown(Exception):
    """What a value is cannot be told from what it was."""


class _Same:
    """An object that is equal to itself only. It is kept alive, so that its address is not used again."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x


_PLAIN = (int, bool, str, bytes, type(None), type(...), type(NotImplemented))
# What has no state of its own besides what its module or class makes it.
_BY_IDENTITY: tuple[type, ...] = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.ModuleType, np.ufunc),
)


class _Walk:
    """Goes through objects and what they hold.

    **Attributes:**

    - `found`: the keys of all that was found, in an order that the objects determine.
    """

    def __init__(self) -> None:
        self.found: list[Hashable] = []
        # The objects that were met, which are kept so that no other gets the address of one of them.
        self._met: dict[int, tuple[int, Any]] = {}

    def add(self, x: Any) -> None:
        """Add an object and all that it holds, one after the other."""
        left = [iter((x,))]
        while left:
            one = next(left[-1], _END)
            if one is _END:
                left.pop()
            elif type(one) in _PLAIN:
                self.found.append((type(one), one))
            elif type(one) is float:  # NaN is not equal to itself, and -0.0 is to 0.0.
                self.found.append(one.hex())
            elif id(one) in self._met:
                self.found.append(("met", self._met[id(one)][0]))
            else:
                self._met[id(one)] = len(self._met), one
                if len(self._met) > _MOST_OBJECTS:
                    raise _Unknown
                left.append(self._parts(one))

    def _parts(self, x: Any) -> Iterator[Any]:
        """Add the key of an object itself, and give what it holds."""
        if isinstance(x, types.FunctionType):
            self.found.append(x.__code__)
            return _held_by_function(x)
        if isinstance(x, type):
            self.found.append(_Same(x))
            return _held_by_class(x)
        if isinstance(x, _BY_IDENTITY):
            self.found.append(_Same(x))
            return iter(())
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            return self._array(x)
        several = isinstance(x, list | tuple | dict | set | frozenset)
        self.found.append((_Same(type(x)), len(x) if several else 0))
        if isinstance(x, dict):
            return (one for pair in x.items() for one in pair)
        return iter(x) if several else self._object(x)

    def _array(self, x: Any) -> Iterator[Any]:
        if isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer):
                raise _Unknown
            if x.is_deleted() or x.size > _SMALL or not x.is_fully_addressable:
                self.found.append(_Same(x))
                return iter(())
            numbers = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        else:
            numbers = np.asarray(x)
        kind = type(x), str(x.dtype), getattr(x, "weak_type", None), getattr(x, "sharding", None)
        if numbers.dtype.hasobject:
            self.found.append((kind, numbers.shape))
            return iter(numbers.reshape(-1).tolist())
        if numbers.nbytes > _MOST_BYTES:
            raise _Unknown
        data = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
        self.found.append(
            (kind, numbers.shape, hashlib.blake2b(data.tobytes(), digest_size=16).digest())
        )
        return iter(())

    def _object(self, x: Any) -> Iterator[Any]:
        if isinstance(x, functools.partial | eqx.Partial):
            return iter((x.func, x.args, x.keywords))
        if isinstance(x, types.MethodType):
            return iter((x.__func__, x.__self__))
        if isinstance(x, staticmethod | classmethod):
            return iter((x.__func__,))
        if isinstance(x, property):
            return iter((x.fget,))
        if isinstance(x, types.BuiltinFunctionType):
            self.found.append(x.__name__)
            return iter((x.__self__,))
        if isinstance(x, types.CellType):
            return iter((_contents(x),))
        if sm.is_state(x) or isinstance(x, sm.Packed):
            leaves, structure = jax.tree.flatten(x)
            return iter((structure, *leaves))
        if hasattr(x, "__wrapped__"):
            # A function under `jax.jit`, or in a mapping: what is wrapped, as this very object wraps it.
            self.found.append(_Same(x))
            return iter((x.__wrapped__,))
        return self._other(x)

    def _other(self, x: Any) -> Iterator[Any]:
        held = getattr(x, "__dict__", None)
        whole = held is None or _is_installed(type(x).__module__)
        if whole and not dataclasses.is_dataclass(x) and _is_a_value(x):
            key = static_key(x)
            if key is None:
                raise _Unknown
            self.found.append(key)
            return iter(())
        if held is None or isinstance(x, Iterator) or _is_reference(x):
            raise _Unknown
        return iter((type(x), held))


_END = object()


def _is_a_value(x: Any) -> bool:
    """Whether an object is hashable, and its class says when two are equal or is one of JAX.

    Devices, meshes and the like are never changed. References of JAX are.
    """
    by_identity: Any = object.__hash__
    whole = _is_of_jax(x) and not _is_reference(x)
    return is_hashable(x) and (whole or type(x).__hash__ is not by_identity)


def _is_of_jax(x: Any) -> bool:
    return type(x).__module__.split(".")[0] in ("jax", "jaxlib")


def _is_reference(x: Any) -> bool:
    return _is_of_jax(x) and hasattr(x, "__setitem__")


def _held_by_function(fun: types.FunctionType) -> Iterator[Any]:
    yield fun.__defaults__
    yield fun.__kwdefaults__
    yield from fun.__closure__ or ()
    yield fun.__dict__ or None
    # Not its `__module__`, which `functools.wraps` copies from another function.
    if _is_installed(fun.__globals__.get("__name__")):
        return
    names = _names(fun.__code__)
    for name in names:
        if name not in fun.__globals__:
            continue
        value = fun.__globals__[name]
        yield name
        yield value
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            # What the code takes from a module has its name in the code, too.
            for inner in names:
                if inner in vars(value):
                    yield inner
                    yield vars(value)[inner]


def _held_by_class(cls: type) -> Iterator[Any]:
    if _is_installed(cls.__module__):
        return
    yield from cls.__bases__
    # Those of a named tuple.
    fields = getattr(cls, "_fields", ()) if issubclass(cls, tuple) else ()
    for name, value in vars(cls).items():
        # Fields and slots are what objects hold, and what Python and `abc` keep of a class is no code.
        own = not name.startswith(("__", "_abc")) or isinstance(value, types.FunctionType)
        if own and not isinstance(value, types.MemberDescriptorType) and name not in fields:
            yield name
            yield value


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in the code of the functions in it."""
    found = dict.fromkeys(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= dict.fromkeys(_names(one))
    return tuple(found)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The variable has no value yet.
        return "empty"


_PACKAGES = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def _is_installed(name: str | None) -> bool:
    """Whether a module is one of the standard library or of an installed package, whose globals stay."""
    if name is None or name == "__main__":
        return False
    if name.split(".")[0] in ("statemesh", "builtins"):
        return True
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and any(part in file for part in _PACKAGES)
