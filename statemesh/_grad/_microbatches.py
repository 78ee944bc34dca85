"""A loss and its gradients over microbatches, which follow one another as shards stand side by side."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._differing import all_axes
from .._axes._joined import widened
from .._axes._mesh_and_lanes import IN_MICROBATCHES, MICROBATCHES, inside_microbatches, varying_over
from .._base import _errors as errors
from .._base._checks import is_key, is_shaped
from .._base._errors import (
    DivergedStateError,
    StatemeshError,
    StructureError,
    _loss,
    error_listing,
    listed,
)
from .._base._trees import describe, is_state, path_str, positional_names
from .._base._types import NO_AXES, NUMBERS, Array, Axes, Fun, KeyPath, Leaf, PyTree, PyTreeDef
from .._call._arguments import inside_modules
from .._call._origins import Entered, find_origins, has_same_leaves, leaves_of, values
from .._call._per_shard import all_left, checked_state, filled
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax import _jaxprs as jaxprs
from .._jax._compat import ClosedJaxpr, tree_util
from .._jax._dataflow import forwarded
from .._jax._jaxprs import run_varying, traced_outside
from .._state._random import again
from .._state._state import State, mark_origin, origin
from .._state._values import strong
from ._loss import (
    Evaluated,
    LossFunction,
    Parts,
    Returned,
    Scope,
)


_NAMES = (MICROBATCHES,)


@dataclasses.dataclass(frozen=True)
class _Own:
    """A state as a microbatch sees it, where its kind says that it enters as another one.

    **Attributes:**

    - `leaves`: its leaves, without those that each microbatch has for itself.
    - `at`: where these stand among its leaves, and among all such arrays.
    """

    leaves: list[Leaf]
    treedef: PyTreeDef
    at: dict[int, int]

    def of(self, parts: Sequence[Leaf]) -> State:
        leaves = [parts[self.at[i]] if i in self.at else x for i, x in enumerate(self.leaves)]
        return self.treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Continued:
    """What is known of the states in a model that a microbatch returned.

    **Attributes:**

    - `written`: for each state whether it was written.
    - `olds`: for each state the one that it continues, as it came in; `None` for one made inside.
    - `paths`: of the states and of the leaves outside of them.
    """

    written: list[bool]
    olds: list[State | None]
    paths: list[str]


class Entering:
    """The states of the model and of the keyword arguments on their way into a microbatch.

    **Attributes:**

    - `parts`: the arrays that each microbatch has for itself, of all of them along a new first axis.
    """

    def __init__(self, fun: Fun, model: PyTree, kwargs: dict[str, PyTree], count: int) -> None:
        self.root = positional_names(fun, 1)[0]
        self.kwargs = kwargs
        self.olds: list[tuple[str, KeyPath, State]] = [
            (path_str(keys, name), keys, node)
            for name, tree in [(self.root, model), *kwargs.items()]
            for keys, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
            if is_state(node)
        ]
        self.parts: list[Array] = []
        self.own = [self._entered(state, count) for _, _, state in self.olds]
        self.entered: list[Entered] = []

    def _entered(self, old: State, count: int) -> _Own | None:
        if type(old).enter is State.enter:
            return None
        shared = set(map(id, leaves_of(old)))
        found: list[_Own] = []

        def enter() -> list[Array]:
            state = checked_state(old._made(_NAMES), old, "enter")
            leaves, treedef = tree_util.tree_flatten(state)
            new = [
                i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and id(x) not in shared
            ]
            own = [leaves[i] for i in new]
            for i in new:
                leaves[i] = None
            at = {i: len(self.parts) + k for k, i in enumerate(new)}
            found[:] = [_Own(leaves, treedef, at)]
            return own

        run = jax.vmap(enter, axis_name=MICROBATCHES, axis_size=count)
        self.parts += run()
        return found[0]

    def seen(self, model: PyTree, parts: Sequence[Leaf]) -> tuple[PyTree, dict[str, PyTree]]:
        """The model and the keyword arguments as the function sees them."""
        entered: list[Entered] = []

        def one(node: PyTree) -> PyTree:
            if not is_state(node):
                return node
            path, keys, old = self.olds[len(entered)]
            own, mark = self.own[len(entered)], object()
            new = mark_origin(node if own is None else own.of(parts), mark)
            entered.append(Entered(mark, path, keys, old, new, (), ()))
            return new

        both = [
            jax.tree.map(one, tree, is_leaf=is_state) for tree in (model, *self.kwargs.values())
        ]
        self.entered = entered
        return both[0], dict(zip(self.kwargs, both[1:], strict=True))

    def continued(self, name: str, model: PyTree) -> tuple[PyTree, Continued]:
        """The model that was returned, with states that were not written as they came in."""
        flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        returned = [(keys, node) for keys, node in flat if is_state(node)]
        sources = iter(find_origins(name, returned, self.entered, False))
        units: list[PyTree] = []
        found = Continued([], [], [])
        for keys, node in flat:
            found.paths.append(path_str(keys, self.root))
            if is_state(node):
                source = next(sources)
                written = source is None or not has_same_leaves(node, source.seen)
                found.written.append(written)
                found.olds.append(None if source is None else source.old)
                if source is not None and not written:
                    node = source.old._with_value(source.old.value, node._meta)
            units.append(node)
        # They hold tracers.
        self.entered = []
        return treedef.unflatten(units), found

    def left(self, tree: PyTree) -> PyTree:
        """Auxiliary values, with states as they are outside of any microbatch."""

        def one(node: PyTree) -> PyTree:
            own_way = is_state(node) and type(node).enter is not State.enter
            return node.leave(None, ()) if own_way else node

        return jax.tree.map(one, tree, is_leaf=is_state)


_MERGED_NAMES = (MICROBATCHES,)
# It stands for an array among the leaves of a state.
_ARRAY = object()


@dataclasses.dataclass(frozen=True)
class _Written:
    """A written state, and which of its leaves hold the values of all microbatches along their first axis."""

    state: State
    old: State | None
    path: str
    stacked: list[bool]

    @property
    def leaves(self) -> list[tuple[Leaf, bool]]:
        """The state's leaves, each with whether it holds the values of all microbatches."""
        return list(zip(leaves_of(self.state), self.stacked, strict=True))

    @property
    def shared(self) -> list[Array]:
        """The arrays that all microbatches share: of the state, then of the one that it continues."""
        old = [] if self.old is None else leaves_of(self.old)
        mine = [x for x, hit in self.leaves if not hit]
        return [x for x in (*mine, *old) if isinstance(x, jax.Array)]

    def rebuilt(
        self, stacks: Iterator[Array], shared: Iterator[Array]
    ) -> tuple[State, State | None]:
        """The state of one microbatch and the one that it continues, of other arrays in the same order."""
        leaves = [
            next(stacks) if hit else next(shared) if isinstance(x, jax.Array) else x
            for x, hit in self.leaves
        ]
        state, old = filled(self.state, leaves), self.old
        if (mark := origin(self.state)) is not None:
            state = mark_origin(state, mark)
        if old is not None:
            own = [next(shared) if isinstance(x, jax.Array) else x for x in leaves_of(old)]
            old = filled(old, own)
        return state, old

    @property
    def over(self) -> list[tuple[str, ...]]:
        """For each leaf of the value whether it is merged. A function sees all leaves, or none."""
        here = self.stacked[: len(values(self.state))]
        if not isinstance(self.state.reduce, str):
            here = [any(here)] * len(here)
        return [_MERGED_NAMES if hit else () for hit in here]

    @property
    def has_own_way(self) -> bool:
        """Whether its kind merges microbatches in another way than shards."""
        own_way = type(self.state)._of_microbatches is not State._of_microbatches
        return own_way and any(self.over)

    @property
    def has_no_policy(self) -> bool:
        own_way = self.has_own_way or type(self.state).leave is not State.leave
        return any(self.over) and self.state.reduce is None and not own_way


