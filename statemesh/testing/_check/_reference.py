"""The right results: of the function on one device, or of another function."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from .._program._doubled import Doubled, Wide, widened
from .._types import Fun, Numbers, PyTree
from ._chain import Chain, Feed, Rounding, Step


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
