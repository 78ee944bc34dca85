"""What differs between the versions of JAX, and what its public names do not tell. All found by feature."""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._base._checks import is_key
from .._base._types import NO_AXES, Array, Axes, AxisName, Leaf, PyTree, flat_names


if TYPE_CHECKING:
    # Newer releases of JAX have one class for both kinds of jaxpr, exported under one name only. Older ones
    # have two classes.
    ClosedJaxpr: TypeAlias = Any
    Equation: TypeAlias = JaxprEqn
    Operand: TypeAlias = Var | Literal
else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr

    # While JAX records a jaxpr, its equations are of another class, which has no public name, and they read
    # tracers instead of variables.
    Equation = Operand = Any


# `jax.shard_map`'s own default for `in_specs`; it is exported under no public name.
INFER: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default

# Older releases do not annotate its options.
_config: Any = jax.config

# The module in which one can ask what JAX is tracing. It does not mark these names as exported.
core: Any = importlib.import_module("jax.extend.core")
# JAX ships no stubs of `PyTreeDef`, so that a type checker would allow none of its methods.
tree_util: Any = jax.tree_util


# Whether a compiled call refuses a deleted buffer. Older releases crash the process if there are several
# devices. JAX does not tell which it does; `jax.get_mesh` came with the first release that refuses.
REFUSES_DELETED: bool = hasattr(jax, "get_mesh")


# The value of `inline` with which a call of `jax.jit` leaves its equations in a surrounding jaxpr, instead of
# one equation that calls. Releases without the name would also inline it in the backward pass of an eager
# `jax.vjp`, and run that pass operation by operation.
INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else False


def varying(x: Leaf) -> Axes:
    """The mesh axes over which `x` may differ, by its type."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Array, axis_names: Iterable[AxisName]) -> Array:
    """`x` typed as varying over these mesh axes at least."""
    still = tuple(name for name in axis_names if name not in varying(x))
    return jax.lax.pcast(x, still, to="varying") if still else x


def optimization_barrier(arrays: Sequence[Array]) -> list[Array]:
    """`jax.lax.optimization_barrier` that keeps the types of its operands, and lets keys pass.

    Older releases type all results of a barrier as varying over what any operand varies over. There each type
    has a barrier of its own.
    """
    results = list(arrays)
    plain = [k for k, x in enumerate(arrays) if not is_key(x)]

    def behind(at: list[int]) -> None:
        for k, x in zip(at, jax.lax.optimization_barrier([arrays[k] for k in at]), strict=True):
            results[k] = x

    behind(plain)
    if list(map(varying, results)) != list(map(varying, arrays)):
        for axes in dict.fromkeys(varying(arrays[k]) for k in plain):
            behind([k for k in plain if varying(arrays[k]) == axes])
    return results


def varying_type(aval: object) -> Axes:
    """The mesh axes over which a variable of a jaxpr may differ, by its type; none for a token."""
    mark = getattr(aval, "manual_axis_type", None)
    return NO_AXES if mark is None else frozenset(mark.varying)


def says_what_varies(aval: object) -> bool:
    """Whether a variable's type says what varies. That of a token or a reference does not."""
    return getattr(aval, "manual_axis_type", None) is not None and referred_type(aval) is aval


def is_inexact_type(x: Any) -> bool:
    """Whether a value, or a variable of a jaxpr, holds floating or complex numbers. No literal does."""
    dtype = getattr(getattr(x, "aval", None), "dtype", None)
    return (
        not isinstance(x, Literal) and dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)
    )


def unreduced_type(aval: object) -> Axes:
    """The mesh axes over which a variable of a jaxpr holds parts of one sum, by its type."""
    mark = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(mark, "unreduced", ()))


def referred_type(kind: Any) -> Any:
    """The type of the array that a reference of this type refers to; of any other type the type itself."""
    return getattr(kind, "inner_aval", kind)


def made_by(x: Leaf) -> tuple[Equation, int] | None:
    """The equation that made a traced value, and the number of the value among its results.

    We read it from JAX's tracers: JAX has no public way to look at a jaxpr before it is finished. The
    operands of such an equation are tracers.
    """
    eqn: Any
    eqn, var = getattr(x, "parent", None), getattr(x, "val", None)
    outvars = getattr(eqn, "outvars", ())
    return next(((eqn, i) for i, result in enumerate(outvars) if result is var), None)


def recorded_equations() -> list[Equation]:
    """The equations that have been recorded into the jaxpr that is being traced now, in their order.

    Those that nobody can reach any more may be missing.
    """
    trace = current_trace(())
    while not hasattr(trace, "frame") and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace  # A derivative or a `vmap` records into the trace around it.
    entries = getattr(getattr(trace, "frame", None), "tracing_eqns", ())
    equations = [entry() if callable(entry) else entry for entry in entries]
    return [eqn for eqn in equations if eqn is not None]


