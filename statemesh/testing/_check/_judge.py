"""Which numbers of a result differ from those of the reference by more than rounding explains."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp
import numpy as np

from .._program._noise import roundoff
from .._types import Numbers
from ._chain import Chain, Rounding, distances
from ._leaves import Leaf
from ._mismatch import Mismatch
from ._parts import is_key
from ._reference import RightCalls


# So many times as far as noise moves a number, rounding may. A number that is off is tried with more runs.
_FACTOR: dict[Rounding, float] = {"double": 8.0, "own": 4.0}
_FEW, _MANY = 3, 24
# A number whose rounding is larger than this part of it is not judged.
_CLEAR = 0.05
_NARROWER = 100


@dataclasses.dataclass
class Judge:
    """Compares results with those of the reference, and remembers what rounding left unseen.

    **Attributes:**

    - `tolerance`: the largest difference relative to the largest number of an array, if one is given.
    - `left_out`: the numbers of the arrays that are not compared.
    - `exact`: the numbers of the arrays to which `tolerance` does not apply.
    - `unjudged`: for each path the count of numbers that are not judged, since rounding alone may change them
        by more than a few per cent.
    - `only_double`: for each path the count of numbers that are judged in double precision only.
    - `judged`: for each path and each mesh whether a number of it was ever judged.
    """

    tolerance: float | None = None
    left_out: Collection[int] = ()
    exact: Collection[int] = ()
    unjudged: dict[str, int] = dataclasses.field(default_factory=dict)
    only_double: dict[str, int] = dataclasses.field(default_factory=dict)
    judged: dict[tuple[str, str], bool] = dataclasses.field(default_factory=dict)

    @property
    def never_judged(self) -> list[str]:
        """The paths of the results of which on some mesh no number was ever judged."""
        return list(dict.fromkeys(path for (path, _), judged in self.judged.items() if not judged))

    def double(
        self,
        step: int,
        leaves: Sequence[Leaf],
        mesh: Chain,
        reference: RightCalls,
        place: str = "",
    ) -> list[Mismatch]:
        """The arrays of a call that differ in double precision.

        **Arguments:**

        - `leaves`: the results of the call, or their types.
        - `mesh`, `reference`: the calls that are compared.
        - `place`: the mesh, if every number that is off there is a mistake.
        """
        got = mesh.exact[step].numbers
        return self._compared("double", step, leaves, got, [mesh, reference], self.unjudged, place)

    def own(
        self,
        step: int,
        leaves: Sequence[Leaf],
        got: Sequence[Numbers],
        mesh: Chain,
        reference: RightCalls,
        again: Callable[[], Sequence[Numbers]] | None,
        place: str = "",
    ) -> list[Mismatch]:
        """The arrays of a call that differ in the dtypes of the program.

        **Arguments:**

        - `leaves`, `got`: the results of the call, and their numbers.
        - `again`: gives the results of the reference in its own dtypes. It is called only where something is
            off: what the reference makes of its own dtypes too, such as an overflow, is not.
        - `place`: as for `double`, if there is no comparison in double precision.
        """
        found = self._compared("own", step, leaves, got, [mesh, reference], self.only_double, place)
        if not found or again is None or any(not one.same_shape for one in found):
            return found
        other = again()
        still = []
        for one in found:
            want = other[one.number]
            if want.shape == one.got.shape:
                allowed = np.where(one.off(), one.allowed, np.inf)
                one = dataclasses.replace(one, want=want, allowed=allowed)
            if one.off().any():
                still.append(one)
        return still

    def allowed(
        self, step: int, number: int, leaf: Leaf, mesh: Chain, reference: RightCalls
    ) -> Numbers:
        """How far apart rounding in the program's dtypes may bring two copies of an array."""
        if is_key(leaf.array):
            # A key has several numbers, of which none is rounded.
            return np.zeros(leaf.array.shape)
        want = reference.exact[step].numbers[number]
        moved = mesh.moved("own", _MANY)[step][number]
        return _allowed("own", leaf, want, _least("own", leaf, want), moved)

    def _compared(
        self,
        rounding: Rounding,
        step: int,
        leaves: Sequence[Leaf],
        got: Sequence[Numbers],
        chains: Sequence[RightCalls],
        unclear: dict[str, int],
        place: str,
    ) -> list[Mismatch]:
        wanted = chains[-1].exact[step].numbers
        found = []

        def note(leaf: Leaf, judged: bool) -> None:
            if place:
                key = leaf.path, place
                self.judged[key] = judged or self.judged.get(key, False)

        for number, (leaf, mine, want) in enumerate(zip(leaves, got, wanted, strict=False)):
            if number in self.left_out:
                continue
            if mine.shape != want.shape:
                nothing = np.zeros(want.shape)
                found.append(Mismatch(number, leaf, mine, want, nothing, rounding))
                continue
            difference = _distances(rounding, leaf, mine, want)
            least = _least(rounding, leaf, want)
            if self.tolerance is None and not (difference > 4 * least).any():
                note(leaf, True)
                continue
            given = None if number in self.exact else self._given(want, difference)
            allowed: Numbers = np.zeros(want.shape) if given is None else given
            if given is None:
                # The fewest runs that clear the numbers: the noise of the mesh costs a compile.
                for some, runs in ((chains[-1:], _FEW), (chains, _FEW), (chains, _MANY)):
                    each = [one.moved(rounding, runs)[step][number] for one in some]
                    moved = _moved(rounding, each, least)
                    allowed = _allowed(rounding, leaf, want, least, moved)
                    if not (difference > allowed).any():
                        break
                hidden = _unclear(want, difference, allowed - _flushed(rounding, leaf))
                note(leaf, not hidden.all())
                if count := int(hidden.sum()):
                    unclear[leaf.path] = max(count, unclear.get(leaf.path, 0))
                # Of a number of which rounding leaves nothing it may leave NaN.
                allowed = np.where(hidden & ~np.isfinite(difference), np.inf, allowed)
            if (difference > allowed).any():
                found.append(Mismatch(number, leaf, mine, want, allowed, rounding))
        return found

    def _given(self, want: Numbers, difference: Numbers) -> Numbers | None:
        """The differences that `tolerance` allows."""
        if self.tolerance is None:
            return None
        if want.dtype.kind == "b":
            # Of booleans so many may differ.
            few = (difference > 0).mean() <= self.tolerance if difference.size else True
            return np.full(want.shape, 1.0 if few else 0.0)
        finite = np.abs(np.where(np.isfinite(want), want, 0))
        return np.full(want.shape, self.tolerance * float(finite.max(initial=0)))


