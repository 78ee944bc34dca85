"""`shard_map`: signature, docstring, and one call of the engine."""

from collections.abc import Callable
from typing import Any, overload

from .._base import _errors as errors
from .._base._checks import axis_names as as_names
from .._base._checks import check_flag
from .._base._trees import fun_name
from .._base._types import (
    MISSING,
    AnyMesh,
    AxisNames,
    Donate,
    Fun,
    Params,
    Result,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from ._mapping import Decorator, StatefulMapping, makes_mappings
from ._rules import DONATE, Declared, SpecRules


@overload
def shard_map(
    fun: Callable[Params, Result],
    mesh: AnyMesh | None = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree = ...,
    *,
    state_in_specs: StateSpecs = ...,
    state_out_specs: StateSpecs = ...,
    check_vma: bool = ...,
    axis_names: AxisNames = ...,
    donate: Donate = ...,
    jit: bool = ...,
) -> StatefulMapping[Params, Result]: ...


@overload
def shard_map(
    fun: None = None,
    mesh: AnyMesh | None = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree = ...,
    *,
    state_in_specs: StateSpecs = ...,
    state_out_specs: StateSpecs = ...,
    check_vma: bool = ...,
    axis_names: AxisNames = ...,
    donate: Donate = ...,
    jit: bool = ...,
) -> Decorator: ...


@makes_mappings
def shard_map(
    fun: Fun | None = None,
    mesh: AnyMesh | None = None,
    in_specs: SpecTree = compat.INFER,
    out_specs: SpecTree = MISSING,
    *,
    state_in_specs: StateSpecs = None,
    state_out_specs: StateSpecs = None,
    check_vma: bool = True,
    axis_names: AxisNames = frozenset(),
    donate: Donate = "none",
    jit: bool = True,
) -> Any:
    """Map a stateful function over shards of its arguments.

    It means what `jax.shard_map` means for every array that is not in a `State`. States may stand
    anywhere in arguments and results: each is split off, handed to the function as its shard sees it,
    and, if it was written, merged by its own policy and put back.

    **Arguments:**

    - `fun`: a pure function over one shard. Left out, a decorator is returned.
    - `mesh`: the mesh; left out, that of `jax.set_mesh` at each call.
    - `in_specs`: one entry for each positional argument, or one spec for all; prefix trees allowed.
        `None` for an argument: not sharded, and what is no array reaches `fun` as it is. Left out on
        a mesh of Explicit axes, the specs that the arguments' types carry.
    - `out_specs`: a spec, or a prefix tree of specs, for the arrays of the result.
    - `state_in_specs`: where states enter: one spec, or `{filter: spec}` of which the first match
        counts. A state that it does not mention enters by its own `spec`, else replicated. One spec
        for all passes `RandomState` by.
    - `state_out_specs`: where *written* states leave, in the same forms. A state that it does not
        mention leaves the way it entered; one made inside by its own `spec`, else replicated.
    - `check_vma`: whether JAX keeps account of which values differ between shards. With it a write
        that differs where it should not is found.
    - `axis_names`: the mesh axes to map over; empty for all. The others are left to the compiler.
    - `donate`: `'states'` gives up the memory of written states' old values, `'all'` that of every
        argument whose memory a result can take.
    - `jit`: `False` runs without compiling, for debugging.

    **Returns:** a function like `fun`, with `place`, `unsharded`, `on_mesh`, `lower` and `explain`.

    **Raises:** `SpecError` for specs that do not fit the mesh or the arguments, `StructureError` for
    filters that match nothing, `DivergedStateError` for a write without a policy that differs between
    shards. What `fun` raises comes through unchanged.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> def step(mean, x):
        ...     return x - mean.value, mean.set(jnp.mean(x))
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=(P("data"), P()))
        >>> out, mean = step(sm.BatchState(0.0, reduce="mean"), jnp.arange(4.0))
        >>> float(mean.value)
        1.5

        ```
    """
    if out_specs is MISSING:
        raise TypeError(
            "shard_map needs out_specs: `shard_map(fun, mesh, in_specs, out_specs)`, with P() for results "
            "that are the same on every shard."
        )
    if not (isinstance(donate, str) and donate in DONATE):
        raise errors.unknown_choice("donate", donate, DONATE)
    check_flag("shard_map", "check_vma", check_vma)
    check_flag("shard_map", "jit", jit)
    expected = (
        "the name of a mesh axis, or several, as in axis_names={'data'}; leave it out for all"
    )
    names = as_names("shard_map", axis_names, "axis_names", expected)

    def decorate(fun: Fun) -> StatefulMapping:
        rules = SpecRules(
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            state_in_specs=state_in_specs,
            state_out_specs=state_out_specs,
            check_vma=check_vma,
            axis_names=names,
        )
        declared = Declared("shard_map", fun, fun_name(fun), rules, donate, jit)
        return StatefulMapping(declared)

    return decorate if fun is None else decorate(fun)
