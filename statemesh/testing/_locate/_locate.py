"""`locate`: the line at which a call on a mesh stops computing what it computes on one device."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .. import _errors as errors
from .._program._doubled import widened
from .._program._numbers import is_inexact, promoted
from .._program._stacked import Scope, Stacked
from .._program._trace import NO_MESH, Trace, is_array_or_type, on_one_device, trace
from .._types import AnyLeaf, Fun, PyTree, tree_util
from . import _words as words
from ._comparison import Comparison
from ._flat import flat
from ._located import Located, Place
from ._rank import places
from ._specs import wrong_specs


def locate(mapped: sm.StatefulMapping, /, *args: PyTree, **kwargs: PyTree) -> Located | None:
    """Find the line at which a call on a mesh stops computing what it computes on one device.

    The programs of both are traced and replayed side by side in double precision, with all shards on one
    device. A value is what it should be where shards have all of it, or their parts, or partial results that
    a later line makes whole. From the wrong results `locate` goes back to the lines that make other values
    than these. It runs the program with the right values at such lines, and the line comes first that so puts
    the results right.

    **Arguments:**

    - `mapped`: the result of `shard_map`, `pmap2` or `vmap2`. The mesh may be a `jax.sharding.AbstractMesh`.
    - `args`, `kwargs`: the arguments of the call. Generic numbers tell more than zeros and ones.

    **Returns:** a `Located`, whose text is a report; `None` if the results and their derivatives agree. Where
    the results agree, the derivatives of a weighted sum of them are compared. A line in a loop comes with the
    number of its first wrong round. If all agrees in double precision, the dtypes of the program are tried.

    **Raises:** the errors of the call, and those of its gradient if it has none; `StatemeshError` that names
    a primitive that cannot be replayed.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> found = locate(centred, jnp.arange(8.0))
        >>> found.places[0].source
        'mean = x.mean(0)'
        >>> found.places[0].note
        "the mean over 'data' of what shards have is the value on one device"

        ```
    """
    if not isinstance(mapped, sm.StatefulMapping):
        raise errors.not_mapped(mapped)
    return located(mapped, mapped.unsharded, args, kwargs)


def located(
    mapped: Fun, reference: Fun, args: Sequence[PyTree], kwargs: PyTree = None
) -> Located | None:
    """`locate` for any two functions of the same arguments, of which the second is right."""
    given = tuple(args), kwargs or {}
    found = _compared(mapped, reference, given)
    if found is None and any(map(eqx.is_inexact_array, jax.tree.leaves(given))):
        found = located_in_gradient(mapped, reference, args, kwargs)
    return found


def located_in_gradient(
    mapped: Fun, reference: Fun, args: Sequence[PyTree], kwargs: PyTree = None
) -> Located | None:
    """`located` for the gradient of a weighted sum of all results."""
    given = tuple(args), kwargs or {}
    found = _compared(_Gradient(mapped), _Gradient(reference), given, narrow=False)
    return None if found is None else dataclasses.replace(found, gradient=True)


class _Gradient:
    """The gradient of a call, by every inexact array."""

    def __init__(self, call: Fun) -> None:
        self._call = call
        self.__name__ = getattr(call, "__name__", type(call).__name__)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        inexact, rest = eqx.partition((args, kwargs), _is_inexact)

        def results(inexact: PyTree) -> list[jax.Array]:
            args, kwargs = eqx.combine(inexact, rest)
            found = jax.tree.leaves(self._call(*args, **kwargs))
            return [x for x in found if _is_inexact(x)]

        made, pull = jax.vjp(results, inexact)
        return pull([_weights(x) for x in made])[0]


def _is_inexact(x: AnyLeaf) -> bool:
    return is_array_or_type(x) and is_inexact(x.dtype)


def _weights(x: jax.Array) -> jax.Array:
    """A weight for each number of a result, so that none cancels another."""
    return jnp.asarray(np.cos(np.arange(x.size)).reshape(x.shape), x.dtype)


def _compared(mapped: Fun, reference: Fun, given: PyTree, *, narrow: bool = True) -> Located | None:
    """Where two calls differ in double precision, or else in the dtypes of the program."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if _is_traced(x) else x, given)
    leaves, treedef = tree_util.tree_flatten(arrays)
    traces = [trace(fun, treedef, leaves) for fun in (mapped, reference)]
    if len(traces[0].paths) != len(traces[1].paths):
        raise errors.other_leaves(*(one.paths for one in traces))
    paths = _paths_of_arrays(given)
    found = _places(traces, paths, widened(arrays).values, wide=True)
    if found is None and narrow and any(map(_is_narrow, leaves)):
        found = _places(traces, paths, jax.tree.map(on_one_device, arrays), wide=False)
        return None if found is None else dataclasses.replace(found, rounding=True)
    return found


def _paths_of_arrays(given: PyTree) -> list[str]:
    """What a user would type for each array of the arguments."""
    flat, _ = tree_util.tree_flatten_with_path(given)
    names = ("args", "kwargs")
    return [
        names[path[0].idx] + jax.tree_util.keystr(path[1:])
        for path, x in flat
        if is_array_or_type(x) or _is_traced(x)
    ]


def _places(
    traces: Sequence[Trace], arguments: Sequence[str], given: PyTree, *, wide: bool
) -> Located | None:
    values = [Stacked(x) for x in jax.tree.leaves(given) if is_array_or_type(x)]
    mesh, one = (flat(traced.closed, Scope()) for traced in traces)
    inputs = [dict(zip(program.inputs, values, strict=True)) for program in (mesh, one)]
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        found = Comparison(mesh, one, Scope(), (inputs[0], inputs[1]), wide)
        if all(result.right for result in found.results):
            return None
        chosen = wrong_specs(found, traces[0].paths, arguments)
        cause = None
        if not chosen:
            chosen, cause = places(found)
    if not chosen:
        # No line of the user's makes them.
        wrong = (k for k, result in enumerate(found.results) if not result.right)
        number = next(wrong)
        result = found.results[number]
        types = [traced.closed.out_avals[number] for traced in traces]
        got, want = words.whole_values((result.got.x, result.want), types)
        chosen = [
            Place("", 0, traces[0].paths[number], words.A_RESULT, got=got, want=want, shards="")
        ]
    return Located(tuple(chosen), found.matched, cause)


def _is_narrow(x: object) -> bool:
    return _is_inexact(x) and promoted(x.dtype) != x.dtype  # type: ignore[attr-defined]


def _is_traced(x: object) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USOMm"
