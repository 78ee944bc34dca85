"""`assert_equivalent`: a function gives the same results on every mesh."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from .. import _errors as errors
from .._types import Fun, PyTree
from ._adapted import check_specs, is_mapped
from ._check import Check
from ._checked import Checked
from ._environment import environment, held_by
from ._feedback import Named
from ._programs import mesh_of, on_mesh
from ._subject import Asked, Subject
from ._untested import UntestedWarning
from ._values import as_arrays


def assert_equivalent(
    fun: Fun,
    args: PyTree,
    *,
    meshes: Iterable[Any],
    in_specs: PyTree = ...,
    out_specs: PyTree = ...,
    state_in_specs: PyTree = None,
    state_out_specs: PyTree = None,
    check_vma: bool | None = None,
    unsharded: Fun | Literal[False] | None = None,
    steps: int | None = None,
    gradients: bool | None = None,
    tolerance: float | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    fed_back: Named | None = None,
    leave_out: Any = None,
    keep: Collection[str] = (),
) -> Checked:
    """Fail unless a function of shards gives on every mesh what it gives unsharded.

    The function is called several times on each mesh. Each call gets the model that the call before returned,
    and its results are compared. On the last mesh the function is also called inside `jax.jit`, replayed by
    `emulate`, and run with a model that was saved halfway on the mesh before and placed on this one.

    **Arguments:**

    - `fun`, `in_specs`, `out_specs`, `state_in_specs`, `state_out_specs`, `check_vma`: as for `shard_map`.
        The programs of the last functions stay compiled: define your function outside of the test, and many
        values cost one compile.
    - `args`: the arguments of the first call, in a tuple. The last results replace the first arguments in the
        next call where their structures and shapes agree and they are more than one bare array.
    - `meshes`: each a `jax.sharding.Mesh` or the sizes of its axes, `{name: size}`.
    - `unsharded`: a plain function of the same arguments that gives the right results. Left out, `fun` on a
        mesh of one device. Only such a function finds a mistake that one shard makes too, such as a new state
        that is not returned. `False` for a function whose results depend on the mesh: each mesh is then
        compared with its emulation only.
    - `steps`: the number of calls.
    - `gradients`: whether the gradients of a weighted sum of all results are compared too, by all inexact
        arrays of the arguments.
    - `tolerance`: how far floats may differ, relative to the largest of the array (or to one). Left out, as
        far as rounding explains by dtype, length of reductions and condition of a result. All other numbers
        must be equal.

    **Raises:** `AssertionError` that names every array that is off, by how much, where and on which mesh and
    shard, with a guess at the cause. Errors of `fun` or of the call come through, with a note that says on
    which mesh. `StatemeshError` for meshes of more devices than there are.

    With n meshes there are n + 3 compiles for the calls, and 2 (n + 1) for the gradients.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import assert_equivalent
        >>> def centered(mean, x):
        ...     now = jax.lax.pmean(x.mean(0), "data")
        ...     return x - now, mean.set(0.9 * mean.value + 0.1 * now)
        >>> model, x = sm.State(np.zeros(2)), np.sin(np.arange(16.0)).reshape(8, 2)
        >>> assert_equivalent(
        ...     centered, (model, x), meshes=[{"data": 2}, {"data": 4}],
        ...     in_specs=(None, P("data")), out_specs=(P("data"), P()),
        ... )

        ```

        Where it fails:

        ```python
        >>> def centered(x):
        ...     return x - x.mean(0)
        >>> try:
        ...     assert_equivalent(
        ...         centered, (x,), meshes=[{"data": 2}], in_specs=P("data"), out_specs=P("data")
        ...     )
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[2])
        On mesh data=2, call 1 of 3, compared with the function on one device:

        ```
    """
    if not isinstance(args, tuple | list):
        raise errors.not_arguments(args)
    if steps is not None and steps < 1:
        raise errors.steps_too_few(steps)
    found = [mesh_of(mesh) for mesh in meshes]
    if not found:
        raise errors.no_meshes()
    specs: dict[str, PyTree] = {
        "in_specs": in_specs,
        "out_specs": out_specs,
        "state_in_specs": state_in_specs,
        "state_out_specs": state_out_specs,
        "check_vma": check_vma,
    }
    check_specs(fun, specs)
    given = as_arrays((tuple(args), dict(kwargs or {})))
    key = environment(fun, *held_by(given))
    mapping = {} if is_mapped(fun) else {**specs, "check_vma": check_vma is not False}
    asked = Asked(
        name=getattr(fun, "__name__", type(fun).__name__),
        args=given,
        meshes=[on_mesh(fun, key, mesh, mapping) for mesh in found],
        unsharded=unsharded,
        steps=steps,
        gradients=gradients,
        tolerance=tolerance,
        fed_back=fed_back,
        leave_out=leave_out,
        keep=keep,
    )
    check = Check(Subject(asked))
    check.run()
    checked = check.conclude()
    for text in checked.untested:
        warnings.warn(text, UntestedWarning, stacklevel=2)
    return checked
