"""`vmap2`: signature, docstring, and one call of the engine."""

from collections.abc import Callable
from typing import Any, overload

from .._base._trees import fun_name
from .._base._types import (
    MISSING,
    UNNAMED,
    AxisTree,
    Fun,
    LaneName,
    Missing,
    Params,
    Result,
    SeveralAxes,
    Size,
    StateAxes,
)
from ._axis_rules import AxisRules
from ._lanes import Lanes, as_pairs
from ._mapping import Decorator, StatefulMapping, makes_mappings
from ._rules import Declared


@overload
def vmap2(
    fn: Callable[Params, Result],
    *,
    in_axes: AxisTree = ...,
    out_axes: AxisTree = ...,
    axis_name: LaneName | None = ...,
    axis_size: Size | None = ...,
    spmd_axis_name: SeveralAxes = ...,
    state_in_axes: StateAxes = ...,
    state_out_axes: StateAxes = ...,
    unexpected_out_state_mapping: str = ...,
) -> StatefulMapping[Params, Result]: ...


@overload
def vmap2(
    fn: Missing = ...,
    *,
    in_axes: AxisTree = ...,
    out_axes: AxisTree = ...,
    axis_name: LaneName | None = ...,
    axis_size: Size | None = ...,
    spmd_axis_name: SeveralAxes = ...,
    state_in_axes: StateAxes = ...,
    state_out_axes: StateAxes = ...,
    unexpected_out_state_mapping: str = ...,
) -> Decorator: ...


@makes_mappings
def vmap2(
    fn: Any = MISSING,
    *,
    in_axes: AxisTree = 0,
    out_axes: AxisTree = 0,
    axis_name: LaneName | None = None,
    axis_size: Size | None = None,
    spmd_axis_name: SeveralAxes = None,
    state_in_axes: StateAxes = None,
    state_out_axes: StateAxes = None,
    unexpected_out_state_mapping: str = "raise",
) -> Any:
    """Map a stateful function over lanes: over an axis of its arguments, on one device.

    It means what `jax.vmap` means for every array that is not in a `State`. States may stand anywhere
    in arguments and results. One that is not declared enters as it is, the same in all lanes; a
    `RandomState` gives each lane its own stream.

    **Arguments:**

    - `fn`: a pure function over one lane. Left out, a decorator is returned.
    - `in_axes`: the axis of each positional argument that is mapped over: an int (negative ones count
        from the end), `None` for what all lanes share, a prefix tree of these, or a tuple with one
        entry for each positional argument. Keyword arguments are mapped over axis 0. It is for arrays outside
        of States: an axis that stands for States alone is an error, unless it is the default.
    - `out_axes`: where the lanes go in the arrays of the result; `None` where all lanes agree, which
        is checked. In a Module, what has axis `None` in `in_axes` and is not written leaves as it
        came, whatever is said here.
    - `axis_name`: what collectives call the lanes.
    - `axis_size`: how many lanes there are. It is needed only where nothing is mapped.
    - `spmd_axis_name`: mesh axes over which the compiler is to spread the lanes, as for `jax.vmap`.
    - `state_in_axes`: the states that have a lane axis: a filter (axis 0), or `{axis: filter}` of
        which the first match counts. They leave on the same axis.
    - `state_out_axes`: where *written* states get their lane axis, in the same forms. Axis `None`
        says that all lanes agree, which is checked.
    - `unexpected_out_state_mapping`: what happens to a state that lanes wrote different values to,
        without a declared axis and without a `reduce`: `'raise'`; `'warn'` or `'ignore'`, which stack
        the values on axis 0; `'auto'`, which does so too, but feeds a state that is read and
        written, and whose axis 0 has the size of the lanes, per lane instead. `'auto'` traces the
        function twice.

    **Returns:** a function like `fn`, with `place`, `unsharded`, `lower` and `explain`.

    **Raises:** `BatchAxisError` for axes that do not fit the arguments, the states or one another, and for
    unexpected writes. What `fn` raises comes through unchanged.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def update(weights, delta):
        ...     weights = weights.set(weights.value + delta)
        ...     return weights.value, weights
        >>> update = sm.vmap2(update, in_axes=(None, 0), state_out_axes=sm.ParamState)
        >>> out, weights = update(sm.ParamState(jnp.ones(4)), jnp.zeros((3, 4)))
        >>> out.shape, weights.value.shape
        ((3, 4), (3, 4))

        ```
    """
    rules = AxisRules(
        transform="vmap2",
        carrier=Lanes(spmd_axis_name),
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=UNNAMED if axis_name is None else axis_name,
        axis_size=axis_size,
        state_in=as_pairs(state_in_axes, "state_in_axes"),
        state_out=as_pairs(state_out_axes, "state_out_axes"),
        unexpected=unexpected_out_state_mapping,
    )

    def decorate(fn: Fun) -> StatefulMapping:
        declared = Declared("vmap2", fn, fun_name(fn), rules)
        return StatefulMapping(declared)

    return decorate if fn is MISSING else decorate(fn)
