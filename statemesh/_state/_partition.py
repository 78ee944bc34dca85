"""Step 1: split trees into states and the rest, and join them again."""

from .._base._errors import StructureError, error_listing, shortened
from .._base._trees import REMOVED, is_removed, is_state, is_state_or_removed, path_str, unpacked
from .._base._types import Filter, Leaf, PyTree
from .._jax._compat import tree_util
from ._filters import first_matches
from ._state import State


def partition(tree: PyTree, *filters: Filter) -> tuple[Leaf, ...]:
    """Split a tree by its states.

    **Arguments:**

    - `tree`: any pytree. A `Packed` in it counts as its model, which is what `combine` makes of the parts.
    - `filters`: which states go where; the first filter that matches takes the state. Left out,
        `...`: all of them.

    **Returns:** one tree per filter, holding its states, and one more that holds the rest. Where a
    tree has given a leaf away stands `Removed`, a node without leaves.

    **Raises:** `StructureError` for a filter that matches no state.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState([1.0]), "n": sm.State(0), "name": "net"}
        >>> params, rest = sm.partition(tree, sm.ParamState)
        >>> params
        {'n': Removed, 'name': Removed, 'w': ParamState([float32(1.0)])}
        >>> sm.combine(params, rest)["name"]
        'net'

        ```
    """
    filters = filters or (...,)
    tree = unpacked(tree)
    numbers = iter(first_matches(filters, [("tree", tree)], "partition"))
    leaves, treedef = tree_util.tree_flatten(tree, is_leaf=is_state_or_removed)
    # The number of the part that each leaf goes to; `None` for the rest.
    parts = [next(numbers) if is_state(leaf) else None for leaf in leaves]
    return tuple(
        treedef.unflatten([x if p == k else REMOVED for x, p in zip(leaves, parts, strict=True)])
        for k in (*range(len(filters)), None)
    )


def combine(*trees: PyTree) -> PyTree:
    """Join what `partition` split.

    **Arguments:**

    - `trees`: parts of one tree, in any order, each leaf in exactly one of them.

    **Returns:** the whole tree.

    **Raises:** `StructureError` naming every path at which the parts disagree: different structures,
    two values, or none.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.combine(*sm.partition((sm.State(1), "rest")))
        (State(int32(1)), 'rest')

        ```
    """
    if not trees:
        raise StructureError(
            "combine needs at least one tree: `combine(*partition(tree, filter))`."
        )
    flat = [tree_util.tree_flatten_with_path(tree, is_leaf=is_state_or_removed) for tree in trees]
    for k, (_, treedef) in enumerate(flat[1:], start=1):
        if treedef != flat[0][1]:
            path, first, other = _where_they_part(trees[0], trees[k])
            place = f"at `{path.removeprefix('.')}`" if path else "at the root"
            raise StructureError(
                f"combine: trees 0 and {k} have different structures {place}.\n"
                f"  tree 0: {shortened(first)}\n"
                f"  tree {k}: {shortened(other)}\n"
                "All parts of one `partition` have the same structure. Did anything but `set` change a part?"
            )
    joined, several, none = [], [], []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        path = path_str(column[0][0])
        present = [leaf for _, leaf in column if not is_removed(leaf)]
        if len(present) > 1:
            values = ", ".join(map(shortened, present))
            several.append(f"`{path}` is in {len(present)} trees: {values}")
        elif not present:
            none.append(f"`{path}` is in none of the trees")
        joined.append(present[0] if present else REMOVED)
    if several or none:
        head = "combine: each leaf must be in exactly one tree"
        raise error_listing(StructureError, head, several + none)
    return flat[0][1].unflatten(joined)


def states(tree: PyTree, filter: Filter = ...) -> dict[str, State]:
    """List the states of a tree by path.

    **Arguments:**

    - `tree`: any pytree. A `Packed` in it counts as its model.
    - `filter`: which of its states.

    **Returns:** a dictionary from path, as one would type it after the tree's name, to state.

    **Raises:** `StructureError` when the filter matches none.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.states({"bn": [sm.BatchState(0.0)], "w": sm.ParamState(1.0)}, sm.BatchState)
        {"['bn'][0]": BatchState(float32(0.0))}

        ```
    """
    tree = unpacked(tree)
    matches = first_matches((filter,), [("tree", tree)], "states")
    flat = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
    listed = [(path_str(path), leaf) for path, leaf in flat if is_state(leaf)]
    return {path: x for (path, x), match in zip(listed, matches, strict=True) if match is not None}


def _where_they_part(a: PyTree, b: PyTree, path: str = "") -> tuple[str, PyTree, PyTree]:
    """The first path at which the nodes of two trees differ, and both nodes."""
    kids_a, def_a = tree_util.tree_flatten_with_path(
        a, is_leaf=lambda node: node is not a or is_state_or_removed(node)
    )
    kids_b, def_b = tree_util.tree_flatten_with_path(
        b, is_leaf=lambda node: node is not b or is_state_or_removed(node)
    )
    if def_a != def_b:
        return path, a, b
    for (key, kid_a), (_, kid_b) in zip(kids_a, kids_b, strict=True):
        inside_a, inside_b = (
            tree_util.tree_structure(kid, is_leaf=is_state_or_removed) for kid in (kid_a, kid_b)
        )
        if inside_a != inside_b:
            return _where_they_part(kid_a, kid_b, path + path_str(key, "tree").removeprefix("tree"))
    return path, a, b
