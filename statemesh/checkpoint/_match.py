"""Which of the saved values each value of `like` gets."""

import difflib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import _errors as errors
from ._files import Record
from ._leaves import Form, Value


Renames = Mapping[str, str | None]


def saved_forms(record: Record) -> dict[str, Form]:
    """The form of each saved value, by the name under which it was saved."""
    arrays, numbers = record["arrays"], record["numbers"]
    forms = {name: Form(one["dtype"], tuple(one["shape"]), True) for name, one in arrays.items()}
    return forms | {name: Form(one["type"], ()) for name, one in numbers.items()}


def match(
    folder: pathlib.Path, record: Record, found: Sequence[Value], rename: Renames, missing: str
) -> dict[str, str]:
    """The name under which each value of `like` was saved, by path. What was not saved is left out.

    **Raises:** `StructureError` listing everything that does not fit.
    """
    forms = saved_forms(record)
    names, bad = _renamed(forms, rename)
    wanted = {value.path: value for value in found}
    absent = [path for path in wanted if path not in names]
    left = [path for path in names if path not in wanted]
    mends = []
    if missing == "error" and absent:
        bad += [f"missing: {p}: {wanted[p].form} is in `like`, and was not saved" for p in absent]
        mends.append("missing='keep' keeps what `like` has for values that were not saved.")
    if left:
        bad += [f"left over: {p}: {forms[names[p]]} was saved, and is not in `like`" for p in left]
        mends.append("rename={'path': None} leaves a saved value out.")
    bad += [
        f"{path}: saved as {forms[names[path]]}, but `like` has {value.form}"
        for path, value in wanted.items()
        if path in names and not _fits(forms[names[path]], value)
    ]
    if bad:
        # An inserted layer moves the later ones: what was saved fits the next path.
        moved = [p for p in wanted if p in names and not _fits(forms[names[p]], wanted[p])]
        likely = _likely(
            {names[p]: forms[names[p]] for p in left + moved}, [wanted[p] for p in absent + moved]
        )
        raise errors.does_not_fit(folder, bad, likely, mends)
    return {path: names[path] for path in wanted if path in names}


def _renamed(forms: Mapping[str, Form], rename: Renames) -> tuple[dict[str, str], list[str]]:
    """The saved names by their new paths, and what is wrong with `rename`."""
    names: dict[str, str] = {}
    bad: list[str] = []
    used = set()
    for name in forms:
        old = max((o for o in rename if _is_below(name, o)), key=len, default=None)
        path: str | None = name
        if old is not None:
            used.add(old)
            new = rename[old]
            path = None if new is None else new + name[len(old) :]
        if path is None:
            continue
        if path in names:
            bad.append(f"rename: {names[path]} and {name} would both be {path}")
        names[path] = name
    bad += [f"rename: {old!r} was not saved" for old in rename if old not in used]
    return names, bad


def _is_below(name: str, old: str) -> bool:
    return name == old or name.startswith((f"{old}.", f"{old}["))


def _fits(form: Form, value: Value) -> bool:
    if not (form.is_array and value.is_array):
        return form.is_array == value.is_array
    skipped = 1 if value.per_shard else 0
    mine = value.form
    return (
        form.dtype == mine.dtype
        and len(form.shape) == len(mine.shape)
        and form.shape[skipped:] == mine.shape[skipped:]
    )


def _likely(left: Mapping[str, Form], absent: Sequence[Value]) -> dict[str, str]:
    """For each saved name that is left over, the most similar missing path of the same form."""
    likely: dict[str, str] = {}
    free = list(absent)
    for name, form in left.items():
        alike: list[Any] = [value.path for value in free if _fits(form, value)]
        if best := difflib.get_close_matches(name, alike, n=1, cutoff=0.5):
            likely[name] = best[0]
            free = [value for value in free if value.path != best[0]]
    return likely
