"""Errors of checkpoints."""

from collections.abc import Sequence

from .._base._errors import StatemeshError, StructureError, error_listing


class CheckpointError(StatemeshError):
    """A folder that cannot be written or read as a checkpoint.

    !!! example

        ```python
        >>> import tempfile
        >>> from statemesh import checkpoint
        >>> try:
        ...     checkpoint.save(tempfile.gettempdir(), {})
        ... except checkpoint.CheckpointError as error:
        ...     print("is there already" in str(error))
        True

        ```
    """


def exists(folder: object) -> CheckpointError:
    return CheckpointError(
        f"save: {folder} is there already, and a checkpoint is never written over another. Give a new "
        "folder, or keep several steps with Checkpoints(folder)."
    )


def step_exists(folder: object, step: int, latest: int) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints.save: step {step} in {folder} is not later than step {latest}, the newest there. Go on "
        "counting from `latest`, or give another folder."
    )


def bad_step(call: str, step: object) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints.{call}: step is {step!r} of type {type(step).__name__}, but must be a whole number "
        "that is not negative."
    )


def bad_folder(call: str, folder: object) -> TypeError:
    return TypeError(
        f"{call}: folder is {folder!r} of type {type(folder).__name__}, but must be a path, as a string or a "
        "pathlib.Path."
    )


def bad_rename(rename: object) -> TypeError:
    return TypeError(
        f"load: rename is {rename!r} of type {type(rename).__name__}, but must be a dictionary of paths, as "
        "in rename={\"['w']\": \"['weight']\"}."
    )


def bad_keep(keep: object) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints: keep is {keep!r}, but must be a whole number of at least 1. Leave it out to keep all "
        "steps."
    )


def half_written(folder: object, step: int) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints.save: another process is saving in {folder}, and step {step} is half-written there. "
        "Give each run a folder of its own. If the other run is dead, end what is left of its processes."
    )


def linked_old(folder: object) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints.save: {folder} is a symbolic link. Old steps are moved there to be deleted, and "
        "nothing is deleted behind a link. Remove the link."
    )


def renamed_step(folder: object, step: int) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints.load: {folder} was saved as step {step}, and has been renamed. Give it its name again, "
        "or write statemesh.checkpoint.load(folder, like), which takes a folder of any name."
    )


def unreadable(call: str, what: object, reason: Exception) -> CheckpointError:
    return CheckpointError(f"{call}: {what} cannot be read: {reason}")


def one_path(call: str, paths: Sequence[tuple[str, Sequence[object]]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{call}: values are saved by their paths, and these paths have several",
        [f"{path}: {' and '.join(map(str, forms))}" for path, forms in paths],
        "Give the keys different reprs, or the fields different names.",
    )


def not_written(what: str, reason: Exception) -> CheckpointError:
    return CheckpointError(
        f"{what} was not saved: {reason}\nThe checkpoints that were saved before are untouched."
    )


def no_checkpoint(folder: object, steps: Sequence[int]) -> CheckpointError:
    if steps:
        return CheckpointError(
            f"load: {folder} holds the steps {', '.join(map(str, steps))}, and is no checkpoint itself. "
            "Write Checkpoints(folder).load(like), or give the folder of a step."
        )
    return CheckpointError(
        f"load: {folder} is no checkpoint that statemesh.checkpoint saved, or it was not saved to its end. "
        "Give the folder that was given to `save`."
    )


def no_step(folder: object, step: int | None, steps: Sequence[int]) -> CheckpointError:
    wanted = "no step" if step is None else f"no step {step}"
    there = f"There are: {', '.join(map(str, steps))}." if steps else "Nothing was saved there yet."
    return CheckpointError(f"Checkpoints.load: {folder} holds {wanted}. {there}")


def newer_version(folder: object, version: object, known: int) -> CheckpointError:
    return CheckpointError(
        f"load: {folder} has version {version} of the format, and this statemesh reads versions up to "
        f"{known}. Install a newer statemesh."
    )


def altered(folder: object, bad: Sequence[tuple[str, str, str]]) -> CheckpointError:
    return error_listing(
        CheckpointError,
        f"load: files in {folder} are not as they were saved",
        [f"{file}{f', of {leaf}' if leaf else ''}: {what}" for file, leaf, what in bad],
        "Load another checkpoint, or copy these files again from where they are whole.",
    )


def does_not_fit(
    folder: object, bad: Sequence[str], renamed: dict[str, str], mends: Sequence[str]
) -> StructureError:
    probably = [f"Probably renamed: rename={renamed!r}."] if renamed else []
    return error_listing(
        StructureError,
        f"load: what {folder} holds is not what `like` has",
        bad,
        "\n".join([*probably, *mends]),
    )


def kept_without_value(paths: Sequence[str]) -> StructureError:
    return error_listing(
        StructureError,
        "load: missing='keep' keeps the values of `like`, which has only shapes for",
        paths,
        "Give the model itself as `like`.",
    )


def no_way_to_reshard(bad: Sequence[tuple[str, str, int, int, object]]) -> StructureError:
    return error_listing(
        StructureError,
        "load: these states have a value for each shard. The mesh has another number of shards, and `reduce` "
        "does not say what becomes of the values",
        [
            f"{path}: {kind} with reduce={getattr(how, '__name__', repr(how))}, saved for {old} shards, but "
            f"the mesh has {new}"
            for path, kind, old, new, how in bad
        ],
        "Declare reduce='mean', 'sum', 'max' or 'min' in `like`, override `reshard` in a kind of your own, "
        "or load on a mesh of the same size.",
    )
