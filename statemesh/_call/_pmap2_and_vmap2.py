"""`pmap2` and `vmap2`: signatures, docstrings, and one call of the engine each."""

import dataclasses
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypedDict, Unpack, overload

import jax

from .._base import _errors as errors
from .._base._checks import positions
from .._base._trees import fun_name
from .._base._types import (
    MISSING,
    UNNAMED,
    UNNAMED_DEVICES,
    AxisTree,
    DeviceList,
    Fun,
    LaneName,
    Leaf,
    Missing,
    Params,
    Positions,
    PyTree,
    Result,
    SeveralAxes,
    Size,
    StateAxes,
    Text,
)
from ._call import Pipeline, make_room
from ._lanes import Devices, Lanes, as_pairs, as_shapes
from ._mapping import Decorator, StatefulMapping, makes_mappings
from ._rules import AxisRules, Declared


# Pipelines kept for one function: the oldest go first.
_KEPT_PIPELINES = 16

_pipelines: "weakref.WeakKeyDictionary[Any, dict[Hashable, Pipeline]]" = weakref.WeakKeyDictionary()

# Types whose values are compared by value, never change, and keep no function alive.
_BY_VALUE = (int, str, type, types.NoneType, types.EllipsisType, types.CodeType, jax.Device)


def shared_pipeline(declared: Declared) -> Pipeline:
    """The pipeline of an equal declaration of the same function, or a new one.

    A function is the same if it is the same object, as under `jax.jit`, and has the same code. What is
    declared with objects that may change, or that may keep the function alive, has a pipeline of its own.
    """
    fun = declared.fun
    if not isinstance(fun, types.FunctionType):
        return Pipeline(declared)
    try:
        declarations = declared.name, declared.rules, declared.donate, declared.static
        key = _key((fun.__code__, *declarations))
    except TypeError:
        return Pipeline(declared)
    alike = _pipelines.setdefault(fun, {})
    pipeline = alike.get(key)
    if pipeline is not None:
        return pipeline
    make_room(alike, _KEPT_PIPELINES)
    return alike.setdefault(key, Pipeline(dataclasses.replace(declared, fun=_Weak(fun))))


class _Weak:
    """A function that can be called without being kept alive. Its mappings keep it alive."""

    def __init__(self, fun: types.FunctionType) -> None:
        self._fun = weakref.ref(fun)

    @property
    def __wrapped__(self) -> Any:
        return self._fun()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        return self.__wrapped__(*args, **kwargs)


