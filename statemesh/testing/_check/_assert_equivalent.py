"""`assert_equivalent`: a function gives the same results on every mesh."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal

import statemesh as sm

from .. import _errors as errors
from .._types import Fun, PyTree, tree_util
from ._check import Check, Checked
from ._environment import environment, held_by
from ._feedback import Named, is_within, path_of
from ._programs import OnMesh, Statics, kept, mesh_of
from ._subject import Subject
from ._untested import UntestedWarning
from ._values import as_arrays


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


# What a keyword must be: a check, and words for it.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "meshes": (
        lambda meshes: isinstance(meshes, Iterable),
        'a list of meshes, as in meshes=[{"x": 2}, {"x": 4}]',
    ),
    "check_vma": (_is_flag, "True, False or None"),
    "unsharded": (
        lambda fun: fun is None or fun is False or callable(fun),
        "a function, False, or None for the function itself on one device",
    ),
    "steps": (
        lambda steps: (
            steps is None or (isinstance(steps, Integral) and not isinstance(steps, bool))
        ),
        "an int, 1 or more: the number of calls in a row",
    ),
    "gradients": (_is_flag, "True, False or None"),
    "tolerance": (
        lambda size: (
            size is None
            or (isinstance(size, Real) and not isinstance(size, bool) and float(size) >= 0)
        ),
        "a number, 0 or more, as in tolerance=1e-6",
    ),
    "kwargs": (
        lambda kwargs: kwargs is None or isinstance(kwargs, Mapping),
        "a dictionary of arguments by name",
    ),
    "fed_back": (
        lambda pairs: pairs is None or isinstance(pairs, Mapping) or _are_pairs(pairs),
        'a dictionary of paths, as in fed_back={"args[0]": "[1]"}',
    ),
    "keep": (
        lambda keep: isinstance(keep, str | Collection),
        'paths of arguments, as in keep=["args[1]"]',
    ),
}


def _are_pairs(pairs: object) -> bool:
    if isinstance(pairs, list | tuple):
        return all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    return isinstance(pairs, Iterable) and not isinstance(pairs, str)


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

    On each mesh the function is called several times. Each call gets what the call before returned, and all
    results are compared with those of one device: in double precision, where rounding hides nothing, and on
    the devices in the dtypes of the program. On the last mesh the function is also called inside `jax.jit`,
    with its gradient, and with a model that was saved halfway on the mesh before and placed on this one. In
    the end it is called with other values of the same shapes and dtypes.

    **Arguments:**

    - `fun`, `in_specs`, `out_specs`, `state_in_specs`, `state_out_specs`, `check_vma`: as for `shard_map`. Or
        `fun` is what `shard_map` returned, which has its specs.
        The programs of the last functions stay compiled: define your function outside of the test, and many
        values cost one compile. A function whose closed-over values or globals have changed is compiled anew.
    - `args`, `kwargs`: the arguments of the first call: a tuple, and a dictionary.
    - `meshes`: each a `jax.sharding.Mesh`, or the sizes of its axes, `{name: size}`. A
        `jax.sharding.AbstractMesh` has no devices: on it the function is emulated only.
    - `unsharded`: a plain function of the same arguments that gives the right results. Left out, `fun` on a
        mesh of one device. Only such a function finds a mistake that one shard makes too, such as a new state
        that is not returned. `False` for a function whose results depend on the mesh: each mesh is then
        compared with its emulation only.
    - `steps`: the number of calls. Left out, 3 if something is fed back, else 1.
    - `fed_back`: what of the results the next call gets, by paths: `{"args[0]": "[1]"}`. Left out, it is
        matched by structure, wherever it stands in arguments and results.
    - `gradients`: whether the gradient of a weighted sum of all results is compared too, by all inexact
        arrays of the arguments. Left out, it is, except for a training step: a function that changes
        parameters. Results without a derivative are left out of the sum, and named.
    - `tolerance`: how far results may differ, relative to the largest number of the array; of booleans that
        are computed from floats, what part of them may. Left out, as far as rounding explains: by how much
        each number moves when every operation is off by as much as it may round. Integers, booleans and keys
        that are not computed from floats must be equal in any case.
    - `leave_out`: results that are not compared: a filter of States, paths such as `"[1].mean"`, or a list
        of these.
    - `keep`: paths of arguments, such as `"args[1]"`, that keep their values in the calls with other values.
        Name indices, and whatever must be small, or must fit another argument.

    **Returns:** a `Checked`: what agreed, what was fed back and differentiated, and what could not be judged.

    **Raises:** `AssertionError` that names every array that is off, by how much, where and on which mesh and
    shard, with a guess at the cause. Errors of `fun` or of the call come through, with a note that says on
    which mesh. `StatemeshError` for meshes of more devices than there are, and for what cannot be replayed.

    **Warns:** `UntestedWarning` where the check passes without testing what it could be expected to test.

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
    if not callable(fun):
        raise errors.bad_keyword("assert_equivalent", "fun", fun, "a function")
    if not isinstance(args, tuple | list):
        raise errors.not_arguments(args)
    keywords = {
        "meshes": meshes,
        "check_vma": check_vma,
        "unsharded": unsharded,
        "steps": steps,
        "gradients": gradients,
        "tolerance": tolerance,
        "kwargs": kwargs,
        "fed_back": fed_back,
        "keep": keep,
    }
    for argument, value in keywords.items():
        fits, expected = _EXPECTED[argument]
        if not fits(value):
            raise errors.bad_keyword("assert_equivalent", argument, value, expected)
    if steps is not None and steps < 1:
        raise errors.steps_too_few(steps)
    on_meshes = [mesh_of(mesh) for mesh in meshes]
    if not on_meshes:
        raise errors.no_meshes()
    specs: dict[str, PyTree] = {
        "in_specs": in_specs,
        "out_specs": out_specs,
        "state_in_specs": state_in_specs,
        "state_out_specs": state_out_specs,
        "check_vma": check_vma,
    }
    is_mapped, name = (
        isinstance(fun, sm.StatefulMapping),
        getattr(fun, "__name__", type(fun).__name__),
    )
    if is_mapped and (twice := [name for name, value in specs.items() if value not in (None, ...)]):
        raise errors.specs_given_twice(getattr(fun, "__name__", "fun"), twice)
    missing = [name for name in ("in_specs", "out_specs") if specs[name] is ...]
    if not is_mapped and missing:
        raise errors.specs_missing(name, missing)
    given = as_arrays((tuple(args), dict(kwargs or {})))
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    paths = [path_of(keys) for keys, _ in tree_util.tree_flatten_with_path(given)[0]]
    if unknown := [path for path in keep if not any(is_within(known, path) for known in paths)]:
        raise errors.unknown_paths(unknown, paths)
    key = environment(fun, *held_by(given))
    statics = None if is_mapped else Statics({**specs, "check_vma": check_vma is not False})
    subject = Subject(
        name=name,
        args=given,
        meshes=[kept(key, OnMesh, fun, mesh, statics) for mesh in on_meshes],
        unsharded=unsharded,
        steps=steps,
        gradients=gradients,
        tolerance=tolerance,
        fed_back=fed_back,
        leave_out=leave_out,
        keep=keep,
    )
    check = Check(subject)
    check.run()
    checked = check.conclude()
    for text in checked.untested:
        warnings.warn(text, UntestedWarning, stacklevel=2)
    return checked
