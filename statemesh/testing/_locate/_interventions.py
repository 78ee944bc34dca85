"""A flat program that runs again with some values changed: only the nodes after them do."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._noise import roundoff
from .._program._stacked import Scope, Stacked
from .._types import AnyLeaf, Numbers
from . import _words as words
from ._compare import Comparison, right_values
from ._evaluate import Evaluator, Values, is_key, on_all_shards
from ._graph import Constant, Graph, Node, Operand
from ._lines import Line, callers_of
from ._relations import unequal_copies
from ._suspects import Group


# What gives a value, with all mesh axes in front.
Read: TypeAlias = Callable[[int], Numbers]

# What is kept of the first run, in bytes. The rest is computed again.
_KEPT = 2**28


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What becomes of a value.

    **Attributes:**

    - `make`: gives the changed numbers, from what it reads.
    - `reads`: the values it reads, none of them made later than the changed one.
    - `scope`: the mesh axes over which it then may differ, if these are others than before.
    """

    make: Callable[[Read], Numbers]
    reads: tuple[int, ...] = ()
    scope: Scope | None = None


def constant(numbers: Numbers) -> Change:
    """These numbers, whatever the value was."""
    return Change(lambda read: numbers)


class Reruns:
    """A flat program with all its values.

    **Arguments:**

    - `evaluator`, `program`: the program.
    - `given`: the values of its inputs.
    - `scopes`: the mesh axes over which each value may differ.

    **Attributes:**

    - `maker`: the node that makes each value.
    - `nodes_run`: how many nodes ran again so far.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        program: Graph,
        given: Values,
        scopes: Mapping[int, Scope],
    ) -> None:
        self.evaluator, self.program, self.scopes = evaluator, program, scopes
        self.maker = program.maker()
        self.nodes_run = 0
        self.known: Values = {**given}
        size, results = 0, {*program.results}
        last = {x: i for i, node in enumerate(program.nodes) for x in node.inputs}
        left: set[int] = set()
        for i, node in enumerate(program.nodes):
            evaluator.run_node(node, self.known)
            for x in node.results:
                size += _bytes(self.known[x].x)
                if size > _KEPT and x not in results:
                    left.add(x)
            for x in [x for x in left if last.get(x, -1) <= i]:
                left.remove(x)
                del self.known[x]
        self._reached = self._results_after()

    def unit(self, value: Stacked) -> float:
        """The roundoff of a value; 0 where floats are in double precision."""
        return 0.0 if self.evaluator.wide else roundoff(value.x.dtype)

    def reaches(self, value: int) -> frozenset[int]:
        """The numbers of the results that depend on a value."""
        return self._reached.get(value, frozenset())

    def _results_after(self) -> dict[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for k, x in enumerate(self.program.results):
            if isinstance(x, int):
                found[x] = found.get(x, frozenset()) | {k}
        for node in reversed(self.program.nodes):
            after = frozenset[int]().union(*(found.get(x, ()) for x in node.results))
            for x in node.inputs:
                found[x] = found.get(x, frozenset()) | after
        return found

    def run(self, changes: Mapping[int, Change]) -> "Rerun":
        return Rerun(self, changes)

    def both(self, value: int, change: Change) -> tuple[Numbers, Numbers]:
        """A value, and what becomes of it."""
        scope, again = change.scope or self.scopes[value], self.run({})
        read: Read = lambda x: again.read(x, scope)
        return read(value), change.make(read)


class Rerun:
    """The program with some values changed. Results are computed when they are asked for."""

    def __init__(self, around: Reruns, changes: Mapping[int, Change]) -> None:
        self._around, self._changes = around, changes
        # What depends on a change.
        self._changed = {*changes}
        for node in around.program.nodes:
            if not self._changed.isdisjoint(node.inputs):
                self._changed.update(node.results)
        self._known: Values = {}

    def result(self, number: int) -> Stacked | None:
        """A result; `None` if it is one of several copies that differ."""
        wanted = self._around.program.results[number]
        if isinstance(wanted, int):
            self._compute({wanted})
            join = self._around.maker.get(wanted)
            if join and join.kind == "join":
                (operand,) = join.operands
                value = self._value(operand)
                if unequal_copies(value, join.spec, self._around.unit(value)):
                    return None
        return self._value(wanted)

    def _value(self, x: Operand) -> Stacked:
        if isinstance(x, Constant) or x in self._known:
            return self._around.evaluator.operand(x, self._known)
        return self._around.known[x]

    def _is_known(self, x: int) -> bool:
        return x in self._known or (x not in self._changed and x in self._around.known)

    def _compute(self, wanted: Iterable[int]) -> None:
        """Run the nodes on which some values depend."""
        around, todo = self._around, []
        left = {x for x in wanted if not self._is_known(x)}
        for node in reversed(around.program.nodes):
            if left.isdisjoint(node.results):
                continue
            todo.append(node)
            read = {x for y in node.results if y in self._changes for x in self._changes[y].reads}
            left |= {x for x in (*node.inputs, *read) if not self._is_known(x)}
        for x in around.program.inputs:
            if x in left and x in self._changes:
                self._known[x] = around.known[x]
                self._change(x)
        around.nodes_run += len(todo)
        for node in reversed(todo):
            operands = [self._value(x) for x in node.operands]
            made = around.evaluator.results(node, operands)
            self._known.update(zip(node.results, made, strict=True))
            for x in node.results:
                if x in self._changes:
                    self._change(x)

    def _change(self, x: int) -> None:
        """Put what becomes of a value in its place."""
        scope = self._changes[x].scope or self._around.scopes[x]
        numbers = self._changes[x].make(lambda y: self.read(y, scope))
        axes, like = tuple(scope.sizes), self._known[x].x
        if is_key(like):
            impl = jax.random.key_impl(like)
            keys = jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)
            self._known[x] = Stacked(keys, axes)
        else:
            made = np.asarray(numbers).astype(like.dtype)
            self._known[x] = _narrowed(Stacked(made, axes), self._known[x])

    def read(self, x: int, scope: Scope) -> Numbers:
        """A value with all mesh axes of a scope in front."""
        if not self._is_known(x):
            self._compute({x})
        return on_all_shards(self._value(x), scope)


def _narrowed(value: Stacked, like: Stacked) -> Stacked:
    """Without the mesh axes that the value did not have, where copies are equal.

    What is compiled for these mesh axes then runs again.
    """
    x, axes = value.x, list(value.axes)
    for name in [name for name in axes if name not in like.axes]:
        at = axes.index(name)
        first = x.take([0], at)
        if np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=x.dtype.kind in "fc"):
            x = first.squeeze(at)
            axes.remove(name)
    return Stacked(x, tuple(axes))


def _bytes(x: AnyLeaf) -> int:
    return int(x.size) * (16 if is_key(x) else int(x.dtype.itemsize))


# So many nodes run again to see which line mends the results.


@dataclasses.dataclass(frozen=True)
class Mended:
    """What comes of other values at a line.

    **Attributes:**

    - `right`: how many of the results are right.
    - `all`: whether all are.
    - `plain`: whether the other values were those of one device, and no multiples of them.
    """

    right: int = 0
    all: bool = False
    plain: bool = False


class Mender:
    """The program on a mesh, run with other values at some lines.

    **Arguments:**

    - `found`: the comparison.

    **Attributes:**

    - `broken`: the numbers of the results that are wrong.
    """

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self.reruns = Reruns(found.evaluators[0], found.mesh, found.given[0], found.scopes)
        made_at = {x: i for i, node in enumerate(found.mesh.nodes) for x in node.results}
        self._made_at = [made_at.get(x, 0) if isinstance(x, int) else 0 for x in found.mesh.results]
        self.broken = frozenset(k for k, one in enumerate(found.results) if not one.right)

    def try_right(self, group: Group) -> Mended | None:
        """The results where a line makes what it makes on one device; `None` if nobody knows what that is."""
        values = [x for x in group.values if x in self._found.kept]
        if not values or len(values) < len(group.values) or self.reruns.nodes_run > _MOST_NODES:
            return None
        choices = [list(right_values(self._found, x)) for x in values]
        if not all(choices):
            return None
        best = Mended()
        for k in range(max(map(len, choices))):
            chosen = [choice[min(k, len(choice) - 1)] for choice in choices]
            tried = {x: right.numbers for x, right in zip(values, chosen, strict=True)}
            plain = all(right.factor == 1 for right in chosen)
            now = dataclasses.replace(self._run(tried), plain=plain)
            if now.right > best.right:
                best = now
            if best.all:
                break
        return best

    def _run(self, replaced: Mapping[int, Numbers]) -> Mended:
        """The results with other values."""
        changes = {x: constant(numbers) for x, numbers in replaced.items()}
        reached = self.reached(changes)
        again = self.reruns.run(changes)
        right = {k: self._found.judge(k, again.result(k)) for k in sorted(reached)}
        count = sum(right[k] for k in self.broken & reached)
        return Mended(count, self.broken <= reached and all(right.values()))

    def reached(self, changes: Mapping[int, Change]) -> frozenset[int]:
        """The results that may be others after a change."""
        return frozenset[int]().union(*map(self.reruns.reaches, changes))

    def mends(self, changes: Mapping[int, Change]) -> bool:
        """Whether a change puts all results right."""
        reached = self.reached(changes)
        if not self.broken <= reached:
            return False
        again = self.reruns.run(changes)
        # What is wrong first, and of that what is made early: most changes mend nothing.
        order = sorted(reached, key=lambda k: (k not in self.broken, self._made_at[k]))
        return all(self._found.judge(k, again.result(k)) for k in order)


def is_equal(found: Comparison, value: int, name: Hashable) -> bool:
    """Whether all shards along a mesh axis have the same numbers."""
    got, sizes = found.kept[value].got, list(found.scopes[value].sizes)
    if name not in sizes or got.dtype.kind not in "fc":
        return False
    first = got.take([0], sizes.index(name))
    return bool(np.allclose(got, first, rtol=1e-10, atol=0, equal_nan=True))


def reduced(
    found: Comparison, value: int, reduce: Callable[..., Any], name: Hashable
) -> Numbers | None:
    """What a value is when it is reduced over a mesh axis along which shards have different numbers."""
    got, sizes = found.kept[value].got, list(found.scopes[value].sizes)
    if name not in sizes or got.dtype.kind not in "fc" or is_equal(found, value, name):
        return None
    return np.broadcast_to(reduce(got, axis=sizes.index(name), keepdims=True), got.shape)


# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4
# The reductions that are tried to put the results right.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_LEFT_OUT = ("add", "sub", "mul", "max", "min", "or", "and", "select_n")


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A change of one line.

    **Attributes:**

    - `changes`: what it makes of values.
    - `order`: what is likely is tried before what is not.
    - `words`: the change in words, where no other one does the same; else none.
    - `is_added`: whether the change adds an operation, which may stand on any line that hands the value on.
    """

    group: Group
    changes: Mapping[int, Change]
    order: int
    words: str = ""
    is_added: bool = False