def merged(name: str, model: PyTree, differs: PyTree, continued: Continued) -> PyTree:
    """The model that all microbatches together have made.

    **Arguments:**

    - `model`: with the values of all microbatches along the first axis of the leaves that may differ.
    - `differs`: the model with `True` in place of these leaves.
    """
    units, treedef = tree_util.tree_flatten(model, is_leaf=is_state)
    hits = tree_util.tree_leaves(differs, is_leaf=is_state)
    known = iter(zip(continued.written, continued.olds, strict=True))
    writing: list[tuple[int, _Written]] = []
    arrays: list[tuple[str, object]] = []
    for i, (unit, hit, path) in enumerate(zip(units, hits, continued.paths, strict=True)):
        if is_state(unit):
            written, old = next(known)
            if written:
                stacked = [x is True for x in leaves_of(hit)]
                writing.append((i, _Written(unit, old, path, stacked)))
        elif hit is True:
            arrays.append((path, jax.ShapeDtypeStruct(unit.shape[1:], unit.dtype)))
    bad = [(one.path, _one_of(one)) for _, one in writing if one.has_no_policy]
    if bad or arrays:
        raise _microbatches_diverged(name, bad, arrays)
    states = _merged_states(name, [one for _, one in writing])
    for (i, one), state in zip(writing, states, strict=True):
        # Where nothing shows what it continues, the surrounding call is not to take it for known.
        mark = origin(one.old) if one.old is not None and origin(one.state) is not None else None
        units[i] = state if mark is None else mark_origin(state, mark)
    return treedef.unflatten(units)


