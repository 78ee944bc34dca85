"""`RandomState`: random streams that do not depend on the number of shards, for keys of every kind."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._mesh_and_lanes import (
    BLOCKS,
    MERGING,
    PARTS_OF_ROWS,
    all_varying,
    first_of,
    index_along,
    inside_microbatches,
    pmax,
    refuse_in_lanes,
    shard_index,
)
from .._base._checks import count, is_key
from .._base._errors import StatemeshError
from .._base._trees import describe
from .._base._types import (
    Array,
    ArrayLike,
    AxisName,
    Leaf,
    PyTree,
    SeveralAxes,
    Size,
    SpecTree,
    Tags,
)
from .._jax import _compat as compat
from ._state import State, origin, set_rebuilt
from ._values import Meta, conform


_THREEFRY = frozenset({"threefry2x32", "threefry4x32"})
# From these, too, `jax.vmap` draws for each key its own numbers. Of `rbg` keys it takes the first one for all
# lanes, on purpose: https://github.com/jax-ml/jax/issues/19085
_KEY_BY_KEY = _THREEFRY | {"philox2x32", "philox4x32"}


def again(key: Array) -> Array:
    """`key`, to make another key of than it was made into already.

    The numbers that we fold in keep these apart. JAX cannot know that: where it checks that no key is used
    twice, we tell it.
    """
    return jax.random.clone(key) if compat.key_reuse_checked() else key


def advance(key: Array) -> tuple[Array, Array]:
    """The key that remains after a draw, and the key that is drawn."""
    rest, drawn = jax.random.split(_seed(key))
    return _of(rest, key), _of(drawn, key)


def numbered_key(key: Array, number: ArrayLike) -> Array:
    """A key of its own for each number."""
    return _of(jax.random.fold_in(_seed(key), number), key)


def drawable(key: Array, what: str) -> Array:
    """`key`, if the caller may draw from it.

    **Raises:** `StatemeshError` in lanes with a key each, if `jax.vmap` would draw from the first one only.
    """
    impl = jax.random.key_impl(key)
    if impl in _KEY_BY_KEY:
        return key
    return refuse_in_lanes(key, lambda: _drawn_in_lanes(what, impl))


def words(key: Array) -> Array:
    """The numbers that a key consists of, as one row."""
    return jax.random.key_data(key).ravel()


def from_words(row: Array, like: Array) -> Array:
    """The key that consists of these numbers, of the implementation of `like`."""
    shape = jax.random.key_data(like).shape
    return jax.random.wrap_key_data(row.reshape(shape), impl=jax.random.key_impl(like))


def _is_threefry(key: Array) -> bool:
    return jax.random.key_impl(key) in _THREEFRY


def _seed(key: Array) -> Array:
    """A threefry key made of `key`: itself, or one into which all of its words are folded."""
    if _is_threefry(key):
        return key
    row = words(key)
    first = jnp.pad(row, (0, max(0, 2 - len(row))))[:2]
    seed: Array = jax.random.wrap_key_data(first, impl="threefry2x32")
    for k in range(2, len(row)):
        seed = jax.random.fold_in(seed, row[k])
    return seed


def _of(seed: Array, key: Array) -> Array:
    """The key of `key`'s implementation that is made of a threefry key."""
    if _is_threefry(key):
        return seed
    return from_words(jax.random.bits(seed, (len(words(key)),), jnp.uint32), key)


# Far from the small numbers from which `split` makes its keys.
_UNEVEN_DRAWS = 0x0DD0DD0D


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "was_set", "number"],
    meta_fields=["axis_names", "count"],
)
@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A random stream that is the same on all shards of one call. Each draw of a shard advances it too.

    **Arguments:**

    - `key`: the key of the first shard, as long as keys are only drawn.
    - `was_set`: whether the user set a key, so that only the first shard knows the key that follows. A NumPy
        `bool` while that is known; an array after a `cond` or a `scan`.
    - `axis_names`: the mapped axes of the call.
    - `number`, `count`: of a microbatch or block its number, and how many a shard has. Shards have an
        `axis_index` instead.
    """

    key: Leaf
    was_set: Leaf
    axis_names: tuple[AxisName, ...]
    number: Leaf = None
    count: int = 1

    def drawn(self) -> "Line":
        """This line after one draw."""
        return dataclasses.replace(self, key=advance(again(self.key))[0])

    def written(self) -> "Line":
        """This line after a key was set."""
        return dataclasses.replace(self, was_set=np.True_)


def known(was_set: Leaf, value: bool) -> bool:
    """Whether `was_set` is known while tracing, and is `value`."""
    return isinstance(was_set, np.bool_) and bool(was_set) is value


def synchronized(key: Array, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines, with the first shard's key on all shards if a key was set."""
    if not any(known(line.was_set, True) for line in lines):
        return lines
    same = []
    for line in lines:
        if line.axis_names in PARTS_OF_ROWS:
            # No key was set inside: all microbatches began with this one, and drew alike.
            key = line.key
        else:
            key = from_words(first_of(words(key), line.axis_names), key)
        same.append(dataclasses.replace(line, key=key))
    return tuple(same)


