"""Collectives for code that runs sharded and unsharded: outside any mapped call an axis means one shard."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp

from .._base import _errors as errors
from .._base._checks import check_flag, is_masked
from .._base._trees import path_str
from .._base._types import Array, AxisName, Gathered, PyTree, SeveralAxes, Tree, flat_names
from .._jax import _compat as compat
from . import _mesh_and_lanes as mesh_and_lanes
from ._mesh_and_lanes import (
    all_varying,
    bound_names,
    index_along,
    lanes_in_checked_map,
    meshes_and_lanes,
    shard_index,
    total,
)


def axis_index(axis_name: AxisName) -> Array:
    """This shard's number along an axis; 0 outside any mapped call.

    **Arguments:**

    - `axis_name`: a mesh axis or the lanes of that name, or a tuple of several, major to minor; `None` for
        none.

    **Raises:** `StatemeshError` for a name that is not bound inside a mapped call.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def number(x):
        ...     return sm.axis_index("rows") + x
        >>> int(number(0))
        0
        >>> sm.vmap2(number, axis_name="rows")(jnp.zeros(3, int))
        Array([0, 1, 2], dtype=int32)

        ```
    """
    _check_names("axis_index", axis_name)
    return jnp.asarray(shard_index("axis_index", axis_name), jnp.int32)


def axis_size(axis_name: AxisName) -> int:
    """How many shards there are along an axis; 1 outside any mapped call.

    Arguments and errors are those of `axis_index`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def share(x):
        ...     return x / sm.axis_size("rows")
        >>> share(6.0)
        6.0
        >>> sm.vmap2(share, axis_name="rows")(jnp.array([6.0, 9.0, 3.0]))
        Array([2., 3., 1.], dtype=float32)

        ```
    """
    return math.prod(map(jax.lax.axis_size, _names("axis_size", axis_name)))


def psum(x: Tree, axis_name: AxisName) -> Tree:
    """The sum over an axis of every array of a tree; outside any mapped call that of one shard.

    Its value and its gradient are those of `jax.lax.psum`.

    **Arguments:**

    - `x`: a pytree of arrays.
    - `axis_name`: as for `axis_index`; mesh axes and lanes may stand together.

    **Raises:** `StatemeshError` for a name that is not bound inside a mapped call; `TypeError` for a masked
    array.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def share(x):
        ...     return x / sm.psum(x, "rows")
        >>> share(jnp.float32(5))
        Array(1., dtype=float32)
        >>> sm.vmap2(share, axis_name="rows")(jnp.array([1.0, 3.0]))
        Array([0.25, 0.75], dtype=float32)

        ```
    """
    return _over(_unmasked("psum", x), _names("psum", axis_name), jax.lax.psum, total)


def pmean(x: Tree, axis_name: AxisName) -> Tree:
    """The mean over an axis of every array of a tree; outside any mapped call that of one shard.

    Its value and its gradient are those of `jax.lax.pmean`; arguments and errors are those of `psum`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def centred(x):
        ...     return x - sm.pmean(x.mean(), "rows")
        >>> centred(jnp.array([1.0, 3.0]))
        Array([-1.,  1.], dtype=float32)
        >>> sm.vmap2(centred, axis_name="rows")(jnp.array([[1.0], [3.0]]))[:, 0]
        Array([-1.,  1.], dtype=float32)

        ```
    """
    return _over(_unmasked("pmean", x), _names("pmean", axis_name), jax.lax.pmean, _mean)


def pmax(x: Tree, axis_name: AxisName) -> Tree:
    """The largest over an axis of every array of a tree: NaN if there is one, on any device.

    Arguments and errors are those of `psum`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def scaled(x):
        ...     return x / sm.pmax(jnp.abs(x), "rows")
        >>> sm.vmap2(scaled, axis_name="rows")(jnp.array([1.0, -4.0]))
        Array([ 0.25, -1.  ], dtype=float32)

        ```
    """
    return _extreme(_unmasked("pmax", x), _names("pmax", axis_name), mesh_and_lanes.pmax)


def pmin(x: Tree, axis_name: AxisName) -> Tree:
    """The smallest over an axis of every array of a tree: NaN if there is one, on any device.

    Arguments and errors are those of `psum`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def above(x):
        ...     return x - sm.pmin(x, "rows")
        >>> sm.vmap2(above, axis_name="rows")(jnp.array([3.0, 5.0]))
        Array([0., 2.], dtype=float32)

        ```
    """
    return _extreme(_unmasked("pmin", x), _names("pmin", axis_name), mesh_and_lanes.pmin)


def all_gather(
    x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False, to: Gathered = "varying"
) -> Tree:
    """The values of all shards, in their order; outside any mapped call those of one shard.

    Its value and its gradient are those of `jax.lax.all_gather`.

    **Arguments:**

    - `x`: a pytree of arrays.
    - `axis_name`: as for `axis_index`; mesh axes and lanes may stand together.
    - `axis`: where in each array the shards go.
    - `tiled`: whether they are joined along that axis. Left out, the axis is a new one.
    - `to`: `'varying'`, or `'invarying'` for a result of which JAX knows that it is the same on all shards,
        so that it may leave as one copy.

    **Raises:** `StatemeshError` for a name that is not bound inside a mapped call, or another `to`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def rank(x):
        ...     return jnp.sum(sm.all_gather(x, "rows") < x)
        >>> int(rank(jnp.float32(7)))
        0
        >>> sm.vmap2(rank, axis_name="rows")(jnp.array([5.0, 9.0, 1.0]))
        Array([1, 2, 0], dtype=int32)

        ```
    """
    check_flag("all_gather", "tiled", tiled)
    if isinstance(axis, bool) or not isinstance(axis, Integral):
        expected = "an int: the position of the new axis, as in axis=0"
        raise errors.invalid_argument("all_gather", "axis", axis, expected)
    if to not in ("varying", "invarying"):
        raise errors.unknown_choice("all_gather: to", to, ("varying", "invarying"))
    x = _unmasked("all_gather", x)
    names = _names("all_gather", axis_name)
    one_by_one = partial(_gathered, axis=axis, tiled=tiled, to=to)
    at_once = partial(_at_once, axis=axis, tiled=tiled, to=to)
    # JAX cannot gather over lanes and anything else at once.
    several = len(names) > 1 and meshes_and_lanes(names)[1]
    return _over(x, names, one_by_one if several else at_once, one_by_one)


# The axis name of the one shard that there is outside any mapped call.
_ONE = "one shard"


def _check_names(what: str, axis_name: SeveralAxes) -> None:
    for name in flat_names(axis_name):
        if isinstance(name, int):
            raise TypeError(
                f"{what}: axis_name={name} is the position of an array's axis, not the name of a mapped one. "
                "Give the name, such as 'data'. To reduce over an array's own axis, use jnp.sum, jnp.mean, "
                "jnp.max or jnp.min."
            )


def _names(what: str, axis_name: SeveralAxes) -> tuple[AxisName, ...]:
    _check_names(what, axis_name)
    return bound_names(what, axis_name)


def _unmasked(what: str, x: Tree) -> Tree:
    flat, _ = jax.tree_util.tree_flatten_with_path(x)
    if bad := [(path_str(keys, "x"), leaf) for keys, leaf in flat if is_masked(leaf)]:
        raise errors.masked(f"the argument x of {what}", bad)
    return x


def _over(
    x: PyTree,
    names: tuple[AxisName, ...],
    of_jax: Callable[..., PyTree],
    anywhere: Callable[[PyTree, tuple[AxisName, ...]], PyTree],
) -> PyTree:
    """A collective of JAX, or `anywhere` where JAX's fails: for lanes inside a checked `shard_map`."""
    if not names:
        # A `vmap` of one lane, so that dtypes, shapes and gradients are those of JAX's collective.
        of_one: Callable[[], PyTree] = jax.vmap(
            lambda: of_jax(x, _ONE), axis_name=_ONE, axis_size=1, out_axes=None
        )
        return of_one()
    if not lanes_in_checked_map(names):
        return of_jax(all_varying(jax.tree.map(_array, x), names), names)
    return anywhere(jax.tree.map(jnp.asarray, x), names)


def _array(x: PyTree) -> PyTree:
    # JAX sums a Python number while it traces, and gives a number.
    return x if isinstance(x, int | float | complex) else jnp.asarray(x)


def _mean(x: PyTree, names: Sequence[AxisName]) -> PyTree:
    count = math.prod(map(jax.lax.axis_size, names))
    return jax.tree.map(lambda x: x / count, total(x, names))


def _extreme(x: PyTree, names: tuple[AxisName, ...], over: Callable[..., list[Array]]) -> PyTree:
    x = jax.tree.map(jnp.asarray, x)
    return jax.tree.map(lambda x: over([all_varying(x, names)], names)[0], x) if names else x


def _at_once(x: PyTree, names: AxisName, axis: int, tiled: bool, to: Gathered) -> PyTree:
    # Without types there is nothing to say of the result, and JAX 0.10 fails where it is told.
    typed = all(compat.varying_type(jax.typeof(leaf)) for leaf in jax.tree.leaves(x))
    return jax.lax.all_gather(x, names, axis=axis, tiled=tiled, to=to if typed else "varying")


def _gathered(x: PyTree, names: Sequence[AxisName], axis: int, tiled: bool, to: Gathered) -> PyTree:
    def gathered(x: PyTree) -> PyTree:
        shape = x.shape
        for name in reversed(names):
            x = _stacked(x, name, to)
        whole = x.reshape(-1, *shape)
        if not tiled:
            return jnp.moveaxis(whole, 0, axis)
        return jnp.concatenate(list(whole), axis)

    return jax.tree.map(gathered, x)


def _stacked(x: PyTree, name: AxisName, to: Gathered) -> PyTree:
    """The arrays of all shards, or lanes, of one axis, stacked."""
    if not lanes_in_checked_map((name,)):
        return _at_once(all_varying(x, [name]), name, axis=0, tiled=False, to=to)
    room = jnp.zeros((jax.lax.axis_size(name), *x.shape), x.dtype)
    return total(room.at[index_along([name])].set(x), (name,))
