"""Which simple changes put all results right, and whether they tell the cause."""

import dataclasses
from collections.abc import Sequence

from . import _words as words
from ._changes import Trial, changes, reductions
from ._comparison import Comparison
from ._mend import Mender
from ._suspects import Group


# So many steps run again for all trials.
_MOST_STEPS = 12_000
# A cause that may stand at more lines than these is not sure.
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """The changes that put all results right.

    **Attributes:**

    - `trials`: the likeliest first.
    """

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
        lines = sorted({trial.group.line for trial in self.trials if trial.group.line})
        return words.confirmed(here.pop(), lines) if len(lines) <= _MOST_LINES else None


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
    trials = [trial for group in lined for trial in reductions(found, group)]
    for group in (*lined, *others) if others is not None else ():
        trials += changes(found, group, mender.reruns)
    # What has to reach all wrong results and does not needs no run.
    trials = [one for one in trials if mender.broken <= mender.reached(one.changes)]
    good, end = [], mender.reruns.steps_run + _MOST_STEPS
    for trial in sorted(trials, key=lambda one: one.order):
        if mender.reruns.steps_run > end:
            break
        if mender.mends(trial.changes):
            good.append(trial)
    return Confirmed(good)