def reductions(found: Comparison, group: Group, values: Sequence[int]) -> Iterator[Trial]:
    """Values that a line makes, reduced over a mesh axis or multiplied by its size."""
    if not values or not all(x in found.kept for x in values):
        return
    for name, size in found.scopes[values[0]].sizes.items():
        for collective, reduce in REDUCTIONS.items():
            made = {x: reduced(found, x, reduce, name) for x in values}
            changed = {x: constant(new) for x, new in made.items() if new is not None}
            if len(changed) == len(values):
                yield Trial(group, changed, 1, words.reduced(collective, name), True)
        # A line with a collective of its own may have the wrong one.
        is_added = not any(node.is_collective for node in group.nodes)
        if size > 1 and all(is_equal(found, x, name) for x in values):
            for factor in (size, 1 / size):
                changed = {x: constant(found.kept[x].got * factor) for x in values}
                yield Trial(group, changed, 1, words.scaled(size, factor > 1), is_added)


def reductions_inside(found: Comparison, group: Group) -> Iterator[Trial]:
    """The same of what only the line itself uses."""
    for x in [x for node in group.nodes for x in node.results if x not in group.values]:
        yield from reductions(found, group, [x])


def changes(found: Comparison, group: Group, reruns: Reruns) -> Iterator[Trial]:
    """Other simple changes of a line."""
    if group.transposed:
        return
    # The same operation in each round of a loop is changed in all rounds, also in those that are right.
    kinds: dict[Hashable, list[Node]] = {}
    for node in found.mesh.nodes:
        if node.line == group.line and not node.transposed:
            kinds.setdefault((node.name, str(node.eqn.outvars[0].aval)), []).append(node)
    suspects = {*group.nodes}
    for nodes in kinds.values():
        if not suspects.intersection(nodes):
            continue
        name = nodes[0].name
        if name == "ppermute":
            yield from _moves(found, group, nodes)
        elif name == "axis_index":
            yield from _indices(found, group, nodes)
        elif len(nodes[0].results) == 1 and nodes[0].kind == "run":
            yield from _whole_numbers(found, group, nodes)
            yield from _operands(found, group, nodes, reruns)
            if name in _LEFT_OUT:
                yield from _left_out(found, group, nodes)