def _distances(rounding: Rounding, leaf: Leaf, got: Numbers, want: Numbers) -> Numbers:
    found = distances(got, want)
    if rounding == "double" or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return found
    # What is larger than the dtype can hold is infinite in it.
    largest = float(jnp.finfo(leaf.dtype).max)  # type: ignore[no-untyped-call]
    over = np.isinf(got) & (np.abs(want) > largest) & (np.sign(got) == np.sign(want))
    return np.where(over, 0.0, found)


def _moved(rounding: Rounding, each: Sequence[Numbers], least: Numbers) -> Numbers:
    """How far noise moves the numbers of the mesh and of the reference, which comes last.

    A mesh that rounds a hundred times as much as the reference uses a narrower dtype: that is a mistake.
    """
    reference = each[-1]
    if len(each) == 1 or not reference.size:
        return reference
    # In double precision it has rounded constants.
    much = rounding == "own" and np.median(each[0]) > _NARROWER * np.median(reference + least)
    return reference if much else each[0] + reference


def _least(rounding: Rounding, leaf: Leaf, want: Numbers) -> Numbers:
    """The roundoff of each number."""
    unit = roundoff(np.float64) if rounding == "double" else roundoff(leaf.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.nan_to_num(unit * np.abs(want.astype(np.complex128)), posinf=0.0, nan=0.0)


def _allowed(
    rounding: Rounding, leaf: Leaf, want: Numbers, least: Numbers, moved: Numbers
) -> Numbers:
    if want.dtype.kind in "biu":
        return np.where(moved > 0, np.inf, 0.0)
    return _FACTOR[rounding] * moved + 4 * least + _flushed(rounding, leaf)


def _flushed(rounding: Rounding, leaf: Leaf) -> float:
    """XLA may flush what is smaller to zero. A zero is judged all the same: what is larger would be found."""
    if rounding == "double" or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(leaf.dtype).tiny)  # type: ignore[no-untyped-call]


def _unclear(want: Numbers, difference: Numbers, allowed: Numbers) -> Numbers:
    """Which numbers are not judged."""
    if want.dtype.kind in "biu":
        return (difference > 0) & np.isinf(allowed)
    size = np.nan_to_num(np.abs(want), posinf=0.0)
    known = size[np.isfinite(np.abs(want))]
    typical = float(np.median(known)) if known.size else 0.0
    return allowed > _CLEAR * np.maximum(size, typical)
