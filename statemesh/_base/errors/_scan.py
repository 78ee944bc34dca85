"""Errors of `scan`."""

from collections.abc import Sequence
from typing import Any

from .._paths import describe
from ._classes import StructureError
from ._text import bullets, kind_str


def not_carry_and_result(name: str, returned: Any) -> TypeError:
    return TypeError(
        f"scan: {name} must return (carry, y), but returned {kind_str(returned)}. Write `return carry, None` "
        "where nothing is to be stacked."
    )


def carry_structure(name: str, gone: Sequence[str], added: Sequence[str]) -> StructureError:
    items = [f"{path} is missing" for path in gone] + [f"{path} is new" for path in added]
    return StructureError(
        f"scan: {name} returned a carry of another structure than it was given:\n{bullets(items)}\n"
        "Make before the loop whatever is carried through it."
    )


def carry_changed(name: str, bad: Sequence[tuple[str, Any, Any]]) -> StructureError:
    items = [f"{path}: was {describe(old)}, is {describe(new)}" for path, old, new in bad]
    return StructureError(
        f"scan: {name} returned a carry with other states, or with other leaves that are no arrays, than it "
        f"was given:\n{bullets(items)}\n"
        "A loop carries one form through all steps. Write states with `state.set(...)`; make an array of a "
        "number that changes, before the loop: `jnp.asarray(...)`."
    )
