"""Where a failing call goes wrong: the line of the program, and the shards that hold what is off."""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._locate._locate import located_or_why
from .._program._doubled import narrowed
from .._types import Fun, PyTree
from . import _report as report
from ._calls import Calls
from ._mismatch import Mismatch
from ._reference import Args
from ._values import generic


def results_on_mesh(calls: Calls, found: Sequence[Mismatch]) -> list[str]:
    """Lines on the results that are off, with the shards that hold them."""
    shown = sorted(found, key=lambda one: -one.size)
    if calls.one.has_devices:
        args, kwargs = calls.args
        leaves = calls.subject.leaves(calls.one.mapped(*args, **kwargs))
        shown = [
            dataclasses.replace(one, leaf=leaves[one.number]) if one.number < len(leaves) else one
            for one in shown
        ]
    return report.results(shown)


def located_in(calls: Calls, step: int, *, gradient: bool) -> list[str]:
    """Lines on the place in the program; none where it cannot be found.

    Simple values, such as those that Hypothesis shrinks to, hide the place: many lines compute the same from
    zeros. Then other values are tried first.
    """
    reference = _reference(calls)
    if reference is None:
        return []
    given = narrowed(calls.mesh.exact[step].given)
    tried = [(given, False)]
    if step == 0 and _is_simple(given):
        tried.insert(0, (generic(given, calls.subject.asked.keep), True))
    for args, other in tried:
        found = located_or_why(
            calls.one.mapped, reference, *args, results=other or not gradient, gradient=gradient
        )
        if found is not None:
            return report.located(found, generic=other)
    return []


def _reference(calls: Calls) -> Fun | None:
    """The function whose program is compared, if there is one."""
    given = calls.subject.asked.unsharded
    if given is False or not calls.reference.is_exact:
        return None
    return calls.subject.asked.meshes[0].mapped.unsharded if given is None else given


def _is_simple(args: Args) -> bool:
    """Whether most numbers of some array outside of States are equal."""
    is_state: Callable[[object], bool] = lambda x: isinstance(x, sm.State)
    return any(map(_repeats, jax.tree.leaves(args, is_leaf=is_state)))


def _repeats(x: PyTree) -> bool:
    if not eqx.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating) or x.size < 2:
        return False
    return bool(2 * len(np.unique(np.asarray(x, np.float64))) < x.size)