def row_numbers(what: str, n: int, axis_name: SeveralAxes, lines: Sequence[Line]) -> Leaf:
    """The numbers in the global array of the `n` rows that a shard, or a microbatch of a shard, holds."""
    shard, rows = shard_index(what, axis_name), jnp.arange(n)
    line = next((line for line in lines if line.axis_names in PARTS_OF_ROWS), None)
    if line is None:
        if inside_microbatches():
            raise StatemeshError(
                f"{what}: inside the microbatches of value_and_grad, a RandomState must come with the model "
                "or as a keyword argument. One that the function makes or closes over does not know which "
                "rows a microbatch has."
            )
        return shard * n + rows
    if known(line.was_set, True):
        raise StatemeshError(
            f"{what}: inside the microbatches of value_and_grad, rows cannot be drawn after a key was set, "
            "because only the first microbatch knows that key. Set the key before value_and_grad."
        )
    if line.axis_names == (BLOCKS,):
        # The blocks follow one another, first those of the first shard.
        return (shard * line.count + line.number) * n + rows
    # A microbatch holds every `count`-th row of the global array, from row `number` on.
    return (shard * n + rows) * line.count + line.number


@jax.named_scope(MERGING)
def left(
    last: Array,
    lines: Sequence[Line],
    entered: Array,
    old: Array,
    outer: Sequence[Line],
    axis_names: tuple[AxisName, ...],
) -> tuple[Array, tuple[Line, ...]]:
    """The key that leaves a call whose shards may have drawn different numbers of times, and the outer lines.

    It is the first shard's key. If that key might give a number twice, a key aside from the line leaves
    instead. All of this takes one reduction.

    **Arguments:**

    - `last`: the key with which this shard would go on.
    - `lines`: the lines of this call and of the calls around it, the innermost first.
    - `entered`: the key with which this shard began.
    - `old`: the key that came into the call, before the shard was folded into it.
    - `outer`: the lines of the calls around it, as they came in.
    - `axis_names`: the mapped axes that this call leaves.
    """
    rows = [words(line.key) for line in lines]
    first = jnp.where(jax.lax.axis_index(axis_names) == 0, words(last), 0)
    moved = jnp.ravel(~_equal(last, entered)).astype(jnp.uint32)
    # One maximum finds the largest and the smallest of each word, the first shard's key, and whether any
    # shard has drawn.
    parts = [*rows, *(~row for row in rows), first, moved]
    (joined,) = pmax([all_varying(jnp.concatenate(parts), axis_names)], axis_names)
    extremes = jnp.split(joined, np.cumsum([len(part) for part in parts])[:-1])
    count = len(rows)
    even = [
        jnp.all(a == ~b) for a, b in zip(extremes[:count], extremes[count : 2 * count], strict=True)
    ]
    key, any_moved = from_words(extremes[-2], last), extremes[-1][0] != 0
    # If the first shard has not drawn but another one has, that one would draw the same numbers again.
    fit = even[0] & ~(any_moved & _equal(key, old))
    around = []
    for line, row, same, before in zip(lines[1:], extremes[1:], even[1:], outer, strict=False):
        common = _unless(same, from_words(row, line.key), before.key)
        was_set = line.was_set if known(line.was_set, False) else np.True_
        around.append(dataclasses.replace(line, key=common, was_set=was_set))
    return _unless(fit, key, old), tuple(around)


def _equal(a: Array, b: Array) -> Array:
    if a.dtype != b.dtype:
        return jnp.zeros((), bool)
    return jnp.all(words(a) == words(b))


