"""Which simple changes put all results right, and whether they tell the cause."""

import dataclasses
from collections.abc import Sequence

from . import _words as words
from ._changes import Trial, changes, reductions, reductions_inside
from ._comparison import Comparison
from ._lines import Line, callers_of
from ._mend import Mender
from ._suspects import Group


# So many steps run again for all trials.
_MOST_STEPS = 20_000
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
        own_values = {x for step in trial.group.steps for x in step.results}
        for x in {x for step in trial.group.steps for x in step.inputs} - own_values:
            known, before = self.found.relations[x], self.found.maker.get(x)
            if before is not None and before.transposed:
                # What is missing or too much may as well be in the loss.
                lines |= {None}
            elif before is not None and not (known and known.is_plain):
                lines |= {before.line}
        for x in trial.changes:
            maker = self.found.maker[x]
            own = callers_of(maker.eqn)
            readers = [step for step in self.found.mesh.steps if x in step.inputs]
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
    good, end = [], mender.reruns.steps_run + _MOST_STEPS
    for trial in sorted(trials, key=lambda one: one.order):
        if mender.reruns.steps_run > end:
            break
        if mender.mends(trial.changes):
            good.append(trial)
    return good
