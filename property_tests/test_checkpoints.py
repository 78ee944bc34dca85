"""A folder of checkpoints that is being written: two savers, lookers and killed savers in any order."""

import pathlib
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm
from statemesh.checkpoint import CheckpointError, Checkpoints


SAVERS = "ab"
# What is done, by whom, and how far its step is beyond the newest one.
ACTIONS = st.tuples(
    st.sampled_from(["save", "save", "save", "look", "look", "killed", "end"]),
    st.sampled_from([*SAVERS, "another"]),
    st.sampled_from([1, 1, 2, 0, -1]),
)


def tree(step: int) -> Any:
    return {"n": step, "x": sm.State(np.full(3, step))}


class Folder:
    """What must be in a folder, as plain sets of steps.

    **Attributes:**

    - `there`: steps that are whole.
    - `dropped`: steps that a saver does not keep, as soon as what it writes is whole.
    - `maybe`: steps that are being written, or may be dropped by now.
    - `halves`: what killed savers have left half-written.
    - `writing`: the step that each saver has not waited for.
    - `open`: the savers that have saved and not ended; for each, whether no other was open meanwhile.
    - `newest`, `newest_whole`: the newest step of all that were written, and of those that were waited for.
    """

    def __init__(self, path: pathlib.Path, keep: dict[str, int | None]) -> None:
        self.path, self.keep = path, keep
        self.savers = {name: Checkpoints(path, number) for name, number in keep.items()}
        self.there: set[int] = set()
        self.dropped: set[int] = set()
        self.maybe: set[int] = set()
        self.halves: set[int] = set()
        self.writing: dict[str, int] = {}
        self.open: dict[str, bool] = {}
        self.newest_whole = self.newest = -1

    def save(self, name: str, gap: int) -> None:
        step = self.newest + gap
        if gap <= 0:
            # Otherwise it depends on the time whether a step that the other one writes is there already.
            for other, saver in self.savers.items():
                saver.wait()
                self.waited(other)
        self.waited(name)
        others = self.open.keys() - {name}
        if gap <= 0:
            with pytest.raises(CheckpointError, match=r"is not later than|must be a whole"):
                self.savers[name].save(step, tree(step))
            return
        self.open = {**dict.fromkeys(others, False), name: self.open.get(name, True) and not others}
        if step in self.halves and others:
            with pytest.raises(CheckpointError, match=f"step {step} is half-written"):
                self.savers[name].save(step, tree(step))
            return
        self.savers[name].save(step, tree(step))
        if not others:
            self.halves.clear()
        self.newest, self.writing[name] = step, step
        if (keep := self.keep[name]) is not None:
            self.dropped |= set(sorted({*self.there, *self.writing.values()})[:-keep])
        self.maybe |= {step} | (self.there & self.dropped)
        self.there -= self.dropped

    def waited(self, name: str) -> None:
        """A saver has written its step, and dropped what it does not keep."""
        step = self.writing.pop(name, None)
        if step is not None:
            self.newest_whole = max(self.newest_whole, step)
            if step not in self.dropped:
                self.maybe.remove(step)
                self.there.add(step)
            if self.open[name] and len(self.there) == self.keep[name]:
                self.maybe.clear()

    def end(self, name: str) -> None:
        with self.savers[name]:
            pass
        self.waited(name)
        self.open.pop(name, None)

    def killed(self) -> None:
        """Another process is killed while it saves the next step."""
        half = self.path / f"{self.newest + 1}.orbax-checkpoint-tmp" / "arrays"
        half.mkdir(parents=True, exist_ok=True)
        self.halves.add(self.newest + 1)

    def look(self, name: str, gap: int) -> None:
        """Look at a folder, with a saver or as another process does."""
        looker = self.savers[name] if name in self.savers else Checkpoints(self.path, keep=1)
        latest = looker.latest
        if latest is None:
            assert self.newest_whole < 0
        else:
            assert latest >= self.newest_whole and latest in self.there | self.maybe
            assert self.load(looker, name, None) in range(latest, self.newest + 1)
        self.load(looker, name, max(self.newest + gap, 0))
        for half in self.halves:
            assert (self.path / f"{half}.orbax-checkpoint-tmp").exists()

    def load(self, looker: Checkpoints, name: str, step: int | None) -> int | None:
        """The step that is loaded, with its own values; `None` where there is none."""
        self.waited(name)
        try:
            loaded = looker.load(tree(0), step)
        except CheckpointError:
            assert step is not None and step not in self.there
            return None
        number: int = loaded["n"]
        assert number in self.there | self.maybe and step in (None, number)
        np.testing.assert_array_equal(loaded["x"].value, np.full(3, number))
        return number


@pytest.mark.slow
@given(
    st.fixed_dictionaries(dict.fromkeys(SAVERS, st.sampled_from([None, 1, 2]))),
    st.lists(ACTIONS, min_size=8, max_size=12),
)
def test_savers_and_lookers_in_any_order(keep: dict[str, int | None], actions: Any) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(pathlib.Path(path), keep)
        for action, name, gap in actions:
            if action == "look":
                folder.look(name, gap)
            elif action == "killed" or name not in SAVERS:
                folder.killed()
            elif action == "save":
                folder.save(name, gap)
            else:
                folder.end(name)
        for name in SAVERS:
            folder.end(name)
        fresh = Checkpoints(path)
        loaded = {
            step for step in range(folder.newest + 1) if folder.load(fresh, "", step) is not None
        }
        assert folder.there <= loaded <= folder.there | folder.maybe
        halves = {int(half.name.partition(".")[0]) for half in folder.path.glob("*tmp*")}
        assert halves == folder.halves
