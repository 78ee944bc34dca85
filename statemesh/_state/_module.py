"""`Module`: an Equinox module with `replace` and the protocol by which states are made."""

import dataclasses
import inspect
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import equinox as eqx
import jax

from .._base import _errors as errors
from .._base._errors import quoted
from .._base._trees import is_state
from .._base._types import Leaf, PyTree, PyTreeDef
from .._jax._frames import without_own_frames
from ._state import State, unknown_fields


field = eqx.field


M = TypeVar("M", bound="Module")


class Module(eqx.Module):
    """An `equinox.Module` that can be copied with some fields changed, and that makes its states.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> class Counter(sm.Module):
        ...     count: sm.State
        >>> counter = Counter(sm.State(0)).replace(count=3)
        >>> counter.count.value
        Array(3, dtype=int32)

        ```
    """

    # Hidden from type checkers, which would take it for leave to assign any attribute.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: PyTree) -> None:
            try:
                super().__setattr__(name, value)
            except dataclasses.FrozenInstanceError:
                raise _not_assigned(self, name) from None

    def replace(self: M, **fields: PyTree) -> M:
        """A copy with some fields changed.

        **Arguments:**

        - `fields`: new values by field name. A field that holds a State and is given something that
            is not a State is written with `State.set`, which checks it.

        **Returns:** a module of the same type.

        **Raises:** `StructureError` for a field that the module does not have.
        """
        names = [f.name for f in dataclasses.fields(self)]
        if unknown := [name for name in fields if name not in names]:
            raise unknown_fields(type(self).__name__, unknown, names)
        # Not through the constructor: what it computes from its arguments is already here.
        new = object.__new__(type(self))
        for name in names:
            if name not in fields:
                if hasattr(self, name):
                    object.__setattr__(new, name, getattr(self, name))
                continue
            value, old = fields[name], getattr(self, name, None)
            if isinstance(old, State) and not isinstance(value, State):
                value = old._set(value, f"{type(self).__name__}.{name}")
            object.__setattr__(new, name, value)
        return new

    def init_state(self: M, *args: PyTree, **kwargs: PyTree) -> M:
        """Make this module's own states; override it in modules that have any.

        **Arguments:**

        - `args`, `kwargs`: whatever the module needs to know, named in its own signature; it is given
            by name.

        **Returns:** the module with its states made.
        """
        del args, kwargs
        return self

    @without_own_frames
    def init_all_states(self: M, **kwargs: PyTree) -> M:
        """Make the states of this module and of every module in it.

        Each module's `init_state` is called once, the inner ones first, with those of `kwargs` that
        its signature names.

        **Arguments:**

        - `kwargs`: arguments for the `init_state` methods.

        **Returns:** the module with all states made.

        **Raises:** `TypeError` for an argument that no `init_state` takes.
        """
        used: set[str] = set()
        new = _init_all(self, kwargs, used)
        if unused := [name for name in kwargs if name not in used]:
            raise TypeError(
                f"{type(self).__name__}.init_all_states got {quoted(unused)}, which no `init_state` in it "
                "takes. Add the argument to the signature of the `init_state` that needs it."
            )
        return new


def _not_assigned(module: Module, name: str) -> dataclasses.FrozenInstanceError:
    kind, known = type(module).__name__, [f.name for f in dataclasses.fields(module)]
    if name in known:
        return dataclasses.FrozenInstanceError(
            f"{kind} is immutable; cannot assign to `{name}`. Write `new = self.replace({name}=...)`, and "
            "return the new module."
        )
    fields = f"has the fields {quoted(known)}" if known else "has no fields"
    return dataclasses.FrozenInstanceError(
        f"{kind} {fields}; cannot assign to `{name}`. Declare it in the class, as in `{name}: sm.State`, and "
        "assign it in `__init__`; later, `self.replace` makes a changed copy."
    )


class _Level:
    """A module whose inner modules are being initialised: what is left of it, and what is done already."""

    def __init__(self, module: Module) -> None:
        # States are not flattened: inside a mapped call they remember where they came from.
        self.structure: PyTreeDef
        nodes, self.structure = jax.tree.flatten(module, is_leaf=partial(_is_held, module))
        self.left = iter(nodes)
        self.done: list[Leaf] = []


def _is_held(module: Module, node: PyTree) -> bool:
    return is_state(node) or (isinstance(node, Module) and node is not module)


_END = object()


def _init_all(module: M, kwargs: dict[str, PyTree], used: set[str]) -> M:
    # Without recursion: modules may be nested as deeply as JAX can take them.
    levels = [_Level(module)]
    while True:
        level = levels[-1]
        node = next(level.left, _END)
        if node is _END:
            levels.pop()
            inner: PyTree = level.structure.unflatten(level.done)
            taken = _taken(inner, kwargs)
            used.update(taken)
            new = _returned(inner, "init_state", inner.init_state(**taken))
            if not levels:
                return new
            levels[-1].done.append(new)
        elif not isinstance(node, Module):
            level.done.append(node)
        elif type(node).init_all_states is Module.init_all_states:
            levels.append(_Level(node))
        else:
            # It overrides `init_all_states`, which gets the arguments that the modules in it take.
            taken = _taken_inside(node, kwargs)
            used.update(taken)
            level.done.append(_returned(node, "init_all_states", node.init_all_states(**taken)))


def _taken(module: Module, kwargs: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those of the arguments that the module's own `init_state` takes."""
    if type(module).init_state is Module.init_state:
        return {}
    parameters = inspect.signature(module.init_state).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: x for name, x in kwargs.items() if takes_all or name in parameters}


def _taken_inside(module: Module, kwargs: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those of the arguments that an `init_state` of the module, or of one in it, takes."""
    taken: dict[str, PyTree] = {}
    left = [module]
    while left:
        inner = left.pop()
        taken |= _taken(inner, kwargs)
        nodes = jax.tree.leaves(inner, is_leaf=partial(_is_held, inner))
        left += [node for node in nodes if isinstance(node, Module)]
    return taken


def _returned(module: PyTree, method: str, result: PyTree) -> PyTree:
    """The module that a method returned which makes states. Anything else is refused."""
    if not isinstance(result, Module):
        name = f"{type(module).__name__}.{method}"
        raise errors.method_returned(
            name, result, "the module with its states", "return self.replace(mean=BatchState(0.0))"
        )
    return result
