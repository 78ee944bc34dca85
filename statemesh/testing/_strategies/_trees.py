"""Strategies for states, and for module trees that hold states."""

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import statemesh as sm

from .. import _errors as errors
from .._errors import check
from .._types import AnyLeaf, AnyMesh, DType, Fun, PyTree, tree_util
from ._arrays import arrays
from ._meshes import Draw, Shape, check_mesh, specs, split_count


Reduce: TypeAlias = str | Fun | None
KINDS: tuple[type[sm.State], ...] = (
    sm.State,
    sm.ShortTermState,
    sm.HiddenState,
    sm.NonBatchState,
    sm.LongTermState,
    sm.ParamState,
    sm.BatchState,
    sm.RandomState,
)


class Pair(sm.Module):
    """Two parts and a static field, as `modules` draws them."""

    left: PyTree
    right: PyTree
    label: str = sm.field(static=True, default="pair")


class Layer(sm.Module):
    """A list of parts, and a static leaf that is a function, as `modules` draws them."""

    parts: list[PyTree]
    activation: Fun = jnp.tanh


def states(
    *,
    kinds: Sequence[type[sm.State]] | None = None,
    shapes: st.SearchStrategy[Shape] | None = None,
    dtypes: st.SearchStrategy[AnyLeaf] | None = None,
    tags: Sequence[str] = ("a", "b"),
    reduces: Sequence[Reduce] = (None, "sum", "mean", "max", "min"),
    mesh: AnyMesh | None = None,
) -> st.SearchStrategy[sm.State]:
    """States with any metadata, whose values are arrays or small trees of arrays.

    Shrinks to a zero of the first of `kinds`, without metadata.

    **Arguments:**

    - `kinds`: the kinds to draw from, which may be your own subclasses. A subclass of `RandomState` gets a
        key. Left out: all kinds of statemesh.
    - `shapes`: a strategy for the shape of one shard's part of an array. Left out: a few small shapes.
    - `dtypes`: a strategy for the dtypes. Left out: floats, integers, booleans and complex numbers.
    - `tags`: the tags to draw from. A state carries none, one or two.
    - `reduces`: the policies to draw from. Where a policy has no meaning for the dtypes of a state, the state
        has none.
    - `mesh`: the mesh on which states are placed: replicated, by a spec, or by `PerShard`, with arrays of the
        size that this takes. Left out, states have no spec.

    **Returns:** a strategy of `State`s.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> import statemesh as sm
        >>> from statemesh.testing import states
        >>> find(states(kinds=[sm.ParamState, sm.BatchState]), lambda state: state.reduce == "mean")
        ParamState(float32(0.0), reduce='mean')

        ```
    """
    classes = isinstance(kinds, Sequence | None) and all(
        isinstance(kind, type) and issubclass(kind, sm.State) for kind in kinds or ()
    )
    if not classes:
        expected = "several classes of State, as in kinds=[sm.ParamState]"
        raise errors.bad_keyword("states", "kinds", kinds, expected)
    strategy = st.SearchStrategy | None
    check("states", "shapes", shapes, strategy, "a strategy of shapes")
    check("states", "dtypes", dtypes, strategy, "a strategy of dtypes")
    for argument, value, what in (("tags", tags, "tags"), ("reduces", reduces, "policies")):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise errors.bad_keyword("states", argument, value, f"a list of {what}")
    if mesh is not None:
        check_mesh("states", mesh)
    of_shapes = st.sampled_from([(), (2,), (2, 1)]) if shapes is None else shapes
    usual: list[AnyLeaf] = [np.float32, np.int32, np.bool_, jnp.bfloat16, np.complex64]
    of_dtypes = st.sampled_from(usual) if dtypes is None else dtypes

    @st.composite
    def drawn(draw: Draw) -> sm.State:
        kind: Any = draw(st.sampled_from(kinds or KINDS))
        known: dict[str, Any] = {"name": draw(st.sampled_from([None, "n"]))}
        known["tag"] = (
            draw(st.lists(st.sampled_from(tags), unique=True, max_size=2)) if tags else None
        )
        if issubclass(kind, sm.RandomState):
            spec, (count,) = draw(_placed((1,), mesh, True))
            # To Hypothesis fewer choices are simpler. So a key is drawn in as many choices as other states.
            bits = draw(st.tuples(*[st.booleans()] * 8))
            key = jax.random.key(sum(2**n for n, bit in enumerate(bits) if bit))
            key = key if spec is None else jax.random.split(key, count)
            return kind(key, spec=spec, **known)
        template = draw(st.sampled_from([0, {"a": 0, "b": (0, 0)}, [0, None]]))
        leaves, treedef = tree_util.tree_flatten(template)
        values, placements = [], []
        for _ in leaves:
            spec, shape = draw(_placed(draw(of_shapes), mesh, kind.always_replicated))
            values.append(draw(arrays(shape=shape, dtype=of_dtypes)))
            placements.append(spec)
        same = all(spec == placements[0] for spec in placements)
        reduce = draw(st.sampled_from(reduces))
        return kind(
            treedef.unflatten(values),
            spec=placements[0] if same else treedef.unflatten(placements),
            reduce=reduce if all(_has_meaning(reduce, x.dtype) for x in values) else None,
            **known,
        )

    return drawn()


