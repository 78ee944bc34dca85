"""How messages spell specs, meshes, names and lists."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._paths import describe
from .._types import AxisName


E = TypeVar("E", bound=Exception)


def spec_str(spec: object) -> str:
    """A spec as the user would type it."""
    if isinstance(spec, PartitionSpec):
        marked = {"unreduced": spec.unreduced, "reduced": spec.reduced}
        named = [f"{key}={set(names)!r}" for key, names in marked.items() if names]
        return f"P({', '.join([*map(repr, spec.partitions), *named])})"
    return repr(spec)


def filter_str(filter: object) -> str:
    """A filter as the user would type it."""
    if filter is ...:
        return "..."
    return filter.__name__ if isinstance(filter, type) else repr(filter)


def sizes_str(sizes: Mapping[AxisName, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def mesh_str(mesh: Mesh | AbstractMesh) -> str:
    """A mesh by the sizes of its axes."""
    return f"Mesh({sizes_str(mesh.shape)})"


def mesh_with_types_str(mesh: Mesh | AbstractMesh) -> str:
    return f"{mesh_str(mesh)} with axis types ({', '.join(t.name for t in mesh.axis_types)})"


def listed(head: str, items: Iterable[str], mend: str = "") -> str:
    """`head`, then each different item on its own line, then how to mend them."""
    # Leaves of one state often give the same line.
    lines = [f"  - {item}" for item in dict.fromkeys(items)]
    return "\n".join([f"{head}:", *lines, *([mend] if mend else [])])


def error_listing(kind: type[E], head: str, items: Iterable[str], mend: str = "") -> E:
    return kind(listed(head, items, mend))


def quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def axes_argument(axes: Sequence[AxisName]) -> AxisName:
    """Axis names as collectives take them: one name by itself, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def first_paths(paths: Sequence[str]) -> str:
    """The first three paths, and how many more there are."""
    more = [f"{len(paths) - 3} more"] if len(paths) > 3 else []
    return ", ".join([*paths[:3], *more])


def first_items(items: Sequence[str]) -> list[str]:
    """The first ten items of a list, and how many more there are."""
    more = [f"{len(items) - 10} more"] if len(items) > 10 else []
    return [*items[:10], *more]


def shortened(value: object) -> str:
    text = describe(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def typed_str(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def kind_str(value: object) -> str:
    """An array by dtype and shape, anything else by its type."""
    return describe(value) if isinstance(value, jax.Array) else type(value).__name__


def node_str(node: object) -> str:
    """One node of a tree, without what is below it."""
    if isinstance(node, dict):
        return f"a dict with keys {sorted(map(str, node))}"
    if isinstance(node, tuple | list):
        return f"a {type(node).__name__} of {counted(len(node), 'element')}"
    if jax.tree_util.all_leaves([node]):
        return describe(node)
    return f"a {type(node).__name__}"


def policy_name(state: Any) -> str:
    """The function or method that merges the writes to a state, by the name its author gave it."""
    return getattr(state.reduce, "__name__", None) or f"{type(state).__name__}.leave"