def _unless(even: Array, key: Array, before: Array) -> Array:
    """`key` where `even`, else a key aside from the line of `before`."""
    other = _of(jax.random.fold_in(_seed(again(before)), _UNEVEN_DRAWS), key)
    return again(jnp.where(even, again(key), other))


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
                raise TypeError(
                    "RandomState got both key and value, which are two names of one thing. Give the key "
                    "only: `sm.RandomState(jax.random.key(0))`."
                )
            key = value if key is None else key
            if not is_key(key):
                raise _not_a_key(key)
            super().__init__(key, name=name, tag=tag, spec=spec)
        else:
            set_rebuilt(self, value, _meta)
        _set_shared(self, _shared)

    @property
    def key(self) -> PyTree:
        """The key that the next draw comes from: this shard's own inside a mapped call.

        **Raises:** `StatemeshError` in lanes, as `split` does.
        """
        self._check_no_block("key")
        return drawable(self.value, "RandomState.key")

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
        self._check_no_block("split")
        if num is not None:
            expected = "an int, 0 or more: the number of keys, as in split(2)"
            num = count("RandomState.split", "num", num, expected)
        rest, drawn = advance(drawable(self.value, "RandomState.split"))
        if num is not None:
            seeds = jax.random.split(_seed(drawn), num)
            drawn = seeds if _is_threefry(drawn) else jax.vmap(partial(_of, key=drawn))(seeds)
        return drawn, self._advanced(rest)

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
        expected = "an int, 0 or more: the number of rows that this shard holds"
        n = count("RandomState.rows", "n", n, f"{expected}, as in rows(x.shape[0], 'data')")
        numbers = row_numbers("RandomState.rows", n, axis_name, self._shared)
        stream = self._rebuilt(self.value, synchronized(self.value, self._shared))
        _, drawn = advance(again(stream._shared[-1].key if stream._shared else self.value))
        rest, _ = advance(self.value)
        # Of threefry keys alone `jax.vmap` draws for each key the numbers that it gives by itself.
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(_seed(drawn), numbers)
        return keys, stream._advanced(rest)

    def _set(self: R, value: PyTree, label: str) -> R:
        return self._with_new(conform(self.value, value, label))

    def replace(self: R, **changes: PyTree) -> R:
        """As for `State`. Inside a mapped call a new key is a single one."""
        new = super().replace(**changes)
        if "value" not in changes:
            return new
        if not is_key(new.value):
            raise _not_a_key(new.value)
        if self._shared and new.value.shape:
            raise _several_keys(new.value)
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
            raise _several_keys(self.value)

    def _check_no_block(self, what: str) -> None:
        if any(line.axis_names == (BLOCKS,) for line in self._shared):
            raise StatemeshError(
                f"RandomState.{what}: inside the blocks of value_and_grad a shard's own key would be another "
                "one on another number of shards. Draw a key for each row, `keys, rng = rng.rows(x.shape[0], "
                "axis_name)`, or draw before value_and_grad and pass the key as a keyword argument."
            )

    def _streamed(self: R, axis_names: tuple[AxisName, ...]) -> R:
        """This stream with the index of the shard folded into each key."""
        shard = index_along(axis_names)
        # Nested calls fold in different numbers, because the first shard has the same key in both.
        line = _SHARD_STREAMS + len(self._shared) + self.value.ndim

        def of_shard(key: Leaf) -> PyTree:
            other = numbered_key(numbered_key(again(key), line), shard)
            first = again(compat.vary(again(key), compat.varying(shard)))
            return again(jnp.where(shard == 0, first, other))

        for _ in range(self.value.ndim):
            of_shard = jax.vmap(of_shard)
        shared = Line(self.value, np.False_, axis_names)
        if axis_names in PARTS_OF_ROWS:
            shared = Line(self.value, np.False_, axis_names, shard, jax.lax.axis_size(axis_names))
        return self._rebuilt(of_shard(self.value), (shared, *self._shared))

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
        further = [numbered_key(numbered_key(value[0], _NEW_SHARDS), k) for k in new]
        return jnp.stack([*value[:count], *further])

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


def _not_a_key(key: object) -> TypeError:
    return TypeError(
        f"RandomState needs a typed key, got {describe(key)}. Write `sm.RandomState(jax.random.key(0))`; "
        "`jax.random.wrap_key_data(raw)` makes a typed key of a raw one."
    )


def _several_keys(keys: jax.Array) -> StatemeshError:
    return StatemeshError(
        f"RandomState holds keys of shape {keys.shape}, but a shard or lane draws from one key. Hold one "
        "key; each shard or lane then gets a stream of its own. Or give each its own key: RandomState(keys, "
        "spec=sm.PerShard('axis')) for shard_map, state_in_axes=sm.RandomState for pmap2 and vmap2."
    )


def _drawn_in_lanes(what: str, impl: object) -> StatemeshError:
    return StatemeshError(
        f"{what}: each lane has its own key, of the implementation {impl!r}. For such keys jax.vmap may use "
        "only the first lane's key: the numbers would depend on the number of lanes, and differ from those "
        "of shard_map and pmap2. Make the key with `jax.random.key(seed, impl='threefry2x32')`, or draw with "
        "`RandomState.rows`, whose keys are threefry keys."
    )
