"""Which changes of lines put all results right, and whether they tell the cause."""

import builtins
import re
from collections.abc import Callable, Sequence

from .._program._lines import SourceLine, is_same_function, returned_as_is
from ._changes import reductions, simple_changes
from ._compare import Comparison
from ._graph import Node
from ._reruns import MOST_NODES, Again, Reruns, runs_of
from ._rounds import of_rounds
from ._several_lines import at_hand, of_gradients, of_losses, of_one_device, of_shares, unreduced
from ._suspects import Suspect, of_single_calls
from ._trials import Trial


# A cause that may stand at more lines than these is not sure.
_MOST_LINES = 3

# A call by a bare name.
_CALL = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\(")


def mending(
    reruns: Reruns,
    suspects: Sequence[Suspect],
    others: Sequence[Suspect] | None,
    again: Again | None,
) -> list[Trial]:
    """The trials that put all results right, the likeliest first.

    **Arguments:**

    - `suspects`: the lines that lead to wrong results.
    - `others`: the lines whose values may be wrong though they are those of one device, if any change may
        be tried.
    - `again`: gives the program with other arguments, of which the results have to be right too: a few
        numbers may be right by accident. None inside of loops.
    """
    comparison = reruns.comparison
    calls = [call for suspect in suspects for call in of_single_calls(suspect)]
    # As many of each kind are tried as there is time for: reductions first, and of both what is likely.
    trials = [x for suspect in (*suspects, *calls) for x in reductions(comparison, suspect)]
    trials += [*of_gradients(comparison, suspects), *of_one_device(comparison)]
    # What a round hands on hardly tells a loss from a share of it.
    trials += [*of_losses(comparison), *of_shares(comparison)] if again is not None else []
    trials.sort(key=_order)
    rest: list[Trial] = []
    if others is not None:
        more = [*unreduced(comparison), *at_hand(comparison), *of_rounds(comparison)]
        more += (x for suspect in suspects for x in simple_changes(comparison, suspect))
        trials += sorted(more, key=_order)
        rest += (x for suspect in others for x in simple_changes(comparison, suspect))
        rest.sort(key=_order)
    early, late = [x for x in trials if not _is_late(x)], [x for x in trials if _is_late(x)]
    good = []
    for some, count in ((early, reruns.most_nodes), (rest, MOST_NODES), (late, MOST_NODES)):
        most = reruns.nodes_run + count
        for trial in some:
            if reruns.nodes_run > most:
                break
            if _mends(reruns, trial):
                good.append(trial)
    good.sort(key=_cost)
    return [
        trial
        for trial in good
        if trial.is_fixed or all(_mends(other, trial) for other in runs_of(again))
    ]


def _mends(reruns: Reruns, trial: Trial) -> bool:
    """Whether a trial puts all results right, where its line runs in loops too."""
    changes = reruns.everywhere(trial.suspect.line, trial.changes)
    return changes is not None and reruns.mends(changes)


def _is_late(trial: Trial) -> bool:
    """Whether a trial is of a line that reads what is wrong already."""
    return trial.suspect.evidence == "after"


def _cost(trial: Trial) -> int | float:
    return trial.cost


def _order(trial: Trial) -> int | float:
    """What is tried first. That a line reads the index of a shard says little against it."""
    return trial.cost + 0.5 * (trial.suspect.evidence == "index")


def cause(
    comparison: Comparison,
    suspect: Suspect,
    trials: Sequence[Trial],
    handed_on: Callable[[Suspect, SourceLine], Sequence[SourceLine]],
) -> str | None:
    """The change that puts all results right at a line, if every change that does so anywhere is the same.

    **Arguments:**

    - `handed_on`: gives the lines that hand on what a line makes, and compute nothing of it.
    """
    # A line may sum something over shards and compute more of the sum. A factor for the sum and one for what
    # the line hands on are then the same cause, in other words.
    of_ends = {x.suspect.line for x in trials if x.is_factor and not _is_inside(x)}
    trials = [
        x for x in trials if not (x.is_factor and x.suspect.line in of_ends and _is_inside(x))
    ]
    at_line = [trial for trial in trials if trial.suspect.line == suspect.line]
    here = {trial.words for trial in at_line}
    if len(here) != 1 or {trial.words for trial in trials} != here or "" in here:
        return None
    lines = {trial.suspect.line for trial in trials}
    if any(_may_be_given(comparison, x) for trial in trials for x in trial.changes):
        return None
    makers = [_maker(comparison, x) for trial in at_line for x in _numbers_of(comparison, trial)]
    if any(node is not None and node.line not in (None, suspect.line) for node in makers):
        # The line reads what another one has made.
        return None
    if any(_is_inside(x) and _is_reduced_by_policy(comparison, x.suspect) for x in trials):
        # Who merges what shards have may merge it in the wrong way.
        return None
    for trial in trials:
        if trial.is_added or trial.is_factor:
            lines |= _before(comparison, trial)
        if trial.is_added and trial.suspect.line:
            after = _after(comparison, trial)
            lines |= after
            if after != {trial.suspect.line}:
                lines |= {*handed_on(trial.suspect, trial.suspect.line)}
    if any(trial.is_added for trial in trials):
        lines |= {*filter(None, map(returned_as_is, filter(None, [*lines])))}
    known = sorted(line for line in lines if line is not None)
    if len(known) < len(lines) or len(known) > _MOST_LINES:
        return None
    first, *others = known
    told = next((x.here for x in trials if x.here and not others), here.pop())
    more = [str(line.number) if line.file == first.file else str(line) for line in others]
    return f"{told} at {' or '.join([str(first), *more])}, all results are right"


def _is_inside(trial: Trial) -> bool:
    """Whether a trial changes values that their line does not hand on."""
    return not {*trial.suspect.values}.issuperset(trial.changes)


def _is_reduced_by_policy(comparison: Comparison, suspect: Suspect) -> bool:
    """Whether a function that reads what a line makes is a write policy: no line of the user's calls it."""
    made, line = {*suspect.values}, suspect.line
    callers = {node.callers for node in suspect.nodes}
    readers = [
        x.line for x in comparison.mesh.nodes if x.callers in callers and made & {*x.operands}
    ]
    return any(line and reader and not is_same_function(line, reader) for reader in readers)


def _numbers_of(comparison: Comparison, trial: Trial) -> set[int]:
    """What a trial changes, and the whole numbers of which its line makes whole numbers that it changes."""
    values = {x for x in trial.changes if comparison.is_whole(x)}
    for node in reversed(comparison.mesh.nodes):
        if node.line == trial.suspect.line and not values.isdisjoint(node.results):
            values.update(filter(comparison.is_whole, node.operands))
    return values | trial.changes.keys()


def _maker(comparison: Comparison, value: int) -> Node | None:
    """What makes a value, or the array of which it is an entry."""
    maker = comparison.maker.get(value)
    while maker is not None and maker.kind == "entry":
        maker = comparison.maker.get(maker.operands[0])
    return maker


def _may_be_given(comparison: Comparison, value: int) -> bool:
    """Whether a literal is added on a line that calls a function, which may have given it."""
    maker = comparison.maker.get(value)
    if maker is None or maker.line is None or not _calls_by_name(maker.line):
        return False
    literals = comparison.mesh.constants.keys()
    nodes = [node for node in comparison.mesh.nodes if value in node.operands or node is maker]
    return any(node.name == "add" and not literals.isdisjoint(node.operands) for node in nodes)


def _calls_by_name(line: SourceLine) -> bool:
    """Whether a line calls a function by its bare name, as those of the user's are called."""
    return any(not hasattr(builtins, name) for name in _CALL.findall(line.source))


def _before(comparison: Comparison, trial: Trial) -> set[SourceLine | None]:
    """The lines before, at which what a change adds can stand as well; a `None` among them is any line."""
    lines: set[SourceLine | None] = {None} if trial.suspect.transposed else set()
    # In the first call of a function and round of a loop: in the others, all that comes in may be wrong.
    first = trial.suspect.nodes[0]
    runs = [(node.callers, node.rounds) for node in (first, *trial.suspect.nodes)]
    nodes = [x for x, run in zip(trial.suspect.nodes, runs[1:], strict=True) if run == runs[0]]
    results_here = {x for node in nodes for x in node.results}
    for x in {x for node in nodes for x in node.operands} - results_here:
        before = comparison.maker.get(x)
        if before is not None and before.transposed:
            # What is missing or too much may as well be in the loss.
            lines.add(None)
        elif before and not comparison.is_plain(x) and x not in comparison.indices:
            lines.add(before.line)
    return lines


def _after(comparison: Comparison, trial: Trial) -> set[SourceLine | None]:
    """The lines after, at which what a change adds can stand as well.

    There is a `None` among them where the value goes to another function: nobody knows by which lines.
    """
    lines: set[SourceLine | None] = set()
    callers = [node.callers for node in comparison.mesh.nodes if node.line is not None]
    # How many lines of the user's are around those of the mapped function itself.
    depth = min(map(len, callers), default=0)
    for x in trial.changes:
        maker = comparison.maker.get(x)
        if maker is None:
            # It comes from the round of a loop before.
            return {None}
        around = maker.callers
        for reader in [node for node in comparison.mesh.nodes if x in node.operands]:
            if reader.kind == "run" and reader.callers == around:
                lines.add(reader.line)
            elif reader.kind == "run" or len(around) > depth:
                lines.add(None)
    return lines
