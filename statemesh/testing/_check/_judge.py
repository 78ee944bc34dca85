"""Which numbers of a result differ from those of the reference by more than rounding explains."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import _errors as errors
from .._program._doubled import Doubled, Wide, widened
from .._program._jaxprs import Equation
from .._program._noise import roundoff
from .._program._replay import Broken
from .._types import AnyLeaf, Fun, Numbers, PyTree
from ._feedback import is_key


# Where a shard is on the mesh: its index along each axis, by the name of the axis.
Coordinates: TypeAlias = dict[Hashable, int]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a result.

    **Attributes:**

    - `path`: the path as the user would type it.
    - `array`: the array as it was returned, or its type.
    """

    path: str
    array: Any

    @cached_property
    def value(self) -> Numbers:
        """The numbers of the array, also where it holds keys."""
        return numbers(self.array)

    @property
    def dtype(self) -> Any:
        """Of a number of Python it is the dtype that JAX gives it."""
        return self.array.dtype if hasattr(self.array, "dtype") else jnp.result_type(self.array)

    @cached_property
    def parts(self) -> list[tuple[Coordinates, tuple[slice, ...]]]:
        """For each shard its coordinates and its part; empty for an array that lies on no mesh."""
        sharding = getattr(self.array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(
            sharding.mesh, jax.sharding.Mesh
        ):
            return []
        has = sharding.devices_indices_map(self.array.shape)
        return [
            (dict(zip(sharding.mesh.axis_names, at, strict=True)), has[device])
            for at, device in np.ndenumerate(sharding.mesh.devices)
        ]


def leaves_of(name: str, result: PyTree) -> list[Leaf]:
    """The arrays of a result, and its numbers of Python."""
    flat, _ = jax.tree_util.tree_flatten_with_path(result)
    return [Leaf(name + jax.tree_util.keystr(keys), x) for keys, x in flat if is_number_or_type(x)]


def is_number_or_type(x: AnyLeaf) -> bool:
    return eqx.is_array_like(x) or isinstance(x, jax.ShapeDtypeStruct)


def numbers(x: AnyLeaf) -> Numbers:
    """The numbers of an array: floats in double precision, and keys as the integers that they are."""
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = np.asarray(x)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return found.astype(np.float64)  # NumPy cannot subtract bfloat16 and the like.
    return found.astype(np.complex128) if found.dtype.kind == "c" else found


# Whose rounding is meant: that of double precision, or that of the program's own dtypes.
Rounding: TypeAlias = Literal["double", "own"]
# From the arguments and the results of a call to the arguments of the next one.
Feed: TypeAlias = Callable[[PyTree, PyTree], PyTree]

_NOISE: dict[Rounding, tuple[float, float]] = {"double": (1.0, 0.0), "own": (0.0, 1.0)}


@dataclasses.dataclass(frozen=True)
class Step:
    """One of several calls.

    **Attributes:**

    - `given`: the arguments.
    - `results`: the results.
    - `broken`: what is promised to be the same on several shards and is not.
    - `unended`: the loops that were stopped before they had ended.
    """

    given: Wide
    results: Wide
    broken: list[Broken]
    unended: list[Equation]

    @cached_property
    def numbers(self) -> list[Numbers]:
        return [numbers(leaf.array) for leaf in leaves_of("", self.results.values)]


class Chain:
    """Calls in a row in double precision. Each gets what the call before returned.

    **Arguments:**

    - `program`: the function.
    - `args`: the arguments of the first call, and its keyword arguments.
    - `feed`: gives the arguments of the next call.
    - `steps`: the number of calls.
    - `noisy`: whether noise will be wanted, so that the program need not be compiled without.
    - `compared_with`: the function that the results are compared with.
    """

    def __init__(
        self,
        program: Doubled,
        args: Wide,
        feed: Feed,
        steps: int,
        *,
        noisy: bool,
        compared_with: Doubled | None = None,
    ) -> None:
        self.program, self.args, self.feed, self.steps = program, args, feed, steps
        self.compared_with = compared_with
        self.exact = self._run(np.zeros(3) if noisy else None)
        self._moved: dict[Rounding, list[list[Numbers]]] = {}
        self._runs: dict[Rounding, int] = {}
        self._unended: dict[Rounding, list[Equation]] = {}
        # For each call and each promise of the program, by how much copies differ in runs with noise.
        self._promises: dict[tuple[int, int], list[float]] = {}

    def _run(self, noise: Numbers | None) -> list[Step]:
        given, found = self.args, []
        for _ in range(self.steps):
            called = self.program(given, noise, self.compared_with)
            results = called.results
            found.append(Step(given, results, called.broken, called.unended))
            given = Wide(
                self.feed(given.types, results.types), self.feed(given.values, results.values)
            )
        return found

    def moved(self, rounding: Rounding, runs: int) -> list[list[Numbers]]:
        """By how much noise moves each number: the most of so many runs, for each call and array.

        It is infinite where a number becomes NaN or infinite, or is so no longer.
        """
        most = self._moved.setdefault(
            rounding, [[np.zeros(x.shape) for x in step.numbers] for step in self.exact]
        )
        for run in range(self._runs.get(rounding, 0), runs):
            noisy = self._run(np.array([*_NOISE[rounding], run + 1.0]))
            stopped = self._unended.setdefault(rounding, [])
            stopped += [loop for step in noisy for loop in step.unended]
            for step, (exact, other) in enumerate(zip(self.exact, noisy, strict=True)):
                pairs = zip(exact.numbers, other.numbers, strict=True)
                for k, (a, b) in enumerate(pairs):
                    most[step][k] = np.maximum(most[step][k], distances(a, b))
                if rounding == "double":
                    self._note(step, other)
        self._runs[rounding] = max(runs, self._runs.get(rounding, 0))
        return most

    def unended(self, rounding: Rounding) -> list[Equation]:
        """The loops that do not end where operations round."""
        if not self.program.loops(self.args.types):
            return []
        self.moved(rounding, 3)
        return self._unended[rounding]

    def _note(self, step: int, other: Step) -> None:
        for one in other.broken:
            self._promises.setdefault((step, one.number), []).append(one.unequal.amount)

    def broken(self, step: int) -> list[Broken]:
        """The promises that do not hold, where copies differ by more than rounding explains."""
        found = self.exact[step].broken
        if not found:
            return []
        self.moved("double", 8)
        return [one for one in found if not self._is_rounding(step, one)]

    def _is_rounding(self, step: int, one: Broken) -> bool:
        amount = one.unequal.amount
        others = self._promises.get((step, one.number), [])
        # Noise moves what is rounding by as much as it is. A difference that stays is none.
        return bool(others) and max(abs(x - amount) for x in others) * 4 >= amount


def distances(a: Numbers, b: Numbers) -> Numbers:
    """The differences between numbers; infinite where only one of the two is NaN or infinite."""
    if a.dtype.kind in "biu" or b.dtype.kind in "biu":
        return np.abs(a.astype(np.float64) - b.astype(np.float64))
    with np.errstate(invalid="ignore"):
        difference: Any = np.abs(a - b)
    equal = (a == b) | ((a != a) & (b != b))
    return np.where(equal, 0.0, np.where(np.isnan(difference), np.inf, difference))


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """An array that differs from the reference.

    **Attributes:**

    - `number`: the number of the array in the result.
    - `leaf`: the array, where it lies on the mesh, or its type.
    - `got`: its numbers.
    - `want`: the numbers of the reference.
    - `allowed`: how far rounding may bring each number from the reference.
    - `rounding`: whose rounding that is.
    """

    number: int
    leaf: Leaf
    got: Numbers
    want: Numbers
    allowed: Numbers
    rounding: Rounding

    @property
    def same_shape(self) -> bool:
        return bool(self.got.shape == self.want.shape)

    @cached_property
    def deviation(self) -> Numbers:
        """The difference between each number and the reference; zero where rounding explains it."""
        found = distances(self.got, self.want)
        return np.where(found > self.allowed, found, 0.0)

    @cached_property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest difference, the first of those that are as large but for rounding."""
        largest = self.deviation >= self.deviation.max() * (1 - 1e-6)
        return tuple(map(int, np.unravel_index(int(np.argmax(largest)), self.want.shape)))

    @cached_property
    def shards(self) -> list[str]:
        """The shards that hold the number with the largest difference."""
        at = self.worst
        has = [shard for shard, index in self.leaf.parts if _covers(index, at, self.want.shape)]
        return [errors.axes_str(shard) for shard in has]

    @cached_property
    def size(self) -> float:
        """The largest difference in parts of the largest number of the reference."""
        if not self.same_shape:
            return math.inf
        known = np.abs(self.want[np.isfinite(np.abs(self.want))])
        largest = float(known.max(initial=0.0))
        off = float(np.max(self.deviation, initial=0.0))
        return off / largest if largest else math.inf

    def off(self) -> Numbers:
        """Which numbers differ by more than rounding."""
        return self.deviation > 0

    @property
    def is_overflow(self) -> bool:
        """Whether a number is infinite or NaN that is finite in the reference."""
        return bool((~np.isfinite(self.got) & np.isfinite(self.want) & self.off()).any())

    @property
    def is_number_on_one_device(self) -> bool:
        """Whether a number is off that is one in the reference, where NaN may have come to others too."""
        return bool((np.isfinite(self.want) & self.off()).any())


def _covers(index: tuple[slice, ...], at: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(k in range(*s.indices(n)) for s, k, n in zip(index, at, shape, strict=False))


# Positional arguments and keyword arguments.
Args: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]


def chained(call: Fun, args: Args, steps: int, feed: Feed) -> list[PyTree]:
    """The results of calls, each of which gets what the call before returned."""
    found = []
    for _ in range(steps):
        # One call at a time: in older versions of JAX the collectives of several running calls can lock up.
        result = jax.block_until_ready(call(*args[0], **args[1]))
        found.append(result)
        args = feed(args, result)
    return found


class Traced:
    """A function that JAX can trace: it gives its results in double precision.

    **Arguments:**

    - `what`: the name of the function in messages.
    - `doubled`: the function in double precision.
    - `compiled`: the function in its own dtypes.
    """

    is_exact = True

    def __init__(self, what: str, doubled: Doubled, compiled: Fun) -> None:
        self.what, self.doubled, self.compiled = what, doubled, compiled

    def calls(self, args: Args, steps: int, feed: Feed) -> Chain:
        return Chain(self.doubled, widened(args), feed, steps, noisy=True)

    def again(self, args: Args, steps: int, feed: Feed) -> list[PyTree]:
        """The results in the function's own dtypes."""
        return chained(self.compiled, args, steps, feed)

    def form(self, types: PyTree, args: Args) -> PyTree:
        """The results of the first call. There may be types in the place of arrays."""
        del args
        return self.doubled.form(types)


class Plain:
    """A function that JAX cannot trace, such as one of NumPy. It has only the results that it gives."""

    what = "the unsharded function"
    is_exact = False

    def __init__(self, fun: Fun) -> None:
        self.fun = fun

    def calls(self, args: Args, steps: int, feed: Feed) -> "PlainCalls":
        return PlainCalls(chained(self.fun, args, steps, feed))

    def again(self, args: Args, steps: int, feed: Feed) -> list[PyTree]:
        return chained(self.fun, args, steps, feed)

    def form(self, types: PyTree, args: Args) -> PyTree:
        del types
        return self.fun(*args[0], **args[1])


class PlainCalls:
    """Results as they are, which nothing moves."""

    def __init__(self, results: Sequence[PyTree]) -> None:
        self.exact = [Step(Wide(None, None), Wide(result, result), [], []) for result in results]

    def moved(self, rounding: Rounding, runs: int) -> list[list[Numbers]]:
        return [[np.zeros(x.shape) for x in step.numbers] for step in self.exact]


RightCalls: TypeAlias = Chain | PlainCalls


# Where a part of an array lies: its first and last index along each axis.
Place: TypeAlias = tuple[tuple[int, int], ...]


class Copies:
    """An array of which several devices hold the same part.

    **Attributes:**

    - `path`: the path of the array as the user would type it.
    - `array`: the array.
    - `spread`: for each number, the difference between the largest and the smallest copy of it. It is
        infinite where some copies are NaN and others are not. Keys are compared by their data, and complex
        numbers by their real and imaginary parts, of which the larger difference counts.
    """

    def __init__(
        self, path: str, array: jax.Array, parts: dict[Place, list[tuple[Any, jax.Array]]]
    ) -> None:
        self.path, self.array = path, array
        self._parts = {
            place: [(device, _numbers(data)) for device, data in copies]
            for place, copies in parts.items()
        }
        self.spread: Numbers = np.zeros(array.shape)
        for place, copies in self._parts.items():
            found = _spread([data for _, data in copies])
            self.spread[tuple(slice(*ends) for ends in place)] = found

    def worst(self, allowed: Numbers = 0.0) -> errors.UnequalCopies | None:
        """The number whose spread exceeds by most what is allowed.

        **Arguments:**

        - `allowed`: a number, or one for each number of the array.

        **Returns:** where it is and what it is there, or `None` if no spread is larger than allowed.
        """
        allowed = np.broadcast_to(allowed, self.spread.shape)
        # Where nothing is allowed, a larger spread still exceeds that by more.
        least = 1e-12 * float(self.spread.max(initial=0.0, where=np.isfinite(self.spread)))
        with np.errstate(divide="ignore", invalid="ignore"):
            times = self.spread / np.maximum(allowed, least)
        # An allowance that is NaN allows nothing.
        times = np.where(self.spread <= allowed, 0.0, np.where(np.isnan(times), np.inf, times))
        if not times.any():
            return None
        at = tuple(map(int, np.unravel_index(int(np.argmax(times)), self.spread.shape)))
        place = next(place for place in self._parts if _holds(place, at))
        inside = tuple(k - start for k, (start, _) in zip(at, place, strict=True))
        devices = [device for device, _ in self._parts[place]]
        values = np.stack([data[inside] for _, data in self._parts[place]])
        low, high = _farthest(values)
        return errors.UnequalCopies(
            self.path,
            errors.array_str(self.array),
            getattr(self.array.sharding, "spec", None),
            self._left_out(),
            float(self.spread[at]),
            float(allowed[at]),
            at,
            (self._shard(devices[low]), self._shard(devices[high])),
            (self._shown(values[low]), self._shown(values[high])),
        )

    def _left_out(self) -> tuple[Hashable, ...]:
        """The mesh axes over which the array is not split."""
        sharding = self.array.sharding
        if not isinstance(sharding, NamedSharding):
            return ()
        named = [x if isinstance(x, tuple) else (x,) for x in sharding.spec]
        split = {name for names in named for name in names}
        return tuple(name for name in sharding.mesh.axis_names if name not in split)

    def _shard(self, device: Any) -> str:
        sharding = self.array.sharding
        if not isinstance(sharding, NamedSharding):
            return f"device {device.id}"
        (at,) = np.argwhere(sharding.mesh.devices == device)
        return errors.axes_str(dict(zip(sharding.mesh.axis_names, map(int, at), strict=True)))

    def _shown(self, value: Numbers) -> str:
        if jnp.issubdtype(self.array.dtype, jnp.complexfloating):
            return f"{complex(*value):.6g}"
        if jnp.issubdtype(self.array.dtype, jnp.floating):
            return f"{float(value[0]):.6g}"
        if jnp.issubdtype(self.array.dtype, jnp.bool_):
            return str(bool(value[0]))
        numbers = [int(x) for x in value]
        return str(numbers if jnp.issubdtype(self.array.dtype, jax.dtypes.prng_key) else numbers[0])


def copies_of(path: str, array: object) -> Copies | None:
    """The copies of an array; `None` where each device holds a part of its own, or there is only one.

    **Arguments:**

    - `path`: the path of the array as the user would type it.
    - `array`: a leaf of a result. Whatever is no `jax.Array` has no copies.
    """
    if not isinstance(array, jax.Array):
        return None
    parts: dict[Place, list[tuple[Any, jax.Array]]] = defaultdict(list)
    shards = array.addressable_shards
    for shard in shards:
        # The index of keys has an entry more, for their data.
        sides = zip(shard.index, array.shape, strict=False)
        place = tuple(part.indices(side)[:2] for part, side in sides)
        parts[place].append((shard.device, shard.data))
    return None if len(parts) == len(shards) else Copies(path, array, dict(parts))


def _numbers(x: jax.Array) -> Numbers:
    """The numbers of an array, in a type in which NumPy compares all of them, with one more axis.

    The last axis has the real and the imaginary part, or the numbers of a key.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        found = np.asarray(jax.random.key_data(x))
        return found.reshape((*x.shape, -1)).astype(np.uint64)
    found = np.asarray(x)
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        return np.stack([found.real, found.imag], axis=-1).astype(np.float64)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return found.astype(np.float64)[..., None]
    signed = jnp.issubdtype(found.dtype, jnp.signedinteger)
    return found.astype(np.int64 if signed else np.uint64)[..., None]


def _spread(copies: list[Numbers]) -> Numbers:
    first, *rest = copies
    if all(np.array_equal(first, other) for other in rest):
        return np.zeros(first.shape[:-1])
    if first.dtype.kind in "iu":
        most, least = functools.reduce(np.maximum, copies), functools.reduce(np.minimum, copies)
        # In unsigned numbers the difference of any two integers is exact.
        return (most.astype(np.uint64) - least.astype(np.uint64)).astype(np.float64).max(axis=-1)
    missing = [np.isnan(x) for x in copies]
    some, every = (
        functools.reduce(np.logical_or, missing),
        functools.reduce(np.logical_and, missing),
    )
    most, least = functools.reduce(np.fmax, copies), functools.reduce(np.fmin, copies)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where((most == least) | every, 0.0, most - least)
    return np.where(some & ~every, np.inf, difference).max(axis=-1)


def _farthest(values: Numbers) -> tuple[int, int]:
    """The numbers of the two copies that are farthest from each other."""
    columns = [_spread([values[:1], values[k : k + 1]]) for k in range(len(values))]
    one = int(np.argmax(columns))
    columns = [_spread([values[one : one + 1], values[k : k + 1]]) for k in range(len(values))]
    two = int(np.argmax(columns))
    return min(one, two), max(one, two)


def _holds(place: Place, at: tuple[int, ...]) -> bool:
    return all(start <= k < stop for k, (start, stop) in zip(at, place, strict=True))


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
