"""The words of a failed check: where results differ, and the probable cause."""

from collections.abc import Hashable, Sequence


WITH_OTHER_VALUES = "With other values the results differ too:"


def not_equivalent(name: str, failed: Sequence[str], agreed: Sequence[str]) -> AssertionError:
    good = f"\n\nIt agrees {', '.join(agreed)}." if agreed else ""
    return AssertionError(f"{name}: the calls do not agree.\n\n" + "\n\n".join(failed) + good)


def failed_call(where: str, against: str, leaves: Sequence[str]) -> str:
    head = f"{where[0].upper()}{where[1:]}compared with {against}:"
    return "\n".join([head, *leaves])


def leaf_report(path: str, what: str, off: str, guess: str | None) -> str:
    probably = f"\n    Probably: {guess}" if guess else ""
    return f"  - {path}: {what}, {off}.{probably}"


def on_shards(shards: Sequence[str], tolerance: float) -> str:
    """The shards that hold a number, every shard if none is named; and what rounding explains."""
    there = f"shard {' and '.join(shards)}" if shards else "every shard"
    return (
        f", on {there} ({f'{tolerance:.1g} would be rounding' if tolerance else 'none is allowed'})"
    )


def off_by(amount: float, at: Sequence[int], got: object, want: object) -> str:
    index = f" at {list(at)}" if at else ""
    return f"off by {amount:.4g}{index}, where it is {_short(got)} and should be {_short(want)}"


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float | complex) else str(x)


def other_shape(got: Sequence[int], want: Sequence[int]) -> str:
    return f"of shape {tuple(got)}, should be {tuple(want)}"


def guess_longer(axis: int, times: int, names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"axis {axis} is {times} times as long, once for each shard along {_or(names)}: an in spec leaves "
        "out the axis over which the argument is meant to be split, or an out spec names it although every "
        "shard has the whole result."
    )


def guess_shorter(axis: int, times: int, names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"axis {axis} is one of {times} parts: the out spec leaves {_or(names)} out, over which the result "
        "is split."
    )


def guess_unequal_copies(shards: Sequence[str]) -> str:
    return (
        f"an unreduced output: its spec keeps one copy for all shards, and {shards[0]} and {shards[1]} have "
        "different ones. Reduce it inside (jax.lax.psum, pmean), or name the axis in the out spec."
    )


def guess_unchanged() -> str:
    return "it came back as it went in: the new value is computed and not returned."


def guess_factor(times: int, more: bool, names: Sequence[Sequence[Hashable]], added: bool) -> str:
    what = "what is added to it" if added else "it"
    if more:
        return (
            f"{what} is {times} times too much: reduced twice over {_or(names)}, or summed over it although "
            "every shard has the same (a gradient is reduced already; an in spec leaves the axis out)."
        )
    return (
        f"{what} is 1/{times} of what it should be: not reduced over {_or(names)}, or pmean where psum is "
        "meant."
    )


def guess_shifted(by: int) -> str:
    return (
        f"every shard has what belongs to the one {by} before it, counted around: a ppermute sends to the "
        "wrong neighbour."
    )


def guess_permuted() -> str:
    return "the parts of the shards are right, but in another order: the axis names of a spec are exchanged."


def guess_statistic() -> str:
    return (
        "right where all shards have the same rows: a statistic of each shard is averaged although that of "
        "all rows is no average (a mean of variances). Average what the formula sums: the mean and the mean "
        "of squares."
    )


def guess_own_mean() -> str:
    return (
        "right where all shards have the same rows: it depends on a statistic of the shard's own rows where "
        "that of all rows is meant (a pmean is missing), or on an average of such (a mean of variances)."
    )


def guess_own_sum(names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"a sum over the shard's own part is used where that over all is meant: jax.lax.psum over "
        f"{_or(names)} is missing, or there twice."
    )


def guess_key() -> str:
    return (
        "every shard draws the same random numbers: a key is shared. Draw from rng.rows(n, axis_name), one "
        "key for each row whatever the mesh."
    )


def guess_rows() -> str:
    return (
        "every shard counts its rows from 0: add jax.lax.axis_index(axis_name) * the number of rows of a "
        "shard."
    )


def guess_edges(axis: int) -> str:
    return (
        f"only entries at the edge of a shard's part of axis {axis} are wrong: what comes from the next "
        "shard is another one's (ppermute, off by one)."
    )


def guess_some(shard: str) -> str:
    return f"only shard {shard} is right: the others do not get what it has (psum or all_gather is missing)."


def _or(names: Sequence[Sequence[Hashable]]) -> str:
    return " or ".join(" and ".join(map(repr, some)) for some in names)