def _moves(found: Comparison, group: Group, nodes: Sequence[Node]) -> Iterator[Trial]:
    """Every shift along the axis, with and without what goes round."""
    name = nodes[0].eqn.params["axis_name"]
    names = (name,) if isinstance(name, str) else tuple(name)
    sizes = found.scopes[nodes[0].results[0]].sizes
    if len(names) != 1 or names[0] not in sizes:
        return
    at = list(sizes).index(names[0])
    for shift, wraps in itertools.product((1, -1, 0), (True, False)):
        if shift or wraps:
            made = {
                x: _moved(source, at, shift, wraps)
                for node in nodes
                for x, source in zip(node.results, node.inputs, strict=True)
            }
            yield Trial(group, made, 0, words.moved(names[0], shift))


def _moved(source: int, at: int, shift: int, wraps: bool) -> Change:
    def change(read: Read) -> Numbers:
        made = np.roll(read(source), shift, at)
        if not wraps:
            edge = [slice(None)] * made.ndim
            edge[at] = slice(0, shift) if shift > 0 else slice(shift, None)
            made[tuple(edge)] = 0
        return made

    return Change(change, (source,))


def _indices(found: Comparison, group: Group, nodes: Sequence[Node]) -> Iterator[Trial]:
    """The index along another axis, or times the length of a part."""
    x = nodes[0].results[0]
    sizes = found.scopes[x].sizes
    given = nodes[0].eqn.params["axis_name"]
    for name in sizes:
        if name != given and sizes[name] > 1:
            made = _set(nodes, _index(found, x, name))
            yield Trial(group, made, 1, words.indexed(name))
    if given in sizes and sizes[given] > 1:
        for length in _lengths(found):
            made = _set(nodes, length * _index(found, x, given))
            yield Trial(group, made, 2)


