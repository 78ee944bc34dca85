"""`RandomState`: random streams that do not depend on the number of shards."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._base import _errors as errors
from .._base._axes import all_varying, pmax, shard_index
from .._base._types import AxisName
from ._state import Meta, State, origin, set_meta, set_value
from ._values import conform


# A folded key equals one of `split`'s keys when the number folded in is a small one. These numbers
# keep the streams below away from every key that a user may split off.
_SHARD_STREAMS = 0x5EED5EED
_UNEVEN_DRAWS = 0x0DD0DD0D


R = TypeVar("R", bound="RandomState")


class RandomState(State):
    """A random stream: its value is a key, and drawing gives keys and a new `RandomState`.

    Inside a mapped call each shard draws from a stream of its own; the first shard's is the one
    that the same code draws from outside, so that a run on one device equals a run without a mesh.
    What is written back is the stream as the draws left it: the same key however many shards drew,
    and the very key that went in when none did. Its key is always replicated, unless it is placed
    `PerShard`.

    **Arguments:**

    - `key`: a typed key, as `jax.random.key(seed)` makes.
    - `name`, `tag`, `spec`: as for `State`. A `spec` can only be `PerShard`.

    **Raises:** `TypeError` when `key` is not a typed key.

    !!! example

        ```python
        >>> import jax, statemesh as sm
        >>> rng = sm.RandomState(jax.random.key(0))
        >>> key, rng = rng.split()
        >>> jax.random.uniform(key, (2,)).shape
        (2,)

        ```
    """

    __slots__ = ("_shared",)

    # Inside a mapped call: the stream that its shards have in common, advanced in step with the
    # shard's own; it is what leaves. With nested calls there is one for each, the innermost first.
    # `rows` draws from the last. Outside: empty.
    _shared: tuple[Any, ...]

    children = ("value", "_shared")
    always_replicated = True

    def __init__(
        self,
        key: Any = None,
        *,
        name: str | None = None,
        tag: Any = None,
        spec: Any = None,
        value: Any = None,
        _shared: Any = (),
        _meta: Meta | None = None,
    ) -> None:
        if _meta is None:
            key = value if key is None else key
            if not _is_key(key):
                raise errors.not_a_key(key)
            super().__init__(key, name=name, tag=tag, spec=spec)
        else:
            set_value(self, value)
            set_meta(self, _meta)
        _set_shared(self, _shared)

    @property
    def key(self) -> Any:
        """The key that the next draw comes from: this shard's own inside a mapped call."""
        return self.value

    def split(self: R, num: int | None = None) -> tuple[Any, R]:
        """Draw a key, or several.

        **Arguments:**

        - `num`: how many keys; left out, one key without an axis.

        **Returns:** `(key, rng)`: a key, or keys of shape `(num,)`, and the advanced `RandomState`.

        **Raises:** `StatemeshError` for a `RandomState` that holds several keys.
        """
        self._check_single()
        rest, drawn = _advance(self.value)
        keys = drawn if num is None else jax.random.split(drawn, num)
        return keys, self._advanced(rest)

    def rows(
        self: R, n: int, axis_name: AxisName | tuple[AxisName, ...] | None = None
    ) -> tuple[Any, R]:
        """Draw one key for each row of a global array that is sharded over `axis_name`.

        Row `i` of the global array gets the same key on any number of shards, and unsharded, so
        masks and noise made from them are bit-identical.

        **Arguments:**

        - `n`: how many rows this shard holds.
        - `axis_name`: the mesh axis, or axes, that the rows are sharded over, as in a
            `PartitionSpec`. Outside any mapped call it means one shard. `None` where the rows are
            not sharded.

        **Returns:** `(keys, rng)`: keys of shape `(n,)`, and the advanced `RandomState`.

        **Raises:** `StatemeshError` for an axis name that is not bound inside a mapped call, and for a
        `RandomState` that holds several keys.

        !!! example

            ```python
            >>> import jax, statemesh as sm
            >>> keys, rng = sm.RandomState(jax.random.key(0)).rows(4, "data")
            >>> jax.vmap(jax.random.bernoulli)(keys).shape
            (4,)

            ```
        """
        self._check_single()
        shard = shard_index("RandomState.rows", axis_name)
        _, drawn = _advance(self._shared[-1] if self._shared else self.value)
        rows = shard * n + jnp.arange(n)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(drawn, rows)
        rest, _ = _advance(self.value)
        return keys, self._advanced(rest)

    def _set(self: R, value: Any, label: str) -> R:
        """With a new key it has been drawn from: the common stream moves on too."""
        return self._advanced(conform(self.value, value, label))

    def replace(self: R, **changes: Any) -> R:
        """As for `State`. A new key is taken for one drawn, as by `set`."""
        new = super().replace(**changes)
        if "value" not in changes:
            return new
        if not _is_key(new.value):
            raise errors.not_a_key(new.value)
        return new._rebuilt(new.value, self._advanced(self.value)._shared)

    def enter(self, axis_names: tuple[AxisName, ...]) -> "RandomState":
        """This stream as one shard sees it: its place on `axis_names` folded into the key."""
        if not axis_names:
            return self
        self._check_single()
        return self._streamed(axis_names)

    def _made(self, axis_names: tuple[AxisName, ...]) -> "State":
        # What was made over lanes inside has a key for each of these.
        return self._streamed(axis_names) if self.value.shape else self.enter(axis_names)

    def _check_single(self) -> None:
        if self.value.shape:
            raise errors.several_keys(self.value)

    def _streamed(self: R, axis_names: tuple[AxisName, ...]) -> R:
        """With the shard's place folded into each key."""
        shard = jax.lax.axis_index(axis_names)
        # Each nested call has its own line: the first shard's key is the same in both.
        line = _SHARD_STREAMS + len(self._shared) + self.value.ndim

        def own(key: Any) -> Any:
            streams = jax.random.fold_in(key, line)
            return jnp.where(shard == 0, key, jax.random.fold_in(streams, shard))

        for _ in range(self.value.ndim):
            own = jax.vmap(own)
        return self._rebuilt(own(self.value), (self.value, *self._shared))

    def leave(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        """The stream as the draws left it, the same for every shard."""
        if not axis_names or not self._shared or not isinstance(old, RandomState):
            outside = old._shared if isinstance(old, RandomState) else ()
            return self._rebuilt(self.value, outside)
        shared = self._shared
        if origin(self) is None:
            # It went through a `cond`, a `scan`, a `where`: shards may have drawn different numbers
            # of times, which types do not always tell.
            before = (old.value, *old._shared)
            shared = tuple(map(partial(_agreed, axis_names), shared, before))
        return self._rebuilt(shared[0], shared[1:])

    def _advanced(self: R, value: Any) -> R:
        return self._rebuilt(value, tuple(_advance(key)[0] for key in self._shared))

    def _rebuilt(self: R, value: Any, shared: tuple[Any, ...]) -> R:
        new = self._with_value(value)
        _set_shared(new, shared)
        return new


_set_shared = RandomState.__dict__["_shared"].__set__


def _is_key(key: Any) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _advance(key: Any) -> tuple[Any, Any]:
    rest, drawn = jax.random.split(key)
    return rest, drawn


def _agreed(axis_names: tuple[AxisName, ...], key: Any, before: Any) -> Any:
    """`key` where all shards have the same, else a key off the line of `before`.

    Then nothing is drawn twice, whatever each shard drew.
    """
    data = jax.random.key_data(key)
    # The largest word and the smallest, in one reduction.
    both = pmax(all_varying(jnp.stack([data, ~data]), axis_names), axis_names)
    largest, smallest = both[0], ~both[1]
    common = jax.random.wrap_key_data(largest, impl=jax.random.key_impl(key))
    apart = jax.random.fold_in(before, _UNEVEN_DRAWS)
    return jnp.where(jnp.all(largest == smallest), common, apart)
