"""How messages spell specs, meshes, names and lists."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._paths import describe
from .._types import AxisName


def spec_str(spec: Any) -> str:
    """A spec as one types it."""
    if isinstance(spec, PartitionSpec):
        beside = {"unreduced": spec.unreduced, "reduced": spec.reduced}
        named = [f"{key}={set(names)!r}" for key, names in beside.items() if names]
        return f"P({', '.join([*map(repr, spec.partitions), *named])})"
    return repr(spec)


def filter_str(filter: Any) -> str:
    """A filter as one types it."""
    if filter is ...:
        return "..."
    return filter.__name__ if isinstance(filter, type) else repr(filter)


def mesh_str(mesh: Any) -> str:
    """A mesh by the sizes of its axes."""
    return f"Mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"


def sizes_str(sizes: Mapping[AxisName, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"


def axis_types_str(mesh: Any) -> str:
    return f"with axis types ({', '.join(kind.name for kind in mesh.axis_types)})"


def bullets(items: Iterable[str]) -> str:
    """A list, without what it says already: leaves of one state are often alike."""
    return "\n".join(f"  - {item}" for item in dict.fromkeys(items))


def quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def first_paths(paths: Sequence[str]) -> str:
    more = [f"{len(paths) - 3} more"] if len(paths) > 3 else []
    return ", ".join([*paths[:3], *more])


def shortened(value: Any) -> str:
    text = describe(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def node_str(node: Any) -> str:
    if isinstance(node, dict):
        return f"a dict with keys {sorted(map(str, node))}"
    if isinstance(node, tuple | list):
        return f"a {type(node).__name__} of {counted(len(node), 'element')}"
    if jax.tree_util.all_leaves([node]):
        return describe(node)
    return f"a {type(node).__name__}"


def kind_str(value: Any) -> str:
    return describe(value) if isinstance(value, jax.Array) else type(value).__name__


def policy_name(state: Any) -> str:
    """What merges the writes to a state, by the name that its author gave it."""
    return getattr(state.reduce, "__name__", None) or f"{type(state).__name__}.leave"
