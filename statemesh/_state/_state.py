"""`State`: an immutable pytree node for one piece of state; its kinds; how it prints; where it came from."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec

from .._axes._mesh_and_lanes import call_policy
from .._base import _errors as errors
from .._base._checks import check_text, is_key, takes
from .._base._checks import tags as as_tags
from .._base._errors import SpecError, StatemeshError, StructureError, quoted, spec_str
from .._base._specs import is_spec
from .._base._trees import StateNode, describe_leaf, fun_name, is_state
from .._base._types import AxisName, Leaf, PyTree, Reduce, SpecTree, Tags, Text, Value
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._jax._jaxprs import active as active_links
from ._values import REDUCTIONS, Meta, Write, arrays, check_reducible, conform, reduced, resharded


class NoArray:
    """Refuses what only arrays have, with an error that says what to write instead."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - set(_ATTRIBUTES))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise self._no_array("==")
        return self is other

    __hash__ = object.__hash__

    def _no_array(self, what: str) -> TypeError:
        """The error of an operation of arrays."""
        return TypeError(
            f"a {type(self).__name__} holds an array and is not one itself: apply {what} to `state.value`. "
            "Write a new value with `state.set(value)`."
        )


# What is refused, by the name of its method without the underscores. Methods that do not exist, such as
# `__rneg__`, are refused as well, which nobody will see.
_REFUSED = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "neg": "-",
    "invert": "~",
    "getitem": "[...]",
    **{name: f"{name}()" for name in ("bool", "int", "float", "complex", "index", "abs")},
    # The functions of NumPy and `jax.numpy` look for these methods.
    **dict.fromkeys(("array", "array_ufunc", "jax_array"), "a function of arrays"),
}


def _refusing(what: str) -> PyTree:
    def refuse(self: NoArray, *others: object, **options: object) -> PyTree:
        raise self._no_array(what)

    return refuse


for _name, _sign in _REFUSED.items():
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(NoArray, _method, _refusing(_sign))


# The attributes of arrays that users look for first. They are properties, because Python would run a
# `__getattr__` also where an unset slot is read, in each call.
_ATTRIBUTES = (
    "at",
    "shape",
    "dtype",
    "ndim",
    "size",
    "T",
    "astype",
    "reshape",
    "sum",
    "mean",
    "max",
    "min",
)


def _absent(name: str) -> property:
    def refuse(self: NoArray) -> PyTree:
        raise AttributeError(
            f"a {type(self).__name__} holds an array and is not one itself: write `state.value.{name}`.",
            name=name,
            obj=self,
        )

    return property(refuse)


for _name in _ATTRIBUTES:
    setattr(NoArray, _name, _absent(_name))


class Shown(StateNode):
    """Prints a State as what makes it.

    Scalars with their value, arrays by dtype and shape: the numbers in small ones are shown by
    `equinox.tree_pformat(short_arrays=False)`.
    """

    __slots__ = ()

    def _fields(self) -> dict[str, PyTree]:
        """The metadata to show: all that is not at its default."""
        fields = {name: getattr(self, name) for name in ("name", "spec", "reduce")}
        fields["tag"] = sorted(getattr(self, "tag", ())) or None
        return {name: value for name, value in fields.items() if value is not None}

    def __repr__(self) -> str:
        return eqx.tree_pformat(self)

    def _one_line(self) -> str:
        return eqx.tree_pformat(self, width=1_000_000)

    def __pdoc__(self, **options: Leaf) -> PyTree:
        # Imported here, because only what prints by this package calls this method.
        import wadler_lindig as wl

        if options.get("short_arrays", True):
            custom = functools.partial(_short, wl.TextDoc, options.get("custom"))
            options = options | {"custom": custom}
        docs = [wl.pdoc(getattr(self, "value", None), **options)]
        for name, field in self._fields().items():
            text = getattr(field, "__name__", None) or repr(field)
            docs.append(wl.TextDoc(f"{name}={text}"))
        return wl.bracketed(
            wl.TextDoc(f"{type(self).__name__}("),
            docs,
            wl.comma,
            wl.TextDoc(")"),
            options["indent"],
        )

    def __rich_repr__(self) -> PyTree:
        yield getattr(self, "value", None)
        yield from self._fields().items()

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., object]
    ) -> PyTree:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={"value": getattr(self, "value", None), **self._fields()},
            path=path,
            subtree_renderer=subtree_renderer,
        )


def _short(
    text: Callable[[str], object], outer: Callable[..., object] | None, leaf: Leaf
) -> PyTree:
    if getattr(leaf, "dtype", None) is None or getattr(leaf, "shape", None) is None:
        return None if outer is None else outer(leaf)
    return text(f"{leaf.dtype}({leaf.item()})" if _is_known(leaf) else describe_leaf(leaf))


