"""What `assert_budget` says."""

from collections.abc import Hashable, Sequence


# More lines are counted and not shown.
_SHOWN = 12


def over_budget(name: str, over: Sequence[str]) -> AssertionError:
    return AssertionError("\n".join([f"{name}: the call is over its budget.", *over]))


def collectives_over(key: str | None, times: int, room: int, lines: Sequence[str]) -> str:
    allowed = f"{times} where {room} {'is' if room == 1 else 'are'} allowed"
    if key is None:
        head = f"collectives that the budget does not name: {times}"
    else:
        head = f"collectives{f' ({key})' if key else ''}: {allowed}"
    return _listed(head, lines)


def bytes_over(what: str, found: int, allowed: int, lines: Sequence[str]) -> str:
    return _listed(f"{what}: {found} B where {allowed} B are allowed", lines)


def collective_line(
    operation: str,
    axes: Sequence[Hashable],
    times: int,
    unknown_loop: bool,
    sent: int,
    cause: str,
    line: str,
) -> str:
    over = f" over {', '.join(map(str, axes))}" if axes else ""
    turns = " in each turn of a loop of unknown length" if unknown_loop else ""
    often = f"{times} time{'s' * (times != 1)}{turns}"
    return f"{operation}{over}, {often}, {sent} B: {cause}{line and f', {line}'}"


def held_line(path: str, held: int, enters: str, placed_by: str) -> str:
    return f"{path}: {held} B, as {enters} ({placed_by})"


def moved_line(path: str, moved: int) -> str:
    return f"{path}: {moved} B"


def memory_line(what: str, size: int) -> str:
    return f"{what}: {size} B"


def result_line(path: str, size: int) -> str:
    return f"{path}: {size} B, a result"


def nothing_donated() -> str:
    return "nothing is donated"


def memory_unknown(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name}: `{what}` is known only of a compiled call, and this one has no devices. Leave it out, or "
        "give a mesh with devices."
    )


def _listed(head: str, lines: Sequence[str]) -> str:
    shown = [f"  - {line}" for line in lines[:_SHOWN]]
    more = [f"  - and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"{head}.", *shown, *more])
