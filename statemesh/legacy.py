"""The signature of `jax.experimental.shard_map`, for code that was written for it."""

from jax.sharding import AbstractMesh, Mesh

from ._base._checks import axis_names as as_names
from ._base._checks import check_flag, check_function
from ._base._errors import SpecError, mesh_str
from ._base._types import AnyMesh, AxisNames, FunOf, Params, Result, SpecTree
from ._call._mapping import StatefulMapping
from ._call._mesh_and_specs import not_a_mesh
from ._call._shard_map import shard_map as _shard_map


def shard_map(
    f: FunOf[Params, Result],
    mesh: AnyMesh,
    in_specs: SpecTree,
    out_specs: SpecTree,
    check_rep: bool = True,
    auto: AxisNames = frozenset(),
) -> StatefulMapping[Params, Result]:
    """`statemesh.shard_map` by the names of `jax.experimental.shard_map`.

    **Arguments:**

    - `f`: a pure function over one shard; it may take and return States.
    - `mesh`: the mesh.
    - `in_specs`, `out_specs`: as for `statemesh.shard_map`.
    - `check_rep`: `check_vma` there.
    - `auto`: the mesh axes *not* to map over, which are left to the compiler.

    **Returns:** a function like `f`.

    **Raises:** `SpecError` when `auto` names an axis that the mesh does not have, or all of them.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.legacy import shard_map
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> shard_map(lambda x: 2 * x, mesh, (P("x"),), P("x"), check_rep=False)(jnp.arange(3))
        Array([0, 2, 4], dtype=int32)

        ```
    """
    check_function("shard_map", f)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise not_a_mesh(mesh)
    check_flag("shard_map", "check_rep", check_rep)
    expected = "the names of mesh axes that are not mapped over, as in auto={'model'}"
    auto = as_names("shard_map", auto, "auto", expected)
    names = frozenset(mesh.axis_names)
    if not auto <= names or (auto and auto == names):
        raise SpecError(
            f"auto={sorted(map(str, auto))} must be some, but not all, of the axes of {mesh_str(mesh)}."
        )
    mapped = names - auto if auto else ()
    return _shard_map(f, mesh, in_specs, out_specs, check_vma=check_rep, axis_names=mapped)
