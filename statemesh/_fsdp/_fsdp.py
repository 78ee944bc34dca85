"""`fsdp`: which axis of each parameter is split over a data axis."""

import math
from typing import Any

import jax

from .._base import errors
from .._base._checks import required_names
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._nodes import is_packed, is_state, is_state_or_packed
from .._base._paths import path_str
from .._base._specs import PerShard
from .._base._types import AnyMesh, Leaf, PyTree, SeveralAxes, SpecTree
from .._model._kinds import ParamState
from .._resolve._mesh import check_mesh
from ._split import SplitArray, axes_of, is_plain_parameter, spec_with, specs_of


@without_own_frames
def fsdp(
    model: PyTree,
    mesh: AnyMesh,
    axis_name: SeveralAxes,
    *,
    min_size: int = 1024,
    first_axis: int = 0,
) -> Any:
    """The model with its parameters split over a data axis (fully sharded data parallelism).

    Each device holds `1/n` of the parameters, and so of their gradients and of an optimizer's slots.
    `gather` makes them whole where they are used.

    Of each array the largest axis is split whose length the size of the mesh axis divides and which is not
    split already; of equal ones the first. An array without such an axis stays whole. What its spec says of
    other mesh axes, as for tensor parallelism, holds on.

    **Arguments:**

    - `model`: any pytree. Its parameters are what `value_and_grad` differentiates by default: every
        `ParamState`, and every array of floats outside any State.
    - `mesh`: the mesh of the calls.
    - `axis_name`: the mesh axis over which the rows of a batch are split, or a tuple of several, major to
        minor. Several split one axis of a parameter together.
    - `min_size`: arrays with fewer elements stay whole.
    - `first_axis`: the first axis that may be split: 1 for layers that are stacked for a scan.

    **Returns:** the model with a spec, of one entry for each axis, in each `ParamState`. A parameter outside
    any State is held by a `ParamState` of its own, until `gather` makes it an array again. Parameters that
    have been through `fsdp` stay as they are, so that a part of the model may go first, with options of its
    own. No array is moved: `place` or a mapped call does it.

    **Raises:** `SpecError` for an axis that the mesh does not have; `StructureError` where the model has no
    parameters or is packed; `TypeError` or `ValueError` for an argument that is none.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = {"w": sm.ParamState(jnp.ones((32, 64))), "b": sm.ParamState(jnp.ones(64))}
        >>> model = sm.fsdp(model, mesh, "data")
        >>> model["w"].spec, model["b"].spec
        (P(None, 'data'), P(None,))

        ```

    Source: the third stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
    """
    check_mesh("fsdp", mesh)
    axis_names = required_names("fsdp", axis_name)
    if unknown := [name for name in axis_names if name not in mesh.shape]:
        raise errors.fsdp_unknown_axes(unknown, mesh)
    for what, number in (("min_size", min_size), ("first_axis", first_axis)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise errors.fsdp_bad_number(what, number)
    if any(map(is_packed, tree_util.tree_leaves(model, is_leaf=is_state_or_packed))):
        raise errors.fsdp_packed()
    size = math.prod(mesh.shape[name] for name in axis_names)
    flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    found = False

    def one(spec: SpecTree, x: Leaf) -> SpecTree:
        if isinstance(spec, PerShard):
            return spec
        axes = axes_of(spec, x.ndim)
        # A spec that names no mesh axis, with an entry for every axis, says that the array is to stay whole.
        decided = spec is not None and x.ndim > 0 and len(spec) == x.ndim and not any(axes)
        if decided or any(name in names for names in axes for name in axis_names):
            return spec
        position = None
        if math.prod(x.shape) >= min_size:
            free = [k for k in range(first_axis, x.ndim) if not axes[k] and not x.shape[k] % size]
            position = max(free, key=lambda k: x.shape[k], default=None)
        return spec_with(axes, position, axis_names)

    units = []
    for keys, unit in flat:
        if is_plain_parameter(unit):
            # A shape becomes the shape of a State.
            is_shape = isinstance(unit, jax.ShapeDtypeStruct)
            unit = jax.eval_shape(SplitArray, unit) if is_shape else SplitArray(unit)
        if isinstance(unit, ParamState):
            found = True
            leaves, structure = tree_util.tree_flatten(unit.value)
            pairs = zip(specs_of(unit, path_str(keys, "model")), leaves, strict=True)
            unit = unit.replace(spec=structure.unflatten([one(*pair) for pair in pairs]))
        units.append(unit)
    if not found:
        raise errors.fsdp_no_parameters()
    return treedef.unflatten(units)
