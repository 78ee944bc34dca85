"""Other values for the same arguments: generic, large, or with NaN on one shard."""

from collections.abc import Callable, Collection, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._types import AnyLeaf, PyTree, tree_util
from ._numbers import is_key
from ._paths import is_within, owners, path_of
from ._trace import on_one_device


# Makes another array of the same shape and dtype.
Make = Callable[[np.random.Generator, AnyLeaf], AnyLeaf]

# What counters have counted in later calls: steps at which a warmup, a schedule or an interval may do what it
# does not do in the first three calls.
COUNTS = (4, 9, 99)


def counts(limits: Sequence[int]) -> list[int]:
    """What to try that counters have counted, if the program has these limits of counts.

    A condition on a count may begin at its limit, or just before or after it. Of many limits the largest are
    tried: what the small ones begin goes on there.
    """
    far = [limit for limit in limits if limit > 1][-3:]
    around = {limit + step for limit in far for step in (-1, 0, 1)}
    return sorted({*COUNTS, *around})


# Near the largest number of float16. What float32 computes from it does not overflow.
_LARGE = 3e4


def generic(args: PyTree, kept: Collection[str], seed: int = 1) -> PyTree:
    """Arguments with random values in the range of the given ones.

    The values that Hypothesis shrinks to are zeros and ones, for which many mistakes look alike.

    **Arguments:**

    - `args`: the tuple of the positional arguments and the dictionary of the others.
    - `kept`: the paths of arguments, or of parts of them, that keep their values.
    - `seed`: other values for another one.
    """
    return _changed(args, kept, _generic, in_states=True, seed=seed)


def later(
    args: PyTree,
    kept: Collection[str],
    fed_back: Collection[int],
    counters: Collection[int],
    count: int,
) -> PyTree:
    """The arguments of a later call, which has another batch.

    **Arguments:**

    - `args`: those of a call before, or what it returned where that is fed back.
    - `fed_back`: the numbers of the leaves that are fed back. What else is in no State is drawn anew.
    - `counters`, `count`: the numbers of the leaves that count, and what they have counted.
    """
    others = set(range(len(jax.tree.leaves(args)))).difference(fed_back)
    new = _changed(args, kept, _generic, in_states=False, only=others, seed=count)
    counted: Make = lambda _, x: jnp.asarray(count, x.dtype)
    return _changed(new, kept, counted, in_states=True, only=counters)


def within(args: PyTree, kept: Collection[str], largest: float) -> PyTree:
    """Arguments whose floats outside of States are no larger than this, on both sides of zero."""

    return _with_floats(args, kept, lambda random, x: random.uniform(-1, 1, x.shape) * largest)


def large(args: PyTree, kept: Collection[str]) -> PyTree:
    """Arguments whose arrays outside of States are as large as float16 can hold."""

    def draw(random: np.random.Generator, x: AnyLeaf) -> AnyLeaf:
        return np.sign(np.asarray(x, np.float64)) * _LARGE * random.uniform(0.5, 1, x.shape)

    return _with_floats(args, kept, draw)


def _with_floats(args: PyTree, kept: Collection[str], draw: Make) -> PyTree:
    """Arguments with generic values, and floats outside of States as they are drawn, in double precision."""

    def make(random: np.random.Generator, x: AnyLeaf) -> AnyLeaf:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(draw(random, x).astype(x.dtype))

    return _changed(generic(args, kept), kept, make, in_states=False)


def one_nan(args: PyTree, kept: Collection[str], split: Collection[int]) -> PyTree | None:
    """Arguments whose arrays of floats outside of States end with NaN, which only the last shard has.

    **Arguments:**

    - `split`: the numbers of the leaves of which a shard gets a part. The others, mostly parameters, would
        hand the NaN on to all shards and to all results.

    **Returns:** the arguments; `None` if there are no such arrays.
    """
    changed = []

    def make(_: np.random.Generator, x: AnyLeaf) -> AnyLeaf:
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            return x
        value = np.array(x)
        value[tuple(size - 1 for size in x.shape)] = np.nan
        changed.append(jnp.asarray(value))
        return changed[-1]

    with_nan = _changed(generic(args, kept), kept, make, in_states=False, only=split)
    return with_nan if changed else None


def _changed(
    args: PyTree,
    kept: Collection[str],
    make: Make,
    *,
    in_states: bool,
    only: Collection[int] | None = None,
    seed: int = 1,
) -> PyTree:
    random = np.random.default_rng(seed)
    leaves, treedef = tree_util.tree_flatten(args)
    may_change = free(args, kept).intersection(range(len(leaves)) if only is None else only)
    for number, (x, owner) in enumerate(zip(leaves, owners(args, sm.is_state), strict=True)):
        is_kept = number not in may_change or (sm.is_state(owner) and not in_states)
        if not is_kept and eqx.is_array(x) and not is_key(x):
            leaves[number] = make(random, x)
    return treedef.unflatten(leaves)


def free(args: PyTree, kept: Collection[str]) -> set[int]:
    """The numbers of the leaves that need not keep their values."""
    paths = [path_of(keys) for keys, _ in tree_util.tree_flatten_with_path(args)[0]]
    is_kept = [any(is_within(path, outer) for outer in kept) for path in paths]
    return {number for number, keeps in enumerate(is_kept) if not keeps}


def _generic(random: np.random.Generator, x: AnyLeaf) -> AnyLeaf:
    value = np.asarray(x)
    if value.dtype == bool:
        return jnp.asarray(random.integers(0, 2, x.shape).astype(bool))
    if jnp.issubdtype(x.dtype, jnp.integer):
        # A single integer is mostly a counter or a position, which other arguments must match.
        if not x.shape:
            return x
        least, largest = int(value.min(initial=0)), int(value.max(initial=0))
        drawn = random.integers(least, max(largest, least + 1) + 1, x.shape)
        return jnp.asarray(drawn.astype(value.dtype))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        drawn = random.normal(size=x.shape) + 1j * random.normal(size=x.shape)
        return jnp.asarray(drawn.astype(value.dtype))
    wide = np.where(np.isfinite(value.astype(np.float64)), value, 0.0).astype(np.float64)
    drawn = random.uniform(-1, 1, x.shape) * (np.abs(wide).max(initial=0.0) or 1.0)
    # Values that are never negative, such as variances and counts, stay so.
    return jnp.asarray((np.abs(drawn) if wide.min(initial=0.0) >= 0 else drawn).astype(value.dtype))


def as_arrays(args: PyTree) -> PyTree:
    """Arguments as JAX arrays of strong types, like the results that are fed back: so there is one trace.

    They may lie on any mesh. What they become can meet the arrays of any other one.
    """
    return jax.tree.map(_as_array, args)


def _as_array(x: AnyLeaf) -> AnyLeaf:
    if isinstance(x, np.ndarray | np.generic):
        return jnp.asarray(x)
    x = on_one_device(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x
