"""How bytes are written."""


def bytes_str(count: int) -> str:
    """A number of bytes with its unit: `12 B`, `3.4 MiB`."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