def _set(nodes: Sequence[Node], numbers: Numbers) -> dict[int, Change]:
    return {x: constant(numbers) for node in nodes for x in node.results}


def _index(found: Comparison, value: int, name: Hashable, rank: int = 0) -> Numbers:
    """The index of each shard along an axis, with all mesh axes in front."""
    sizes = found.scopes[value].sizes
    shape = [size if other == name else 1 for other, size in sizes.items()]
    index = np.arange(sizes[name]).reshape(shape)
    return np.broadcast_to(index, tuple(sizes.values())).reshape((*sizes.values(), *(1,) * rank))


def _lengths(found: Comparison) -> list[int]:
    """The lengths of what shards have of arrays that are split."""
    return sorted(found.lengths - {0, 1})[:_MOST_LENGTHS]


def _whole_numbers(found: Comparison, group: Group, nodes: Sequence[Node]) -> Iterator[Trial]:
    """Truths the other way round or of another shard; numbers off by one or by the index of a shard."""
    values, sizes = [node.results[0] for node in nodes], found.scopes[nodes[0].results[0]].sizes
    aval: Any = nodes[0].eqn.outvars[0].aval
    if aval.dtype == bool:
        yield Trial(group, {x: _inverted(x) for x in values}, 1)
        for at, name in enumerate(sizes):
            for shift in range(1, sizes[name]):
                yield Trial(group, {x: _moved(x, at, shift, True) for x in values}, 1)
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        for summand in (1, -1):
            made = {x: _increased(x, np.asarray(summand)) for x in values}
            yield Trial(group, made, 1)
        for name, length, offset in _offsets(found, values[0], aval.shape):
            made = {x: _increased(x, offset) for x in values}
            yield Trial(group, made, 1, words.offset(length, name))


