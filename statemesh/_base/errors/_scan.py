"""Errors of `scan`."""

from collections.abc import Sequence

from .._paths import describe
from ._classes import StructureError
from ._text import error_listing, kind_str


def not_carry_and_result(name: str, returned: object) -> TypeError:
    return TypeError(
        f"scan: {name} must return (carry, y), but returned {kind_str(returned)}. If nothing is to be "
        "stacked, write `return carry, None`."
    )


def carry_structure(name: str, missing: Sequence[str], added: Sequence[str]) -> StructureError:
    items = [f"{path} is missing" for path in missing] + [f"{path} is new" for path in added]
    return error_listing(
        StructureError,
        f"scan: {name} returned a carry whose structure is not that of the carry it was given",
        items,
        "Create everything that the loop carries before the loop.",
    )


def carry_changed(name: str, bad: Sequence[tuple[str, object, object]]) -> StructureError:
    return error_listing(
        StructureError,
        f"scan: {name} returned a carry with other states, or with other leaves that are not arrays, "
        "than it was given",
        [f"{path}: was {describe(old)}, is {describe(new)}" for path, old, new in bad],
        "The carry must keep its form through all steps. Write states with `state.set(...)`. Make a "
        "number that changes an array before the loop: `jnp.asarray(...)`.",
    )
