"""`assert_equivalent`: a function gives the same results on every mesh."""

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from numbers import Integral, Real
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

import statemesh as sm

from ..._jax._frames import stacklevel, without_own_frames
from .. import _errors as errors
from .._caches import environment, held_by
from .._errors import check
from .._program._other_values import as_arrays
from .._program._paths import is_within, path_of
from .._program._trace import name_of
from .._types import Args, Fun, PyTree, tree_util
from ._check import Check, Checked
from ._feedback import Named
from ._jitted import is_jitted, jitted_on_meshes, refused
from ._programs import FunctionOnMesh, StaticLeaves, kept, mesh_of
from ._progress import progress
from ._subject import Subject
from ._untested import RangeWarning, UntestedWarning


@functools.partial(without_own_frames, says_so=False)
def assert_equivalent(
    fun: Fun,
    args: PyTree,
    *,
    meshes: Iterable[Any] | None = None,
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
    bitwise: bool = False,
) -> Checked:
    """Fail unless a function of shards gives on every mesh what it gives unsharded.

    On each mesh the function is called several times. Each call gets what the call before returned, and all
    results are compared with those of one device: in double precision, where rounding hides nothing, and on
    the devices in the dtypes of the program. On the last mesh the function is also called inside `jax.jit`,
    with its gradient, and with a model that was saved halfway on the mesh before and placed on this one. In
    the end it is called with other values of the same shapes and dtypes.

    **Arguments:**

    - `fun`, `in_specs`, `out_specs`, `state_in_specs`, `state_out_specs`, `check_vma`: as for `shard_map`. Or
        `fun` is what `shard_map` returned, which has its specs. Or it is a function of `jax.jit`, without
        `out_specs`: what the partitioner makes of it is held to the same program on one device. Its mesh is
        that of its shardings or of the arguments'; or `in_specs` place the arguments on each of the `meshes`.
        The programs of the last functions stay compiled: define your function outside of the test, and many
        values cost one compile. A function whose closed-over values or globals have changed is compiled anew.
    - `args`, `kwargs`: the arguments of the first call: a tuple, and a dictionary.
    - `meshes`: each a `jax.sharding.Mesh`, or the sizes of its axes, `{name: size}`. A
        `jax.sharding.AbstractMesh` has no devices: on it the function is emulated only. Left out, the mesh
        that `shard_map` was given, or that of a function of `jax.jit`.
    - `unsharded`: a plain function of the same arguments that gives the right results. Left out, `fun` on a
        mesh of one device. Only such a function finds a mistake that one shard makes too, such as a new state
        that is not returned. `False` for a function whose results depend on the mesh: each mesh is then
        compared with its emulation only.
    - `steps`: the number of calls. Left out, 3 if something is fed back, else 1.
    - `fed_back`: what of the results the next call gets, by paths: `{"args[0]": "[1]"}`. Left out, it is
        matched by structure, wherever it stands in arguments and results.
    - `gradients`: whether the gradient of a weighted sum of all results is compared too, by all inexact
        arrays of the arguments. Left out, it is, except for a training step: a function that changes
        parameters. Results without a derivative are left out of the sum, and named. If none has one, it is
        not taken; `True` raises JAX's error then.
    - `tolerance`: how far results may differ, relative to the largest number of the array; of booleans that
        are computed from floats, what part of them may. Left out, as far as rounding explains: by how much
        each number moves when every operation is off by as much as it may round. Integers, booleans and keys
        that are not computed from floats must be equal in any case.
    - `leave_out`: results that are not compared: a filter of States, paths such as `"[1].mean"`, or a list
        of these.
    - `keep`: paths of arguments, such as `"args[1]"`, that keep their values in the calls with other values.
        Name indices, and whatever must be small, or must fit another argument.
    - `bitwise`: whether the calls in a row must also give the same bits on the devices of every mesh as on
        one device, as they do with `value_and_grad(..., blocks=...)`. The report names the first line whose
        numbers differ in a bit.

    **Returns:** a `Checked`: what agreed, what was fed back and differentiated, and what could not be judged.

    **Raises:** `AssertionError` that names every array that is off, by how much, where and on which mesh and
    shard, with a guess at the cause. Errors of `fun` or of the call come through, with a note that says on
    which mesh. `StatemeshError` for meshes of more devices than there are, and for what cannot be replayed.

    **Warns:** `UntestedWarning` where the check passes without testing what it could be expected to test;
    `RangeWarning` where nothing but the range of float16 is too small on a mesh.

    With n meshes there are 2 (n + 1) compiles, and n of them are optimized.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import assert_equivalent
        >>> def centered(mean, x):
        ...     now = jax.lax.pmean(x.mean(0), "data")
        ...     return x - now, mean.set(0.9 * mean.value + 0.1 * now)
        >>> model, x = sm.State(np.zeros(2)), np.sin(np.arange(16.0)).reshape(8, 2)
        >>> checked = assert_equivalent(
        ...     centered, (model, x), meshes=[{"data": 2}, {"data": 4}],
        ...     in_specs=(None, P("data")), out_specs=(P("data"), P()),
        ... )
        >>> checked.fed_back
        (('args[0]', 'centered(...)[1]'),)

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
        On mesh data=2, compared with the function on one device:

        ```
    """
    what, flag = "assert_equivalent", "True, False or None"
    if not callable(fun):
        raise errors.bad_keyword(what, "fun", fun, "a function")
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args: a {type(args).__name__}. Give the arguments of the function in a tuple: args=(model, x)."
        )
    several = 'a list of meshes, as in meshes=[{"x": 2}, {"x": 4}]'
    # With out_specs it is a function of shards.
    jitted = is_jitted(fun) and out_specs is ...
    if meshes is None and isinstance(fun, sm.StatefulMapping) and fun.mesh is not None:
        meshes = [fun.mesh]
    if meshes is not None or not jitted:
        check(what, "meshes", meshes, Iterable, several)
    check(what, "check_vma", check_vma, bool | None, flag)
    if unsharded is not None and unsharded is not False and not callable(unsharded):
        expected = "a function, False, or None for the function itself on one device"
        raise errors.bad_keyword(what, "unsharded", unsharded, expected)
    check(what, "steps", steps, Integral | None, "an int, 1 or more: the number of calls in a row")
    check(what, "gradients", gradients, bool | None, flag)
    check(what, "bitwise", bitwise, bool, "True or False")
    expected = "a number, 0 or more, as in tolerance=1e-6"
    check(what, "tolerance", tolerance, Real | None, expected)
    if tolerance is not None and not float(tolerance) >= 0:
        raise errors.bad_keyword(what, "tolerance", tolerance, expected)
    check(what, "kwargs", kwargs, Mapping | None, "a dictionary of arguments by name")
    expected = 'a dictionary of paths, as in fed_back={"args[0]": "[1]"}'
    check(what, "fed_back", fed_back, Iterable | None, expected)
    pairs = fed_back if isinstance(fed_back, list | tuple) else ()
    if isinstance(fed_back, str) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise errors.bad_keyword(what, "fed_back", fed_back, expected)
    check(what, "keep", keep, str | Collection, 'paths of arguments, as in keep=["args[1]"]')
    if steps is not None and steps < 1:
        raise ValueError(f"steps: {steps}. Give the number of calls in a row, at least 1.")
    each = None if meshes is None else [mesh_of(mesh) for mesh in meshes]
    if each == []:
        raise ValueError('meshes: the list is empty. Give at least one mesh: meshes=[{"x": 2}].')
    specs: dict[str, PyTree] = {
        "in_specs": in_specs,
        "out_specs": out_specs,
        "state_in_specs": state_in_specs,
        "state_out_specs": state_out_specs,
        "check_vma": check_vma,
    }
    name = name_of(fun)
    is_mapped = isinstance(fun, sm.StatefulMapping)
    if is_mapped and (twice := [key for key, value in specs.items() if value not in (None, ...)]):
        raise TypeError(
            f"{name} is mapped already, with specs of its own: leave out "
            f"{', '.join(twice)}, or give the function that it was made from."
        )
    missing = [key for key in ("in_specs", "out_specs") if specs[key] is ...]
    if jitted:
        others = {key: value for key, value in specs.items() if key != "in_specs"}
        refused(
            name, {**others, "unsharded": unsharded is False or None, "bitwise": bitwise or None}
        )
    elif not is_mapped and missing:
        raise TypeError(
            f"{name} is not mapped yet: give {' and '.join(missing)}, or the function that shard_map returns."
        )
    # A script may have set a mesh for its own calls. It is set again when the check is done.
    with nullcontext() if jitted else jax.set_mesh(Mesh(np.empty((), object), ())):
        given: Args = (tuple(args), dict(kwargs or {}))
        call = as_arrays(given)
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        paths = [path_of(keys) for keys, _ in tree_util.tree_flatten_with_path(call)[0]]
        if unknown := [path for path in keep if not any(is_within(known, path) for known in paths)]:
            raise sm.StructureError(
                f"keep: no argument has the path {', '.join(map(repr, unknown))}. The paths of the arguments "
                f"are {', '.join(paths)}; a shorter one, such as 'args[0]', stands for all that begin with "
                "it."
            )
        with progress(f"{name}: tracing"):
            if jitted:
                on_meshes = jitted_on_meshes(fun, given, each, in_specs)
            else:
                key = environment(fun, *held_by(call))
                specs["check_vma"] = check_vma is not False
                statics = None if is_mapped else StaticLeaves(specs)
                on_meshes = [kept(key, FunctionOnMesh, fun, mesh, statics) for mesh in each or ()]
            subject = Subject(
                name=name,
                args=call,
                meshes=on_meshes,
                unsharded=unsharded,
                steps=steps,
                gradients=gradients,
                tolerance=tolerance,
                fed_back=fed_back,
                leave_out=leave_out,
                keep=keep,
                bitwise=bitwise,
                is_jitted=jitted,
            )
        comparisons = Check(subject)
        comparisons.run()
        checked = comparisons.conclude()
    for text in checked.untested:
        warnings.warn(text, UntestedWarning, stacklevel=stacklevel())
    for text in checked.overflows:
        warnings.warn(text, RangeWarning, stacklevel=stacklevel())
    return checked