def _offsets(
    found: Comparison, value: int, shape: Sequence[int]
) -> Iterator[tuple[Hashable, int, Numbers]]:
    """The index of each shard along an axis, times the length of a part."""
    for name, size in found.scopes[value].sizes.items():
        lengths = {*shape[-1:]} or {1, *_lengths(found)}
        for length in sorted(lengths) if size > 1 else ():
            yield name, length, length * _index(found, value, name, len(shape))


def _operands(
    found: Comparison, group: Group, nodes: Sequence[Node], reruns: Reruns
) -> Iterator[Trial]:
    """Whole numbers that a line is given, less the index of a shard times the length of a part."""
    made_here = {x for node in group.nodes for x in node.results}
    for k, operand in enumerate(nodes[0].operands):
        aval: Any = nodes[0].eqn.invars[k].aval
        if not jnp.issubdtype(aval.dtype, jnp.integer):
            continue
        value = nodes[0].results[0]
        if isinstance(operand, int):
            if operand in made_here or operand in found.indices:
                continue
            given = {x for node in nodes for x in node.operands[k : k + 1] if isinstance(x, int)}
            readers = [node for node in found.mesh.nodes if not given.isdisjoint(node.inputs)]
            if any(node.scope != nodes[0].scope for node in readers):
                continue
            for name, length in itertools.product(found.scopes[value].sizes, _lengths(found)):
                offset = -length * _index(found, value, name, len(aval.shape))
                changed = {x: _increased(x, offset, found.scopes[value]) for x in given}
                yield Trial(group, changed, 2, words.offset(-length, name))
        elif nodes[0].name in _COMPARISONS and not aval.shape:
            for _, _, offset in _offsets(found, value, ()):
                changed = {node.results[0]: _compared(node, k, offset, reruns) for node in nodes}
                yield Trial(group, changed, 2)


def _compared(node: Node, at: int, offset: Numbers, reruns: Reruns) -> Change:
    """A comparison with another constant."""

    def operand(k: int, x: Operand, read: Read) -> Stacked:
        if isinstance(x, int):
            return Stacked(read(x), tuple(node.scope.sizes))
        fixed = reruns.evaluator.operand(x, {})
        return Stacked(fixed.x + offset, tuple(node.scope.sizes)) if k == at else fixed

    def change(read: Read) -> Numbers:
        operands = [operand(k, x, read) for k, x in enumerate(node.operands)]
        (made,) = reruns.evaluator.results(node, operands)
        return on_all_shards(made, node.scope)

    return Change(change, tuple(node.inputs))


