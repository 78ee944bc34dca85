"""`KVCache`: a ring buffer of keys and values for attention."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._axes._mesh_and_lanes import bound_names, shard_index
from .._base._checks import check_names
from .._base._errors import StatemeshError, counted
from .._base._types import Array, Dtype, Leaf, SeveralAxes
from .._state._module import Module, field
from .._state._state import ShortTermState
from ._running import bad_shape, check_sizes


K = TypeVar("K", bound="KVCache")


class KVCache(Module):
    """The keys and values of the latest tokens of a sequence, for attention.

    It is a ring: the token at position `p` is written to slot `p % capacity`, over the token that was there.
    It holds one sequence; under `vmap2` it holds several.

    On a mesh `spec` may split the heads; each shard then gets the keys and values of its own heads. It may
    also split the slots, along the axes that `axis_name` names. Each shard then gets all tokens, writes those
    whose slots it holds, and attends to these slots. Join the results of the shards, as by a softmax over all
    slots.

    **Arguments:**

    - `capacity`: the number of slots.
    - `heads`: the number of heads.
    - `dim`: the size of a key, and of a value.
    - `dtype`: the dtype of the cache, by default JAX's own. Keys and values are cast to it.
    - `spec`: the placement of keys and values, of shape `(capacity, heads, dim)`.
    - `axis_name`: the mesh axes that split the slots: one name, or several from major to minor. Outside any
        mapped call they mean one shard.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> cache = sm.nn.KVCache(capacity=4, heads=1, dim=2)
        >>> tokens = jnp.ones((3, 1, 2))
        >>> (keys, values, mask), cache = cache(tokens, tokens)
        >>> mask.astype(int)
        Array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0]], dtype=int32)

        ```
    """

    slots: ShortTermState
    position: ShortTermState
    capacity: int = field(static=True)
    axis_name: SeveralAxes = field(static=True)

    def __init__(
        self,
        capacity: int,
        heads: int,
        dim: int,
        *,
        dtype: Dtype | None = None,
        spec: PartitionSpec | None = None,
        axis_name: SeveralAxes = None,
    ) -> None:
        check_sizes("KVCache", capacity=capacity, heads=heads, dim=dim)
        shape = (capacity, heads, dim)
        empty = {"keys": jnp.zeros(shape, dtype), "values": jnp.zeros(shape, dtype)}
        self.slots = ShortTermState(empty, spec=spec)
        self.position = ShortTermState(0)
        self.capacity = capacity
        check_names("KVCache", axis_name)
        self.axis_name = axis_name

    def __call__(self: K, keys: Leaf, values: Leaf) -> tuple[tuple[Array, Array, Array], K]:
        """Write tokens, and give back what they may attend to.

        **Arguments:**

        - `keys`, `values`: of shape `(tokens, heads, dim)`, those of the next tokens in order.

        **Returns:** `((keys, values, mask), cache)`: all slots, `(capacity, heads, dim)` each, of which this
        shard holds its own; and of shape `(tokens, capacity)`, whether a token may attend to a slot: one
        that holds it or an earlier token. An earlier one that a later one of the same call has overwritten
        is gone: write several at once while there is room, and one at a time from then on.

        **Raises:** `StatemeshError` for other shapes, more tokens than slots, and slots that are split over
        other axes than `axis_name` says.
        """
        old, start = self.slots.value, self.position.value
        keys, values = self._checked("keys", keys), self._checked("values", values)
        tokens, mine = len(keys), self._own_slots()
        if len(values) != tokens:
            why = f"keys hold {tokens}"
            raise bad_shape("KVCache", "values", values, f"{tokens} tokens", why)
        if tokens > self.capacity:
            raise StatemeshError(
                f"KVCache: {counted(tokens, 'token')} at once do not fit into a capacity of {self.capacity}: "
                "some would overwrite others. Write them in several calls."
            )
        positions = start + jnp.arange(tokens)
        # Slots of other shards get an index past the end, which `mode="drop"` ignores.
        at = positions % self.capacity - mine[0]
        at = jnp.where((at >= 0) & (at < len(mine)), at, len(mine))
        new = {
            "keys": old["keys"].at[at].set(keys, mode="drop"),
            "values": old["values"].at[at].set(values, mode="drop"),
        }
        # The latest position written to each slot; negative for an empty slot.
        last = positions[-1] - (positions[-1] - mine) % self.capacity
        mask = (last >= 0)[None] & (last[None] <= positions[:, None])
        cache = self.replace(slots=new, position=start + tokens)
        return (new["keys"], new["values"], mask), cache

    def reset(self: K) -> K:
        """The cache as it was made, empty."""
        slots, position = jax.tree.map(jnp.zeros_like, (self.slots.value, self.position.value))
        return self.replace(slots=slots, position=position)

    def init_state(self: K) -> K:
        """As `reset`, but with new states: `vmap2_new_states` then makes a cache for each sequence."""
        empty = self.reset()
        states = [ShortTermState(old.value, spec=old.spec) for old in (empty.slots, empty.position)]
        return self.replace(slots=states[0], position=states[1])

    def _checked(self, what: str, x: Leaf) -> jax.Array:
        x, buffer = jnp.asarray(x), self.slots.value[what]
        if x.ndim != 3 or x.shape[1:] != buffer.shape[1:] or not len(x):
            heads, dim = buffer.shape[1:]
            why = "one token at least, in the heads and the size of the cache"
            raise bad_shape("KVCache", what, x, f"(tokens, {heads}, {dim})", why)
        return x.astype(buffer.dtype)

    def _own_slots(self) -> jax.Array:
        """The numbers of the slots that this shard holds."""
        names = bound_names("KVCache", self.axis_name)
        local = len(self.slots.value["keys"])
        shards = int(jax.lax.psum(1, names)) if names else 1
        if local * shards != self.capacity:
            raise StatemeshError(
                f"KVCache: {counted(local, 'slot')} in each of {counted(shards, 'shard')} (by axis_name) "
                f"make {local * shards}, but the capacity is {self.capacity}. Name the mesh axes that split "
                "the slots, and no others: KVCache(..., spec=P('data'), axis_name='data')."
            )
        return shard_index("KVCache", self.axis_name) * local + jnp.arange(local)
