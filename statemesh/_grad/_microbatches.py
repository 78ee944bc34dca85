"""A loss and its gradients over microbatches, which follow one another as shards stand side by side."""

import dataclasses
from collections.abc import Sequence

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
from .._base._types import NO_AXES, NUMBERS, Array, Axes, Fun, KeyPath, Leaf, PyTree
from .._call._arguments import inside_modules
from .._call._origins import (
    Entered,
    Skeleton,
    find_origins,
    has_same_leaves,
    leaves_of,
    taken_apart,
    values,
)
from .._call._per_shard import all_left, checked_state, filled
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax import _jaxprs as jaxprs
from .._jax._compat import tree_util
from .._jax._dataflow import forwarded
from .._jax._jaxprs import run_varying, traced_outside
from .._state._random import again
from .._state._state import State, mark_origin, origin, origins
from .._state._values import strong
from ._loss import Evaluated, LossFunction, Parts, Scope


_NAMES = (MICROBATCHES,)
_DIFFERS = frozenset(_NAMES)


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
        raise StatemeshError(
            f"value_and_grad: the microbatches of {fun.name} stand inside those of another value_and_grad. "
            "Split the rows once: leave `microbatches` out inside, and give the outer one the product of "
            "both."
        )
    batch, rows = _split_rows(fun, args, count)
    entering = _Entering(fun.fun, model, kwargs, count)
    arguments = {id(x): x for x in tree_util.tree_leaves((model, args, kwargs))}
    params = scope.cast(parts.params)
    results: list[tuple[Skeleton, Skeleton, list[_Continued], Axes]] = []

    def one(params: list[Leaf], own: list[Leaf]) -> tuple[Array, list[Leaf], list[Array]]:
        returned: list[tuple[Skeleton, Skeleton, list[_Continued]]] = []

        def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
            seen, keywords = entering.seen(parts.model.filled(params), own[len(rows) :])
            loss, (aux, new) = fun(seen, batch.filled(own[: len(rows)]), keywords)
            new, continued = entering.continued(fun.name, new)
            kept = arguments | {id(x): old for x, old in zip(params, parts.params, strict=True)}
            aux, aux_arrays = taken_apart(_left(aux), kept)
            new, new_arrays = taken_apart(new, kept)
            returned[:] = [(aux, new, continued)]
            return loss, [*aux_arrays, *new_arrays]

        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
        results[:] = [(*returned[0], crossed() if scope.asks_what_crosses(loss) else NO_AXES)]
        return loss, grads, made

    with scope.casting():
        first = [
            *(x[:, 0] for x in rows),
            *((again(x) if is_key(x) else x)[0] for x in entering.parts),
        ]
        closed = compat.trace_marked(one, [params, first], [IN_MICROBATCHES])
    ((aux, new, continued, crossed),) = results
    program = jaxprs.open_jaxpr(closed)
    facts = all_axes(program, [*[NO_AXES] * len(params), *[_DIFFERS] * len(first)])
    differs = [bool(axes & _DIFFERS) for axes in facts]
    if not scope.reduction.mean and count > 1 and not differs[0]:
        raise StatemeshError(
            f"{_loss(fun.name)} is the same in every microbatch: reduce='sum' would count it once for each. "
            "Compute it from the rows, or write reduce='mean', which leaves such a loss as it is."
        )
    # The program's results are the loss and the gradients, which are summed; auxiliary arrays, which are
    # stacked; and arrays of the model, which are stacked if they differ. Keys are stacked too, because there
    # are no zeros of them for a loop to start with.
    avals = closed.out_avals
    summed = 1 + len(params)
    of_model = summed + len(aux.positions)
    is_key_result = [jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in avals]
    is_stacked = [
        k >= summed and (k < of_model or differs[k] or is_key_result[k]) for k in range(len(avals))
    ]
    known = {
        k: parts.params[i]
        for k, i in enumerate(forwarded(program))
        if k >= of_model and i is not None and i < len(params)
    }
    carried = [k for k, hit in enumerate(is_stacked) if not hit and k not in known]

    def start(k: int) -> Array:
        zeros = compat.vary(explicit.zeros_of(avals[k]), compat.varying_type(avals[k]))
        return widened(zeros) if k < summed else zeros

    def step(carry: list[Array], xs: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        number, others = xs
        # The rows are picked here. As the scan's own operand the whole batch would be copied first, to put
        # the rows of each microbatch side by side.
        picked = [jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False) for x in rows]
        made = jaxprs.run_jaxpr(closed, [*params, *picked, *others])
        after = [
            before + widened(made[k]) if k < summed else strong(made[k])
            for k, before in zip(carried, carry, strict=True)
        ]
        return after, [x for x, hit in zip(made, is_stacked, strict=True) if hit]

    xs = jnp.arange(count), list(entering.parts)
    last, stacks = jax.lax.scan(step, [start(k) for k in carried], xs)
    once = dict(zip(carried, last, strict=True)) | known
    left = iter(stacks)
    made = [next(left) if hit else once[k] for k, hit in enumerate(is_stacked)]
    loss, *grads = [x / count if scope.reduction.mean else x for x in made[:summed]]
    model = _merged(
        fun.name,
        new.filled(
            [
                x[0] if is_stacked[k] and not differs[k] else x
                for k, x in enumerate(made[of_model:], start=of_model)
            ]
        ),
        new.filled(differs[of_model:]),
        continued,
    )
    # Of auxiliary values every array is stacked, also those that all microbatches share.
    shared = [
        jnp.broadcast_to(x, (count, *x.shape)) if isinstance(x, jax.Array | np.ndarray) else x
        for x in aux.leaves
    ]
    result = dataclasses.replace(aux, leaves=shared).filled(made[summed:of_model]), model
    dtypes = [aval.dtype for aval in (*avals[1:summed], avals[0])]
    return Evaluated(loss, grads, result, lambda: crossed, lambda: program, dtypes)