def _merged_states(name: str, writing: Sequence[_Written]) -> list[State]:
    # JAX's collectives, which a function may call, fail over lanes inside a checked `shard_map`.
    checked = compat.inside_checked_shard_map()
    outside = [checked and callable(one.state.reduce) for one in writing]
    done = {
        hit: iter(
            _merged_alike(
                name, [one for one, own in zip(writing, outside, strict=True) if own is hit], hit
            )
        )
        for hit in (False, True)
    }
    return [next(done[hit]) for hit in outside]


def _merged_alike(name: str, writing: Sequence[_Written], outside: bool) -> list[State]:
    """States merged as they stand, or by a program that is traced outside of any mapped call."""
    stacks = [x for one in writing for x, hit in one.leaves if hit]
    shared = [x for one in writing for x in one.shared]
    # The structures of the merged states, and their leaves, with `_ARRAY` in place of each array.
    found: list[tuple[PyTreeDef, list[Leaf]]] = []

    def merge(stacks: list[Array], shared: list[Array]) -> list[Array]:
        mine, others = iter(stacks), iter(shared)
        found.clear()
        bad: list[tuple[str, str]] = []
        made: list[Array] = []
        for one in writing:
            state, old = one.rebuilt(mine, others)
            if one.has_own_way:
                state = state._of_microbatches(old, _MERGED_NAMES)
            else:
                (state,) = all_left([(state, old)], [one.over])
            leaves = leaves_of(state)
            own = [x for x in leaves if isinstance(x, jax.Array)]
            # Without stacks no axis of microbatches is bound, and nothing differs.
            if stacks and any(varying_over(own, _MERGED_NAMES)):
                bad.append((one.path, errors.policy_name(one.state)))
            made += own
            rest = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
            found.append((tree_util.tree_structure(state), rest))
        if bad:
            raise _microbatch_policies_diverged(name, bad)
        return made

    if not writing:
        return []
    run = merge
    if stacks:
        run = jax.vmap(merge, in_axes=(0, None), out_axes=None, axis_name=MICROBATCHES)
    if outside:
        program = traced_outside(run, stacks, shared)
        arrays = iter(run_varying(program, [*stacks, *shared]))
    else:
        arrays = iter(run(stacks, shared))
    return [
        treedef.unflatten([next(arrays) if x is _ARRAY else x for x in leaves])
        for treedef, leaves in found
    ]


def _one_of(one: _Written) -> State:
    """The state of one microbatch, for messages."""
    leaves = [
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if hit else x
        for x, hit in zip(leaves_of(one.state), one.stacked, strict=True)
    ]
    return filled(one.state, leaves)


_DIFFERS = frozenset([MICROBATCHES])


def check_microbatches(count: object) -> None:
    """Refuse what is neither `None` nor a positive int."""
    if count is not None and (type(count) is not int or count < 1):
        raise _bad_microbatches(count)


