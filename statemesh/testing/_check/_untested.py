"""What a check that passed has not tested."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import hypothesis
import jax
import numpy as np

import statemesh as sm

from .._program._numbers import data_of, equal, is_key
from .._program._paths import path_of
from .._types import AnyLeaf, Args, PyTree
from ._feedback import parts_of
from ._subject import Subject


# The positional and keyword arguments of each call, and its result.
CallsMade: TypeAlias = list[tuple[Args, PyTree]]


class UntestedWarning(UserWarning):
    """A check passed without testing something that it could be expected to test.

    !!! example

        ```python
        >>> import warnings
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import UntestedWarning, assert_equivalent
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", UntestedWarning)
        ...     _ = assert_equivalent(
        ...         abs, (np.arange(1.0, 5.0),), meshes=[{"x": 1}], in_specs=P("x"), out_specs=P("x")
        ...     )
        >>> print(str(caught[0].message).split(". ")[0])
        Every mesh has one device, so nothing is compared between shards

        ```
    """


class RangeWarning(UserWarning):
    """A result overflows in float16 on a mesh and not on one device, for data near the largest float16.

    If the data can be so large, that is a mistake; no check can know whether it can.

    !!! example

        ```python
        >>> import warnings
        >>> import jax, numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import RangeWarning, assert_equivalent
        >>> def mean_size(x):
        ...     return jax.lax.psum(abs(x).mean(), "x") / jax.lax.axis_size("x")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", RangeWarning)
        ...     _ = assert_equivalent(
        ...         mean_size, (np.ones(8, np.float16),), meshes=[{"x": 4}], in_specs=P("x"), out_specs=P()
        ...     )
        >>> print(str(caught[0].message).split(",")[0])
        mean_size(...) is inf

        ```
    """


def untested(subject: Subject, calls: CallsMade) -> Iterator[str]:
    """What the calls have not tested.

    - A state that came back as it went in from every call. Parameters, other `LongTermState`s except
      `BatchState`, and states that the function does not return count as read only.
    - A random state that is drawn from and came back as it went in, or did not come back. Of a bare key only
      the first, if no count that goes on is folded into it: it is the caller who makes keys anew.
    - Differences between shards, if every mesh has one device.
    - Calls in a row, if nothing is fed back.
    - An argument that several results may replace.
    - An array of the results that holds nothing but NaN and infinities.

    What else was not tested, `Check` knows: results that are not judged, loops without end, branches.

    **Arguments:**

    - `calls`: `((args, kwargs), result)` of each call on one of the meshes. All have one structure.

    **Returns:** a sentence for each, for an `UntestedWarning`.
    """
    steps, feedback = subject.steps, subject.feed_back
    # The other examples of a property have other meshes.
    one_of_many = hypothesis.currently_in_test_context()
    if not one_of_many and all(on_mesh.mesh.size == 1 for on_mesh in subject.meshes):
        yield (
            "Every mesh has one device, so nothing is compared between shards. Give a mesh of several, such "
            'as meshes=[{"data": 4}].'
        )
    if steps is not None and steps > 1 and not feedback:
        yield (
            f"steps={steps}, but nothing that a call returns fits its arguments, so that every call gets the "
            'same. Name what the next call gets, as in fed_back={"args[0]": "[1]"}, or give steps=1.'
        )
    for path, fitting in feedback.unclear:
        yield (
            f"{path}: every call gets the same. {' and '.join(fitting)} could replace it, but for a tuple in "
            f'the place of a list. Name what it gets, as in fed_back={{"{path}": "{fitting[-1]}"}}, or '
            "nothing: fed_back={}."
        )
    arguments = [jax.tree.leaves(args) for args, _ in calls]
    results = [jax.tree.leaves(result) for _, result in calls]
    returned = dict(feedback.numbers)

    def unchanged(numbers: Sequence[int]) -> bool:
        """Whether these leaves of the arguments come back, always as they were."""
        return all(
            number in returned and _same(before[number], after[returned[number]])
            for before, after in zip(arguments, results, strict=True)
            for number in numbers
        )

    def is_counted(draw: set[int], key: Sequence[int]) -> bool:
        """Whether something that goes on makes the key of a draw too, as where a count is folded into it."""
        return any(x in returned and not unchanged([x]) for x in draw.difference(key))

    draws_again = (
        "every call draws the same. Return what the draw returns: `key, rng = rng.split()`."
    )
    for path, node, numbers in _states_and_keys(calls[0][0]):
        if isinstance(node, sm.RandomState) or is_key(node):
            draws = [draw for draw in subject.call.drawn if draw.intersection(numbers)]
            if not draws:
                continue
            if unchanged(numbers):
                if not sm.is_state(node) and all(is_counted(draw, numbers) for draw in draws):
                    continue
                yield (
                    f"{path}: random numbers are drawn from it, and it comes back as it went in, so that "
                    f"{draws_again}"
                )
            elif sm.is_state(node) and not set(numbers) <= set(returned):
                yield (
                    f"{path}: random numbers are drawn from this RandomState, and the next call does not get "
                    f"the new one, so that {draws_again}"
                )
        elif {returned.get(number) for number in numbers} & subject.left_out:
            continue
        elif numbers and _is_written(node) and unchanged(numbers):
            yield (
                f"{path}: no call changed this {type(node).__name__}, so that writing it is not tested. If "
                "the function writes it, return the new one; if it only reads it, name it in leave_out, or "
                "make it a LongTermState."
            )
    for number, same in enumerate(
        zip(*(subject.leaves(result) for _, result in calls), strict=True)
    ):
        finite = any(np.isfinite(leaf.value).any() for leaf in same)
        if number not in subject.left_out and same[0].value.size and not finite:
            yield (
                f"{same[0].path}: no call gave a finite number here, and NaN agrees with NaN, so that what "
                "is computed is not tested. Give arguments for which it is finite."
            )


def _states_and_keys(args: PyTree) -> Iterator[tuple[str, PyTree, Sequence[int]]]:
    """The states and the bare keys of arguments, with their paths and the numbers of their leaves."""
    end = 0
    for part in parts_of(args):
        if part.leaves.start < end:
            continue  # It is in the state before.
        if sm.is_state(part.node) or is_key(part.node):
            end = part.leaves.stop
            yield path_of(part.keys), part.node, part.leaves


def _is_written(state: sm.State) -> bool:
    """Whether a function that returns a state of this kind is expected to write it."""
    return isinstance(state, sm.BatchState) or not isinstance(state, sm.LongTermState)


def _same(a: AnyLeaf, b: AnyLeaf) -> bool:
    if a is b:
        return True
    a, b = np.asarray(data_of(a)), np.asarray(data_of(b))
    return bool(a.shape == b.shape and np.all(equal(a, b)))
