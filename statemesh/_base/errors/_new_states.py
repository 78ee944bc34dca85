"""Errors of new states and of `Map`."""

from collections.abc import Sequence

from .._paths import describe
from ._classes import BatchAxisError, StructureError
from ._text import node_str, quoted


def new_states_need_size() -> BatchAxisError:
    return BatchAxisError(
        "vmap2_new_states needs axis_size=..., the number of lanes: nothing else shows it."
    )


def not_a_module(module: object) -> TypeError:
    return TypeError(
        f"states are created for a statemesh.Module, got {describe(module)} of type {type(module).__name__}. "
        "Derive its class from sm.Module and create its states in `init_state(self, **kwargs)`."
    )


def unknown_method(module: str, name: object, known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{module} has no method {name!r}. Its methods are {quoted(known) or 'none'}."
    )


def not_a_pair(module: str, name: str, result: object) -> StructureError:
    return StructureError(
        f"Map: {module}.{name} returned {node_str(result)}, not `(out, module)`. Return the result and the "
        "module with its new states: `return out, self.replace(state=...)`, or `return out, self`."
    )