@contextmanager
def in_place_of(eqn: Equation) -> Iterator[None]:
    """A context in which equations are recorded with the line, the scopes and the settings of this one."""
    info: Any = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def under_jit() -> bool:
    """Whether operations are being recorded into a jaxpr now."""
    return bool(core.unsafe_am_i_under_a_jit_DO_NOT_USE())


# `current_trace(()) is TOP_LEVEL` tells whether nothing is traced or transformed. Every call asks this, and
# there is no quicker question.
current_trace: Any = core.find_top_trace
TOP_LEVEL: Any = current_trace(())


def runs_at_once() -> bool:
    """Whether operations on concrete arrays run at once although JAX is tracing.

    They do inside `jax.ensure_compile_time_eval`.
    """
    return bool(getattr(jax.config, "eager_constant_folding", False))


# The errors of tracing a function that needs the values of its arguments.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# We bind a mark like the name of a mapped axis while a function is traced. A variable of our own would not
# do: JAX keeps the jaxprs of inner `jit`s, and finds them again by the names that are bound. With a mark
# among the names it traces anew, and never hands us a jaxpr that was traced without the mark.


@dataclasses.dataclass(frozen=True)
class FollowedAxes:
    """Marks a trace whose jaxpr will tell, from its inputs on, what differs over these axes."""

    axis_names: tuple[AxisName, ...]
    # Whether its axes are lanes, each of which may have a loss of its own.
    lanes: bool


@dataclasses.dataclass(frozen=True)
class FollowedStates:
    """Marks a trace whose jaxpr will tell which state was made from which."""


@dataclasses.dataclass(frozen=True)
class TypedRight:
    """Marks a trace in which the calls of these primitives are typed right."""

    primitives: frozenset[str]


class Watched:
    """Marks a trace in which every mapped call is looked at. Each one is a mark of its own."""


class InMicrobatches:
    """Marks the trace of one microbatch."""


class Lifted:
    """Marks a trace into which casts are put. A jaxpr that lacks them is none for it."""


Mark: TypeAlias = FollowedAxes | FollowedStates | TypedRight | Watched | InMicrobatches | Lifted


def trace_marked(
    fun: Callable[..., PyTree],
    arrays: Sequence[Leaf],
    marks: Sequence[Mark],
) -> ClosedJaxpr:
    """The jaxpr of `fun`. Whatever runs while it is traced can ask for the marks."""
    return jax.make_jaxpr(fun, axis_env=[(mark, 1) for mark in marks])(*arrays)


def axes_from_dataflow() -> tuple[FollowedAxes, ...]:
    """The marks of the traces that are under way, the outermost first."""
    names = core.unsafe_get_axis_names_DO_NOT_USE()
    return tuple(name for name in names if isinstance(name, FollowedAxes))


def bound_axis_names() -> tuple[AxisName, ...]:
    """The axis names that collectives may use here: all that are bound, without our marks."""
    names = core.unsafe_get_axis_names_DO_NOT_USE()
    return tuple(name for name in names if not isinstance(name, Mark))


