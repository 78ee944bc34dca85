"""The specs that may be to blame, where a function has to be mapped again with others."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

import statemesh as sm

from .. import _errors as errors
from .._program._stacked import as_names, names_of_spec
from .._types import PyTree, tree_util
from ._located import Place


# So many programs are run, and so many are refused, by JAX or by what the user wrote.
_MOST_RUN = 8
_MOST_REFUSED = 32

# Whether all results of a mapped function are right for its arguments; `None` where it cannot be run.
IsRight: TypeAlias = Callable[[sm.StatefulMapping, PyTree], bool | None]


class _Spec(NamedTuple):
    """The spec of an argument, of a part of one, or of a state.

    **Attributes:**

    - `path`: what a user would type.
    - `is_state`: whether a state has it.
    - `spec`: the spec.
    - `shapes`: those of the arrays that have it.
    """

    path: str
    is_state: bool
    spec: PartitionSpec
    shapes: Sequence[tuple[int, ...]]


def of_mapping_again(
    mapped: sm.StatefulMapping, call: PyTree, is_right: IsRight
) -> tuple[list[Place], str | None]:
    """The spec, if all results are right where the function is mapped with another one; and that in words.

    With another spec shards have parts of another shape, so that the program is another one.

    **Arguments:**

    - `call`: the arguments and the keyword arguments.
    """
    found: list[bool | None] = []
    for changed, new in _others(mapped, call):
        found.append(is_right(*_with(mapped, call, changed, new)))
        if found[-1]:
            (path, is_state, spec, _), *_ = changed
            got, want = errors.spec_str(spec), errors.spec_str(new)
            source = f"{'the spec' if is_state else 'in_specs'} of {path}: {got}"
            tried = f"with {want} for {', '.join(x.path for x in changed)}, all results are right"
            return [Place("", 0, source, "the spec", got=got, want=want, shards="")], tried
        if found.count(False) == _MOST_RUN or found.count(None) == _MOST_REFUSED:
            break
    return [], None


def _others(
    mapped: sm.StatefulMapping, call: PyTree
) -> Iterator[tuple[Sequence[_Spec], PartitionSpec]]:
    """Specs that are changed together, and what they become; the likeliest first.

    Arrays with one spec are changed together, then those of one length, and then each by itself.
    """
    sizes = _sizes(mapped)
    known = [*_of_arguments(mapped, call), *_of_states(call)] if sizes else []
    specs = dict.fromkeys(x.spec for x in known)
    tried = set[tuple[Collection[str], PartitionSpec]]()
    for is_single in (False, True):
        for spec in specs:
            alike = [x for x in known if x.spec == spec]
            for d, new in _other_specs(spec, sizes):
                for some in _groups(alike, d, is_single=is_single):
                    if not _is_likely(some, [x for x in known if x not in some], new):
                        continue
                    key = frozenset(x.path for x in some), new
                    if key not in tried:
                        tried.add(key)
                        yield some, new


def _is_likely(some: Sequence[_Spec], others: Sequence[_Spec], new: PartitionSpec) -> bool:
    """Whether the author may have meant another spec. Who splits no batch at all along an axis means that.

    States are split otherwise than a batch.
    """
    before, after = {*names_of_spec(some[0].spec)}, {*names_of_spec(new)}
    if before - after and after - before:
        return True
    kinds = {x.is_state for x in some}
    like = [x for x in others if x.is_state in kinds] if before - after else others
    return before ^ after <= {name for x in like for name in names_of_spec(x.spec)}


def _groups(alike: Sequence[_Spec], d: int, *, is_single: bool) -> Iterator[Sequence[_Spec]]:
    """The specs that are changed together because of what they split: all, or those of one length."""
    if is_single:
        yield from ([x] for x in alike)
        return
    yield alike
    by_lengths: dict[Hashable, list[_Spec]] = {}
    for x in alike:
        lengths = frozenset(shape[d] for shape in x.shapes if d < len(shape))
        by_lengths.setdefault(lengths, []).append(x)
    yield from by_lengths.values()


def _other_specs(
    spec: PartitionSpec, sizes: Mapping[Hashable, int]
) -> Iterator[tuple[int, PartitionSpec]]:
    """Specs with another axis, an axis less or one more, each with the array axis that is split otherwise."""
    names, entries = names_of_spec(spec), [*spec]
    for d, entry in enumerate(entries):
        for name in as_names(entry):
            others = [other for other in sizes if other not in names]
            for other in (*others, None):
                kept = [other if x == name else x for x in as_names(entry) if x != name or other]
                changed: Any = kept[0] if len(kept) == 1 else tuple(kept) or None
                yield d, _spec([*entries[:d], changed, *entries[d + 1 :]])
    if not names:
        yield from ((0, _spec([name, *entries[1:]])) for name in sizes)


def _spec(entries: Sequence[Any]) -> PartitionSpec:
    """A spec without entries at its end that split nothing."""
    count = max((d + 1 for d, entry in enumerate(entries) if entry is not None), default=0)
    return PartitionSpec(*entries[:count])


def _sizes(mapped: sm.StatefulMapping) -> Mapping[Hashable, int]:
    """The sizes of the mesh axes along which there are shards; none for lanes."""
    mesh = mapped.mesh
    return {} if mesh is None else {name: n for name, n in mesh.shape.items() if n > 1}


# What has specs


def _is_spec(x: PyTree) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _of_arguments(mapped: sm.StatefulMapping, call: PyTree) -> Iterator[_Spec]:
    """The specs in `in_specs`."""
    rules: Any = mapped._declared.rules
    args = call[0]
    flat, treedef = tree_util.tree_flatten_with_path(rules.in_specs, is_leaf=_is_spec)
    # One spec may be that of all arguments.
    parts = [args] if not flat[0][0] else treedef.flatten_up_to(args)
    for (path, spec), part in zip(flat, parts, strict=True):
        if isinstance(spec, PartitionSpec):
            arrays = [x for x in jax.tree.leaves(part) if hasattr(x, "shape")]
            shapes = [x.shape for x in arrays]
            yield _Spec("args" + jax.tree_util.keystr(path), False, spec, shapes)


def _of_states(call: PyTree) -> Iterator[_Spec]:
    """The specs of the states among the arguments, also those of parts of their values."""
    for path, state in tree_util.tree_flatten_with_path(call, is_leaf=sm.is_state)[0]:
        specs = state.spec if sm.is_state(state) else None
        flat, treedef = tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)
        parts = [state] if len(flat) == 1 else treedef.flatten_up_to(state.value) if flat else []
        for (inner, spec), part in zip(flat, parts, strict=True):
            if isinstance(spec, PartitionSpec):
                shapes = [x.shape for x in jax.tree.leaves(part)]
                yield _Spec(_typed(path, inner), True, spec, shapes)


def _typed(path: Any, inner: Any = ()) -> str:
    """The path of a state among the arguments, or of a part of its value, as a user would type it."""
    typed = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
    return f"{typed}.value{jax.tree_util.keystr(inner)}" if inner else typed


def _with(
    mapped: sm.StatefulMapping, call: PyTree, changed: Sequence[_Spec], new: PartitionSpec
) -> tuple[sm.StatefulMapping, PyTree]:
    """A mapped function and its arguments, with another spec for some of these."""
    paths = {x.path for x in changed}

    def of_state(path: Any, state: PyTree) -> PyTree:
        if not sm.is_state(state):
            return state

        def of_part(inner: Any, spec: PyTree) -> PyTree:
            return new if _typed(path, inner) in paths else spec

        specs = jax.tree_util.tree_map_with_path(of_part, state.spec, is_leaf=_is_spec)
        return state.replace(spec=specs)

    def of_argument(path: Any, spec: PyTree) -> PyTree:
        return new if "args" + jax.tree_util.keystr(path) in paths else spec

    # No public function maps with other specs what is mapped already.
    declared: Any = mapped._declared
    specs = jax.tree_util.tree_map_with_path(of_argument, declared.rules.in_specs, is_leaf=_is_spec)
    rules = dataclasses.replace(declared.rules, in_specs=specs)
    other = sm.StatefulMapping(dataclasses.replace(declared, rules=rules), None, mapped._bound)
    return other, jax.tree_util.tree_map_with_path(of_state, call, is_leaf=sm.is_state)
