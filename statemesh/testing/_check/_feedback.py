"""What one call returns that the next call gets: found by structure, wherever it stands."""

import dataclasses
import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from .. import _errors as errors
from .._caches import is_hashable
from .._program._numbers import has_shape, is_key, is_numeric
from .._program._paths import owners, path_of
from .._types import AnyLeaf, Args, PyTree, tree_util


@dataclasses.dataclass(frozen=True, eq=False)
class Subtree:
    """A node or a leaf of a tree.

    **Attributes:**

    - `keys`: its key path.
    - `node`: the node itself.
    - `form`: what parts of equal structure and equal shapes share.
    - `loose`: what such parts share where a tuple in one may be a list in the other.
    - `leaves`: the numbers of its leaves among those of the whole tree.
    - `arrays`: how many of its leaves are arrays or numbers.
    - `depth`: how many nodes stand on top of each other in it; 0 for a leaf.
    - `in_state`: whether it is a State or holds one.
    - `is_named`: whether it, or a part of it, has keys, fields or a class of its own: it is more than tuples
        and lists of arrays.
    """

    keys: tuple[Any, ...]
    node: PyTree
    form: Hashable
    loose: Hashable
    leaves: range
    arrays: int
    depth: int
    in_state: bool
    is_named: bool

    @property
    def path(self) -> str:
        """The path below the root, as one types it."""
        return str(jax.tree_util.keystr(self.keys))


def parts_of(node: PyTree, keys: tuple[Any, ...] = (), start: int = 0) -> list[Subtree]:
    """All parts of a tree, each before the parts in it. The first is the tree itself.

    **Arguments:**

    - `keys`, `start`: the key path of the tree, and the number of its first leaf.
    """
    kids, structure = tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if kids and tree_util.treedef_is_leaf(structure):
        numeric = is_numeric(node)
        form = ("leaf", np.shape(node), is_key(node)) if numeric else "static"
        number = range(start, start + 1)
        return [Subtree(keys, node, form, form, number, int(numeric), 0, False, False)]
    inner: list[Subtree] = []
    heads: list[Subtree] = []
    for key, kid in kids:
        parts = parts_of(kid, (*keys, *key), heads[-1].leaves.stop if heads else start)
        heads.append(parts[0])
        inner += parts
    # Static metadata without a hash, such as a list, is known by its text.
    known = structure if is_hashable(structure) else repr(structure)
    whole = Subtree(
        keys,
        node,
        (known, *(head.form for head in heads)),
        (known if type(node) not in (tuple, list) else "", *(head.loose for head in heads)),
        range(start, heads[-1].leaves.stop if heads else start),
        sum(head.arrays for head in heads),
        1 + max((head.depth for head in heads), default=0),
        sm.is_state(node) or isinstance(node, sm.Packed) or any(head.in_state for head in heads),
        type(node) not in (tuple, list, type(None)) or any(head.is_named for head in heads),
    )
    return [whole, *inner]


def kind_of(x: AnyLeaf) -> str:
    """The kind of a leaf: `key`, `float`, `complex`, `integer`, a dtype; `static` if it is no array."""
    if not is_numeric(x):
        return "static"
    if is_key(x):
        return "key"
    dtype = x.dtype if has_shape(x) else np.result_type(type(x))
    kinds = {"float": jnp.floating, "complex": jnp.complexfloating, "integer": jnp.integer}
    names = [name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)]
    return names[0] if names else str(dtype)