def _is_known(leaf: Leaf) -> bool:
    """Whether it is one number that can be read now."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape == ()
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape == ()
        and not compat.is_tracer(leaf)
        and not is_key(leaf)
        and not leaf.is_deleted()
        and (leaf.is_fully_addressable or leaf.is_fully_replicated)
    )


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
        # JAX rebuilds nodes with `_meta` and any object as the value. Only where the user makes a state are
        # there values to convert and mistakes to find.
        if _meta is None:
            set_value(self, arrays(value))
            set_meta(self, _checked_meta(type(self), name, tag, spec, reduce))
            check_reducible(self.value, reduce)
        else:
            set_rebuilt(self, value, _meta)

    def __init_subclass__(cls, **kwargs: PyTree) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.__init__).parameters
        if "_meta" not in parameters:
            raise TypeError(
                f"{cls.__name__} overrides __init__, which JAX calls whenever it rebuilds a state. Override "
                f"`enter` and `leave`, and give {cls.__name__} a classmethod for other ways to make one."
            )
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
        """A new State with some of its arguments changed. A value need not be like the old one.

        **Arguments:**

        - `changes`: any of `value`, `name`, `tag`, `spec` and `reduce`, as for the class.

        **Returns:** a State of the same kind.

        **Raises:** `StructureError` for other names; else as the class does.
        """
        unknown = [key for key in changes if key not in _FIELDS]
        if unknown:
            raise unknown_fields(type(self).__name__, unknown, _FIELDS)
        value = arrays(changes.pop("value")) if "value" in changes else self.value
        meta = self._meta
        if changes:
            fields = {name: getattr(meta, name) for name in ("name", "tag", "spec", "reduce")}
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
            label = f"what reduce={getattr(reduce, '__name__', reduce)} returned"
            return self._with_value(conform(self.value, merged, label))
        over = [axis_names] * len(jax.tree_util.tree_leaves(self.value))
        (merged,) = reduced([Write(self.value, before, reduce, over, label)])
        return self._with_value(merged)

    def reshard(self, value: Leaf, count: int) -> Leaf:
        """The `PerShard` values of other shards, for `count` shards: a checkpoint is loaded on another mesh.

        **Arguments:**

        - `value`: one leaf of the value, with the old shards on its first axis.
        - `count`: the number of shards.

        **Returns:** a leaf with `count` shards on its first axis. All of them hold what `reduce` makes of the
        old ones; for `'sum'` the first shard holds it, and the others hold zeros. `NotImplemented` where
        `reduce` is not one of the named policies.
        """
        reduce = self.reduce
        return resharded(value, reduce, count) if isinstance(reduce, str) else NotImplemented

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
        overrides = type(self).leave is not State.leave
        return overrides or callable(self.reduce) or self.reduce == "sum"

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and pickling would assign to the slots.
        children = tuple(getattr(self, child) for child in self.children)
        return _remade, (type(self), children, self._meta)

    def __setattr__(self, name: str, value: object) -> None:
        raise _immutable_state(type(self).__name__, name)

    def __delattr__(self, name: str) -> None:
        raise _immutable_state(type(self).__name__, name)


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
    states = list(map(object.__new__, kinds))
    any(map(set_value, states, values))
    any(map(set_meta, states, metas))
    return states


def _checked_meta(cls: type[State], name: Text, tag: Tags, spec: SpecTree, reduce: Reduce) -> Meta:
    check_text(cls.__name__, "name", name, "a string, as in name='mean'")
    tags = as_tags(cls.__name__, tag)
    named = isinstance(reduce, str) and reduce in REDUCTIONS
    if not (reduce is None or callable(reduce) or named):
        raise StatemeshError(
            f"reduce={reduce!r} is not a write policy. Use None, {quoted(REDUCTIONS)}, or a function `(old, "
            "new, axis_names) -> value`."
        )
    if callable(reduce) and not takes(reduce, 3):
        raise StatemeshError(
            f"reduce={fun_name(reduce)}{inspect.signature(reduce)} cannot be called with the old value, the "
            "new value and the names of the axes. Write a function `(old, new, axis_names) -> value`, as in "
            "`lambda old, new, axis_names: jax.lax.pmean(new, axis_names)`."
        )
    for leaf in jax.tree_util.tree_leaves(spec, is_leaf=is_spec):
        if not is_spec(leaf):
            raise errors.not_a_spec("spec", leaf)
        if cls.always_replicated and isinstance(leaf, PartitionSpec) and tuple(leaf):
            raise always_replicated(cls.__name__, leaf)
    if name is None and not tags and spec is None and reduce is None:
        return _PLAIN[cls]
    return Meta(cls, name, tags, spec, reduce)


class ShortTermState(State[Value]):
    """State that is meaningful for a short while: one sequence, one episode, one batch.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> position = sm.ShortTermState(0)
        >>> int(position.set(position.value + 1).value)
        1

        ```
    """

    __slots__ = ()


class HiddenState(ShortTermState[Value]):
    """The hidden value of a recurrent layer.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def step(hidden, x):
        ...     return hidden.set(0.5 * hidden.value + x)
        >>> step = sm.vmap2(step, in_axes=(None, 0), out_axes=0, state_in_axes=sm.HiddenState)
        >>> step(sm.HiddenState(jnp.zeros(3)), jnp.arange(3.0)).value
        Array([0., 1., 2.], dtype=float32)

        ```
    """

    __slots__ = ()


class NonBatchState(ShortTermState[Value]):
    """State that is never given a lane axis: it stays replicated where others are distributed.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> class Filter(sm.Module):
        ...     table: sm.NonBatchState | None = None
        ...     last: sm.HiddenState | None = None
        ...     def init_state(self):
        ...         table = sm.NonBatchState(jnp.arange(3.0))
        ...         return self.replace(table=table, last=sm.HiddenState(0.0))
        >>> made, _ = sm.vmap2_new_states(Filter(), {}, axis_size=4)
        >>> made.table.value.shape, made.last.value.shape
        ((3,), (4,))

        ```
    """

    __slots__ = ()


class LongTermState(State[Value]):
    """State that lives as long as the model: parameters and statistics.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> model = {"w": sm.ParamState(1.0), "mean": sm.BatchState(0.0), "h": sm.HiddenState(0.0)}
        >>> kept, _ = sm.partition(model, sm.LongTermState)
        >>> sorted(sm.states(kept))
        ["['mean']", "['w']"]

        ```
    """

    __slots__ = ()


class ParamState(LongTermState[Value]):
    """Parameters: what training changes along its gradients.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def loss(w, x):
        ...     return (w.value * x).sum(), w
        >>> _, gradient = sm.value_and_grad(loss)(sm.ParamState(2.0), jnp.arange(3.0))
        >>> float(gradient.value)
        3.0

        ```
    """

    __slots__ = ()


class BatchState(LongTermState[Value]):
    """Statistics gathered from batches, such as a running mean.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> def step(mean, x):
        ...     return mean.set(x.mean())
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=P())
        >>> float(step(sm.BatchState(0.0, reduce="mean"), jnp.arange(16.0)).value)
        7.5

        ```
    """

    __slots__ = ()


def origin(state: State) -> object:
    """The mark that `mark_origin` gave a state; `None` if it has been lost."""
    return getattr(state, "_origin", None)


NEW = object()
"""The mark of a state that continues no other, whatever its path suggests."""


class Unknown:
    """The mark of a state that may continue any of several others.

    **Arguments:**

    - `marks`: the marks of these others, if the program shows which they are; else none.
    """

    __slots__ = ("marks",)

    def __init__(self, marks: tuple[object, ...]) -> None:
        self.marks = marks


def mark_origin(state: State, mark: object) -> State:
    """A copy of `state` that remembers `mark` through `set` and `replace`."""
    new = state._with_value(state.value)
    set_origin(new, mark)
    return new


def states_of(tree: PyTree) -> list[State]:
    """The states of a tree."""
    return [node for node in tree_util.tree_leaves(tree, is_leaf=is_state) if is_state(node)]


def origins(tree: PyTree) -> list[object]:
    """The marks of a tree's states. To be asked before the tree is flattened, which loses them."""
    return list(map(origin, states_of(tree)))


def with_origins(tree: PyTree, marks: Sequence[object]) -> PyTree:
    """`tree` with its states remembering these marks."""
    left = iter(marks)

    def marked(node: PyTree) -> PyTree:
        mark = next(left) if is_state(node) else None
        return node if mark is None else mark_origin(node, mark)

    return jax.tree.map(marked, tree, is_leaf=is_state)


def _immutable_state(kind: str, attribute: str) -> AttributeError:
    return AttributeError(
        f"{kind} is immutable; cannot assign to `{attribute}`. Write `new = state.set(value)`, or "
        f"`new = state.replace({attribute}=...)`, and return the new state."
    )


def unknown_fields(owner: str, unknown: Sequence[str], known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{owner}.replace got {quoted(unknown)}; the fields of {owner} are {quoted(known)}."
    )


def always_replicated(kind: str, spec: object) -> SpecError:
    return SpecError(
        f"{kind} cannot be placed with spec={spec_str(spec)}: every shard holds the same key and draws its "
        "own numbers from it. Leave `spec` out, or use sm.PerShard('axis') for independent keys."
    )
