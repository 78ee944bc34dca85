"""`locate`: the line at which a call on a mesh stops computing what it computes on one device."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax

import statemesh as sm

from ..._jax._frames import without_own_frames
from .. import _errors as errors
from .._program._collective_rules import RULES
from .._program._doubled import widened
from .._program._lines import (
    SourceLine,
    definition_of_axes,
    definitions_of_numbers,
    is_wrapper,
    line_of_gradient,
    renames,
    returned_as_is,
    returns,
    uses_of,
)
from .._program._numbers import is_inexact, is_numpy, promoted
from .._program._other_values import generic
from .._program._trace import (
    NO_MESH,
    Trace,
    is_array_or_type,
    name_of,
    on_one_device,
    trace_exactly,
    weighted_gradient,
)
from .._types import AnyLeaf, Fun, PyTree, tree_util
from ._changes import is_reduced_after
from ._compare import Comparison, both_traced, compare_traced, inside, right_values
from ._graph import Node, needed
from ._interventions import cause, mending
from ._located import (
    Located,
    Place,
    most_off,
    name_of_operation,
    relation_in_words,
    shapes_in_words,
    whole_values,
)
from ._other_specs import of_mapping_again
from ._reruns import Again, Outcome, Reruns
from ._specs import of_lengths, of_other_axes, of_other_policies
from ._suspects import (
    REDUCTIONS,
    Evidence,
    Suspect,
    call_to_blame,
    is_first,
    is_multiple,
    is_of_one,
    of_first_wrong_round,
    of_the_others,
    others,
    suspects_of,
)
from ._trials import Trial


# A report names so many.
_MOST_PLACES = 3
# These compute nothing.
_REARRANGING = ("split", "slice", "squeeze", "reshape", "transpose", "concatenate", "dynamic_slice")
_LEFT_AS_IT_IS = "a value that this line leaves as it is, unlike others that are made with it"
_NO_LINE = "this result, made by no line of yours"
# The places of specs, and what puts all right.
_OfSpecs: TypeAlias = tuple[list[Place], str | None]
# Whether a report raises a failure of `locate` instead of telling it; our tests set this.
RAISE_FAILURES = False


@without_own_frames
def locate(mapped: sm.StatefulMapping, /, *args: PyTree, **kwargs: PyTree) -> Located | None:
    """Find the line at which a call on a mesh stops computing what it computes on one device.

    The programs of both are traced and replayed side by side in double precision, with all shards on one
    device. A value is what it should be where shards have all of it, or their parts, or partial results that
    a later line makes whole. From the wrong results `locate` goes back to the lines that make other values
    than these. It runs the program with the right values at such lines, and the line comes first that so puts
    the results right.

    **Arguments:**

    - `mapped`: the result of `shard_map`, `pmap2` or `vmap2`. The mesh may be a `jax.sharding.AbstractMesh`.
    - `args`, `kwargs`: the arguments of the call. Generic numbers tell more than zeros and ones.

    **Returns:** a `Located`, whose text is a report; `None` if the results and their derivatives agree. Where
    the results agree, those of other floats are compared, and then the derivatives of a weighted sum of the
    results. A line in a loop comes with the number of its first wrong round. If all agrees in double
    precision, the dtypes of the program are tried.

    **Raises:** the errors of the call, and those of its gradient if it has none; `StatemeshError` that names
    a primitive that cannot be replayed.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> located = locate(centred, jnp.arange(8.0))
        >>> located.places[0].source
        'mean = x.mean(0)'
        >>> located.places[0].note
        "the mean over 'data' of what shards have is the value on one device"

        ```
    """
    if not isinstance(mapped, sm.StatefulMapping):
        expected = "what shard_map, pmap2 or vmap2 returned"
        raise errors.bad_keyword("locate", "mapped", mapped, expected)
    return located(mapped, mapped.unsharded, args, kwargs, others=True)


def located(
    mapped: Fun,
    reference: Fun,
    args: Sequence[PyTree],
    kwargs: PyTree = None,
    *,
    results: bool = True,
    gradient: bool = True,
    others: bool = False,
    kept: Collection[str] = (),
) -> Located | None:
    """`locate` for any two functions of the same arguments, of which the second is right.

    **Arguments:**

    - `results`: whether the results are compared.
    - `gradient`: whether the derivatives are compared where the results agree.
    - `others`: whether the results of other floats are compared where those of the arguments agree.
    - `kept`: the paths of arguments, or of parts of them, that other arguments have too.
    """
    call = tuple(args), kwargs or {}
    lines = _compared(mapped, reference, call, kept, others=others) if results else None
    if lines is None and gradient and any(map(eqx.is_inexact_array, jax.tree.leaves(call))):
        lines = _compared(_gradient(mapped), _gradient(reference), call, kept, narrow=False)
        lines = None if lines is None else dataclasses.replace(lines, gradient=True)
    return lines


def located_or_why(*args: Any, **kwargs: Any) -> Located | str | None:
    """`located` for a report, which must not end in an error of its own.

    It takes the same arguments. A failure is a bug of `locate`: the report says it, and our tests raise it.
    """
    try:
        return located(*args, **kwargs)
    except Exception as error:
        if RAISE_FAILURES:
            raise
        text = " ".join(str(error).split())
        return f"No line is named, because locate failed: {type(error).__name__}: {text}"


def _gradient(call: Fun) -> Fun:
    """The gradient, by every inexact array, of a weighted sum of all results of a call."""

    def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        inexact, rest = eqx.partition((args, kwargs), _is_inexact)

        def results(inexact: PyTree) -> tuple[list[jax.Array], None]:
            args, kwargs = eqx.combine(inexact, rest)
            return [x for x in jax.tree.leaves(call(*args, **kwargs)) if _is_inexact(x)], None

        return weighted_gradient(results, inexact)[0]

    gradient.__name__ = name_of(call)
    return gradient


def _is_inexact(x: AnyLeaf) -> bool:
    return is_array_or_type(x) and is_inexact(x.dtype)


def _compared(
    mapped: Fun,
    reference: Fun,
    call: PyTree,
    kept: Collection[str],
    *,
    narrow: bool = True,
    others: bool = False,
) -> Located | None:
    """Where two calls differ in double precision, or in the dtypes of the program, or of other floats."""
    arrays, traces = both_traced(mapped, reference, call)
    on_mesh, on_device = (traced.paths for traced in traces)
    if len(on_mesh) != len(on_device):
        only = [path for path in on_mesh if path not in on_device]
        only += [path for path in on_device if path not in on_mesh]
        raise sm.StatemeshError(
            f"locate: the call on the mesh returns {len(on_mesh)} arrays, and the one on one device "
            f"{len(on_device)}. Only one of the two returns: {', '.join(only[:8])}."
        )
    of_mapping = _of_mapping(mapped, traces[1], arrays, kept, is_wide=jax.config.jax_enable_x64)
    runs = [(True, widened(arrays).values)]
    if narrow and any(
        _is_inexact(x) and promoted(x.dtype) != x.dtype for x in jax.tree.leaves(arrays)
    ):
        runs.append((False, jax.tree.map(on_one_device, arrays)))
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        for wide, values in runs:
            comparison = compare_traced(traces, values, wide=wide)
            if not all(comparison.right):
                again = functools.partial(_run_again, traces, arrays, kept, wide=wide)
                of_specs = functools.partial(of_mapping, lambda: arrays, wide)
                found = _located(comparison, traces, call, functools.cache(again), of_specs)
                return dataclasses.replace(found, rounding=not wide)
        make = functools.partial(_with_other_floats, arrays, kept)
        other = _compared_with(traces, make, wide=True) if others else None
        if other is not None and not all(other.right):
            again = functools.partial(_run_again, traces, arrays, kept, wide=True)
            of_specs = functools.partial(of_mapping, make, True)
            found = _located(other, traces, call, functools.cache(again), of_specs)
            return dataclasses.replace(found, other_floats=True)
    return None


def _with_other_floats(arrays: PyTree, kept: Collection[str]) -> PyTree:
    """Arguments with other floats. Integers keep their values: many are positions."""
    other = generic(arrays, kept)
    return jax.tree.map(lambda x, y: y if _is_inexact(x) else x, arrays, other)


def _compared_with(
    traces: Sequence[Trace], make: Callable[[], PyTree], *, wide: bool
) -> Comparison | None:
    """Two traced functions with arguments that are made; `None` where they cannot be run with them."""
    try:
        other = make()
        values = widened(other).values if wide else jax.tree.map(on_one_device, other)
        return compare_traced(traces, values, wide=wide)
    except Exception:  # A function may raise any error for values that it was not written for.
        return None


def _run_again(
    traces: Sequence[Trace], arrays: PyTree, kept: Collection[str], *, wide: bool
) -> Reruns | None:
    """The program with other arguments; `None` where it cannot be run with them."""
    make = functools.partial(generic, arrays, kept, seed=2)
    other = _compared_with(traces, make, wide=wide)
    return None if other is None else Reruns(other)


def _of_mapping(
    mapped: Fun, reference: Trace, arrays: PyTree, kept: Collection[str], *, is_wide: bool
) -> Callable[[Callable[[], PyTree], bool], _OfSpecs]:
    """What finds the spec with which a function has to be mapped, so that all its results are right.

    **Arguments:**

    - `is_wide`: whether the user's JAX has 64 bits.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def find(make: Callable[[], PyTree], wide: bool) -> _OfSpecs:
        def is_right(other: Fun, call: PyTree) -> bool | None:
            leaves, treedef = tree_util.tree_flatten(call)
            try:
                with jax.enable_x64(is_wide), jax.sharding.use_abstract_mesh(mesh):
                    traces = trace_exactly(other, treedef, leaves), reference
            except (
                Exception
            ):  # A function may raise any error for parts that it was not written for.
                return None
            found = _compared_with(traces, make, wide=wide)
            if found is None or not all(found.right):
                return None if found is None else False
            again = _compared_with(
                traces, functools.partial(generic, arrays, kept, seed=2), wide=wide
            )
            return again is None or all(again.right)

        if not isinstance(mapped, sm.StatefulMapping):
            return [], None
        return of_mapping_again(mapped, arrays, is_right)

    return find


def _located(
    comparison: Comparison,
    traces: Sequence[Trace],
    call: PyTree,
    again: Again,
    of_specs: Callable[[], _OfSpecs],
) -> Located:
    """Where two traced calls differ, by what speaks for it: specs, then lines, then the result itself."""
    names, paths = ("args", "kwargs"), traces[0].paths
    # What a user would type for each array of the arguments.
    arguments = [
        names[path[0].idx] + jax.tree_util.keystr(path[1:])
        for path, x in tree_util.tree_flatten_with_path(call)[0]
        if is_array_or_type(x) or is_numpy(x)
    ]
    (likeliest, is_all), reason = of_lengths(comparison, paths, arguments), None
    if likeliest and not is_all:
        found, reason = of_specs()
        known = {place.source for place in found}
        likeliest = [*found, *(place for place in likeliest if place.source not in known)]
    if not likeliest:
        likeliest, reason, is_explained = places(comparison, again)
        if not is_explained:
            found, reason_of_specs = of_other_axes(comparison, arguments, paths, again)
            if not found:
                found, reason_of_specs = of_specs()
            likeliest, reason = [*found, *likeliest], reason_of_specs or reason
        of_policies, is_likelier = of_other_policies(comparison, arguments, paths, again)
        # A line can do what another policy would.
        position = 0 if is_likelier else 1
        likeliest[position:position] = of_policies
        # One of the two is enough, and nobody knows which.
        reason = None if of_policies else reason
    if not likeliest:
        number = comparison.right.index(False)
        types = [traced.closed.out_avals[number] for traced in traces]
        got, want = whole_values([values[number].x for values in comparison.ends], types)
        result = paths[number]
        likeliest = [Place("", 0, result, _NO_LINE, got=got, want=want, shards="")]
    return Located(tuple(likeliest[:_MOST_PLACES]), comparison.matched, reason)


# The likeliest lines

# There is one list of interventions: right values at each line that leads to a wrong result, and simple
# changes of lines that put all results right. Each has a cost: of what speaks for it, and of the results that
# stay wrong. Lines are ordered by the least cost of their interventions, and then by their place in the
# program.
#
# The costs are those that name most lines of the planted models (`property_tests/planted`), but for two that
# are kept apart. Settings beside these name up to three lines of 270 less in the first place, on either half
# of the models. What else could speak for a line, such as that it reads what the likeliest line makes, that
# it moves values between shards, or that it puts all right together with its derivative, was tried and named
# no more lines.

_COST_OF_EVIDENCE = {
    "first": 1,
    "reduced": 0,
    "unshaped": 4,
    "unsure": 2,
    "unmasked": 1,
    "related": 1,
    "derivative": 2,
    "index": 5,
    "after": 3,
}
# After a line that makes partial results any other one may be to blame.
_UNDECIDED: Sequence[Evidence] = ("related", "derivative")
# What makes their values whole may be missing on a later line.
_INCOMPLETE: Sequence[Evidence] = (*_UNDECIDED, "unsure")
# What is likelier than another one by its kind alone.
_BEFORE = 0.5
# A mistake in a line shows in its derivative too.
_COST_OF_DERIVATIVE = 1
# Not all results are known to be right with right values at the line: some stay wrong, or the values were not
# tried, because nobody knows them or those at an earlier line put all results right. And no result is.
_COST_OF_OUTCOME: Mapping[Outcome | None, int] = {"all": 0, "some": 3, None: 3, "none": 6}


def places(
    comparison: Comparison, again: Again | None = None
) -> tuple[list[Place], str | None, bool]:
    """The likeliest places, and what puts all results right if that is sure.

    And whether the first place explains all: right values or a change there put all results right, and it is
    not that parts which do not belong together come into it.

    **Arguments:**

    - `again`: gives the program with other arguments.
    """
    search = _search(comparison, again)
    reruns, suspects, trials = search.reruns, search.suspects, search.trials
    interventions = [*search.interventions]
    if not trials and (of_round := of_first_wrong_round(comparison)) is not None:
        search = _search(of_round)
        # What puts one round right is less sure than what puts all results right.
        trials = search.trials
        interventions += search.interventions
    by_line: dict[SourceLine | None, Suspect] = {}
    ordered = sorted(interventions, key=lambda intervention: intervention[:2])
    for *_, suspect in ordered:
        by_line.setdefault(suspect.line, suspect)
    if not by_line:
        return [], None, False
    starts = [node for node in ordered[0][2].nodes if is_first(comparison, node)]
    # Parts that are split by other axes do not belong together, whatever is computed of them.
    is_explained = (
        ordered[0][0] < _COST_OF_EVIDENCE["after"]
        and not (starts and starts[0].name not in RULES)
        and not any(is_of_one(comparison, x) for x in ordered[0][2].values)
    )
    likeliest = list(by_line.values())
    # What a wrong reduction gets is what another one would put right.
    accused = likeliest[: 2 if likeliest[0].evidence == "reduced" else 1]
    handed_on = functools.partial(_handed_on, comparison)
    reasons = (cause(comparison, suspect, trials, handed_on) for suspect in accused)
    reason = next(filter(None, reasons), None)
    # What is made of positions only, a later line may take from the shards that have it.
    is_of_positions = not any(x.evidence in ("first", "reduced", "unshaped") for x in suspects)
    incomplete = (*_INCOMPLETE, "after") if is_of_positions else _INCOMPLETE
    shown: dict[tuple[str, int], Place] = {}
    # After a cause nothing is left to explain.
    for suspect in likeliest[: 2 if reason else _MOST_PLACES]:
        deeper, reason_inside = _places_inside(comparison, suspect)
        if deeper and not shown:
            reason = reason_inside
        trial = next((trial for trial in trials if trial.suspect.line == suspect.line), None)
        for place in deeper or _places_at(reruns, suspect, trial, incomplete):
            shown.setdefault((place.file, place.line), place)
            if (axes := definition_of_axes(SourceLine(place.file, place.line))) is not None:
                shown.setdefault((axes.file, axes.number), _at(place, axes))
    return list(shown.values())[:_MOST_PLACES], reason, is_explained


@dataclasses.dataclass(frozen=True)
class _Search:
    """What was found by running a program again.

    **Attributes:**

    - `reruns`: what ran it.
    - `suspects`: the lines that lead to wrong results.
    - `trials`: the changes that put all results right.
    - `interventions`: the costs of all interventions, the positions of their lines, and the lines.
    """

    reruns: Reruns
    suspects: Sequence[Suspect]
    trials: Sequence[Trial]
    interventions: Sequence[tuple[int | float, int, Suspect]]


def _search(comparison: Comparison, again: Again | None = None) -> _Search:
    reruns, suspects = Reruns(comparison), suspects_of(comparison)
    # Of a long program there is time for some lines only. Last come derivatives, and lines that read what is
    # wrong already.
    outcomes: dict[Suspect, Outcome | None] = {}
    positions = {suspect: position for position, suspect in enumerate(suspects)}
    last = len(suspects)
    for suspect in sorted(suspects, key=lambda x: x.evidence == "after" or x.transposed):
        if positions[suspect] > last:
            continue
        outcomes[suspect] = reruns.try_right(suspect)
        if outcomes[suspect] == "all" and suspect.evidence not in _UNDECIDED:
            last = positions[suspect]
        if suspect.evidence == "after" and reruns.ends_with(suspect.values):
            # Who changes the results themselves puts them right in any case.
            outcomes[suspect] = None
    # Right values at a line after one that puts everything right would do so too.
    outcomes |= dict.fromkeys(suspects[last + 1 :])
    lines = [suspect for suspect in suspects if suspect.line]
    if "all" in outcomes.values():
        # There is one mistake, and it leads to all wrong results.
        for x in lines:
            if outcomes[x] in ("some", None) and not reruns.reaches_all(x.values):
                outcomes[x] = "none"
    is_sure = comparison.matched and any(
        outcomes[suspect] == "all"
        and suspect.evidence in ("first", "reduced")
        # A simple change of what makes a piece may be the cause.
        and comparison.pieces.keys().isdisjoint(suspect.values)
        for suspect in lines
    )
    changed = [suspect for suspect in lines if suspect.evidence != "derivative"]
    trials = mending(reruns, changed, None if is_sure else others(comparison, suspects), again)
    # The cost of an intervention, the position of its line in the program, and the line. Lines that lead to
    # no wrong result come last.
    interventions = [(x.cost, positions.get(x.suspect, len(suspects)), x.suspect) for x in trials]
    for x in lines:
        evidence = _COST_OF_EVIDENCE[x.evidence] + _BEFORE * _next_line_reduces(comparison, x)
        evidence += _COST_OF_DERIVATIVE * x.transposed
        interventions.append((evidence + _COST_OF_OUTCOME[outcomes[x]], positions[x], x))
    for cost, position, x in [*interventions]:
        if x.evidence in _UNDECIDED and (other := of_the_others(comparison, x)):
            interventions.append((cost - _BEFORE, position, other))
    return _Search(reruns, suspects, trials, interventions)


def _next_line_reduces(comparison: Comparison, suspect: Suspect) -> bool:
    """Whether a line makes partial results which the next line reduces after it has computed more of them."""
    if suspect.evidence != "related" or suspect.transposed:
        return False
    relations = [(x, comparison.relations[x]) for x in suspect.values]
    along = {
        (x, axis)
        for x, known in relations
        for axis, kind, _ in (known.kinds if known else ())
        if kind in ("sum", "mean")
    }
    return bool(along) and all(is_reduced_after(comparison, x, axis) for x, axis in along)


def _places_at(
    reruns: Reruns, suspect: Suspect, trial: Trial | None, incomplete: Collection[Evidence]
) -> list[Place]:
    """The place of a line, with the lines before and after it that may be to blame as well.

    **Arguments:**

    - `incomplete`: evidence for a line whose values something on a later line should make whole.
    """
    comparison, place, line = reruns.comparison, _place(reruns, suspect, trial), suspect.line

    def at(lines: Sequence[SourceLine]) -> list[Place]:
        return [_at(place, x) for x in lines]

    is_handed = not any(is_first(comparison, node) for node in suspect.nodes)
    if is_handed and all(node.name in _REARRANGING for node in suspect.nodes):
        rearranged = _rearranged(comparison, suspect)
        if rearranged or suspect.evidence != "related":
            return [*at(rearranged), place]
    call = _call_of_wrapper(comparison, suspect)
    if call is not None:
        return [*at([call]), place]
    number = _own_number(comparison, suspect) if trial is None else None
    if number is not None:
        return [*at([number]), place]
    loop = _loop_to_blame(comparison, suspect) if trial is None else None
    if loop is not None:
        return [*at([loop]), place]
    is_incomplete = suspect.evidence in incomplete or (trial is not None and trial.is_added)
    if suspect.transposed:
        return [place, *at(_gives(comparison, suspect))]
    if not is_incomplete or line is None:
        return [place]
    # A line that a change puts right is not right elsewhere.
    is_own = trial is not None and not trial.is_added
    is_partial = suspect.evidence == "related" and not is_own
    call = call_to_blame(comparison, suspect) if is_partial else None
    handed_on = _handed_on(comparison, suspect, line) if call is None else uses_of(call)[:1]
    # Who gives a value another name, or returns it by its name, had something else to do with it, unless the
    # line itself reduces it along some axes.
    reduces = any(
        node.name.startswith(REDUCTIONS) and node.line == line for node in comparison.mesh.nodes
    )
    renamed = [x for x in handed_on if renames(call or line, x) and not reduces]
    others = [x for x in handed_on if x not in renamed]
    if call is None:
        # A function that does nothing was to do something.
        idle = _idle(comparison, suspect, line) if trial is not None and trial.is_added else []
        return [*at([*idle, *renamed]), place, *at(others)]
    return [*at([*renamed, call, *others]), place]


def _call_of_wrapper(comparison: Comparison, suspect: Suspect) -> SourceLine | None:
    """The line that calls a function of one line, where a collective is wrong only in this call of it."""
    line = suspect.line
    if line is None or suspect.transposed or not is_wrapper(line):
        return None
    calls: dict[bool, set[SourceLine]] = {True: set(), False: set()}
    for node in comparison.mesh.nodes:
        is_alike = node.line == line and not node.transposed and node.name in RULES
        is_right = all(map(comparison.is_plain, node.results))
        is_given = is_right or all(map(comparison.is_plain, node.operands))
        if is_alike and node.callers and is_given:
            calls[is_right].add(node.callers[0])
    wrong, right = calls[False], calls[True] - calls[False]
    return wrong.pop() if right and len(wrong) == 1 else None


def _own_number(comparison: Comparison, suspect: Suspect) -> SourceLine | None:
    """The line that computes the number which a line reads by its name, where one device has another."""
    first = [x for x in suspect.nodes if is_first(comparison, x)] if not suspect.transposed else []
    for node in first:
        partner = comparison.partners.get(node)
        for x, y in zip(node.operands, partner.operands, strict=False) if partner else ():
            got, want = comparison.named(x, y)
            if got != want and suspect.line is not None:
                here = [node for node in comparison.mesh.nodes if node.line == suspect.line]
                makers = [comparison.maker.get(x) for node in here for x in node.operands]
                # These lines make arrays, not numbers of Python's.
                made = {maker.line for maker in makers if maker}
                of_numbers = definitions_of_numbers(suspect.line)
                return next((line for line in of_numbers if line not in made), None)
    return None


def _at(place: Place, line: SourceLine) -> Place:
    """The place at another line."""
    return dataclasses.replace(place, file=line.file, line=line.number, source=line.source)


def _loop_to_blame(comparison: Comparison, suspect: Suspect) -> SourceLine | None:
    """The line that runs a loop over the rows of each shard, where nothing is wrong before the loop.

    On one device its rounds are those of all shards one after another. What is wrong then is what the loop of
    each shard begins with, and not the line in its body.
    """
    lines = {node.rounds[0].line if node.rounds else None for node in suspect.nodes}
    line = lines.pop()
    if lines or line is None:
        return None
    own, whole = (
        _length_of_loop(side.nodes, line) for side in (comparison.mesh, comparison.single)
    )
    is_split = any(n > 1 and own * n == whole for n in suspect.nodes[0].scope.sizes.values())
    before = needed(comparison.mesh.nodes, suspect.values)
    outside = [x for node in before if not node.rounds for x in node.results]
    # The numbers of a shard's own rows are as they should be.
    is_right = all(comparison.is_whole(x) or not comparison.is_unrelated(x) for x in outside)
    return line if is_split and is_right else None


def _length_of_loop(nodes: Sequence[Node], line: SourceLine) -> int:
    """How many rounds the loop of a line has; 0 if there is none."""
    opened = (
        node.rounds[0].number + 1
        for node in nodes
        if node.rounds[:1] and node.rounds[0].line == line
    )
    whole = (
        node.eqn.params["length"] for node in nodes if node.name == "scan" and node.line == line
    )
    return max((*opened, *whole), default=0)


def _idle(comparison: Comparison, suspect: Suspect, line: SourceLine) -> list[SourceLine]:
    """The lines of functions that do nothing, among those that a line calls, or one that reads it."""
    values = {*suspect.values}
    readers = [x.line for x in comparison.mesh.nodes if not values.isdisjoint(x.operands)]
    lines = dict.fromkeys(x for x in (line, *readers) if x is not None)
    return [*filter(None, map(returned_as_is, lines))]


def _gives(comparison: Comparison, suspect: Suspect) -> list[SourceLine]:
    """The line that calls the function of a line, where it gives the derivatives that are multiples there."""
    if not all(is_multiple(comparison, x) for x in suspect.values):
        return []
    read = {x for node in suspect.nodes for x in node.operands}
    makers = {comparison.maker[x].line for x in read if x in comparison.maker}
    return [line for line in suspect.nodes[0].callers[:1] if line in makers]


def _rearranged(comparison: Comparison, suspect: Suspect) -> list[SourceLine]:
    """The first line before one that computes nothing, where that makes something unrelated.

    What is wrong was so before, where nobody knows what the parts should be.
    """
    read = [x for node in suspect.nodes for x in node.operands if comparison.is_unrelated(x)]
    makers = [comparison.maker[x].line for x in read if x in comparison.maker]
    return [line for line in makers if line is not None and line != suspect.line][:1]


def _handed_on(comparison: Comparison, suspect: Suspect, line: SourceLine) -> Sequence[SourceLine]:
    """The next lines that read what a line makes, where they compute nothing from that.

    That is a line such as `return own`, which lacks what makes the parts of a sum whole, or one that calls
    the function with the line. Of a result of the call that may also be missing where the outermost of the
    user's functions reads it last.
    """
    values = {*suspect.values}
    readers = [node for node in comparison.mesh.nodes if not values.isdisjoint(node.operands)]
    # A function that one of both lines calls may read them too.
    calling = {line for node in readers for line in node.callers}
    if line in calling:
        return []
    uses, around = uses_of(line)[:1], suspect.nodes[-1].callers
    if returns(line):
        uses += around[:1]
    if any(node.kind == "join" for node in readers):
        uses += uses_of([line, *around][-1])[-1:]
    read = {*calling, *(node.line for node in readers)}
    return [use for use in dict.fromkeys(uses) if use not in read]


def _places_inside(comparison: Comparison, suspect: Suspect) -> tuple[list[Place], str | None]:
    """The places inside a loop or branch in which values stop being related."""
    loops = [node for node in suspect.nodes if node in comparison.operands]
    within = inside(comparison, loops[0]) if loops and is_first(comparison, loops[0]) else None
    if within is None:
        return [], None
    likeliest, reason, _ = places(within[0])
    if within[1] is not None:
        likeliest = [dataclasses.replace(place, step=within[1]) for place in likeliest]
    return likeliest, reason


def _place(reruns: Reruns, suspect: Suspect, trial: Trial | None) -> Place:
    comparison = reruns.comparison
    differing = [(node, x) for node in suspect.nodes for x in node.results if comparison.differs(x)]
    # Where all that a line makes is related, what it hands on shows best what is off.
    unrelated = [each for each in differing if comparison.is_unrelated(each[1])]
    node, value = next(
        itertools.chain(
            (
                each
                for each in unrelated
                if next(right_values(comparison, each[1]), None) is not None
            ),
            (
                each
                for each in reversed(differing)
                if each[1] in suspect.values and each not in unrelated
            ),
            unrelated,
        ),
        (suspect.nodes[0], suspect.nodes[0].results[0]),
    )
    got = want = shards = ""
    is_shown = comparison.differs(value) and value not in comparison.indices
    right = next(right_values(comparison, value), None) if is_shown else None
    if is_shown and (right is not None or trial is None):
        if right is None:
            got, want = shapes_in_words(comparison.values[value].shape, comparison.wants.get(value))
        else:
            names = comparison.scopes[value].sizes
            got, want, shards = most_off(comparison.got(value), right, names)
    elif trial:
        # What the change makes is right.
        value, change = next(iter(trial.changes.items()))
        node = comparison.maker.get(value, node)
        names = (change.scope or comparison.scopes[value]).sizes
        got, want, shards = most_off(*reruns.both(value, change), names)
    known, line = comparison.relations.get(value), suspect.line
    assert line is not None
    operation, note = name_of_operation(node), relation_in_words(known) if known else ""
    if (
        suspect.evidence == "other"
        and line not in (node.line, line_of_gradient(node.eqn))
        and not trial
    ):
        operation = _LEFT_AS_IT_IS
    first = differing[0][0] if differing else node
    step = first.rounds[0].number if first.rounds else None
    return Place(line.file, line.number, line.source, operation, got, want, shards, step, note)
