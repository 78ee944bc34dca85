"""Mistakes of the engine that the suites must notice, each a change of one line of the package."""

import pathlib

from .made import Mutant


# The mistake; the file; the code, which stands there once; and what stands in its place.
CHANGES = (
    (
        "a psum dropped",
        "_axes/_reduction.py",
        "sums.over_shards(summands, names)",
        "summands",
    ),
    (
        "a gradient reduced over one axis of several",
        "_axes/_reduction.py",
        "names = tuple(name for name in axis_names if name in over)",
        "names = tuple(name for name in axis_names if name in over)[:1]",
    ),
    (
        "one key for all shards",
        "_state/_random.py",
        "again(jnp.where(shard == 0, first, other))",
        "first",
    ),
    (
        "a stream that does not advance",
        "_state/_random.py",
        "tuple(line.drawn() for line in self._shared)",
        "self._shared",
    ),
    (
        "rows numbered on each shard",
        "_state/_random.py",
        "return shard * n + rows",
        "return rows",
    ),
    (
        "a sum over blocks in another order",
        "_axes/_ordered.py",
        "x = x[0::2] + x[1::2]",
        "x = x[: len(x) // 2] + x[len(x) // 2 :]",
    ),
    (
        "rows numbered in each microbatch",
        "_state/_random.py",
        "return (shard * n + rows) * line.count + line.number",
        "return rows",
    ),
    (
        "the sum without the old value",
        "_state/_values.py",
        "(widened(self.old) + result).astype(self.old.dtype)",
        "result.astype(self.old.dtype)",
    ),
    (
        "the mean is the sum",
        "_state/_values.py",
        "return after_sum(result, self.new.dtype, count)",
        "return made.astype(self.new.dtype)",
    ),
    (
        "a spec swapped for another filter's",
        "_call/_mesh_and_specs.py",
        "entries[hit] for hit in hits",
        "entries[-1 - hit] for hit in hits",
    ),
    (
        "the last filter wins",
        "_state/_filters.py",
        "matches.append(hits[0] if hits else None)",
        "matches.append(hits[-1] if hits else None)",
    ),
    (
        "a written state forgotten",
        "_call/_per_shard.py",
        "if origin is not None and has_same_leaves(node, origin.seen):",
        "if origin is not None:",
    ),
    (
        "an untouched state copied",
        "_call/_per_shard.py",
        "if origin is not None and has_same_leaves(node, origin.seen):",
        "if False:",
    ),
    (
        "a diverged state kept",
        "_call/_per_shard.py",
        "self.mistakes.diverged.append(",
        "len(",
    ),
    (
        "static leaves of the first call",
        "_call/_arguments.py",
        "if not all(map(is_, map(leaves.__getitem__, self.fixed_at), self.fixed)):",
        "if False:",
    ),
)


def mutants(folder: pathlib.Path) -> list[Mutant]:
    """The changes as mutants of the package in `folder`."""
    made: list[Mutant] = []
    for mistake, file, old, new in CHANGES:
        source = (folder / file).read_bytes()
        assert source.count(old.encode()) == 1, f"{file} no longer has: {old}"
        begin = source.index(old.encode())
        line = source.count(b"\n", 0, begin) + 1
        end = begin + len(old.encode())
        made.append(Mutant(file, line, line, mistake, old, new, begin, end, by_hand=True))
    return made
