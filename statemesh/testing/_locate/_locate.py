"""`locate`: the line at which a call on a mesh stops computing what it computes on one device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .. import _errors as errors
from .._program._doubled import widened
from .._program._numbers import is_inexact, promoted
from .._program._stacked import Scope
from .._program._trace import (
    NO_MESH,
    Trace,
    is_array_or_type,
    name_of,
    on_one_device,
    trace,
    weighted_gradient,
)
from .._types import AnyLeaf, Fun, PyTree, tree_util
from . import _words as words
from ._compare import compare
from ._evaluate import Evaluator, in_numpy
from ._graph import graph_of
from ._located import Located, Place
from ._rank import MOST_PLACES, places, wrong_specs


# Whether a report raises a failure of `locate` instead of telling it; our tests set this.
RAISE_FAILURES = False


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
    mapped: Fun,
    reference: Fun,
    args: Sequence[PyTree],
    kwargs: PyTree = None,
    *,
    results: bool = True,
    gradient: bool = True,
) -> Located | None:
    """`locate` for any two functions of the same arguments, of which the second is right.

    **Arguments:**

    - `results`: whether the results are compared.
    - `gradient`: whether the derivatives are compared where the results agree.
    """
    call = tuple(args), kwargs or {}
    lines = _compared(mapped, reference, call) if results else None
    if lines is None and gradient and any(map(eqx.is_inexact_array, jax.tree.leaves(call))):
        lines = _compared(_gradient(mapped), _gradient(reference), call, narrow=False)
        lines = None if lines is None else dataclasses.replace(lines, gradient=True)
    return lines


@dataclasses.dataclass(frozen=True)
class NotLocated:
    """What a report says in the place of the line where `locate` itself has failed."""

    error: Exception

    def __str__(self) -> str:
        text = " ".join(str(self.error).split())
        return f"No line is named, because locate failed: {type(self.error).__name__}: {text}"


def located_or_why(*args: Any, **kwargs: Any) -> Located | NotLocated | None:
    """`located` for a report, which must not end in an error of its own.

    It takes the same arguments. A failure is a bug of `locate`: the report says it, and our tests raise it.
    """
    try:
        return located(*args, **kwargs)
    except Exception as error:
        if RAISE_FAILURES:
            raise
        return NotLocated(error)


def _gradient(call: Fun) -> Fun:
    """The gradient, by every inexact array, of a weighted sum of all results of a call."""

    def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        inexact, rest = eqx.partition((args, kwargs), _is_inexact)

        def results(inexact: PyTree) -> tuple[list[jax.Array], None]:
            args, kwargs = eqx.combine(inexact, rest)
            return [x for x in jax.tree.leaves(call(*args, **kwargs)) if _is_inexact(x)], None

        return weighted_gradient(results, inexact)[0]

    gradient.__name__ = name_of(call)
    return gradient


def _is_inexact(x: AnyLeaf) -> bool:
    return is_array_or_type(x) and is_inexact(x.dtype)


def _compared(mapped: Fun, reference: Fun, call: PyTree, *, narrow: bool = True) -> Located | None:
    """Where two calls differ in double precision, or else in the dtypes of the program."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if _is_traced(x) else x, call)
    leaves, treedef = tree_util.tree_flatten(arrays)
    traces = [trace(fun, treedef, leaves) for fun in (mapped, reference)]
    if len(traces[0].paths) != len(traces[1].paths):
        raise errors.other_leaves(*(traced.paths for traced in traces))
    paths = _paths_of_arrays(call)
    lines = _places(traces, paths, widened(arrays).values, wide=True)
    if lines is None and narrow and any(map(_is_narrow, leaves)):
        lines = _places(traces, paths, jax.tree.map(on_one_device, arrays), wide=False)
        return None if lines is None else dataclasses.replace(lines, rounding=True)
    return lines


def _paths_of_arrays(call: PyTree) -> list[str]:
    """What a user would type for each array of the arguments."""
    leaves, _ = tree_util.tree_flatten_with_path(call)
    names = ("args", "kwargs")
    return [
        names[path[0].idx] + jax.tree_util.keystr(path[1:])
        for path, x in leaves
        if is_array_or_type(x) or _is_traced(x)
    ]


def _places(
    traces: Sequence[Trace], arguments: Sequence[str], call: PyTree, *, wide: bool
) -> Located | None:
    """Where two traced calls differ, by what speaks for it: specs, then lines, then the result itself."""
    inputs = [in_numpy(x) for x in jax.tree.leaves(call) if is_array_or_type(x)]
    mesh, single = (Evaluator(graph_of(traced.closed, Scope()), wide) for traced in traces)
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        comparison = compare((mesh, single), Scope(), (inputs, inputs))
        number = next((k for k, x in enumerate(comparison.results) if not x.right), None)
        if number is None:
            return None
        likeliest, reason = wrong_specs(comparison, traces[0].paths, arguments), None
        if not likeliest:
            likeliest, reason = places(comparison)
    if not likeliest:
        result, path = comparison.results[number], traces[0].paths[number]
        types = [traced.closed.out_avals[number] for traced in traces]
        got, want = words.whole_values((result.got.x, result.want), types)
        likeliest = [Place("", 0, path, words.A_RESULT, got=got, want=want, shards="")]
    return Located(tuple(likeliest[:MOST_PLACES]), comparison.matched, reason)


def _is_narrow(x: object) -> bool:
    return _is_inexact(x) and promoted(x.dtype) != x.dtype  # type: ignore[attr-defined]


def _is_traced(x: object) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USOMm"