def inner_names(keys: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The ends of a key path that hold a name, the longest first."""
    for start in range(len(keys)):
        names = (getattr(key, "name", getattr(key, "key", None)) for key in keys[start:])
        if any(isinstance(name, str) for name in names):
            yield keys[start:]


# The entries of the spec of a leaf; `None` where the call places it, as a leaf in a State.
Placement: TypeAlias = tuple[Any, ...] | None
Named: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class FeedBack:
    """What of a result replaces what of the arguments.

    **Attributes:**

    - `pairs`: of each part that is fed back, the path in the arguments and the path in the result.
    - `numbers`: of each leaf that is fed back, its number in `(args, kwargs)` and its number in the result.
    - `unclear`: of each part that is not, because several parts of the result fit but for tuples and lists:
        its path, and their paths.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    numbers: tuple[tuple[int, int], ...] = ()
    unclear: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def apply(self, args: Args, result: PyTree) -> Args:
        """The arguments of the next call."""
        leaves, structure = tree_util.tree_flatten(args)
        new = jax.tree.leaves(result)
        for to, source in self.numbers:
            leaves[to] = new[source]
        following: Args = structure.unflatten(leaves)
        return following

    def describe(self) -> str:
        """What is fed back, in words."""
        return ", ".join(f"{result} becomes {argument}" for argument, result in self.pairs)


def find(
    args: Args,
    result: PyTree,
    named: Named | None,
    name: str,
    specs: Mapping[str, PyTree] | None,
) -> FeedBack:
    """What of a result the next call gets.

    A part of the result replaces a part of the arguments that has the same structure and the same shapes, the
    largest parts first, each once. Of several that fit, those under the same names are taken, then those in
    the same order, the last results first. A tuple may replace a list, and a list a tuple, if no other part
    fits. A part is one of:

    - a State, or anything that holds one;
    - a dictionary, a module, or another node with names; a tuple or list of several arrays. Their leaves are
      of the same kinds of numbers, and of the same placements where these are given;
    - an array under the same name in arguments and result;
    - an array that is split neither in the arguments nor in the result, if no other fits. A single
      number is not, because a loss and a learning rate look alike. The same holds of a result that is, as a
      whole, a tuple or list of arrays.

    A batch that comes in and outputs of the same shape are not taken for each other.

    **Arguments:**

    - `args`, `result`: those of a call, or `ShapeDtypeStruct`s in place of arrays.
    - `named`: pairs of paths, such as `{"args[0]": "[1]"}`, instead of what would be found.
    - `name`: what paths call the function.
    - `specs`: the `in_specs` and `out_specs` of the mapped function, where these are known.

    **Raises:** `StructureError` for `named` paths that do not exist, do not fit or overlap.
    """
    # The arguments as a whole, and those by keyword as a whole, are no part of them.
    inner = [part for part in parts_of(args) if len(part.keys) > 1]
    ins: list[Placement] = [None] * len(jax.tree.leaves(args))
    outs: list[Placement] = [None] * len(jax.tree.leaves(result))
    if specs is not None:
        ins, outs = _placements(specs["in_specs"], args[0]), _placements(specs["out_specs"], result)
        # Keyword arguments are replicated.
        ins += [()] * len(jax.tree.leaves(args[1]))
    arguments = _Side(inner, lambda part: path_of(part.keys), ins)
    returned = _Side(parts_of(result), lambda part: f"{name}(...){part.path}", outs)
    unclear: dict[Subtree, list[Subtree]] = {}
    if named is None:
        pairs = _by_structure(arguments, returned, unclear)
    else:
        items = named.items() if isinstance(named, Mapping) else named
        pairs = _named(arguments, returned, list(items), name)
    pairs.sort(key=lambda pair: pair[0].leaves.start)
    return FeedBack(
        tuple((arguments.path(a), returned.path(b)) for a, b in pairs),
        tuple(both for a, b in pairs for both in zip(a.leaves, b.leaves, strict=True)),
        tuple(
            (arguments.path(a), tuple(map(returned.path, fitting)))
            for a, fitting in unclear.items()
            if arguments.is_free(a)
            and not any(other is not a and set(a.leaves) <= set(other.leaves) for other in unclear)
        ),
    )


class _Side:
    """The parts with arrays of the arguments, or those of the result, and which of them are still free."""

    def __init__(
        self,
        parts: list[Subtree],
        path: Callable[[Subtree], str],
        placements: Sequence[Placement],
    ) -> None:
        self.whole, self.path, self._placements = parts[0], path, placements
        self.parts = [part for part in parts if part.arrays]
        self._used: set[int] = set()

    def free(self, parts: Iterable[Subtree]) -> list[Subtree]:
        return list(filter(self.is_free, parts))

    def is_free(self, part: Subtree) -> bool:
        return self._used.isdisjoint(part.leaves)

    def use(self, part: Subtree) -> None:
        self._used.update(part.leaves)

    def placed(self, part: Subtree) -> list[Placement]:
        """The placement of each leaf of a part."""
        return [self._placements[number] for number in part.leaves]


Match: TypeAlias = tuple[Subtree, Subtree]


def _by_structure(
    arguments: _Side, returned: _Side, unclear: dict[Subtree, list[Subtree]]
) -> list[Match]:
    """The largest parts that fit, or do but for tuples and lists; then arrays that stand by themselves.

    **Arguments:**

    - `unclear`: to which arguments are added that several results fit but for tuples and lists.
    """
    pairs: list[Match] = []

    def fits(a: Subtree, b: Subtree) -> bool:
        """Whether one of two parts of one form can replace the other, and both are free."""
        if not (arguments.is_free(a) and returned.is_free(b)):
            return False
        specs = zip(arguments.placed(a), returned.placed(b), strict=True)
        agree = a.in_state or (_kinds_agree if a.depth else _dtypes_agree)(a, b)
        return agree and all(p is None or q is None or p == q for p, q in specs)

    def take(a: Subtree, b: Subtree) -> None:
        if fits(a, b):
            arguments.use(a)
            returned.use(b)
            pairs.append((a, b))

    def is_carried(part: Subtree) -> bool:
        """Whether a part of the result is by its structure more than outputs, or may be by its name."""
        several = part.arrays > 1 and part is not returned.whole
        return part.depth == 0 or part.in_state or part.is_named or several

    def take_alike(some: list[Subtree], others: list[Subtree]) -> None:
        carried = list(filter(is_carried, returned.free(others)))
        for pair in _under_one_name(arguments.free(some), carried):
            take(*pair)
        # Then in order, but for arrays. New models are the last results by custom: before them are outputs.
        left = [part for part in arguments.free(some) if part.depth > 0]
        for a, b in zip(left, returned.free(carried)[-len(left) :], strict=False):
            take(a, b)

    def take_but_for_lists(some: list[Subtree], others: list[Subtree]) -> None:
        for a in arguments.free(some):
            fitting = [b for b in others if a.form != b.form and is_carried(b) and fits(a, b)]
            rivals = [x for x in some if any(x.form != b.form and fits(x, b) for b in fitting)]
            if len(fitting) == len(rivals) == 1:
                take(a, fitting[0])
            elif fitting:
                unclear[a] = fitting

    alike = _alike(arguments, returned, lambda part: part.form)
    but_for_lists = _alike(arguments, returned, lambda part: part.loose)
    groups = [(take_alike, *both) for both in alike]
    groups += [(take_but_for_lists, *both) for both in but_for_lists]
    for take_some, *both in sorted(groups, key=lambda group: _smallness(group[1:])):
        take_some(*both)
    for some, others in alike:
        # The only two of a shape and dtype that are split on neither side. A single number is none of them.
        left, right = (
            [x for x in side.free(parts) if not any(side.placed(x)) and None not in side.placed(x)]
            for side, parts in ((arguments, some), (returned, others))
        )
        for a in left:
            rivals = [x for x in left if _dtypes_agree(x, a)]
            fitting = [b for b in right if _dtypes_agree(a, b)]
            if len(rivals) == len(fitting) == 1 and (a.depth > 0 or np.shape(a.node)):
                take(a, fitting[0])
    return pairs


def _smallness(both: Sequence[list[Subtree]]) -> tuple[int, int]:
    return -both[0][0].arrays, -both[0][0].depth


def _alike(
    arguments: _Side, returned: _Side, form: Callable[[Subtree], Hashable]
) -> list[tuple[list[Subtree], list[Subtree]]]:
    """The parts of the arguments, and those of the result, that share a form. The largest come first."""
    by_form: dict[Hashable, tuple[list[Subtree], list[Subtree]]] = defaultdict(lambda: ([], []))
    for which, side in enumerate((arguments, returned)):
        for part in side.parts:
            by_form[form(part)][which].append(part)
    return sorted(filter(all, by_form.values()), key=_smallness)


def _under_one_name(some: list[Subtree], others: list[Subtree]) -> Iterator[Match]:
    """Pairs whose paths end alike, in names. The pairs with the longest common ends come first."""
    by_end: dict[Any, list[Subtree]] = defaultdict(list)
    for part in others:
        for end in inner_names(part.keys):
            by_end[end].append(part)
    ends = [(end, part) for part in some for end in inner_names(part.keys[1:])]
    for end, part in sorted(ends, key=lambda pair: -len(pair[0])):
        for other in by_end[end]:
            yield part, other


def _kinds_agree(a: Subtree, b: Subtree, kind: Callable[[AnyLeaf], Any] = kind_of) -> bool:
    pairs = zip(jax.tree.leaves(a.node), jax.tree.leaves(b.node), strict=True)
    return all(kind(x) == kind(y) for x, y in pairs)


def _dtypes_agree(a: Subtree, b: Subtree) -> bool:
    return _kinds_agree(a, b, lambda x: getattr(x, "dtype", None) or kind_of(x))


def _named(
    arguments: _Side, returned: _Side, items: list[tuple[str, str]], name: str
) -> list[Match]:
    """The pairs of parts that have these paths."""
    pairs = []
    for argument, result in items:
        whole = result if result.startswith(f"{name}(...)") else f"{name}(...){result}"
        a, b = _part_at(arguments, argument, "args"), _part_at(returned, whole, "result")
        if a.loose != b.loose:
            raise sm.StructureError(
                f"fed_back: {returned.path(b)} cannot become {arguments.path(a)}, because structures or "
                f"shapes differ: {_what(b)}, and the argument is {_what(a)}."
            )
        if not (arguments.is_free(a) and returned.is_free(b)):
            raise sm.StructureError(
                f"fed_back: {returned.path(b)} becomes {arguments.path(a)}, and one of the two is in "
                "another pair already. Name each part once."
            )
        arguments.use(a)
        returned.use(b)
        pairs.append((a, b))
    return pairs


def _part_at(side: _Side, path: str, what: str) -> Subtree:
    wanted = path.replace('"', "'")
    for part in side.parts:
        if side.path(part) == wanted:
            return part
    known = [side.path(part) for part in side.parts]
    near = ", ".join(difflib.get_close_matches(path, known, 4, 0.0))
    owner = "the arguments have" if what == "args" else "the result has"
    raise sm.StructureError(
        f"fed_back: {owner} no arrays at {path}, but at {len(known)} other "
        f"{errors.plural('path', len(known))}{near and f', such as {near}'}."
    )


def _what(part: Subtree) -> str:
    """The structure and shapes of a part, as messages show it."""
    kinds = [errors.array_str(x) for x in jax.tree.leaves(part.node)]
    if part.depth == 0:
        return kinds[0]
    more = f", and {len(kinds) - 4} more" if len(kinds) > 4 else ""
    return f"a {type(part.node).__name__} of {', '.join(kinds[:4])}{more}"


def _placements(specs: PyTree, tree: PyTree) -> list[Placement]:
    """The placement of each leaf of a tree.

    **Arguments:**

    - `specs`: a prefix tree, as `in_specs` or `out_specs`. They pass States by. `None` is replicated.
    """
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec | sm.PerShard)
    entries, structure = tree_util.tree_flatten(specs, is_leaf=is_spec)
    return [
        None if sm.is_state(owner) else _entries(spec or ())
        for spec, part in zip(entries, structure.flatten_up_to(tree), strict=True)
        for owner in owners(part, sm.is_state)
    ]


