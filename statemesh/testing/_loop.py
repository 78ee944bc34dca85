"""`loop`: what a mapped call means, as a plain loop. It knows nothing of the engine, nor of `emulate`."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from . import _errors as errors
from ._part import Part, Place, place_str


tree_util: Any = jax.tree_util  # Of its `PyTreeDef` the stubs know nothing.


def loop(fun: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Run a function without collectives for one shard after the other, in plain Python.

    Nothing is traced: `print` shows numbers and a debugger stops at them. It is slow, and needs neither
    devices nor anything that it is compared with.

    **Arguments:**

    - `fun`: what one shard does. It gets JAX arrays, as on devices.
    - `mesh`: the sizes of the axes, `{name: size}`, or a mesh that has them.
    - `in_specs`, `out_specs`: as for `shard_map`.

    **Returns:** a function of the same arguments, NumPy or JAX arrays, that returns what `shard_map` would,
    in NumPy arrays.

    **Raises:** `StatemeshError` for results that differ although their spec keeps one copy of them, for sizes
    that a spec does not divide, and for what a loop cannot do: a collective, a `reduce` that is a function,
    a kind with an `enter` or `leave` of its own (a `RandomState` is one).

    A State enters and leaves by its own `spec`, or whole. Where it is whole along an axis, its `reduce`
    merges what the shards return: `'sum'` adds the increments of all, be they the same by necessity or not.
    Axis names are not bound, so that in layers of statemesh each shard would pass for the only one: give the
    loop functions that name none.

    !!! example

        ```python
        >>> import numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import loop
        >>> def step(total, x):
        ...     return x - x.mean(), total.set(total.value + x.sum())
        >>> looped = loop(step, {"data": 4}, (None, P("data")), (P("data"), P()))
        >>> out, total = looped(sm.State(10.0, reduce="sum"), np.arange(8.0))
        >>> out.tolist(), float(total.value)
        ([-0.5, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5], 38.0)

        ```
    """
    sizes = dict(getattr(mesh, "shape", mesh))
    name = getattr(fun, "__name__", type(fun).__name__)

    def looped(*args: Any, **kwargs: Any) -> Any:
        per_argument = in_specs if type(in_specs) is tuple else (in_specs,) * len(args)
        if len(per_argument) != len(args):
            raise errors.loop_arity(name, len(per_argument), len(args))
        given = (args, kwargs)
        flat, treedef = tree_util.tree_flatten_with_path(given, is_leaf=sm.is_state)
        specs = _for_leaves((per_argument, None), given)
        leaves = [leaf for _, leaf in flat]
        paths = [_argument_path(path) for path, _ in flat]
        results: list[tuple[Place, Any]] = []
        for place in _places(sizes):
            mine = [
                _entering(name, path, leaf, spec, sizes, place, number)
                for number, (path, leaf, spec) in enumerate(zip(paths, leaves, specs, strict=True))
            ]
            own_args, own_kwargs = treedef.unflatten(mine)
            try:
                results.append((place, fun(*own_args, **own_kwargs)))
            except NameError as error:
                if "unbound axis name" not in str(error):
                    raise
                raise errors.loop_collective(name, error) from error
        return _joined(name, results, out_specs, sizes, leaves)

    return looped


def _places(sizes: Mapping[Hashable, int]) -> Iterator[Place]:
    for at in itertools.product(*map(range, sizes.values())):
        yield dict(zip(sizes, at, strict=True))


def _entering(
    name: str,
    path: str,
    leaf: Any,
    spec: Any,
    sizes: Mapping[Hashable, int],
    place: Place,
    number: int,
) -> Any:
    """One argument's leaf as one shard gets it."""
    if not sm.is_state(leaf):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        whole: Any = leaf
        return jnp.asarray(whole[Part(name, path, whole.shape, spec, sizes).at(place)])
    if callable(leaf.reduce) or type(leaf).enter is not sm.State.enter or _own_leave(leaf):
        raise errors.loop_state(name, path, leaf)
    values, treedef = tree_util.tree_flatten(leaf.value)
    parts = [
        x[Part(name, path, x.shape, own, sizes).at(place)]
        for x, own in zip(values, _for_leaves(leaf.spec, leaf.value), strict=True)
    ]
    # By this tag it is known again when it comes back.
    return leaf.replace(value=treedef.unflatten(parts), tag={*leaf.tag, _mark(number)})


def _joined(
    name: str,
    results: list[tuple[Place, Any]],
    out_specs: Any,
    sizes: Mapping[Hashable, int],
    given: list[Any],
) -> Any:
    """The result of all shards, of what each of them returned."""
    first = results[0][1]
    flat, treedef = tree_util.tree_flatten_with_path(first, is_leaf=sm.is_state)
    columns = [jax.tree.leaves(result, is_leaf=sm.is_state) for _, result in results]
    joined: list[Any] = []
    found: list[errors.Unequal] = []
    specs = _for_leaves(out_specs, first)
    for k, ((keys, leaf), spec) in enumerate(zip(flat, specs, strict=True)):
        path = f"{name}(...){jax.tree_util.keystr(keys)}"
        column = [(place, column[k]) for (place, _), column in zip(results, columns, strict=True)]
        if sm.is_state(leaf):
            joined.append(_state_joined(name, path, leaf, column, sizes, given, found))
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
            parts = [(place, np.asarray(x)) for place, x in column]
            joined.append(_array_joined(name, path, parts, spec, sizes, None, None, found))
        else:
            joined.append(leaf)
    if found:
        raise errors.unequal(name, found)
    return treedef.unflatten(joined)


