"""Step 2, before a call: put a tree onto a mesh the way a mapped call wants it."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from .._base import errors
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._nodes import is_packed, is_state, is_state_or_packed
from .._base._paths import path_str
from .._base._prefix import broadcast_specs
from .._base._types import AnyMesh, Leaf, PyTree, SpecTree, StateSpecs
from .._model._values import strong
from ._agreement import array_passed, check_alike
from ._buffers import apart
from ._mesh import check_mesh, check_specs, manual_names
from ._placement import check_concrete, check_shapes, is_laid_out, is_own, onto
from ._specs import (
    UNDECLARED,
    OfStates,
    SpecPlacement,
    check_state_specs,
    choose_specs,
    own_placements,
    placement,
)


@without_own_frames
def place(
    tree: PyTree, mesh: AnyMesh, specs: SpecTree = None, *, state_specs: StateSpecs = None
) -> Any:
    """Put a tree onto a mesh the way a mapped call wants it.

    **Arguments:**

    - `tree`: any pytree. The buffers of a `Packed` in it lie right already, and stay.
    - `mesh`: the mesh.
    - `specs`: a spec, or a prefix tree of specs, for the arrays outside States; left out, they are
        replicated.
    - `state_specs`: where the States go: one spec, or `{filter: spec}`. A state that it does not
        mention goes by its own `spec`, else it is replicated.

    **Returns:** the tree, its arrays on the mesh. Arrays that already lie right are not touched, and
    leaves that are not arrays stay as they are. What is moved shares no memory with what it was moved
    from, so that one may be donated without the other.

    **Raises:** `SpecError` for specs that do not fit the tree, its arrays or the mesh, and for a mesh without
    devices; `TypeError` for arrays that are traced: there a mapped call lays its arguments out itself.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> model = sm.place({"w": sm.ParamState(np.ones(4))}, mesh, state_specs=P("x"))
        >>> model["w"].value.sharding.spec == P("x")
        True

        ```
    """
    check_mesh("place", mesh)
    if isinstance(mesh, AbstractMesh):
        raise errors.invalid_argument("place", "mesh", mesh)
    check_state_specs(state_specs, "state_specs")
    names = manual_names(mesh, ())
    check_specs([("specs", specs)], mesh, names)
    flat, _ = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    declared = iter(choose_specs(state_specs, [("tree", tree)], "state_specs"))
    nodes = tree_util.tree_leaves(tree, is_leaf=is_state_or_packed)
    packed = {id(buffer) for node in nodes if is_packed(node) for buffer in node.buffers}
    paths: list[str] = []
    leaves: list[Leaf] = []
    placements: list[SpecPlacement | None] = []
    of_states = OfStates()
    for (keys, node), spec in zip(flat, broadcast_specs(specs, tree, "specs", "tree"), strict=True):
        path = path_str(keys, "tree")
        own = tree_util.tree_leaves(node)
        if is_state(node):
            chosen = next(declared)
            wheres = own_placements(node, node.spec if chosen is UNDECLARED else chosen, path)
            of_states.state("specs", spec, path, node, wheres)
            placements += wheres
        else:
            moves = is_shaped(node) and id(node) not in packed
            if is_shaped(node):
                of_states.array("specs", spec)
            placements += [placement(spec) if moves else None] * len(own)
        leaves += own
        paths += [path] * len(own)
    if bad := of_states.bad():
        raise errors.specs_of_states("place", "specs", "state_specs", bad)
    chosen_at = [i for i, where in enumerate(placements) if where is not None]
    wheres = [where for where in placements if where is not None]
    arrays = [leaves[i] for i in chosen_at]
    named = [(f"the spec of {paths[i]}", w.spec) for i, w in zip(chosen_at, wheres, strict=True)]
    check_specs(named, mesh, names)
    check_shapes([paths[i] for i in chosen_at], arrays, wheres, mesh, "place")
    check_concrete("place", [paths[i] for i in chosen_at], arrays)
    targets = [NamedSharding(mesh, where.spec) for where in wheres]
    if mesh.is_multi_process:
        pairs = zip(chosen_at, arrays, strict=True)
        check_alike("place", mesh, [array_passed(paths[i], x) for i, x in pairs if is_own(x)])
    for i, x, target in zip(chosen_at, arrays, targets, strict=True):
        if not isinstance(x, jax.Array):
            leaves[i] = onto(apart(x, target), target)
            continue
        leaves[i] = strong(x)
        if not is_laid_out(x, target, frozenset(names)):
            same = x.sharding.is_equivalent_to(target, x.ndim)
            leaves[i] = onto(leaves[i] if same else apart(leaves[i], target), target)
    return tree_util.tree_structure(tree).unflatten(leaves)
