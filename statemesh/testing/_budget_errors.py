"""What `assert_budget` says."""

from collections.abc import Hashable, Sequence


# More lines are counted and not shown.
_SHOWN = 12


def over_budget(name: str, over: Sequence[str]) -> AssertionError:
    return AssertionError("\n".join([f"{name}: the call is over its budget.", *over]))


def no_limit(names: Sequence[str]) -> ValueError:
    return ValueError(
        "assert_budget: there is no limit, so nothing would be checked. Give at least one of "
        f"{', '.join(names)}. What the call takes now is in `explain(fun, *args)`."
    )


def no_number(name: str, limit: object) -> TypeError:
    kinds = (
        "a number, or a dictionary with a number for each cause"
        if name == "collectives"
        else "a number"
    )
    return TypeError(f"assert_budget: {name} is {limit!r}, but must be {kinds}.")


def below_zero(name: str, limit: object) -> ValueError:
    return ValueError(f"assert_budget: {name} is {limit!r}, but no call takes less than 0.")


def collectives_unknown(key: str | None, room: int | float, lines: Sequence[str]) -> str:
    head = (
        "collectives that the budget does not name, in unknown number"
        if key is None
        else f"collectives{f' ({key})' if key else ''}: an unknown number where {room} {_are(room)} allowed"
    )
    return _listed(head, lines)


def bytes_unknown(allowed: int | float, lines: Sequence[str]) -> str:
    return _listed(f"bytes sent: an unknown number where {allowed} B are allowed", lines)


def donated_under(found: int, least: int | float, lines: Sequence[str]) -> str:
    return _listed(f"donated: {found} B where at least {least} B are asked for", lines)


def _are(count: int | float) -> str:
    return "is" if count == 1 else "are"


def collectives_over(key: str | None, times: int, room: int | float, lines: Sequence[str]) -> str:
    allowed = f"{times} where {room} {_are(room)} allowed"
    if key is None:
        head = f"collectives that the budget does not name: {times}"
    else:
        head = f"collectives{f' ({key})' if key else ''}: {allowed}"
    return _listed(head, lines)


def bytes_over(what: str, found: int, allowed: int | float, lines: Sequence[str]) -> str:
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