def context_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` (or of an enclosing `shard_map`), if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` with its devices, if there is one.

    JAX does not tell it while it records a jaxpr.
    """
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        # In an eager transformation JAX does not give the mesh, but still lays an array out on it.
        with jax.ensure_compile_time_eval():
            try:
                there = jax.device_put(np.zeros(()), PartitionSpec()).sharding
            except ValueError:  # No mesh is set, or one without devices.
                return None
        mesh = there.mesh
    return None if mesh.empty else mesh


def manual_axes(mesh: Mesh | AbstractMesh | None) -> Axes:
    """The axes of `mesh` that an enclosing `shard_map` has already taken."""
    return frozenset(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else NO_AXES


def inside_checked_shard_map() -> bool:
    """Whether the types of an enclosing `shard_map` say what varies."""
    mesh = jax.sharding.get_abstract_mesh()
    # In the order of the mesh: what is asked is recorded, and all processes must record the same.
    taken = [name for name in mesh.axis_names if name in manual_axes(mesh)]
    return any(varying(jax.lax.axis_index(name)) for name in taken)


def is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


def argument_type(info: jax.stages.ArgInfo) -> Any:
    """The type of an argument of a lowered program. Its sharding has no public name."""
    return info._aval


def with_argument_type(info: jax.stages.ArgInfo, kind: Any) -> jax.stages.ArgInfo:
    return dataclasses.replace(info, _aval=kind)


# An eager `vmap` or `grad` has concrete arrays inside its tracers, and what runs under it is compiled for the
# devices of these arrays. JAX has no public question for them, so we read the tracers' attributes.


def layers(x: Leaf) -> Iterator[Leaf]:
    """A value; and if a `vmap` or a derivative traces it the value in its tracer, and so on inwards.

    `primal` is the value in the tracer of a derivative, `val` the one in the tracer of a `vmap`, which alone
    has a `batch_dim`.
    """
    yield x
    while is_tracer(x):
        x = getattr(x, "primal", getattr(x, "val", None))
        yield x


def is_batched(x: Leaf) -> bool:
    """Whether an eager `vmap` traces `x`, within eager derivatives or not."""
    return any(hasattr(layer, "batch_dim") for layer in layers(x))


def is_derived_in_lanes(x: Leaf) -> bool:
    """Whether an eager derivative within the lanes of a `vmap` traces `x`, or may do so."""
    derived = False
    for layer in layers(x):
        if hasattr(layer, "batch_dim") and derived:
            return True
        derived |= hasattr(layer, "primal")
    # A tracer of a jaxpr does not show what is done to the jaxpr later.
    return is_tracer(x) and not is_batched(x)


def is_derived(x: Leaf) -> bool:
    """Whether an eager derivative traces `x`."""
    return any(hasattr(layer, "primal") for layer in layers(x))


def concrete_value(x: Leaf) -> Leaf:
    """The array inside the tracers of eager transformations, with all lanes of a `vmap`; else no array."""
    *_, innermost = layers(x)
    return innermost


def recorded_value(x: Leaf) -> Leaf:
    """What is recorded of a value that a `vmap` or a derivative traces, and of any other the value itself."""
    tracers = [layer for layer in layers(x) if is_tracer(layer)]
    recorded = (layer for layer in tracers if made_by(layer) is not None)
    return next(recorded, tracers[-1] if tracers else x)


def onto_devices(x: Leaf, mesh: Mesh | AbstractMesh) -> Leaf:
    """A value that an eager `grad` or `vmap` traces, on the devices of `mesh`.

    It is moved only where its concrete value is committed to other devices, because JAX refuses to move that
    by itself. We move the value and not the tracer, and move its cotangent back.
    """
    value = x.to_concrete_value() if hasattr(x, "to_concrete_value") else None
    if not isinstance(value, jax.Array) or not isinstance(mesh, Mesh) or not value.committed:
        return x
    here, there = value.sharding, NamedSharding(mesh, PartitionSpec())
    if _devices(here) == _devices(there):
        return x
    if isinstance(here, NamedSharding):
        # Between meshes only whole arrays move: a `vmap` adds an axis, which the spec of a layout does not
        # have. The cotangent is laid out like `x` once it is back.
        whole = NamedSharding(here.mesh, PartitionSpec())
        if AxisType.Explicit in here.mesh.axis_types:
            x = jax.sharding.reshard(x, whole)
        else:
            x = jax.lax.with_sharding_constraint(x, here)
        here = whole
    return jax.device_put(x, there, src=here)


def _devices(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """The devices of a sharding, in its order."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def raised_by_jax(error: BaseException) -> bool:
    """Whether an error was raised in JAX's own code."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and _is_of_jax(frames[-1])


def jit_disabled() -> bool:
    """Whether `jax.disable_jit()` is in effect."""
    return bool(_config.jax_disable_jit)


def key_reuse_checked() -> bool:
    """Whether `jax_debug_key_reuse` makes JAX refuse a key from which numbers were drawn already."""
    return bool(_config.jax_debug_key_reuse)


def traceback_filtering() -> str:
    """How JAX keeps its own frames out of tracebacks: `'off'`, `'tracebackhide'` or by removing them."""
    mode: str | None = _config.jax_traceback_filtering
    if mode in (None, "auto"):
        ipython = sys.modules.get("IPython")
        return "tracebackhide" if ipython and ipython.get_ipython() else "quiet_remove_frames"
    return mode


def in_collective_over(error: BaseException, name: AxisName) -> bool:
    """Whether a collective of JAX over `name`, alone or with others, raised it."""
    for frame in reversed([frame for frame, _ in walk_tb(error.__traceback__)]):
        if not _is_of_jax(frame):
            # Further out there is the `vmap` itself, which has that name too.
            return False
        if name in flat_names(frame.f_locals.get("axis_name")):
            return True
    return False


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(JAX_FOLDER)


def in_mesh(mesh: Mesh | AbstractMesh, traced: bool) -> AbstractContextManager[object]:
    """A context in which `mesh` is set; while JAX is tracing, the mesh without its devices."""
    if traced or isinstance(mesh, AbstractMesh):
        abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        return jax.sharding.use_abstract_mesh(abstract)
    return jax.set_mesh(mesh)