def check_microbatches(count: object) -> None:
    """Refuse what is neither `None` nor a positive int."""
    if count is not None and (type(count) is not int or count < 1):
        raise StatemeshError(
            "value_and_grad: microbatches must be a positive int, or None for all rows at once, but is "
            f"{count!r}."
        )


def _split_rows(
    fun: LossFunction, args: tuple[PyTree, ...], count: int
) -> tuple[Skeleton, list[Array]]:
    """The positional arguments after the model, and their arrays with the leading axis split.

    A microbatch holds every `count`-th row. The number of rows on a shard is a multiple of `count`, so the
    rows of one microbatch on all shards are every `count`-th row of the whole batch, whatever the mesh. Those
    of microbatch `i` are at `[:, i]`.
    """
    leaves, treedef = tree_util.tree_flatten(args)
    positions: list[int] = []
    bare: list[tuple[str, object]] = []
    uneven: list[str] = []
    k = 0
    for root, arg in zip(positional_names(fun.fun, 1 + len(args))[1:], args, strict=True):
        units, _ = tree_util.tree_flatten_with_path(arg, is_leaf=is_state)
        for (keys, unit), inside in zip(units, inside_modules(arg), strict=True):
            for rest, x in tree_util.tree_flatten_with_path(unit)[0]:
                if is_shaped(x) or (type(x) in NUMBERS and not inside):
                    positions.append(k)
                    path, shape = path_str((*keys, *rest), root), np.shape(x)
                    if not shape:
                        bare.append((path, x))
                    elif shape[0] % count:
                        parts = f"{shape[0] // count} x {count} + {shape[0] % count}"
                        uneven.append(f"{path}: {describe(x)}, {shape[0]} = {parts}")
                k += 1
    if bare:
        argument = bare[0][0].split(".")[0].split("[")[0]
        raise error_listing(
            StructureError,
            f"value_and_grad: microbatches={count} splits the leading axis of every array in the positional "
            f"arguments of {fun.name} after the model, but these have none",
            [f"{path}: {describe(x)}" for path, x in bare],
            f"Pass what all microbatches share as a keyword argument: `{argument}=...`.",
        )
    if uneven:
        raise error_listing(
            StructureError,
            f"value_and_grad: microbatches={count} does not divide the leading axis of arguments of "
            f"{fun.name}",
            uneven,
            "Inside a mapped call these are the rows of one shard. Choose a number that divides them; or pad "
            "the rows and leave them out of the loss by a mask.",
        )
    skeleton = Skeleton(leaves, treedef, [None] * len(origins(args)), positions)
    return skeleton, [explicit.rows_apart(jnp.asarray(leaves[i]), count) for i in positions]


