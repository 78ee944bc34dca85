"""The specs and the write policies that may be to blame."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from .. import _errors as errors
from .._program._jaxprs import names_of
from .._program._stacked import as_names, names_of_spec
from .._types import Numbers
from ._compare import Comparison
from ._evaluate import on_all_shards
from ._graph import Node
from ._located import Place
from ._reruns import (
    MOST_NODES,
    Again,
    Change,
    Changes,
    Read,
    Reruns,
    runs_of,
)
from ._suspects import REDUCTIONS
from ._trials import reduced_by


# What the named policies are in NumPy.
_POLICIES: Mapping[str, Callable[..., Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
}


def of_lengths(
    comparison: Comparison, results: Sequence[str], arguments: Sequence[str]
) -> tuple[list[Place], bool]:
    """The specs that give results another length on a mesh, the likeliest first.

    They are ordered by how many results each explains, by cost, and by their place among the specs. And
    whether results of another length are all that is wrong.

    **Arguments:**

    - `results`, `arguments`: the paths of the arrays.
    """
    inputs, nodes = comparison.mesh.inputs, comparison.mesh.nodes
    split = {x: node.spec for node in nodes if node.kind == "split" for x in node.operands}
    read = {x for node in nodes for x in node.operands}
    in_specs = {x: split.get(x) or PartitionSpec() for x in inputs if x in read}
    # What each spec costs for each result that it explains, and what is shown.
    specs: dict[str, list[tuple[int, Place]]] = {}
    ends = zip(comparison.mesh.results, *comparison.ends, results, strict=True)
    for operand, result, single, path in ends:
        join = comparison.maker.get(operand)
        got, want = result.x.shape, single.x.shape
        unequal = [d for d in range(len(want)) if len(got) == len(want) and got[d] != want[d]]
        if join is None or join.kind != "join" or len(unequal) != 1 or not math.prod(want):
            continue
        (d,) = unequal
        # A result is too long where its spec names axes that no argument's spec names, and too short where
        # an argument's spec names axes that its own does not.
        is_short = got[d] < want[d]
        own_axes = as_names(join.spec[d]) if d < len(join.spec) else ()
        axes = tuple(join.scope.sizes) if is_short else own_axes
        # Where each shard has the whole result, only putting it together is wrong.
        is_out = is_short or (bool(join.operands) and comparison.is_plain(join.operands[0]))
        explaining = [("out_specs", path, join.spec, int(not is_out))]
        for x, name in zip(inputs, arguments, strict=True):
            spec = in_specs.get(x)
            if spec is None or want[d] not in comparison.values[x].x.shape:
                continue
            if is_short != {*names_of_spec(spec)}.isdisjoint(axes):
                explaining.append(("in_specs", name, spec, int(is_out)))
        for which, name, spec, cost in explaining:
            source = f"{which} of {name}: {errors.spec_str(spec)}"
            length = f"the length of axis {d} of the result"
            place = Place("", 0, source, length, got=str(got[d]), want=str(want[d]), shards="")
            # One spec may be that of several results, none of which is put together.
            is_shared = is_short and which == "out_specs"
            key = f"{which}: {errors.spec_str(spec)}, {d}" if is_shared else source
            specs.setdefault(key, []).append((cost, place))
    order = sorted(specs.values(), key=lambda each: (-len(each), min(cost for cost, _ in each)))
    wrong = [k for k, right in enumerate(comparison.right) if not right]
    shapes = [[values[k].x.shape for values in comparison.ends] for k in wrong]
    return [each[0][1] for each in order], all(got != want for got, want in shapes)


# Of arguments and results

# The value of a state, or a part of it.
_VALUE = re.compile(r"\.value(?=[.\[]|$).*$")

_Node: TypeAlias = tuple[str, Node]


def of_other_axes(
    comparison: Comparison, arguments: Sequence[str], results: Sequence[str], again: Again
) -> tuple[list[Place], str | None]:
    """The spec, if all results are right where it names another axis; and that in words.

    **Arguments:**

    - `arguments`, `results`: the paths of the arrays.
    """
    reruns = Reruns(comparison)
    for which, nodes, spec, other in _with_other_axes(comparison, arguments, results):
        if reruns.nodes_run > MOST_NODES:
            break
        changes = {node.results[0]: dataclasses.replace(node, spec=other) for _, node in nodes}
        if _mends(reruns, changes) and all(x.mends(changes) for x in runs_of(again)):
            got, want = errors.spec_str(spec), errors.spec_str(other)
            states = list(dict.fromkeys(_state(path) for path, _ in nodes))
            named = [path for path in states if path in {*map(_state, arguments)}] or states
            source = f"{which} of {named[0]}: {got}"
            tried = f"with {want} for {', '.join(named)}, all results are right"
            return [Place("", 0, source, "the spec", got=got, want=want, shards="")], tried
    return [], None


def _mends(reruns: Reruns, changes: Mapping[int, Node]) -> bool:
    """Whether all results are right with other specs; they are not where parts of other shapes do not fit."""
    try:
        return reruns.mends(changes)
    except Exception:  # NumPy or JAX may raise any error for shapes that a node was not made for.
        return False


def _is_of_state(path: str) -> bool:
    return _state(path) != path


def _state(path: str) -> str:
    """The path of the state of whose value an array is a part; else that of the array."""
    return _VALUE.sub("", path)


def _with_other_axes(
    comparison: Comparison, arguments: Sequence[str], results: Sequence[str]
) -> Iterator[tuple[str, Sequence[_Node], PartitionSpec, PartitionSpec]]:
    """Arguments and results that other mesh axes split, or, of states, one less.

    States with one spec are changed together, other arrays with one spec too, and then each by itself. A
    state leaves as it came in.

    **Returns:** what has the spec; the paths of the arrays that are changed, with the nodes that split them
    or put them together; their spec; and the other one.
    """
    paths = dict(zip(comparison.mesh.inputs, arguments, strict=True))
    joins: dict[str, _Node] = {}
    for x, path in zip(comparison.mesh.results, results, strict=True):
        maker = comparison.maker.get(x)
        if maker is not None and maker.kind == "join":
            joins[path] = path, maker
    splits = [
        (paths[node.operands[0]], node)
        for node in comparison.mesh.nodes
        if node.kind == "split" and node.operands[0] in paths
    ]
    # For each spec what leaves as it came in, and what has it: the arrays of each state together.
    by_spec: dict[tuple[PartitionSpec, str], dict[str, list[_Node]]] = {}
    for path, node in splits:
        is_state = _is_of_state(path)
        which = "the spec" if is_state else "in_specs"
        left = [x for x in joins.values() if is_state and _is_the_same(path, x[0])]
        each = [(path, node), *(x for x in left if x[1].spec == node.spec)]
        by_spec.setdefault((node.spec, which), {}).setdefault(_state(path), []).extend(each)
    states = {path for path, _ in splits if _is_of_state(path)}
    for path, node in joins.values():
        if not any(_is_the_same(state, path) for state in states):
            by_spec.setdefault((node.spec, "out_specs"), {})[path] = [(path, node)]
    for (spec, which), by_state in by_spec.items():
        groups = [*by_state.values()]
        for new in _other_specs(spec, groups[0][0][1].scope.sizes, less=which == "the spec"):
            for some in [groups] + [[group] for group in groups if len(groups) > 1]:
                yield which, [each for group in some for each in group], spec, new


def _is_the_same(argument: str, result: str) -> bool:
    """Whether a state that is an argument has the path of a result."""
    return _is_of_state(result) and _within(argument) == _within(result)


def _other_specs(
    spec: PartitionSpec, sizes: Mapping[Hashable, int], *, less: bool
) -> Iterator[PartitionSpec]:
    """Specs with another axis of the same size, with two axes in each other's place, and without an axis.

    **Arguments:**

    - `sizes`: those of all mesh axes.
    - `less`: whether there are such without an axis.
    """
    names = names_of_spec(spec)
    for name, other in itertools.permutations(sizes, 2):
        is_swap = other in names and list(sizes).index(name) < list(sizes).index(other)
        # Two axes that split one dimension may be in the wrong order.
        is_order = is_swap and any({name, other} <= {*as_names(entry)} for entry in spec)
        is_other = sizes[name] == sizes[other] and (is_swap or other not in names)
        if name in names and (is_other or is_order):
            yield _renamed(spec, {name: other, other: name})
    for name in names if less else ():
        yield _renamed(spec, {name: None})


def _renamed(spec: PartitionSpec, new: Mapping[Hashable, Hashable | None]) -> PartitionSpec:
    """A spec with other axes in the place of some; those that become `None` are left out."""
    entries: list[Any] = []
    for entry in spec:
        renamed = [new.get(name, name) for name in as_names(entry)]
        kept = tuple(name for name in renamed if name is not None)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


# Of written states


def of_other_policies(
    comparison: Comparison, arguments: Sequence[str], results: Sequence[str], again: Again
) -> tuple[list[Place], bool]:
    """The policy of a written state, if all results are right with another one.

    And whether that is likelier than a line: the state has a policy now, or what a line does to the state
    before the call is what the other policy does.

    **Arguments:**

    - `arguments`, `results`: the paths of the arrays.
    """
    reruns, old_values = Reruns(comparison), dict[str, list[int]]()
    nodes = comparison.mesh.nodes
    parts = {x: node.results[0] for node in nodes if node.kind == "split" for x in node.operands}
    for x, path in zip(comparison.mesh.inputs, arguments, strict=True):
        old_values.setdefault(_within(path), []).append(parts.get(x, x))
    by_state: dict[str, list[tuple[int, str]]] = {}
    for x, right, path in zip(comparison.mesh.results, comparison.right, results, strict=True):
        if not right:
            by_state.setdefault(_state(path), []).append((x, path))
    for state, ends in by_state.items():
        changed: dict[tuple[str | None, str], dict[int, Change]] = {}
        for operand, path in ends:
            old = [x for x in old_values.get(_within(path), ()) if x in comparison.values]
            for policy, other, changes in _with_other_policies(comparison, operand, old):
                changed.setdefault((policy, other), {}).update(changes)
        for (policy, other), changes in changed.items():
            if reruns.nodes_run > MOST_NODES:
                return [], False
            if reruns.mends(changes) and all(x.mends(changes) for x in runs_of(again)):
                source = f"the write policy of {state}: reduce={policy!r}"
                source += f", where {other!r} puts all results right"
                got, want = f"reduce={policy!r}", f"reduce={other!r}"
                place = Place("", 0, source, "the policy", got=got, want=want, shards="")
                before = [x for _, path in ends for x in old_values.get(_within(path), ())]
                is_theirs = any(_does_to(comparison, x, other, before) for x in changes)
                return [place], policy is not None or is_theirs
    if len(by_state) == 1 and _is_of_policy_alone(comparison, state, results):
        source = f"the write policy of {state}"
        return [Place("", 0, source, "the policy", got="", want="", shards="")], True
    return [], False


def _is_of_policy_alone(comparison: Comparison, state: str, results: Sequence[str]) -> bool:
    """Whether no line has made what is wrong in a state, of which a policy reduces at least a part."""
    reduced, made = [], []
    for x, right, path in zip(comparison.mesh.results, comparison.right, results, strict=True):
        join = comparison.maker.get(x)
        if join is not None and _state(path) == state:
            reductions, written = _behind(comparison, join.operands[0])
            reduced += [*reductions]
            made += [] if right else [bool(written)]
    return bool(reduced) and not all(made)


def _does_to(comparison: Comparison, written: int, policy: str, old: Sequence[int]) -> bool:
    """Whether a line makes a state of what it was before as a policy reduces, and all else itself."""
    maker = comparison.maker.get(written)
    names = {"sum": ("add", "scatter-add"), "max": ("max",), "min": ("min",)}.get(policy, ())
    if maker is None or maker.name not in names:
        return False
    # The places of what is added into an array are not reduced.
    operands = [x for k, x in enumerate(maker.operands) if maker.name != "scatter-add" or k != 1]
    others = [comparison.maker.get(x) for x in operands if x not in old]
    # What an earlier line makes may lack the reduction there.
    is_own = all(node is not None and node.line == maker.line for node in others)
    return is_own and len(others) < len(operands)


def _with_other_policies(
    comparison: Comparison, result: int, old: Sequence[int]
) -> Iterator[tuple[str | None, str, Changes]]:
    """A result that is reduced as states are, by another policy.

    **Arguments:**

    - `old`: the parts of arguments that may be the state before the call.

    **Returns:** the policy, the other one, and the changes.
    """
    join = comparison.maker.get(result)
    if join is None or join.kind != "join":
        return
    (end,) = join.operands
    written, node = _policy_of(comparison, end)
    if written is None:
        return
    scope, shape = comparison.scopes[written], comparison.got(written).shape
    old = [x for x in old if on_all_shards(comparison.values[x], scope).shape == shape]
    # Without a reduction each shard has written what it had. A policy reduces where it may differ.
    split, differs_over = [*names_of_spec(join.spec)], comparison.values[written].axes
    reduced_over = names_of(node.eqn) if node else [x for x in differs_over if x not in split]
    axes = tuple([*scope.sizes].index(name) for name in reduced_over)
    reduced = {policy: reduced_by(written, f, axes) for policy, f in _POLICIES.items()}
    if len(old) == 1:
        reduced["sum"] = _added_to(old[0], written, axes)
    if node is None:
        for policy, change in reduced.items() if len(old) == 1 else ():
            yield None, policy, {written: change}
        return
    read: Read = lambda x: on_all_shards(comparison.values[x], scope)
    used = [
        policy
        for policy, change in reduced.items()
        if np.allclose(change.made(read), read(end), rtol=1e-6, equal_nan=True)
    ]
    # A maximum is one of the bits of float32, on one device too. What all shards have goes through it.
    at = end if "sum" in used else written
    for policy, change in reduced.items() if used else ():
        if policy not in used:
            yield used[0], policy, {at: Change(change.make, scope)}


def _policy_of(comparison: Comparison, end: int) -> tuple[int | None, Node | None]:
    """What a line of the user's has written as a result, and the reduction over shards that comes after.

    There is none of the one or the other where nobody knows it.
    """
    reductions, written = _behind(comparison, end)
    if len(written) != 1 or end not in comparison.values:
        return None, None
    (value,) = written
    return (value if comparison.differs(value) else None), next(iter(reductions), None)


def _behind(comparison: Comparison, end: int) -> tuple[dict[Node, None], dict[int, None]]:
    """The reductions of policies behind a result, and what lines of the user's have made before them."""
    reductions, written = dict[Node, None](), dict[int, None]()
    # States of one policy go as one array: which part of it a value is.
    queue: list[tuple[int, int | None]] = [(end, None)]
    while queue:
        x, part = queue.pop()
        node = comparison.maker.get(x)
        if node is not None and node.line is None and node.kind == "run":
            if node.name == "split":
                part = node.results.index(x)
            operands = node.operands
            if node.name == "concatenate" and part is not None:
                operands, part = (node.operands[part],), None
            queue += [(operand, part) for operand in operands]
            if node.name.startswith(REDUCTIONS):
                reductions[node] = None
        elif node is not None and node.line is not None:
            written[x] = None
    return reductions, written


def _within(path: str) -> str:
    """The path within an argument, or within a result: a state has the same one in both."""
    return re.sub(r"^(args|.*?\(\.\.\.\))(\[\d+\])?", "", path)


def _added_to(old: int, written: int, axes: tuple[int, ...]) -> Change:
    """A state plus what all shards have added to it."""

    def make(read: Read) -> Numbers:
        before = read(old)
        return before + np.sum(read(written) - before, axes, keepdims=True)

    return Change(make)