def _entries(spec: Any) -> tuple[Any, ...]:
    """The entries of a spec without those at its end that say nothing."""
    if isinstance(spec, sm.PerShard):
        return (spec,)
    entries = [(x,) if isinstance(x, str) else x or None for x in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def left_out(name: str, result: PyTree, leave_out: Any) -> frozenset[int]:
    """The numbers of the leaves of a result that are not compared.

    **Arguments:**

    - `name`: what paths call the function.
    - `leave_out`: a filter of states, the path of a part of the result such as `[1].mean` or
        `step(...)[1].mean`, or a list of these. A string with a dot, a bracket or nothing in it is a path,
        any other one a tag. `Where` sees the result, then each of several results.

    **Raises:** `StructureError` for a filter or a path that names nothing in the result; `TypeError` for
    what is neither.
    """
    if leave_out is None or leave_out is False or isinstance(leave_out, sm.filters.Nothing):
        return frozenset()
    if isinstance(leave_out, list | tuple):
        return frozenset().union(*(left_out(name, result, entry) for entry in leave_out))
    parts = parts_of(result)
    states = [part for part in parts if sm.is_state(part.node)]
    if isinstance(leave_out, str) and (not leave_out or set(leave_out) & set(".[(")):
        path = leave_out.removeprefix(f"{name}(...)").replace('"', "'")
        hits = [part.leaves for part in parts if part.path == path]
    else:
        several = type(result) in (tuple, list)
        sees_all = sm.filters.to_predicate(leave_out, result)
        sees_one = [sm.filters.to_predicate(leave_out, x) for x in result] if several else []

        def is_hit(part: Subtree) -> bool:
            inside = sees_one[part.keys[0].idx] if several and part.keys else None
            return bool(
                sees_all(part.keys, part.node) or (inside and inside(part.keys[1:], part.node))
            )

        hits = [part.leaves for part in states if is_hit(part)]
    if not hits and leave_out not in (..., True):
        paths = ", ".join(f"{name}(...){part.path}" for part in states)
        listed = f"The states are {paths}." if paths else "There are no states in it."
        raise sm.StructureError(f"leave_out: {leave_out!r} names nothing in the result. {listed}")
    return frozenset(number for leaves in hits for number in leaves)