def in_microbatches(
    fun: LossFunction,
    scope: Scope,
    parts: Parts,
    model: PyTree,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    count: int,
) -> Evaluated:
    """Evaluate the function on one microbatch after the other.

    One microbatch is traced. Its program shows which results come of its rows or of its number, and may
    differ from one microbatch to the next: these are stacked. The others are kept once. The loss and the
    gradients are summed up.
    """
    if inside_microbatches():
        raise _microbatches_in_microbatches(fun.name)
    rows = _Rows(fun.fun, fun.name, args, count)
    entering = Entering(fun.fun, model, kwargs, count)
    given = {id(x): x for x in tree_util.tree_leaves((model, args, kwargs))}
    params = scope.cast(parts.params)
    results: list[tuple[Returned, Returned, Continued, Axes]] = []

    def one(params: list[Leaf], own: list[Leaf]) -> tuple[Array, list[Leaf], list[Array]]:
        found: list[tuple[Returned, Returned, Continued]] = []

        def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
            split = len(rows.parts)
            seen, keywords = entering.seen(parts.model(params), own[split:])
            loss, (aux, new) = fun(seen, rows.filled(own[:split]), keywords)
            new, continued = entering.continued(fun.name, new)
            same = given | {id(x): old for x, old in zip(params, parts.params, strict=True)}
            both = Returned(entering.left(aux), same), Returned(new, same)
            found[:] = [(*both, continued)]
            return loss, [*both[0].take(), *both[1].take()]

        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
        results[:] = [(*found[0], crossed() if scope.asks_what_crosses(loss) else NO_AXES)]
        return loss, grads, made

    with scope.casting():
        first = [
            *(x[:, 0] for x in rows.parts),
            *((again(x) if is_key(x) else x)[0] for x in entering.parts),
        ]
        closed = compat.trace_marked(one, [params, first], [IN_MICROBATCHES])
    ((aux, new, continued, crossed),) = results
    program = jaxprs.open_jaxpr(closed)
    facts = all_axes(program, [*[NO_AXES] * len(params), *[_DIFFERS] * len(first)])
    differs = [bool(axes & _DIFFERS) for axes in facts]
    if not scope.reduction.mean and count > 1 and not differs[0]:
        raise _microbatches_share_loss(fun.name)
    # In the order of the program's results: the loss and the gradients, auxiliary arrays, those of the model.
    summed = 1 + len(params)
    own = summed + len(aux.new)
    sources = forwarded(program)
    known = {
        k: parts.params[i]
        for k, i in enumerate(sources)
        if k >= own and i is not None and i < len(params)
    }
    is_stacked = [
        k >= summed and (k < own or differs[k] or _is_key(aval))
        for k, aval in enumerate(closed.out_avals)
    ]
    values = _run(closed, params, rows.parts, entering.parts, count, summed, is_stacked, known)
    if scope.reduction.mean:
        values[:summed] = [x / count for x in values[:summed]]
    values[own:] = [
        x[0] if is_stacked[k] and not differs[k] else x
        for k, x in enumerate(values[own:], start=own)
    ]
    model = merged(fun.name, new.filled(values[own:]), new.filled(differs[own:]), continued)
    dtypes = [aval.dtype for aval in closed.out_avals[:summed]]
    loss, *grads = values[:summed]
    result = _all_stacked(aux, count, values[summed:own]), model
    return Evaluated(loss, grads, result, lambda: crossed, lambda: program, dtypes)


def _run(
    closed: ClosedJaxpr,
    params: Sequence[Leaf],
    rows: Sequence[Array],
    parts: Sequence[Array],
    count: int,
    summed: int,
    is_stacked: Sequence[bool],
    known: dict[int, Leaf],
) -> list[Leaf]:
    """The results of all microbatches: the first ones as their sums, others stacked or those of the last one.

    **Arguments:**

    - `rows`: arrays of rows, those of microbatch `i` at `[:, i]`.
    - `parts`: other arrays that each microbatch has for itself, along their first axis.
    - `known`: the results, by their numbers, that need not be computed.
    """
    avals = closed.out_avals
    carried = [k for k, hit in enumerate(is_stacked) if not hit and k not in known]

    def start(k: int) -> Array:
        zeros = compat.vary(explicit.zeros_of(avals[k]), compat.varying_type(avals[k]))
        return widened(zeros) if k < summed else zeros

    def step(carry: list[Array], xs: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        number, others = xs
        # The rows are picked here. As the scan's own operand the whole batch would be copied first, to put
        # the rows of each microbatch side by side.
        picked = [jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False) for x in rows]
        results = jaxprs.run_jaxpr(closed, [*params, *picked, *others])
        after = [
            before + widened(results[k]) if k < summed else strong(results[k])
            for k, before in zip(carried, carry, strict=True)
        ]
        return after, [x for x, hit in zip(results, is_stacked, strict=True) if hit]

    xs = jnp.arange(count), list(parts)
    last, stacks = jax.lax.scan(step, [start(k) for k in carried], xs)
    found = dict(zip(carried, last, strict=True)) | known
    left = iter(stacks)
    return [next(left) if hit else found[k] for k, hit in enumerate(is_stacked)]


def _is_key(aval: Leaf) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _all_stacked(aux: Returned, count: int, made: Sequence[Array]) -> PyTree:
    """Auxiliary values with every array stacked, also those that all microbatches share."""
    new = set(aux.new)
    for i, x in enumerate(aux.leaves):
        if i not in new and isinstance(x, jax.Array | np.ndarray):
            aux.leaves[i] = jnp.broadcast_to(x, (count, *x.shape))
    return aux.filled(made)