def _state_joined(
    name: str,
    path: str,
    state: Any,
    column: list[tuple[Place, Any]],
    sizes: Mapping[Hashable, int],
    given: list[Any],
    found: list[errors.Unequal],
) -> Any:
    if callable(state.reduce) or _own_leave(state):
        raise errors.loop_state(name, path, state)
    origin = [number for number in range(len(given)) if _mark(number) in state.tag]
    values, treedef = tree_util.tree_flatten(state.value)
    olds = jax.tree.leaves(given[origin[0]].value) if origin else [0] * len(values)
    specs = _for_leaves(state.spec, state.value)
    joined: list[Any] = []
    for k, (spec, old) in enumerate(zip(specs, olds, strict=True)):
        parts = [(place, np.asarray(jax.tree.leaves(one.value)[k])) for place, one in column]
        joined.append(
            _array_joined(name, path, parts, spec, sizes, state.reduce, np.asarray(old), found)
        )
    tag = {one for one in state.tag if one not in map(_mark, origin)}
    return state.replace(value=treedef.unflatten(joined), tag=tag)


def _array_joined(
    name: str,
    path: str,
    parts: list[tuple[Place, Any]],
    spec: Any,
    sizes: Mapping[Hashable, int],
    reduce: str | None,
    old: Any,
    found: list[errors.Unequal],
) -> Any:
    """One array, of the parts that the shards have; merged by `reduce` where one copy is kept."""
    part = parts[0][1]
    whole = Part(name, path, part.shape, spec, sizes, of_whole=False)
    groups: dict[tuple[tuple[Hashable, int], ...], list[tuple[Place, Any]]] = {}
    for place, x in parts:
        key = tuple((axis, at) for axis, at in place.items() if axis in whole.names)
        groups.setdefault(key, []).append((place, x))
    joined = np.empty(whole.shape, part.dtype)
    apart: list[errors.Unequal] = []
    left = [axis for axis in sizes if axis not in whole.names]
    for group in groups.values():
        at = whole.at(group[0][0])
        if reduce is None:
            apart += _differences(path, spec, group, left)
            joined[at] = group[0][1]
        else:
            before = old[at] if np.ndim(old) else old
            joined[at] = _merged(reduce, np.stack([x for _, x in group]), before)
    if apart:
        found.append(max(apart, key=lambda one: one.amount))
    return joined


def _merged(reduce: str, new: Any, old: Any) -> Any:
    # NumPy does not count bfloat16 among its floats.
    wide = new.astype(np.float64) if jnp.issubdtype(new.dtype, jnp.floating) else new
    match reduce:
        case "mean":
            return wide.mean(0)
        case "max":
            return new.max(0)
        case "min":
            return new.min(0)
        case _:
            return old + (wide - old).sum(0)


def _differences(
    path: str, spec: Any, group: list[tuple[Place, Any]], left: list[Hashable]
) -> list[errors.Unequal]:
    """What the first shard and others differ by, where they do."""
    place, first = group[0]
    found: list[errors.Unequal] = []
    for other, x in group[1:]:
        same = (x == first) | ((x != x) & (first != first))
        if np.all(same):
            continue
        apart = np.where(same, 0, np.abs(x.astype(np.float64) - first.astype(np.float64)))
        apart = np.where(np.isnan(apart), np.inf, apart)
        index = np.unravel_index(int(np.argmax(apart)), x.shape)
        found.append(
            errors.Unequal(
                path=path,
                what=f"{x.dtype}[{','.join(map(str, x.shape))}]",
                spec=PartitionSpec() if spec is None else spec,
                axis_names=tuple(left),
                amount=float(apart.max()),
                index=tuple(map(int, index)),
                shards=(place_str(place), place_str(other)),
            )
        )
    return found


def _for_leaves(specs: Any, tree: Any) -> list[Any]:
    """A prefix tree of specs, one for each leaf of `tree`, a State counting as one."""
    found: list[Any] = []

    def one(spec: Any, part: Any) -> None:
        found.extend([spec] * len(jax.tree.leaves(part, is_leaf=sm.is_state)))

    jax.tree.map(one, specs, tree, is_leaf=_is_spec)
    return found


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | sm.PerShard)


def _own_leave(state: Any) -> bool:
    return type(state).leave is not sm.State.leave


def _mark(number: int) -> str:
    return f"<argument {number}>"


def _argument_path(path: Any) -> str:
    (positional, *rest) = path
    return ("args" if positional.idx == 0 else "kwargs") + jax.tree_util.keystr(tuple(rest))