def _left_out(found: Comparison, group: Group, nodes: Sequence[Node]) -> Iterator[Trial]:
    """One operand in the place of what is made of two."""
    aval = nodes[0].eqn.outvars[0].aval
    for k, var in enumerate(nodes[0].eqn.invars):
        operands = [node.operands[k] for node in nodes]
        if str(var.aval) != str(aval) or not all(isinstance(x, int) for x in operands):
            continue
        made = {
            node.results[0]: _same(x)
            for node, x in zip(nodes, operands, strict=True)
            if isinstance(x, int)
        }
        yield Trial(group, made, 3)


def _same(source: int) -> Change:
    return Change(lambda read: read(source), (source,))


def _inverted(value: int) -> Change:
    return Change(lambda read: ~read(value))


def _increased(value: int, summand: Numbers, scope: Scope | None = None) -> Change:
    return Change(lambda read: read(value) + summand, scope=scope)


# So many nodes run again for all trials.
_MOST_NODES = 20_000
# A cause that may stand at more lines than these is not sure.
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """The changes that put all results right.

    **Attributes:**

    - `found`: the comparison.
    - `trials`: the likeliest first.
    """

    found: Comparison
    trials: Sequence[Trial]

    @property
    def first(self) -> Trial | None:
        return next(iter(self.trials), None)

    def cause(self, group: Group) -> str | None:
        """The cause at a line, if no other change does the same, there or elsewhere."""
        here = {trial.words for trial in self.trials if trial.group.line == group.line}
        everywhere = {trial.words for trial in self.trials}
        if len(here) != 1 or everywhere != here or "" in here:
            return None
        lines = {trial.group.line for trial in self.trials}
        for trial in self.trials:
            if trial.is_added:
                lines |= self._handing_on(trial)
        known = sorted(line for line in lines if line is not None)
        if len(known) < len(lines) or len(known) > _MOST_LINES:
            return None
        return words.confirmed(here.pop(), known)

    def _handing_on(self, trial: Trial) -> set[Line | None]:
        """The lines at which what a change makes can stand as well.

        There is a `None` among them where the value goes to another function: nobody knows by which lines.
        """
        lines: set[Line | None] = {None} if trial.group.transposed else set()
        own_values = {x for node in trial.group.nodes for x in node.results}
        for x in {x for node in trial.group.nodes for x in node.inputs} - own_values:
            known, before = self.found.relations[x], self.found.maker.get(x)
            if before is not None and before.transposed:
                # What is missing or too much may as well be in the loss.
                lines |= {None}
            elif before is not None and not (known and known.is_plain):
                lines |= {before.line}
        for x in trial.changes:
            maker = self.found.maker[x]
            own = callers_of(maker.eqn)
            readers = [node for node in self.found.mesh.nodes if x in node.inputs]
            for reader in readers:
                if reader.kind == "run" and callers_of(reader.eqn) == own:
                    lines |= {reader.line}
                elif reader.kind == "run" or len(own) > self.found.depth:
                    lines |= {None}
        return lines


def confirmed(
    found: Comparison, mender: Mender, groups: Sequence[Group], others: Sequence[Group] | None
) -> Confirmed:
    """The changes that put all results right.

    **Arguments:**

    - `groups`: the lines that lead to wrong results.
    - `others`: the lines whose values may be wrong though they are those of one device, if any change may
        be tried.
    """
    lined = [group for group in groups if group.line is not None]
    trials = [trial for group in lined for trial in reductions(found, group, group.values)]
    for group in (*lined, *others) if others is not None else ():
        trials += changes(found, group, mender.reruns)
    good = _good(mender, trials)
    if good and good[0].words:
        # A cause is sure only if no other line has it.
        good += _good(mender, [one for group in lined for one in reductions_inside(found, group)])
    return Confirmed(found, good)


def _good(mender: Mender, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that put all results right, the likeliest first."""
    good, end = [], mender.reruns.nodes_run + _MOST_NODES
    for trial in sorted(trials, key=lambda one: one.order):
        if mender.reruns.nodes_run > end:
            break
        if mender.mends(trial.changes):
            good.append(trial)
    return good
