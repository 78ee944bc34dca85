"""A loss and its gradients over microbatches, which follow one another as shards stand side by side."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import inside_modules
from .._axes._dataflow import forwarded
from .._axes._differing import all_axes
from .._axes._mesh_and_lanes import IN_MICROBATCHES, MICROBATCHES, inside_microbatches
from .._axes._wide import widened
from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._arrays import is_shaped
from .._base._compat import ClosedJaxpr, tree_util
from .._base._nodes import is_state
from .._base._paths import path_str, positional_names
from .._base._types import NO_AXES, NUMBERS, Array, Axes, Fun, Leaf, PyTree
from .._model._values import strong
from ._loss import Evaluated, LossFunction, Result
from ._merging import merged
from ._microbatch_states import Continued, Entering
from ._scope import Scope
from ._trainable import Parts


_DIFFERS = frozenset([MICROBATCHES])


def check_microbatches(count: object) -> None:
    """Refuse what is neither `None` nor a positive int."""
    if count is not None and (type(count) is not int or count < 1):
        raise errors.bad_microbatches(count)


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
        raise errors.microbatches_in_microbatches(fun.name)
    rows = _Rows(fun.fun, fun.name, args, count)
    entering = Entering(fun.fun, model, kwargs, count)
    given = {id(x): x for x in tree_util.tree_leaves((model, args, kwargs))}
    params = scope.cast(parts.params)
    results: list[tuple[Result, Result, Continued, Axes]] = []

    def one(params: list[Leaf], own: list[Leaf]) -> tuple[Array, list[Leaf], list[Array]]:
        found: list[tuple[Result, Result, Continued]] = []

        def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
            split = len(rows.parts)
            seen, keywords = entering.seen(parts.model(params), own[split:])
            loss, (aux, new) = fun(seen, rows.filled(own[:split]), keywords)
            new, continued = entering.continued(fun.name, new)
            same = given | {id(x): old for x, old in zip(params, parts.params, strict=True)}
            both = Result(entering.left(aux), same), Result(new, same)
            found[:] = [(*both, continued)]
            return loss, [*both[0].take(), *both[1].take()]

        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
        results[:] = [(*found[0], crossed() if scope.asks_what_crosses(loss) else NO_AXES)]
        return loss, grads, made

    with scope.casting():
        first = [*(x[:, 0] for x in rows.parts), *(x[0] for x in entering.parts)]
        closed = compat.trace_marked(one, [params, first], [IN_MICROBATCHES])
    ((aux, new, continued, crossed),) = results
    program = jaxprs.open_jaxpr(closed)
    facts = all_axes(program, [*[NO_AXES] * len(params), *[_DIFFERS] * len(first)])
    differs = [bool(axes & _DIFFERS) for axes in facts]
    if not scope.reduction.mean and count > 1 and not differs[0]:
        raise errors.microbatches_share_loss(fun.name)
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


def _all_stacked(aux: Result, count: int, made: Sequence[Array]) -> PyTree:
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
            raise errors.no_rows_to_split(name, count, bare)
        if uneven:
            raise errors.rows_not_divisible(name, count, uneven)
        self.parts = [explicit.rows_apart(jnp.asarray(self.leaves[i]), count) for i in self.at]

    def filled(self, parts: Sequence[Leaf]) -> tuple[PyTree, ...]:
        """The arguments of one microbatch."""
        leaves = list(self.leaves)
        for i, x in zip(self.at, parts, strict=True):
            leaves[i] = x
        args: tuple[PyTree, ...] = self.treedef.unflatten(leaves)
        return args


def _in_modules(tree: PyTree) -> list[bool]:
    """For each leaf whether it stands in a Module."""
    units = tree_util.tree_leaves(tree, is_leaf=is_state)
    sizes = [len(tree_util.tree_leaves(unit)) for unit in units]
    return [hit for hit, size in zip(inside_modules(tree), sizes, strict=True) for _ in range(size)]