def _key(value: Leaf) -> Hashable:
    """A key that is equal for equal values of the same types.

    **Raises:** `TypeError` for what is not plain.
    """
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, tuple | frozenset):
        return type(value), *map(_key, value)
    if isinstance(value, AxisRules | Devices):
        return tuple(_key(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise TypeError(value)


class _LaneOptions(TypedDict, total=False):
    """What `pmap2` and `vmap2` take by name, for type checkers."""

    in_axes: AxisTree
    out_axes: AxisTree
    axis_size: Size | None
    state_in_axes: StateAxes
    state_out_axes: StateAxes
    unexpected_out_state_mapping: str


class _Pmap2Options(_LaneOptions, total=False):
    static_broadcasted_argnums: Positions
    devices: DeviceList | None
    backend: Text
    donate_argnums: Positions
    global_arg_shapes: Any


class _Vmap2Options(_LaneOptions, total=False):
    axis_name: LaneName | None
    spmd_axis_name: SeveralAxes


@overload
def pmap2(
    fn: Callable[Params, Result],
    axis_name: LaneName | None = ...,
    **options: Unpack[_Pmap2Options],
) -> StatefulMapping[Params, Result]: ...


@overload
def pmap2(
    fn: Missing = ...,
    axis_name: LaneName | None = ...,
    **options: Unpack[_Pmap2Options],
) -> Decorator: ...


@makes_mappings
def pmap2(
    fn: Any = MISSING,
    axis_name: LaneName | None = None,
    *,
    in_axes: AxisTree = 0,
    out_axes: AxisTree = 0,
    static_broadcasted_argnums: Positions = (),
    devices: DeviceList | None = None,
    backend: Text = None,
    axis_size: Size | None = None,
    donate_argnums: Positions = (),
    global_arg_shapes: Any = None,
    state_in_axes: StateAxes = None,
    state_out_axes: StateAxes = None,
    unexpected_out_state_mapping: str = "raise",
) -> Any:
    """Map a stateful function over lanes, each on a device of its own.

    The same function gives the same results under `vmap2`, on one device.

    **Arguments:**

    - `fn`: a pure function over one lane. Left out, a decorator is returned.
    - `axis_name`: what collectives call the lanes.
    - `in_axes`: the axis of each positional argument that is mapped over: an int (negative ones count
        from the end), `None` for what all lanes share, a prefix tree of these, or a tuple with one
        entry for each positional argument. Keyword arguments are mapped over axis 0. It is for arrays outside
        of States: an axis that stands for States alone is an error, unless it is the default.
    - `out_axes`: where the lanes go in the arrays of the result; `None` where all lanes agree, which
        is checked. In a Module, what has axis `None` in `in_axes` and is not written leaves as it
        came, whatever is said here.
    - `static_broadcasted_argnums`: positions of arguments that are constants of the program. They must
        be hashable; another value compiles another program.
    - `devices`: the devices, in the order of the lanes; the first of them if there are fewer lanes.
    - `backend`: the platform whose devices are meant, such as `'cpu'`.
    - `axis_size`: how many lanes there are, in all processes. Where nothing is mapped it defaults to
        the number of devices.
    - `donate_argnums`: positions of arguments whose memory results may take, states included.
    - `global_arg_shapes`: for each positional argument the shape that the parts of all processes
        have together (`None`: not said). It is checked.
    - `state_in_axes`, `state_out_axes`, `unexpected_out_state_mapping`: as for `vmap2`.

    **Returns:** a function like `fn`, with `place`, `lower`, `explain`, and `unsharded`, which runs the lanes
    on one device. With several processes each passes the lanes of its own devices and gets these back. The
    same function, mapped again with equal arguments, runs what was compiled before.

    **Raises:** `BatchAxisError` for axes that do not fit the arguments, the states, the devices or one
    another, and for unexpected writes. What `fn` raises comes through unchanged.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> n = jax.device_count()
        >>> step = sm.pmap2(lambda x: x / jax.lax.psum(x, "lanes"), "lanes")
        >>> bool(jnp.allclose(step(jnp.ones(n)), 1 / n))
        True

        ```
    """
    donated = positions("pmap2", "donate_argnums", donate_argnums)
    static = positions("pmap2", "static_broadcasted_argnums", static_broadcasted_argnums)
    if not isinstance(devices, Iterable | None):
        expected = "jax.Devices in the order of the lanes, as in devices=jax.devices()[:4]"
        raise errors.invalid_argument("pmap2", "devices", devices, expected)
    rules = AxisRules(
        transform="pmap2",
        carrier=Devices(None if devices is None else tuple(devices), backend),
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=UNNAMED_DEVICES if axis_name is None else axis_name,
        axis_size=axis_size,
        state_in=as_pairs(state_in_axes, "state_in_axes"),
        state_out=as_pairs(state_out_axes, "state_out_axes"),
        unexpected=unexpected_out_state_mapping,
        global_shapes=as_shapes(global_arg_shapes),
    )

    def decorate(fn: Fun) -> StatefulMapping:
        declared = Declared("pmap2", fn, fun_name(fn), rules, donated or "none", static=static)
        return StatefulMapping(declared, shared_pipeline(declared))

    return decorate if fn is MISSING else decorate(fn)


@overload
def vmap2(
    fn: Callable[Params, Result], **options: Unpack[_Vmap2Options]
) -> StatefulMapping[Params, Result]: ...


@overload
def vmap2(fn: Missing = ..., **options: Unpack[_Vmap2Options]) -> Decorator: ...


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
