"""`Checkpoints`: a folder with checkpoints of several steps."""

import operator
import os
import pathlib
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from .._base._types import PyTree, Size, Tree
from . import _files as files
from ._files import CheckpointError
from ._save_and_load import contents, load


C = TypeVar("C", bound="Checkpoints")


class Checkpoints:
    """A folder with checkpoints of several steps, which are written in the background.

    Leaving a `with`, or `close`, waits until all is written. Each step is a folder as `save` makes one. Only
    `save` writes and deletes: so another process can look at the folder while it is being written.

    **Arguments:**

    - `folder`: where. `save` removes what killed processes have left there half-written or half-deleted.
    - `keep`: how many of the newest steps stay, at least 1; left out, all.

    **Raises:** `CheckpointError` for another `keep`.

    !!! example

        ```python
        >>> import tempfile, jax.numpy as jnp, statemesh as sm
        >>> from statemesh.checkpoint import Checkpoints
        >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
        ...     for step in range(4):
        ...         checkpoints.save(step, {"count": sm.State(jnp.int32(step))})
        >>> checkpoints.latest
        3
        >>> checkpoints.load({"count": sm.State(0)})["count"].value
        Array(3, dtype=int32)

        ```
    """

    def __init__(self, folder: str | os.PathLike[str], keep: Size | None = None) -> None:
        whole = _whole_number(keep)
        if keep is not None and (whole is None or whole < 1):
            raise CheckpointError(
                f"Checkpoints: keep is {keep!r}, but must be a whole number of at least 1. Leave it out to "
                "keep all steps."
            )
        self._folder = files.folder_path("Checkpoints", folder)
        self._keep = whole
        self._writer: _Writer | None = None

    @property
    def latest(self) -> int | None:
        """The newest step that is saved whole; `None` if there is none."""
        return max(files.steps_in(self._folder), default=None)

    def save(self, step: Size, tree: PyTree) -> None:
        """Copy the values of a tree to the host, and write them in the background.

        The step can be loaded when all of it is written. The next `save` waits until then.

        **Arguments:**

        - `step`: a whole number, larger than that of each step in the folder.
        - `tree`: as for `save`.

        **Raises:** `CheckpointError` for a step that is no such number, if this step or the one before cannot
        be written, and if another process is writing this step.
        """
        number = _step("save", step)
        self.wait()
        latest = self.latest
        if latest is not None and number <= latest:
            raise CheckpointError(
                f"Checkpoints.save: step {number} in {self._folder} is not later than step {latest}, the "
                "newest there. Go on counting from `latest`, or give another folder."
            )
        arrays, record = contents("Checkpoints.save", tree)
        record["step"] = number
        with files.writing(f"step {number}"):
            if self._writer is None:
                self._writer = _Writer(self._folder, self._keep)
            self._writer.save(number, files.to_save(arrays, record))

    def load(
        self,
        like: Tree,
        step: Size | None = None,
        mesh: Mesh | None = None,
        *,
        rename: Mapping[str, str | None] | None = None,
        missing: str = "error",
    ) -> Tree:
        """Load a step.

        **Arguments:**

        - `like`, `mesh`, `rename`, `missing`: as for `load`.
        - `step`: left out, the newest.

        **Returns:** the tree, as `load` does.

        **Raises:** what `load` does; `CheckpointError` for a step that was not saved.
        """
        number = None if step is None else _step("load", step)
        self.wait()
        while True:
            steps = files.steps_in(self._folder)
            chosen = max(steps, default=None) if number is None else number
            if chosen is None or chosen not in steps:
                wanted = "no step" if number is None else f"no step {number}"
                there = (
                    f"There are: {', '.join(map(str, steps))}."
                    if steps
                    else "Nothing was saved there yet."
                )
                raise CheckpointError(f"Checkpoints.load: {self._folder} holds {wanted}. {there}")
            folder = self._folder / str(chosen)
            try:
                saved_as = files.read_record(folder).get("step", chosen)
                if saved_as != chosen:
                    raise CheckpointError(
                        f"Checkpoints.load: {folder} was saved as step {saved_as}, and has been renamed. "
                        "Give it its name again, or write statemesh.checkpoint.load(folder, like), which "
                        "takes a folder of any name."
                    )
                return load(folder, like, mesh, rename=rename, missing=missing)
            except CheckpointError:
                # Another process that saves may have dropped the step meanwhile.
                if jax.process_count() > 1 or folder.exists():
                    raise

    def wait(self) -> None:
        """Wait until what was saved is written.

        **Raises:** `CheckpointError` if it cannot be written.
        """
        if self._writer is not None:
            with files.writing("the last step"):
                self._writer.wait()

    def close(self) -> None:
        """Wait until what was saved is written, and end the threads that write. `save` may start them again.

        **Raises:** `CheckpointError` if it cannot be written.
        """
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Writer:
    """What writes the steps of a folder, and deletes them."""

    def __init__(self, folder: pathlib.Path, keep: int | None) -> None:
        self.folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, todelete_subdir=files.OLD)
        self.manager = ocp.CheckpointManager(
            folder, options=options, item_handlers=files.handlers()
        )
        self.lock: int | None = None
        if jax.process_index() == 0:
            self.lock = files.open_lock(folder)
            # It is held while the manager lives, which its thread keeps alive until all is written.
            self.unlock = weakref.finalize(self.manager, os.close, self.lock)
        self.deleting = files.delete_old(folder)

    def save(self, step: int, args: Any) -> None:
        if self.lock is not None:
            files.delete_temporaries(self.folder, self.lock)
        taken = self.lock is not None and files.is_half_written(self.folder, step)
        if jax.process_count() > 1:
            taken = bool(multihost_utils.broadcast_one_to_all(np.bool_(taken)))
        if taken:
            raise CheckpointError(
                f"Checkpoints.save: another process is saving in {self.folder}, and step {step} is "
                "half-written there. Give each run a folder of its own. If the other run is dead, end what "
                "is left of its processes."
            )
        self.manager.save(step, args=args, force=True)

    def wait(self) -> None:
        self.manager.wait_until_finished()
        # Orbax moves old steps away in one go, so that no kill leaves half of one among the steps. They are
        # deleted here, in the background.
        self.deleting.join()
        self.deleting = files.delete_old(self.folder)

    def close(self) -> None:
        self.manager.close()
        self.deleting.join()
        if self.lock is not None:
            self.unlock()


def _whole_number(number: object) -> int | None:
    """A number as an `int`; `None` for what is none. A truth value is none."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def _step(call: str, step: object) -> int:
    number = _whole_number(step)
    if number is None or number < 0:
        meant = (
            " Give the mesh by its name: `load(like, mesh=mesh)`." if isinstance(step, Mesh) else ""
        )
        raise CheckpointError(
            f"Checkpoints.{call}: step is {step!r} of type {type(step).__name__}, but must be a whole number "
            f"that is not negative.{meant}"
        )
    return number
