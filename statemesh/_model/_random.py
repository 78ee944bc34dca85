"""`RandomState`: random streams that do not depend on the number of shards."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._mesh_and_lanes import MICROBATCHES, index_along
from .._base import _compat as compat
from .._base import errors
from .._base._arrays import is_key
from .._base._checks import count
from .._base._types import Array, AxisName, Leaf, PyTree, SeveralAxes, Size, SpecTree, Tags
from . import _keys as keys
from ._lines import Line, known, left, row_numbers, synchronized
from ._meta import Meta
from ._origin import origin
from ._state import State, set_rebuilt
from ._values import conform


# `split` makes its keys by folding in small numbers. This large one keeps the streams of shards apart from
# every key that a user may split off.
_SHARD_STREAMS = 0x5EED5EED
# Of a key of its own per shard, further shards' keys are made by another one.
_NEW_SHARDS = 0x5EED5EEE


R = TypeVar("R", bound="RandomState")


class RandomState(State):
    """A random stream: its value is a key, and drawing gives keys and a new `RandomState`.

    Inside a mapped call each shard draws from a stream of its own; the first shard's is the one
    that the same code draws from outside, so that a run on one device equals a run without a mesh.
    What is written back is the stream as the draws left it: the same key however many shards drew,
    and the very key that went in when none did. Where a new key was set inside, it is the first
    shard's. Its key is always replicated, unless it is placed `PerShard`.

    **Arguments:**

    - `key`: a typed key, as `jax.random.key(seed)` makes, of any implementation.
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

    # Inside a mapped call: the stream that its shards share, whose key leaves the call. Nested calls have one
    # line each, the innermost first. `rows` draws from the last one. Empty outside of any call.
    _shared: tuple[Line, ...]

    children = ("value", "_shared")
    always_replicated = True

    def __init__(
        self,
        key: Leaf = None,
        *,
        name: str | None = None,
        tag: Tags = None,
        spec: SpecTree = None,
        value: PyTree = None,
        _shared: PyTree = (),
        _meta: Meta | None = None,
    ) -> None:
        if _meta is None:
            if key is not None and value is not None:
                raise errors.key_and_value()
            key = value if key is None else key
            if not is_key(key):
                raise errors.not_a_key(key)
            super().__init__(key, name=name, tag=tag, spec=spec)
        else:
            set_rebuilt(self, value, _meta)
        _set_shared(self, _shared)

    @property
    def key(self) -> PyTree:
        """The key that the next draw comes from: this shard's own inside a mapped call.

        **Raises:** `StatemeshError` in lanes, as `split` does.
        """
        return keys.drawable(self.value, "RandomState.key")

    @property
    def needs_old(self) -> bool:
        """No: the state carries the stream that leaves."""
        return False

    def split(self: R, num: Size | None = None) -> tuple[Array, R]:
        """Draw a key, or several.

        **Arguments:**

        - `num`: how many keys; left out, one key without an axis.

        **Returns:** `(key, rng)`: a key, or keys of shape `(num,)`, and the advanced `RandomState`.

        **Raises:** `StatemeshError` for a `RandomState` that holds several keys; and in lanes, for a key of
        an implementation whose numbers `jax.vmap` draws from the first lane's key, as it does those of `rbg`
        and `unsafe_rbg`.
        """
        self._check_single()
        if num is not None:
            num = count("RandomState.split", "num", num)
        rest, drawn = keys.advance(keys.drawable(self.value, "RandomState.split"))
        return (drawn if num is None else keys.several(drawn, num)), self._advanced(rest)

    def rows(self: R, n: Size, axis_name: SeveralAxes = None) -> tuple[Array, R]:
        """Draw one key for each row of a global array that is sharded over `axis_name`.

        Row `i` of the global array gets the same key on any number of shards, and unsharded, so
        masks and noise made from them are bit-identical. They are threefry keys, whatever the state's
        own key is: of these `jax.vmap` draws what each of them gives.

        **Arguments:**

        - `n`: how many rows this shard holds.
        - `axis_name`: the mesh axis, or axes, that the rows are sharded over, as in a
            `PartitionSpec`. Outside any mapped call it means one shard. `None` where the rows are
            not sharded.

        **Returns:** `(keys, rng)`: keys of shape `(n,)`, and the advanced `RandomState`.

        **Raises:** `StatemeshError` for an axis name that is not bound inside a mapped call, for a
        `RandomState` that holds several keys, and for a negative `n`; `TypeError` for an `n` that is no int.

        !!! example

            ```python
            >>> import jax, statemesh as sm
            >>> keys, rng = sm.RandomState(jax.random.key(0)).rows(4, "data")
            >>> jax.vmap(jax.random.bernoulli)(keys).shape
            (4,)

            ```
        """
        self._check_single()
        n = count("RandomState.rows", "n", n)
        numbers = row_numbers("RandomState.rows", n, axis_name, self._shared)
        stream = self._rebuilt(self.value, synchronized(self.value, self._shared))
        _, drawn = keys.advance(
            keys.again(stream._shared[-1].key if stream._shared else self.value)
        )
        rest, _ = keys.advance(self.value)
        return keys.for_rows(drawn, numbers), stream._advanced(rest)

    def _set(self: R, value: PyTree, label: str) -> R:
        return self._with_new(conform(self.value, value, label))

    def replace(self: R, **changes: PyTree) -> R:
        """As for `State`. Inside a mapped call a new key is a single one."""
        new = super().replace(**changes)
        if "value" not in changes:
            return new
        if not is_key(new.value):
            raise errors.not_a_key(new.value)
        if self._shared and new.value.shape:
            raise errors.several_keys(new.value)
        return new._with_new(new.value)

    def enter(self, axis_names: tuple[AxisName, ...]) -> "RandomState":
        """This stream as one shard sees it: its place on `axis_names` folded into the key."""
        if not axis_names:
            return self
        self._check_single()
        return self._streamed(axis_names)

    def _made(self, axis_names: tuple[AxisName, ...]) -> "State":
        # A state that was made inside over inner lanes has a key for each of them.
        return self._streamed(axis_names) if self.value.shape else self.enter(axis_names)

    def _check_single(self) -> None:
        if self.value.shape:
            raise errors.several_keys(self.value)

    def _streamed(self: R, axis_names: tuple[AxisName, ...]) -> R:
        """This stream with the index of the shard folded into each key."""
        shard = index_along(axis_names)
        # Nested calls fold in different numbers, because the first shard has the same key in both.
        line = _SHARD_STREAMS + len(self._shared) + self.value.ndim

        def own(key: Leaf) -> PyTree:
            other = keys.folded(keys.folded(keys.again(key), line), shard)
            first = keys.again(compat.vary(keys.again(key), compat.varying(shard)))
            return keys.again(jnp.where(shard == 0, first, other))

        for _ in range(self.value.ndim):
            own = jax.vmap(own)
        shared = Line(self.value, np.False_, axis_names)
        if axis_names == (MICROBATCHES,):
            shared = Line(self.value, np.False_, axis_names, shard, jax.lax.axis_size(axis_names))
        return self._rebuilt(own(self.value), (shared, *self._shared))

    def leave(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        """The stream as the draws left it, the same for every shard."""
        if not self._shared or not isinstance(old, RandomState):
            return self._rebuilt(self.value, old._shared if isinstance(old, RandomState) else ())
        if not axis_names:
            return self._rebuilt(self.value, tuple(line.written() for line in old._shared))
        line, *outer = self._shared
        if origin(self) is None or not known(line.was_set, False):
            # After a `cond`, `scan` or `where` shards may have drawn different numbers of times, which types
            # do not always tell. Or the user set a key, and the first shard's counts.
            entered = old.enter(line.axis_names)
            lines = entered._shared[1:]
            key, lines = left(self.value, self._shared, entered.value, old.value, lines, axis_names)
            return self._rebuilt(key, lines)
        return self._rebuilt(line.key, tuple(outer))

    def reshard(self, value: Leaf, count: int) -> Leaf:
        """Keys for another number of shards: those of the first shards stay, and further ones are made of the
        first."""
        new = jnp.arange(len(value), count)
        made = [keys.folded(keys.folded(value[0], _NEW_SHARDS), k) for k in new]
        return jnp.stack([*value[:count], *made])

    def _advanced(self: R, value: PyTree) -> R:
        return self._rebuilt(value, tuple(line.drawn() for line in self._shared))

    def _with_new(self: R, value: PyTree) -> R:
        """This stream with another key. It may be made from a drawn one, so the lines advance too."""
        return self._rebuilt(value, tuple(line.drawn().written() for line in self._shared))

    def _rebuilt(self: R, value: PyTree, shared: tuple[Leaf, ...]) -> R:
        new = self._with_value(value)
        _set_shared(new, shared)
        return new


_set_shared = RandomState.__dict__["_shared"].__set__
