"""`State`: an immutable pytree node for one piece of state."""

import inspect
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import jax
from jax.sharding import PartitionSpec

from .._axes._mesh_and_lanes import call_policy
from .._base import errors
from .._base._checks import check_text
from .._base._checks import tags as as_tags
from .._base._links import active as active_links
from .._base._specs import is_spec
from .._base._types import AxisName, Leaf, PyTree, Reduce, SpecTree, Tags, Text, Value
from ._meta import Meta
from ._no_array import NoArray
from ._shown import Shown
from ._values import REDUCTIONS, Write, arrays, check_reducible, conform, reduced, resharded


_PLAIN: dict[type, Meta] = {}
"""The metadata, by kind, of states that were given only a value."""


S = TypeVar("S", bound="State[PyTree]")


class State(NoArray, Shown, Generic[Value]):
    """One piece of state: an immutable leaf of a module tree.

    A State is a pytree node whose children are its value's leaves; the rest is static. It is never
    changed in place: `set` and `replace` return a new one.

    **Arguments:**

    - `value`: a pytree of arrays. Python and NumPy numbers in it become arrays.
    - `name`: a name of your own, for messages and filters.
    - `tag`: a string or several, by which filters find the state; kept as a frozenset.
    - `spec`: this state's own default placement: a `PartitionSpec`, a `PerShard`, or a prefix tree
        of them over `value`.
    - `reduce`: how shards' different values become one when the state is written: `None` (they must
        agree), `'mean'`, `'max'`, `'min'`, `'sum'` (old value plus the sum of the shards'
        increments), or a function `(old, new, axis_names) -> value`. A function is compared by
        identity, so define it once, outside the code that makes models.

    **Raises:** `TypeError` for a leaf that is not an array, or a State inside the value;
    `StatemeshError` for an unknown `reduce`.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> count = sm.State(0, tag="counter", reduce="sum")
        >>> count.set(count.value + 1).value
        Array(1, dtype=int32)

        ```

    A kind of state is a subclass. Kinds differ only in how they enter and leave a shard, and in how they get
    to other numbers of shards: override `enter`, `leave` and `reshard`. Subclasses are pytrees of their own.
    """

    __slots__ = ("_meta", "_origin", "value")

    value: Value
    _meta: Meta
    # A mark of the state that came into the call and from which this one was made, if that is known. It is no
    # part of the pytree: `jax.tree.map`, `jit` and `scan` lose it, and two models never differ by it.
    _origin: object

    children: ClassVar[tuple[str, ...]] = ("value",)
    """Names of the attributes that hold arrays."""

    always_replicated: ClassVar[bool] = False
    """Whether specs pass this kind by (`PerShard` excepted): its value is the same everywhere."""

    def __init__(
        self,
        value: PyTree,
        *,
        name: Text = None,
        tag: Tags = None,
        spec: SpecTree = None,
        reduce: Reduce = None,
        _meta: Meta | None = None,
    ) -> None:
        # JAX rebuilds nodes with `_meta` given and any object as the value. Only a call of the user's own has
        # values to convert and mistakes to find.
        if _meta is None:
            value = arrays(value)
            _meta = _checked_meta(type(self), name, tag, spec, reduce)
            check_reducible(value, reduce)
            set_value(self, value)
            set_meta(self, _meta)
        else:
            set_rebuilt(self, value, _meta)

    def __init_subclass__(cls, **kwargs: PyTree) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.__init__).parameters
        if "_meta" not in parameters:
            raise errors.kind_overrides_init(cls.__name__)
        _register(cls)

    @property
    def name(self) -> str | None:
        """The name given at construction."""
        return self._meta.name

    @property
    def tag(self) -> frozenset[str]:
        """The tags, as a frozenset."""
        return self._meta.tag

    @property
    def spec(self) -> SpecTree:
        """This state's own default placement, or `None`."""
        return self._meta.spec

    @property
    def reduce(self) -> Reduce:
        """The write policy."""
        return self._meta.reduce

    def set(self: S, value: PyTree) -> S:
        """A new State with `value` in place of the old one.

        **Arguments:**

        - `value`: the same tree structure, shapes and dtypes as the old value. Python scalars and
            weakly typed arrays take the old dtype.

        **Returns:** a State of the same kind with the same metadata.

        **Raises:** `StructureError` naming everything that differs, and for a number that does not fit into
        the dtype.
        """
        return self._set(value, self.name or type(self).__name__)

    def _set(self: S, value: PyTree, label: str) -> S:
        """`set`, whose errors call this state by `label`."""
        return self._with_value(conform(self.value, value, label))

    def replace(self: S, **changes: PyTree) -> S:
        """A new State with any of `value`, `name`, `tag`, `spec`, `reduce` changed, unchecked
        against the old ones."""
        unknown = [key for key in changes if key not in _FIELDS]
        if unknown:
            raise errors.unknown_fields(type(self).__name__, unknown, _FIELDS)
        value = self.value
        if "value" in changes:
            value = arrays(changes.pop("value"))
        old = self._meta
        meta = old
        if changes:
            fields = {"name": old.name, "tag": old.tag, "spec": old.spec, "reduce": old.reduce}
            meta = _checked_meta(type(self), **(fields | changes))
        check_reducible(value, meta.reduce)
        return self._with_value(value, meta)

    def enter(self, axis_names: tuple[AxisName, ...]) -> "State":
        """This state as one shard sees it; called inside the mapped call, with the shard's own part.

        **Arguments:**

        - `axis_names`: the mapped axes over which the value arrives equal on every shard.

        **Returns:** a State of any kind; `self` unless a kind says otherwise.
        """
        del axis_names
        return self

    def _made(self, axis_names: tuple[AxisName, ...]) -> "State":
        """This state, made inside a mapped call alike on every shard, as one shard's own."""
        return self.enter(axis_names)

    def _of_microbatches(self, old: "State | None", axis_names: tuple[AxisName, ...]) -> "State":
        """What is written back of this state, which a microbatch wrote: `leave`, over microbatches."""
        return self.leave(old, axis_names)

    def leave(self: S, old: "S | None", axis_names: tuple[AxisName, ...]) -> "State":
        """What is written back of this state, which a shard wrote.

        Called inside the mapped call; collectives over `axis_names` may be used. What it returns
        must be equal over `axis_names`, which is checked.

        **Arguments:**

        - `old`: the state as it came in, before `enter`; `None` for a state made inside.
        - `axis_names`: the mapped axes over which the value still varies and which the placement
            it leaves with does not mention; empty when there is nothing to merge. Where leaves of
            the value have different placements, `leave` is called once for each, and of its result
            the leaves with that placement count.

        **Returns:** a State; by default the one that `reduce` asks for.
        """
        reduce = self.reduce
        if not axis_names or reduce is None:
            return self
        before = None if old is None else old.value
        label = self.name or type(self).__name__
        if callable(reduce):
            merged = call_policy(reduce, before, self.value, axis_names, label)
            made = f"what reduce={getattr(reduce, '__name__', reduce)} returned"
            return self._with_value(conform(self.value, merged, label=made))
        over = [axis_names] * len(jax.tree_util.tree_leaves(self.value))
        (merged,) = reduced([Write(self.value, before, reduce, over, label)])
        return self._with_value(merged)

    def reshard(self, value: Leaf, count: int) -> Leaf:
        """`PerShard` values, old shards on the first axis, for `count` shards; checkpoints need it.

        **Returns:** what `reduce` makes of them; of `'sum'` the first shard has all. Else `NotImplemented`.
        """
        how = self.reduce
        return resharded(value, how, count) if isinstance(how, str) else NotImplemented

    def _with_value(self: S, value: PyTree, meta: Meta | None = None) -> S:
        new = object.__new__(type(self))
        for child in self.children[1:]:
            object.__setattr__(new, child, getattr(self, child))
        meta = self._meta if meta is None else meta
        links = active_links()
        if links is not None and (type(self), self._meta) in links.followed:
            value, token = links.written(value, self.value)
            meta = meta.with_token(token)
        set_value(new, value)
        set_meta(new, meta)
        origin = getattr(self, "_origin", None)
        if origin is not None:
            set_origin(new, origin)
        return new

    @property
    def needs_old(self) -> bool:
        """Whether what `leave` writes back depends on the value that came in."""
        own_way = type(self).leave is not State.leave
        return own_way or callable(self.reduce) or self.reduce == "sum"

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and pickling would assign to the slots.
        children = tuple(getattr(self, child) for child in self.children)
        return _remade, (type(self), children, self._meta)

    def __setattr__(self, name: str, value: object) -> None:
        raise errors.immutable_state(type(self).__name__, name)

    def __delattr__(self, name: str) -> None:
        raise errors.immutable_state(type(self).__name__, name)