@st.composite
def _placed(draw: Draw, shape: Shape, mesh: AnyMesh | None, replicated: bool) -> tuple[Any, Shape]:
    """A placement, and the shape of an array of which one shard then holds a part of the given shape."""
    ways = ["replicated", "split", "per shard"]
    way = "replicated" if mesh is None else draw(st.sampled_from(ways[::2] if replicated else ways))
    if mesh is None or way == "replicated":
        return None, shape
    if way == "per shard":
        names = draw(st.permutations(mesh.axis_names))[: draw(st.integers(1, len(mesh.axis_names)))]
        count = math.prod(mesh.shape[name] for name in names)
        return sm.PerShard(*names), (count, *(shape[1:] if replicated else shape))
    # A spec that divides this shape can be scaled to any shape of as many axes.
    spec = draw(specs(shape=[math.prod(mesh.shape.values())] * len(shape), mesh=mesh))
    spread = [split_count(entry, spec, mesh) for entry in spec]
    return spec, tuple(n * k for n, k in zip(shape, spread + [1] * len(shape), strict=False))


def _has_meaning(reduce: Reduce, dtype: DType) -> bool:
    """Whether a policy has a meaning for a dtype."""
    allowed = {
        "mean": (np.inexact,),
        "sum": (np.number,),
        "max": (np.integer, np.floating),
        "min": (np.integer, np.floating),
    }.get(reduce if isinstance(reduce, str) else "")
    return allowed is None or any(jnp.issubdtype(dtype, kind) for kind in allowed)


def modules(
    *,
    states: st.SearchStrategy[AnyLeaf] | None = None,
    leaves: st.SearchStrategy[AnyLeaf] | None = None,
    min_states: int = 0,
    max_states: int = 5,
    shared: bool = False,
) -> st.SearchStrategy[sm.Module]:
    """Modules that hold states and other leaves in nested modules, dictionaries, lists and tuples.

    Shrinks to a module that holds `min_states` of the simplest states and nothing else.

    **Arguments:**

    - `states`: a strategy of states. Left out: `states()`.
    - `leaves`: a strategy of the other leaves. Left out: arrays and hashable static leaves (numbers, strings,
        `None`, functions, dtypes).
    - `min_states`, `max_states`: the smallest and the largest number of states that are drawn.
    - `shared`: whether one state or module is in the tree twice, as the very same object. To JAX these are
        two nodes. A mapped call refuses to write a State that is in the tree twice.

    **Returns:** a strategy of `Module`s.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> from statemesh.testing import modules
        >>> find(modules(min_states=2), lambda module: True)
        Pair(left=State(float32(0.0)), right=[State(float32(0.0))])

        ```
    """
    for argument, value in (("states", states), ("leaves", leaves)):
        check("modules", argument, value, st.SearchStrategy | None, f"a strategy of {argument}")
    for argument, number in (("min_states", min_states), ("max_states", max_states)):
        check("modules", argument, number, Integral, "an int, 0 or more")
    if not 0 <= min_states <= max_states:
        raise sm.StatemeshError(
            f"modules: no number of states is from min_states={min_states} to max_states={max_states}. Give "
            "numbers, 0 or more, the smaller one first."
        )
    check("modules", "shared", shared, bool, "True or False")
    of_states = _of_any_kind() if states is None else states

    @st.composite
    def drawn(draw: Draw) -> sm.Module:
        units = draw(st.lists(of_states, min_size=min_states, max_size=max_states))
        if units and len(units) < max_states and draw(st.integers(0, 7)) == 7:
            # A copy that differs from the first only by its path.
            units.append(tree_util.tree_map(lambda x: x, units[0]))
        units += draw(st.lists(_leaves() if leaves is None else leaves, max_size=3))
        parts = draw(st.permutations(units))
        while len(parts) > 4:
            parts = [*parts[3:], _node(draw, parts[:3])]
        # Sometimes one level more, so that paths of different lengths end alike.
        if len(parts) > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, len(parts)))
            parts = [_node(draw, parts[:cut]), *parts[cut:]]
        if shared:
            # The second place of the shared node may be on another level.
            shareable = [
                node for node in _nodes(parts) if sm.is_state(node) or isinstance(node, sm.Module)
            ]
            twice = draw(st.sampled_from(shareable)) if shareable else Layer([])
            parts = [*parts, twice, *([] if shareable else [twice])]
        root: Callable[[list[PyTree]], sm.Module] = draw(st.sampled_from(MODULES))
        return root(parts)

    return drawn()


# In `modules` the name `states` is an argument.
_of_any_kind = states


def _node(draw: Draw, parts: list[PyTree]) -> PyTree:
    form: Any = draw(st.sampled_from([list, tuple, _dictionary, *MODULES]))
    return form(parts)


def _dictionary(parts: list[PyTree]) -> dict[str, PyTree]:
    # Filled backwards: the order of a dictionary is not the order of its leaves.
    return {"abcd"[i]: parts[i] for i in reversed(range(len(parts)))}


def _pair(parts: list[PyTree]) -> Pair:
    return Pair(parts[0] if parts else None, parts[1:])


MODULES: tuple[Callable[[list[PyTree]], sm.Module], ...] = (_pair, Layer)


def _nodes(tree: PyTree) -> list[PyTree]:
    """All nodes of a tree except its root."""
    children = tree_util.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    return [*children, *(node for child in children if child is not tree for node in _nodes(child))]


def _leaves() -> st.SearchStrategy[AnyLeaf]:
    array = arrays(shape=(2,))
    return st.one_of(
        st.sampled_from([None, "relu", 1, 0.5, True, jnp.tanh, np.float32, jnp.float32]),
        array,
        array.map(jnp.asarray),
    )
