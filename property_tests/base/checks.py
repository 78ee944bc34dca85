"""How calls are made and their results compared, in all designs."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..programs import Case
from ..trees import structure
from .arrays import EPS, Array, Global, aligned
from .models import arrays_of, mesh_of, partition_spec


HOMES = ("host", "device", "another", "placed")


def at_home(home: str, inputs: Sequence[Array], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Inputs as a caller may hold them: on the host, on some device, or as the call wants them."""
    match home:
        case "host":
            return [aligned(x) for x in inputs]
        case "device":
            return [jnp.array(x) for x in inputs]
        case "another":
            return [jax.device_put(x, jax.devices()[3]) for x in inputs]
        case _:
            return [jax.device_put(x, s) for x, s in zip(inputs, shardings, strict=True)]


def input_shardings(case: Case) -> list[NamedSharding]:
    mesh = mesh_of(case.mesh)
    return [NamedSharding(mesh, partition_spec(leaf.spec)) for leaf in case.inputs]


def jitted(mapped: Callable[..., Any]) -> Callable[..., Any]:
    """The mapped program as part of a bigger compiled one."""

    def call(*args: Any) -> Any:
        arrays, statics = eqx.partition(args, eqx.is_array)
        kept: list[Any] = []

        @jax.jit
        def compiled(arrays: Any) -> Any:
            result, rest = eqx.partition(mapped(*eqx.combine(arrays, statics)), eqx.is_array)
            kept[:] = [rest]
            return result

        result = compiled(arrays)
        return eqx.combine(result, kept[0])

    return call


def assert_close(got: Any, want: Global, what: str) -> None:
    """Integers are equal. Floats differ by no more than the reference's own bound."""
    x = np.asarray(got)
    assert x.shape == want.value.shape, what
    if np.issubdtype(want.value.dtype, np.integer):
        assert x.dtype == np.int32, what
        np.testing.assert_array_equal(x, want.value, what)
        return
    assert x.dtype == np.float32, what
    # XLA may flush a result that is too small to be normal.
    least = float(np.finfo(np.float32).tiny)
    np.testing.assert_allclose(x, want.value, rtol=EPS, atol=want.error + least, err_msg=what)


def assert_near(got: Any, want: Any) -> None:
    """Gradients agree up to rounding, once for each of the entries that are summed on the way back."""
    assert structure(got) == structure(want)
    wanted = [np.asarray(x) for x in jax.tree.leaves(want)]
    largest = max([1.0, *(float(np.max(np.abs(x))) for x in wanted)])
    terms = sum(x.size for x in wanted)
    for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=64 * EPS * terms * largest)


def assert_equal(got: Any, want: Any) -> None:
    """Equal trees of equal arrays."""
    assert structure(got) == structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_kept(case: Case, before: Any, after: Any) -> None:
    """What was not written is the array that went in. A transformation returns arrays of its own."""
    if case.passed not in ("", "map"):
        return
    pairs = zip(arrays_of(case, before), arrays_of(case, after), strict=True)
    for k, (old, new) in enumerate(pairs):
        if k not in case.changed():
            assert all(a is b for a, b in zip(old, new, strict=True)), f"s{k} was copied"
