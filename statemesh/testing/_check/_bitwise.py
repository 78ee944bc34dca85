"""Whether calls on meshes give the very bits that calls on one device give."""

from collections.abc import Sequence

import jax
import numpy as np

from .._locate._bits import line_in_bits
from .._program._numbers import data_of, is_key
from .._types import AnyLeaf, Numbers, PyTree
from ._programs import FunctionOnMesh, chained
from ._subject import Subject


# So many results that differ are named; the others are counted.
_MOST_RESULTS = 4


def labels_of_equal_bits(subject: Subject) -> list[str]:
    """Compare the bits of all calls in a row, each with what the call before on the same mesh returned.

    **Returns:** what agreed.

    **Raises:** `AssertionError` that names the first call whose results differ, and the line.
    """
    on_meshes = [on_mesh for on_mesh in subject.meshes if on_mesh.has_devices]
    if not on_meshes:
        return []
    reference = subject.reference(on_meshes[0])
    wanted = chained(reference.call, subject.args, subject.in_a_row, subject.feed)
    for on_mesh in on_meshes:
        call = subject.programs(on_mesh).call
        results = chained(call, subject.args, subject.in_a_row, subject.feed)
        for step, pair in enumerate(zip(results, wanted, strict=True)):
            if off := _differences(subject, *pair):
                raise AssertionError(_report(subject, on_mesh, reference.what, step, off, results))
    return [f"bit for bit {on_mesh.label}" for on_mesh in on_meshes]


def _differences(subject: Subject, got: PyTree, want: PyTree) -> list[str]:
    lines = []
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for number, (a, b) in enumerate(pairs):
        if number in subject.left_out:
            continue
        x, y = _bits(a), _bits(b)
        if x.shape != y.shape:
            lines.append(f"  - {subject.paths[number]}: {np.shape(a)}, should be {np.shape(b)}")
        elif (differs := x != y).any():
            at = tuple(int(k) for k in np.argwhere(differs)[0])
            shown = (
                [np.asarray(side)[at[: np.ndim(side)]] for side in (a, b)] if not is_key(a) else []
            )
            numbers = f"; at {list(at)} {shown[0]!r}, should be {shown[1]!r}" if shown else ""
            count = f"{int(differs.sum())} of {differs.size} numbers differ"
            lines.append(f"  - {subject.paths[number]}: {count}{numbers}")
    return lines


def _bits(x: AnyLeaf) -> Numbers:
    """An array as unsigned numbers of the same bits: NaN is equal to itself, and 0.0 is not equal to -0.0."""
    array = np.atleast_1d(np.asarray(data_of(x)))
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], -1)
    return array.view(f"u{array.dtype.itemsize}")


def _report(
    subject: Subject,
    on_mesh: FunctionOnMesh,
    what: str,
    step: int,
    off: Sequence[str],
    results: Sequence[PyTree],
) -> str:
    args = subject.args
    for result in results[:step]:
        args = subject.feed(args, result)
    calls = subject.programs(on_mesh).call, subject.reference(on_mesh).call
    line = line_in_bits(*calls, *args)
    if line is None:
        where = (
            "  Run one by one, all operations that belong to each other give equal bits. What is left is the "
            "order of\n  sums, or how XLA compiles the operations together."
        )
    else:
        where = f"  {line}  `{line.source}` gives the first numbers that differ."
    more = [f"  and {len(off) - _MOST_RESULTS} more."] if len(off) > _MOST_RESULTS else []
    first = f"{line}: " if line is not None else ""
    return "\n".join(
        [
            f"{first}`{subject.name}` does not give the same bits on every mesh",
            "",
            f"In call {step + 1} {on_mesh.label}, compared with {what}:",
            *off[:_MOST_RESULTS],
            *more,
            where,
            "  Sums over shards have one order on every mesh with `sm.value_and_grad(..., blocks=...)`.",
        ]
    )
