"""The words for two results that differ in structure, dtypes or static values."""

from collections.abc import Sequence


def other(path: str, got: str, want: str) -> str:
    return f"{path}: {got}, should be {want}"


def other_keys(path: str, added: Sequence[str], missing: Sequence[str]) -> str:
    found = [
        f"{which} {_plural('key', keys)} {', '.join(keys)}"
        for which, keys in (("has the", added), ("lacks the", missing))
        if keys
    ]
    return f"{path}: a dict that {' and '.join(found)}, unlike what it should be"


def _plural(noun: str, some: Sequence[str]) -> str:
    return noun if len(some) == 1 else f"{noun}s"


def other_keys_of(path: str, got: str, want: str) -> str:
    return f"{path}: random keys of dtype {got}, should be of {want}"


def other_dtype(path: str, got: str, want: str) -> str:
    return f"{path}: of dtype {got}, should be of {want}"


def other_weak_type(path: str, got: bool) -> str:
    weak, strong = "of a weak type (a Python number's)", "of a strong type"
    return f"{path}: {weak if got else strong}, should be {strong if got else weak}"


def other_metadata(path: str, what: str) -> str:
    return f"{path}: {what} whose static data differ from what they should be"