@dataclasses.dataclass(frozen=True)
class _Continued:
    """A state in a model that a microbatch returned, or a leaf outside of any.

    **Attributes:**

    - `old`: the state that it continues, as it came in; `None` for one made inside.
    """

    path: str
    old: State | None = None
    is_written: bool = False


class _Entering:
    """The states of the model and of the keyword arguments on their way into a microbatch.

    **Attributes:**

    - `parts`: the arrays that each microbatch has for itself, of all of them along a new first axis. Only
        states that enter a shard as another state have such arrays.
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
        self.entered: list[Entered] = []
        changed = [old for _, _, old in self.olds if _enters_changed(old)]
        kept = {id(x): x for x in tree_util.tree_leaves(changed)}
        skeletons: list[Skeleton] = []

        def enter() -> list[Array]:
            states = [checked_state(old._made(_NAMES), old, "enter") for old in changed]
            skeleton, arrays = taken_apart(states, kept)
            skeletons[:] = [skeleton]
            return arrays

        self.parts = jax.vmap(enter, axis_name=MICROBATCHES, axis_size=count)()
        (self.changed,) = skeletons

    def seen(self, model: PyTree, parts: Sequence[Leaf]) -> tuple[PyTree, dict[str, PyTree]]:
        """The model and the keyword arguments as the function sees them."""
        self.entered = []
        olds, changed = iter(self.olds), iter(self.changed.filled(parts))

        def one(node: PyTree) -> PyTree:
            if not is_state(node):
                return node
            (path, keys, old), mark = next(olds), object()
            new = mark_origin(next(changed) if _enters_changed(old) else node, mark)
            self.entered.append(Entered(mark, path, keys, old, new, (), ()))
            return new

        trees = model, *self.kwargs.values()
        model, *others = [jax.tree.map(one, tree, is_leaf=is_state) for tree in trees]
        return model, dict(zip(self.kwargs, others, strict=True))

    def continued(self, name: str, model: PyTree) -> tuple[PyTree, list[_Continued]]:
        """The model that was returned, with states that were not written as they came in."""
        flat, treedef = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
        returned = [(keys, node) for keys, node in flat if is_state(node)]
        sources = iter(find_origins(name, returned, self.entered, False))
        units: list[PyTree] = []
        continued: list[_Continued] = []
        for keys, node in flat:
            path = path_str(keys, self.root)
            if not is_state(node):
                continued.append(_Continued(path))
            elif (source := next(sources)) is None:
                continued.append(_Continued(path, None, True))
            else:
                is_written = not has_same_leaves(node, source.seen)
                continued.append(_Continued(path, source.old, is_written))
                if not is_written:
                    node = source.old._with_value(source.old.value, node._meta)
            units.append(node)
        # They hold tracers.
        self.entered = []
        return treedef.unflatten(units), continued


def _enters_changed(state: State) -> bool:
    return type(state).enter is not State.enter


def _left(tree: PyTree) -> PyTree:
    """Auxiliary values, with states as they are outside of any microbatch."""

    def one(node: PyTree) -> PyTree:
        return node.leave(None, ()) if is_state(node) and _enters_changed(node) else node

    return jax.tree.map(one, tree, is_leaf=is_state)


@dataclasses.dataclass(frozen=True)
class _Written:
    """A written state, and which of its leaves hold the values of all microbatches along their first axis."""

    state: State
    old: State | None
    path: str
    stacked: list[bool]

    @property
    def over(self) -> list[tuple[str, ...]]:
        """For each leaf of the value whether it is merged. A function sees all leaves, or none."""
        here = self.stacked[: len(values(self.state))]
        if not isinstance(self.state.reduce, str):
            here = [any(here)] * len(here)
        return [_NAMES if hit else () for hit in here]

    @property
    def has_own_way(self) -> bool:
        """Whether its kind merges microbatches in another way than shards."""
        own_way = type(self.state)._of_microbatches is not State._of_microbatches
        return own_way and any(self.over)

    @property
    def has_no_policy(self) -> bool:
        own_way = self.has_own_way or type(self.state).leave is not State.leave
        return any(self.over) and self.state.reduce is None and not own_way


def _merged(name: str, model: PyTree, differs: PyTree, continued: Sequence[_Continued]) -> PyTree:
    """The model that all microbatches together have made.

    **Arguments:**

    - `model`: with the values of all microbatches along the first axis of the leaves that may differ.
    - `differs`: the model with `True` in place of these leaves.
    """
    units, treedef = tree_util.tree_flatten(model, is_leaf=is_state)
    hits = tree_util.tree_leaves(differs, is_leaf=is_state)
    writing: dict[int, _Written] = {}
    states: list[tuple[str, object]] = []
    arrays: list[tuple[str, object]] = []
    for i, (unit, hit, source) in enumerate(zip(units, hits, continued, strict=True)):
        if source.is_written:
            stacked = [x is True for x in leaves_of(hit)]
            writing[i] = written = _Written(unit, source.old, source.path, stacked)
            if written.has_no_policy:
                pairs = zip(leaves_of(unit), stacked, strict=True)
                leaves = [_of_first(x) if is_stacked else x for x, is_stacked in pairs]
                states.append((source.path, filled(unit, leaves)))
        elif hit is True:
            arrays.append((source.path, _of_first(unit)))
    if states or arrays:
        mends = []
        if states:
            mends.append(
                "declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
                "function"
            )
        if arrays:
            mends.append(
                "put an array that is written into a State, which can say how writes are merged"
            )
        mends.append("return the microbatches' own values as auxiliary ones, with `has_aux=True`")
        raise error_listing(
            DivergedStateError,
            f"value_and_grad: the microbatches of {name} wrote different values, but the model keeps one",
            [f"{path}: {describe(value)}" for path, value in (*states, *arrays)],
            listed("Mend it in one of these ways", mends),
        )
    # JAX's collectives, which a function may call, fail over lanes inside a checked `shard_map`. States with
    # such policies are merged by a program that is traced outside of any mapped call.
    checked = compat.inside_checked_shard_map()
    for outside in (False, True):
        group = {
            i: written
            for i, written in writing.items()
            if (checked and callable(written.state.reduce)) is outside
        }
        left = _merged_states(name, list(group.values()), outside) if group else []
        for (i, written), state in zip(group.items(), left, strict=True):
            # Where nothing shows what it continues, the surrounding call is not to take it for known.
            old = None if origin(written.state) is None else written.old
            units[i] = mark_origin(state, None if old is None else origin(old))
    return treedef.unflatten(units)


def _of_first(x: Array) -> jax.ShapeDtypeStruct:
    """What one microbatch has of an array of all microbatches, for messages."""
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _merged_states(name: str, writing: Sequence[_Written], outside: bool) -> list[State]:
    """Written states merged where they stand, or `outside`, by a program that is traced there."""
    before, arrays = taken_apart([(written.state, written.old) for written in writing])
    stacked = [
        hit
        for written in writing
        for hit in (*written.stacked, *[False] * len(tree_util.tree_leaves(written.old)))
    ]
    axes = tuple(0 if stacked[i] else None for i in before.positions)
    after: list[Skeleton] = []

    def merge(*arrays: Array) -> list[Array]:
        states: list[State] = []
        bad: list[str] = []
        for written, (state, old) in zip(writing, before.filled(arrays), strict=True):
            if written.has_own_way:
                state = state._of_microbatches(old, _NAMES)
            else:
                (state,) = all_left([(state, old)], [written.over])
            states.append(state)
            leaves = [x for x in leaves_of(state) if isinstance(x, jax.Array)]
            # Without stacks no axis of microbatches is bound, and nothing differs.
            if 0 in axes and any(varying_over(leaves, _NAMES)):
                bad.append(f"{written.path}: merged by {errors.policy_name(written.state)}")
        if bad:
            raise error_listing(
                DivergedStateError,
                f"value_and_grad: policies that merge what the microbatches of {name} wrote gave values that "
                "still differ between these",
                bad,
                "A policy must return one value for all instances, as with jax.lax.psum(value, axis_names).",
            )
        skeleton, made = taken_apart(states)
        after[:] = [skeleton]
        return made

    run = merge
    if 0 in axes:
        run = jax.vmap(merge, in_axes=axes, out_axes=None, axis_name=MICROBATCHES)
    made = run_varying(traced_outside(run, *arrays), arrays) if outside else run(*arrays)
    return after[0].filled(made)