class _Rows:
    """The positional arguments after the model, with the leading axis of their arrays split.

    A microbatch holds every `count`-th row. The number of rows on a shard is a multiple of `count`, so the
    rows of one microbatch on all shards are every `count`-th row of the whole batch, whatever the mesh.

    **Attributes:**

    - `parts`: the arrays, with the rows of microbatch `i` at `[:, i]`.
    """

    def __init__(self, fun: Fun, name: str, args: tuple[PyTree, ...], count: int) -> None:
        self.leaves, self.treedef = tree_util.tree_flatten(args)
        names = positional_names(fun, 1 + len(args))[1:]
        self.at: list[int] = []
        bare: list[tuple[str, object]] = []
        uneven: list[tuple[str, object, int]] = []
        k = 0
        for root, arg in zip(names, args, strict=True):
            flat, _ = tree_util.tree_flatten_with_path(arg)
            for (keys, x), inside in zip(flat, _in_modules(arg), strict=True):
                if is_shaped(x) or (type(x) in NUMBERS and not inside):
                    path, shape = path_str(keys, root), np.shape(x)
                    self.at.append(k)
                    if not shape:
                        bare.append((path, x))
                    elif shape[0] % count:
                        uneven.append((path, x, shape[0]))
                k += 1
        if bare:
            raise _no_rows_to_split(name, count, bare)
        if uneven:
            raise _rows_not_divisible(name, count, uneven)
        self.parts = [explicit.rows_apart(jnp.asarray(self.leaves[i]), count) for i in self.at]

    def filled(self, parts: Sequence[Leaf]) -> tuple[PyTree, ...]:
        """The arguments of one microbatch."""
        leaves = list(self.leaves)
        for i, x in zip(self.at, parts, strict=True):
            leaves[i] = x
        return self.treedef.unflatten(leaves)


def _in_modules(tree: PyTree) -> list[bool]:
    """For each leaf whether it stands in a Module."""
    units = tree_util.tree_leaves(tree, is_leaf=is_state)
    sizes = [len(tree_util.tree_leaves(unit)) for unit in units]
    return [hit for hit, size in zip(inside_modules(tree), sizes, strict=True) for _ in range(size)]


def _rows_not_divisible(
    name: str, count: int, bad: Sequence[tuple[str, object, int]]
) -> StructureError:
    return error_listing(
        StructureError,
        f"value_and_grad: microbatches={count} does not divide the leading axis of arguments of {name}",
        [
            f"{path}: {describe(x)}, {size} = {size // count} x {count} + {size % count}"
            for path, x, size in bad
        ],
        "Inside a mapped call these are the rows of one shard. Choose a number that divides them; or pad "
        "the rows and leave them out of the loss by a mask.",
    )


def _no_rows_to_split(name: str, count: int, bad: Sequence[tuple[str, object]]) -> StructureError:
    key = bad[0][0]
    return error_listing(
        StructureError,
        f"value_and_grad: microbatches={count} splits the leading axis of every array in the positional "
        f"arguments of {name} after the model, but these have none",
        [f"{path}: {describe(x)}" for path, x in bad],
        f"Pass what all microbatches share as a keyword argument: `{key.split('.')[0].split('[')[0]}=...`.",
    )


def _bad_microbatches(given: object) -> StatemeshError:
    return StatemeshError(
        "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is "
        f"{given!r}."
    )


def _microbatches_in_microbatches(name: str) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: the microbatches of {name} stand inside those of another value_and_grad. Split "
        "the rows once: leave `microbatches` out inside, and give the outer one the product of both."
    )


def _microbatches_diverged(
    name: str, bad: Sequence[tuple[str, object]], arrays: Sequence[tuple[str, object]]
) -> DivergedStateError:
    mends = []
    if bad:
        mends.append(
            "declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
            "function"
        )
    if arrays:
        mends.append(
            "put an array that is written into a State, which can say how writes are merged"
        )
    mends.append("return the microbatches' own values as auxiliary ones, with `has_aux=True`")
    return error_listing(
        DivergedStateError,
        f"value_and_grad: the microbatches of {name} wrote different values, but the model keeps one",
        [f"{path}: {describe(value)}" for path, value in (*bad, *arrays)],
        listed("Mend it in one of these ways", mends),
    )


def _microbatch_policies_diverged(name: str, bad: Sequence[tuple[str, str]]) -> DivergedStateError:
    return error_listing(
        DivergedStateError,
        f"value_and_grad: policies that merge what the microbatches of {name} wrote gave values that still "
        "differ between these",
        [f"{path}: merged by {policy}" for path, policy in bad],
        "A policy must return one value for all instances, as with jax.lax.psum(value, axis_names).",
    )


def _microbatches_share_loss(name: str) -> StatemeshError:
    return StatemeshError(
        f"{_loss(name)} is the same in every microbatch: reduce='sum' would count it once for each. Compute "
        "it from the rows, or write reduce='mean', which leaves such a loss as it is."
    )
