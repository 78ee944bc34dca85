"""Wrapping of long lines of generated source."""

WIDTH = 100
_OPEN, _CLOSE = "([{", ")]}"


def laid_out(line: str) -> list[str]:
    """A line of source, split where it is too long: each item of its longest bracket on a line of its own."""
    if len(line) <= WIDTH:
        return [line]
    start, end = _longest(line)
    indent = line[: len(line) - len(line.lstrip())]
    parts = _parts(line[start + 1 : end])
    if not any(parts) or (len(parts) > 2 and _numbers(parts)):
        return [line]
    last = len(parts) - 1
    inside = [f"{indent}    {part}{',' * (k < last)}" for k, part in enumerate(parts)]
    return [line[: start + 1], *(x for one in inside for x in laid_out(one)), indent + line[end:]]


def _longest(line: str) -> tuple[int, int]:
    """The positions where the longest of the outer brackets opens and closes; `(0, 1)` if there is none."""
    found, depth, start = (0, 1), 0, 0
    for k, letter in enumerate(line):
        if letter in _OPEN:
            start = start if depth else k
            depth += 1
        if letter in _CLOSE:
            depth -= 1
            if not depth and k - start > found[1] - found[0]:
                found = start, k
    return found


def _parts(text: str) -> list[str]:
    """The items between commas, not counting commas in nested brackets and in the arguments of lambdas."""
    parts, depth, heads = [""], 0, 0
    for k, letter in enumerate(text):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if not depth and text.startswith("lambda ", k):
            heads += 1
        if not depth and letter == ":" and heads:
            heads -= 1
        if letter == "," and not depth and not heads:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _numbers(parts: list[str]) -> bool:
    return all(part.lstrip("-")[:1].isdigit() for part in parts)
