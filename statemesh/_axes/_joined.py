"""Many arrays reduced over mesh axes by few collectives.

A collective costs far more than its bytes where arrays are small. So arrays of one dtype are put end to end,
reduced as one, and taken apart again. Each element is reduced as it would be by itself, to the same bits.

What is put end to end forgets which array it came from: whether a `vmap` batches it, and what else a walk
along the program knows of it. So the whole is one call with a rule of its own. Under `vmap` it reduces what
is batched apart from what is not. To walks `jaxprs.apart` shows a collective for each array.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .._base import _compat as compat
from .._base._jaxprs import JOINS
from .._base._types import AxisName
from ._end_to_end import end_to_end, taken_apart
from ._wide import AnyArray


# A collective of one array over mesh axes, which reduces each element by itself.
Collective: TypeAlias = Callable[[AnyArray, tuple[AxisName, ...]], AnyArray]

# In bytes. An array of this size is reduced by itself: its copies cost more than a collective.
_LARGE = 2**20
_BUCKET = 4 * 2**20


def together(
    collective: Collective, arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]
) -> list[AnyArray]:
    """Each array reduced over mesh axes, those of one dtype in one collective for each bucket.

    **Arguments:**

    - `collective`: a sum, or for integers any.
    - `arrays`: they vary over all of the axes, or over none.
    """
    names = tuple(axis_names)
    if not compat.under_jit():
        # Each operation runs by itself: then fewer of them are quicker.
        return [collective(x, names) for x in arrays]
    groups: dict[Hashable, list[int]] = {}
    for k, x in enumerate(arrays):
        groups.setdefault((x.dtype, compat.varying(x)), []).append(k)

    def one(own: Sequence[AnyArray]) -> Sequence[AnyArray]:
        return _several(collective, names, own) if len(own) > 1 else [collective(own[0], names)]

    return by_groups(one, arrays, groups.values())


def by_groups(
    run: Callable[[Sequence[AnyArray]], Sequence[AnyArray]],
    arrays: Sequence[AnyArray],
    groups: Iterable[Sequence[int]],
) -> list[AnyArray]:
    """What `run` makes of each group of arrays, in the order of the arrays.

    **Arguments:**

    - `groups`: the numbers of the arrays in each group. What is in none stays as it is.
    """
    made = list(arrays)
    for at in groups:
        for k, x in zip(at, run([arrays[k] for k in at]) if at else (), strict=True):
            made[k] = x
    return made


def _several(
    collective: Collective, names: tuple[AxisName, ...], arrays: Sequence[AnyArray]
) -> list[AnyArray]:
    @custom_vmap
    def run(*arrays: AnyArray) -> list[AnyArray]:
        one = partial(_as_one, lambda x: collective(x, names))
        return by_groups(one, arrays, _buckets(arrays))

    def rule(_: int, batched: Sequence[bool], *arrays: AnyArray) -> Any:
        groups = [[k for k, one in enumerate(batched) if one == hit] for hit in (True, False)]
        one = partial(together, collective, axis_names=names)
        return by_groups(one, arrays, groups), list(batched)

    setattr(rule, JOINS, True)
    run.def_vmap(rule)
    if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        integers: list[AnyArray] = run(*arrays)
        return integers

    # JAX cannot transpose a `custom_vmap` function.
    @jax.custom_jvp
    def linear(*arrays: AnyArray) -> list[AnyArray]:
        return list(run(*arrays))

    @linear.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return linear(*primals), [collective(x, names) for x in tangents]

    return list(linear(*arrays))


def _buckets(arrays: Sequence[AnyArray]) -> Iterator[list[int]]:
    """The numbers of the arrays that are reduced as one."""
    bucket: list[int] = []
    size = 0
    for k, x in enumerate(arrays):
        own = x.size * x.dtype.itemsize
        if own >= _LARGE:
            yield [k]
            continue
        if size + own > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(k)
        size += own
    if bucket:
        yield bucket


def _as_one(
    collective: Callable[[AnyArray], AnyArray], arrays: Sequence[AnyArray]
) -> list[AnyArray]:
    """What a collective makes of arrays that are put end to end."""
    if len(arrays) == 1:
        return [collective(arrays[0])]
    return taken_apart(collective(end_to_end(arrays)), [x.shape for x in arrays], at_once=1)