# The setters of the slots are several times quicker than `object.__setattr__`.
set_value: Callable[[State, PyTree], None] = State.__dict__["value"].__set__
set_meta: Callable[[State, Meta], None] = State.__dict__["_meta"].__set__
set_origin: Callable[[State, object], None] = State.__dict__["_origin"].__set__
_FIELDS = ("value", "name", "tag", "spec", "reduce")


def set_rebuilt(state: State, value: PyTree, meta: Meta) -> None:
    """Fill in a State that JAX rebuilds."""
    links = active_links()
    if links is None:
        meta = meta if meta.token is None else meta.plain
    elif (type(state), meta) in links.followed:
        value, token = links.rebuilt(value, meta.token)
        meta = meta.with_token(token)
    set_value(state, value)
    set_meta(state, meta)


def _register(cls: type[State]) -> None:
    _PLAIN[cls] = Meta(cls, None, frozenset(), None, None)
    jax.tree_util.register_dataclass(cls, data_fields=list(cls.children), meta_fields=["_meta"])


_register(State)


def _remade(cls: type[S], children: Sequence[Leaf], meta: Meta) -> S:
    new = object.__new__(cls)
    for name, child in zip(cls.children, children, strict=True):
        object.__setattr__(new, name, child)
    set_meta(new, meta)
    return new


def is_plain(kind: type[State]) -> bool:
    """Whether states of this kind hold a value and metadata, and nothing else."""
    return kind.children == ("value",)


def rebuild_plain(
    kinds: Sequence[type[State]], metas: Sequence[Meta], values: Sequence[Leaf]
) -> list[State]:
    """Many plain states at once, a few times quicker than by their constructors.

    `map` calls the slots' setters in C. They return `None`, so that `any` runs through to the end.
    """
    made = list(map(object.__new__, kinds))
    any(map(set_value, made, values))
    any(map(set_meta, made, metas))
    return made


def _checked_meta(cls: type[State], name: Text, tag: Tags, spec: SpecTree, reduce: Reduce) -> Meta:
    check_text(cls.__name__, "name", name)
    tags = as_tags(cls.__name__, tag)
    if not (reduce is None or callable(reduce) or reduce in REDUCTIONS):
        raise errors.unknown_reduce(reduce, REDUCTIONS)
    for leaf in jax.tree_util.tree_leaves(spec, is_leaf=is_spec):
        if not is_spec(leaf):
            raise errors.not_a_spec("spec", leaf)
        if cls.always_replicated and isinstance(leaf, PartitionSpec) and tuple(leaf):
            raise errors.always_replicated(cls.__name__, leaf)
    if name is None and not tags and spec is None and reduce is None:
        return _PLAIN[cls]
    return Meta(cls, name, tags, spec, reduce)
