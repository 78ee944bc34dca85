"""The words for what a check has not tested."""

from .._program._replay import MOST_ROUNDS


def one_device() -> str:
    return (
        "Every mesh has one device, so nothing is compared between shards. Give a mesh of several, such as "
        'meshes=[{"data": 4}].'
    )


def nothing_fed_back(steps: int) -> str:
    return (
        f"steps={steps}, but nothing that a call returns fits its arguments, so that every call gets the "
        'same. Name what the next call gets, as in fed_back={"args[0]": "[1]"}, or give steps=1.'
    )


def never_changed(path: str, kind: str) -> str:
    return (
        f"{path}: no call changed this {kind}, so that writing it is not tested. If the function writes it, "
        "return the new one; if it only reads it, name it in leave_out, or make it a LongTermState."
    )


def same_key(path: str) -> str:
    return (
        f"{path}: random numbers are drawn from it, and it comes back as it went in, so that every call "
        "draws the same. Return what the draw returns: `key, rng = rng.split()`."
    )


def key_not_returned(path: str) -> str:
    return (
        f"{path}: random numbers are drawn from this RandomState, and the next call does not get the new "
        "one, so that every call draws the same. Return what the draw returns: `key, rng = rng.split()`."
    )


def never_finite(path: str) -> str:
    return (
        f"{path}: no call gave a finite number here, and NaN agrees with NaN, so that what is computed is "
        "not tested. Give arguments for which it is finite."
    )


def unjudged(path: str) -> str:
    return (
        f"{path}: none of its numbers could be judged on some mesh, because rounding alone may change them "
        "by more than a few per cent, so that what is computed is not tested. Look for a threshold, a tie or "
        "a difference of nearly equal numbers before it, and give arguments that stay clear of these."
    )


def unended(line: str, where: str) -> str:
    return (
        f"The `while_loop` at {line} was stopped after {MOST_ROUNDS:,} rounds {where}, so that these calls "
        "are not compared on devices, where it may run for ever. Give it a largest number of rounds, and a "
        "tolerance that is relative to its numbers."
    )
