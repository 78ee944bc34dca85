"""`Checkpoints`: a folder with checkpoints of several steps."""

import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

import orbax.checkpoint as ocp
from jax.sharding import Mesh

from .._base._types import PyTree
from . import _errors as errors
from . import _files as files
from ._load import load
from ._save import contents


C = TypeVar("C", bound="Checkpoints")


class Checkpoints:
    """A folder with checkpoints of several steps, which are written in the background.

    Leaving a `with` waits until all is written. Each step is a folder as `save` makes one.

    **Arguments:**

    - `folder`: where. What an earlier run has left there half-written or half-deleted is removed.
    - `keep`: how many of the newest steps stay; left out, all.

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

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = None) -> None:
        self._folder = pathlib.Path(folder).absolute()
        self._deleting = files.delete_old(self._folder)
        self._deleting.join()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, todelete_subdir=files.OLD
        )
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, item_handlers=files.handlers()
        )

    @property
    def latest(self) -> int | None:
        """The newest step that is saved whole; `None` if there is none."""
        return max(files.steps_in(self._folder), default=None)

    def save(self, step: int, tree: PyTree) -> None:
        """Copy the values of a tree to the host, and write them in the background.

        The step can be loaded when all of it is written. The next `save` waits until then.

        **Arguments:**

        - `step`: a number, larger than that of each step in the folder.
        - `tree`: as for `save`.

        **Raises:** `CheckpointError` for a step that is not larger, and if this step or the one before cannot
        be written.
        """
        self.wait()
        latest = self.latest
        if latest is not None and step <= latest:
            raise errors.step_exists(self._folder, step, latest)
        arrays, record = contents("Checkpoints.save", tree)
        try:
            self._manager.save(step, args=files.to_save(arrays, record), force=True)
        except (OSError, ValueError) as reason:
            raise errors.not_written(f"step {step}", reason) from reason

    def load(
        self,
        like: PyTree,
        step: int | None = None,
        mesh: Mesh | None = None,
        *,
        rename: Mapping[str, str | None] | None = None,
        missing: str = "error",
    ) -> PyTree:
        """Load a step.

        **Arguments:**

        - `like`, `mesh`, `rename`, `missing`: as for `load`.
        - `step`: left out, the newest.

        **Returns:** the tree, as `load` does.

        **Raises:** what `load` does; `CheckpointError` for a step that was not saved.
        """
        self.wait()
        steps = files.steps_in(self._folder)
        chosen = max(steps, default=None) if step is None else step
        if chosen is None or chosen not in steps:
            raise errors.no_step(self._folder, step, steps)
        return load(self._folder / str(chosen), like, mesh, rename=rename, missing=missing)

    def wait(self) -> None:
        """Wait until what was saved is written.

        **Raises:** `CheckpointError` if it cannot be written.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as reason:
            raise errors.not_written("the last step", reason) from reason
        # Orbax moves old steps away in one go, so that no kill leaves half of one among the steps. They are
        # deleted here, in the background.
        self._deleting.join()
        self._deleting = files.delete_old(self._folder)

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()
            self._deleting.join()
