"""A cache with a bound, and what its keys are made of: values, functions, and all that these depend on."""

import dataclasses
import functools
import hashlib
import itertools
import os
import sys
import types
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np

import statemesh as sm

from .._base._libraries import is_library_module
from ._program._numbers import data_of
from ._types import PyTree


Entry = TypeVar("Entry")


class Recent(Generic[Entry]):
    """The entries that were used last, such as compiled programs.

    **Arguments:**

    - `most`: how many are kept. A compiled program holds megabytes, and a Python number that is drawn anew
        asks for a new one.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, new: Callable[[], Entry]) -> Entry:
        """The entry of a key. If there is none, `new` makes it."""
        entry = self._entries.pop(key, None) or new()
        self._entries[key] = entry
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return entry

    def forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)


# Keys


def is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def equal_values(a: Any, b: Any) -> bool:
    """Whether two objects are equal by their own `__eq__`."""
    try:
        return bool(a == b)
    except Exception:  # An `__eq__` of the user's may raise anything.
        return False


class _ValueKey:
    """A value with its own `__eq__`, except that it always equals itself.

    With `id` in the place of `hash` it equals nothing else. It is kept alive, so that its address is not used
    again.
    """

    def __init__(self, value: Any, number: Callable[[Any], int] = hash) -> None:
        self.value = value
        self.key = type(value), number(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ValueKey) or self.key != other.key:
            return False
        return self.value is other.value or equal_values(self.value, other.value)


def static_key(x: Any) -> Hashable:
    """A key that is equal for equal values of one type. Where a value cannot be known, it equals no other."""
    if isinstance(x, float):  # NaN is not equal to itself, and -0.0 is to 0.0.
        return type(x), x.hex()
    return _ValueKey(x) if is_hashable(x) else environment(x) or object()


# An environment of more objects, or an array of more bytes, is not compared.
_MOST_OBJECTS = 20_000
_MOST_BYTES = 2**27
# Up to this size the numbers of an array of JAX are compared, so that an equal one made anew is the same.
_SMALL = 2**12

_PLAIN = (int, bool, str, bytes, type(None), type(...), type(NotImplemented))
# What has no state of its own besides what its module or class makes it.
_BY_IDENTITY: tuple[type, ...] = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.ModuleType, np.ufunc),
)
# What holds other objects under these names, and nothing else.
_HOLDERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (functools.partial | eqx.Partial, ("func", "args", "keywords")),
    (types.MethodType, ("__func__", "__self__")),
    (staticmethod | classmethod, ("__func__",)),
    (property, ("fget",)),
    (types.BuiltinFunctionType, ("__name__", "__self__")),
)
# The key of an object itself, and the objects that it holds.
_Apart = tuple[Hashable, Iterable[Any]]


class _NoKey(Exception):
    """What a value is cannot be told from what it was."""


def environment(*values: Any) -> Hashable | None:
    """A key that is equal in two calls only if functions compute the same from the same arguments.

    It holds the code, the defaults, what is closed over, and the globals and environment variables that the
    code names, and what these hold in turn. Of modules of the standard library and of installed packages it
    is assumed that their globals stay. Classes of the user's own count with their methods. It does not hold
    what names that are made at run time lead to, what is in files, and what `functools.lru_cache` keeps.

    **Arguments:**

    - `values`: functions. Classes, modules and other objects are taken apart in the same way.

    **Returns:** a key; `None` where it cannot be known, such as for an iterator or a tracer.
    """
    keys: list[Hashable] = []
    # The objects that were met, which are kept so that no other gets the address of one of them.
    met: dict[int, tuple[int, Any]] = {}
    # A stack of its own, because what objects hold can be nested more deeply than Python calls can.
    stack: list[Iterator[Any]] = [iter(values)]
    while stack:
        x = next(stack[-1], stack)
        if x is stack:
            stack.pop()
        elif type(x) in _PLAIN:
            keys.append((type(x), x))
        elif id(x) in met:
            keys.append(("met", met[id(x)][0]))
        else:
            met[id(x)] = len(met), x
            try:
                key, held = _taken_apart(x)
            except _NoKey:
                return None
            if len(met) > _MOST_OBJECTS:
                return None
            keys.append(key)
            stack.append(iter(held))
    return tuple(keys)


def held_by(args: PyTree) -> list[Any]:
    """What of arguments an environment holds too: the classes of their nodes, and functions in them."""
    classes: dict[type, None] = {}

    def is_leaf(node: Any) -> bool:
        classes[type(node)] = None
        return False

    functions = [x for x in jax.tree.leaves(args, is_leaf=is_leaf) if callable(x)]
    return [cls for cls in classes if not is_library_module(cls.__module__)] + functions


def _taken_apart(x: Any) -> _Apart:
    kind: Any = type(x)
    if kind is float:  # NaN is not equal to itself, and -0.0 is to 0.0.
        return x.hex(), ()
    if isinstance(x, types.FunctionType):
        return x.__code__, _held_by_function(x)
    if isinstance(x, type):
        return _ValueKey(x, id), _held_by_class(x)
    if isinstance(x, _BY_IDENTITY):
        return _ValueKey(x, id), ()
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return _array_apart(x)
    if isinstance(x, dict):
        return (kind, len(x)), itertools.chain.from_iterable(x.items())
    if isinstance(x, list | tuple | set | frozenset):
        return (kind, len(x)), x
    for holder, names in _HOLDERS:
        if isinstance(x, holder):
            return kind, [getattr(x, name) for name in names]
    if isinstance(x, types.CellType):
        try:
            return kind, (x.cell_contents,)
        except ValueError:  # The variable has no value yet.
            return "empty", ()
    if sm.is_state(x) or isinstance(x, sm.Packed):
        leaves, structure = jax.tree.flatten(x)
        return kind, (structure, *leaves)
    if hasattr(x, "__wrapped__"):
        # A function under `jax.jit`, or in a mapping: what is wrapped, as this very object wraps it.
        return _ValueKey(x, id), (x.__wrapped__,)
    return _object_apart(x)


def _array_apart(x: Any) -> _Apart:
    if isinstance(x, jax.core.Tracer):
        raise _NoKey
    is_large = isinstance(x, jax.Array) and (x.size > _SMALL or not x.is_fully_addressable)
    if is_large or (isinstance(x, jax.Array) and x.is_deleted()):
        return _ValueKey(x, id), ()
    numbers = np.asarray(data_of(x))
    weak, sharding = getattr(x, "weak_type", None), getattr(x, "sharding", None)
    key = type(x), str(x.dtype), weak, sharding, numbers.shape
    if numbers.dtype.hasobject:
        return key, numbers.reshape(-1).tolist()
    if numbers.nbytes > _MOST_BYTES:
        raise _NoKey
    data = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).tobytes()
    return (key, hashlib.blake2b(data, digest_size=16).digest()), ()


def _object_apart(x: Any) -> _Apart:
    """An object is a value, or what its `__dict__` holds, or cannot be known."""
    kind: Any = type(x)
    held = getattr(x, "__dict__", None)
    of_jax = kind.__module__.split(".")[0] in ("jax", "jaxlib")
    is_reference = of_jax and hasattr(x, "__setitem__")
    by_identity: Any = object.__hash__
    # A value's class says when two are equal. Devices, meshes and the like of JAX never change.
    is_value = is_hashable(x) and (
        (of_jax and not is_reference) or kind.__hash__ is not by_identity
    )
    whole = held is None or is_library_module(kind.__module__)
    if whole and is_value and not dataclasses.is_dataclass(x):
        return _ValueKey(x), ()
    if held is None or isinstance(x, Iterator) or is_reference:
        raise _NoKey
    return kind, (kind, held)


def _held_by_function(fun: types.FunctionType) -> Iterator[Any]:
    yield from (fun.__defaults__, fun.__kwdefaults__, *(fun.__closure__ or ()))
    yield fun.__dict__ or None
    # Not its `__module__`, which `functools.wraps` copies from another function.
    if is_library_module(fun.__globals__.get("__name__")):
        return
    names, texts = _names(fun.__code__), _texts(fun.__code__)
    if not _READ_BY_TEXT.isdisjoint(names):
        names += texts
    if not _OF_ENVIRONMENT.isdisjoint(names):
        yield {text: os.environ.get(text) for text in texts}
    package = fun.__globals__.get("__package__")
    imported = {
        name: sys.modules[path]
        for name in names
        for path in (name, f"{package}.{name}")
        if path in sys.modules and name not in fun.__globals__
    }
    yield from _held_by_names(ChainMap(fun.__globals__, imported), names, set())


def _held_by_names(
    space: Mapping[str, Any], names: tuple[str, ...], met: set[types.ModuleType]
) -> Iterator[Any]:
    """What code takes by name from its globals, and from the modules in them."""
    for name in names:
        if name not in space:
            continue
        value = space[name]
        yield from (name, value)
        if isinstance(value, types.ModuleType) and value not in met:
            met.add(value)
            if not is_library_module(value.__name__):
                yield from _held_by_names(vars(value), names, met)


def _held_by_class(cls: type) -> Iterator[Any]:
    if is_library_module(cls.__module__):
        return
    yield from cls.__bases__
    # Those of a named tuple.
    fields = getattr(cls, "_fields", ()) if issubclass(cls, tuple) else ()
    for name, value in vars(cls).items():
        # Fields and slots are what objects hold, and what Python and `abc` keep of a class is no code.
        is_code = not name.startswith(("__", "_abc")) or isinstance(value, types.FunctionType)
        if is_code and not isinstance(value, types.MemberDescriptorType) and name not in fields:
            yield from (name, value)


# Functions to which the name of a global or an attribute is handed as a text, and names of the environment.
_READ_BY_TEXT = frozenset(["getattr", "globals", "vars", "attrgetter", "import_module"])
_OF_ENVIRONMENT = frozenset(["environ", "getenv"])


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in the code of the functions in it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


@functools.lru_cache(maxsize=1024)
def _texts(code: types.CodeType) -> tuple[str, ...]:
    """The texts in a function's code, and in the code of the functions in it, that can be names."""
    inner = [_texts(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    texts = [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]
    return tuple(dict.fromkeys(itertools.chain(texts, *inner)))
