"""What statemesh needs to know of JAX beyond its stable surface, each found by feature."""

import dataclasses
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._types import NO_AXES, Axes, AxisName, flat_names, only


Equation: TypeAlias = JaxprEqn
Operand: TypeAlias = Var | Literal
"""What an equation of a jaxpr reads."""
if TYPE_CHECKING:
    # Newer releases of JAX have one class for both kinds of jaxpr, and export it under one name only.
    ClosedJaxpr: TypeAlias = Jaxpr
else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr


# `jax.shard_map`'s own default for `in_specs`; it is exported under no public name.
INFER: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default

# Where JAX keeps what its trace is doing; its stubs do not export these names.
core: Any = importlib.import_module("jax.extend.core")
# The stubs of `PyTreeDef` cannot be found, so that a checker would allow none of its methods.
tree_util: Any = jax.tree_util


# Whether a compiled call refuses a buffer that was given up. In older releases it crashes the process if
# there are several devices. Nothing in JAX tells which it is; this name came with the mended release.
REFUSES_DELETED: bool = hasattr(jax, "get_mesh")


# What `jax.jit` is to be told of `inline` so that a jaxpr that is made of its call has what it runs, no call.
# Releases that have no such name would inline it in the backward pass of an eager `jax.vjp` too, and run that
# one operation after the other.
INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else False


def varying(x: Any) -> Axes:
    """The mesh axes over which the type of `x` says that it may differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Any, axis_names: Iterable[AxisName]) -> Any:
    """`x` typed as varying over these mesh axes at least."""
    still = tuple(name for name in axis_names if name not in varying(x))
    return jax.lax.pcast(x, still, to="varying") if still else x


def varying_type(aval: Any) -> Axes:
    """The same of a variable's type in a jaxpr; a token's says nothing."""
    mark = getattr(aval, "manual_axis_type", None)
    return NO_AXES if mark is None else frozenset(mark.varying)


def is_literal(atom: Any) -> bool:
    """Whether an operand in a jaxpr is a constant written out."""
    return isinstance(atom, core.Literal)


def shard_map_body(jaxpr: Any) -> Any:
    """What one shard runs, in the jaxpr of a program that maps something."""
    bodies = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    return bodies[0] if bodies else None


def control_flow(eqn: Any) -> tuple[Any, ...] | None:
    """An equation that runs other jaxprs, as its kind and these; `None` for any other.

    `("cond", branches)`, `("while", predicate, body, their numbers of constants)`, `("scan", body, numbers of
    constants and carried values)`, `("call", jaxpr)`. JAX documents neither names nor parameters.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            return "cond", [open_jaxpr(branch) for branch in params["branches"]]
        case "while":
            cond, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
            return "while", cond, body, params["cond_nconsts"], params["body_nconsts"]
        case "scan":
            body = open_jaxpr(params["jaxpr"])
            # What is scanned over or stacked has an axis more outside.
            carry = _as_inside(eqn.outvars, body.outvars)
            return "scan", body, _as_inside(eqn.invars, body.invars) - carry, carry
    called = [
        open_jaxpr(j) for name in ("jaxpr", "call_jaxpr") if (j := params.get(name)) is not None
    ]
    if len(called) == 1 and len(called[0].invars) == len(eqn.invars):
        return "call", called[0]
    return None


def made_by(x: Any) -> tuple[Any, int] | None:
    """Of a value that is being traced: the equation, over others, that made it, and which result it is."""
    eqn, var = getattr(x, "parent", None), getattr(x, "val", None)
    outvars = getattr(eqn, "outvars", ())
    return next(((eqn, i) for i, result in enumerate(outvars) if result is var), None)


def collective(eqn: Any) -> tuple[Axes, Axes]:
    """The axes over which an equation makes its results equal, and those over which it makes them differ.

    One that JAX adds under another name is taken to make them differ.
    """
    names = frozenset(
        name
        for key in ("axes", "axis_name")
        for name in flat_names(eqn.params.get(key))
        if not isinstance(name, int | np.integer)
    )
    joins = eqn.primitive.name in _JOINING and eqn.params.get("axis_index_groups") is None
    return (names, NO_AXES) if joins else (NO_AXES, names)


def permutes_all(eqn: Any) -> bool:
    """Whether an equation gives each instance the value of one: all the same if they were so before.

    An instance that gets nothing has zeros. How many there are is known where the axes are bound.
    """
    if eqn.primitive.name != "ppermute":
        return False
    try:
        count = math.prod(map(jax.lax.axis_size, flat_names(eqn.params["axis_name"])))
    except NameError:
        return False
    return len({to for _, to in eqn.params["perm"]}) == count


_SUMS = ("psum", "psum2", "psum_invariant")
_JOINING = (*_SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant")


def is_sum(eqn: Any) -> bool:
    """Whether an equation sums over mapped axes."""
    return eqn.primitive.name in _SUMS


def name_given(eqn: Any) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gives a value by this equation."""
    name: str | None = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return name


def forwards(eqn: Any) -> bool:
    """Whether an equation's one result is its one operand, but for its dtype or type."""
    return eqn.primitive.name in ("name", "copy", "copy_p", "convert_element_type", *_VARYING)


def exchanged_over(jaxpr: Any) -> Axes:
    """The axes over which a program's instances get anything from each other."""
    return NO_AXES.union(*map(exchanged_by, jaxpr.eqns))


def exchanged_by(eqn: Any) -> Axes:
    """The same of an equation, and of the jaxprs that it runs."""
    if eqn.primitive.name in ("axis_index", *_VARYING):
        return NO_AXES
    # By its rule a function may exchange what its jaxpr does not tell.
    by_rule: Axes = getattr(rule_of(eqn), "exchanged_over", NO_AXES)
    return by_rule.union(*collective(eqn), *map(exchanged_over, jaxprs_of(eqn)))


def made_varying(eqn: Any) -> Axes:
    """The axes over which an equation types its operand as varying, leaving it as it is."""
    return frozenset(eqn.params.get("axes", ())) if eqn.primitive.name in _VARYING else NO_AXES


_VARYING = ("pvary", "pcast")


def run_jaxpr(closed: Any, arrays: list[Any]) -> list[Any]:
    """What a traced program makes of arrays; what is a constant of it as an array too."""
    made = core.jaxpr_as_fun(closed)(*arrays)
    avals = closed.out_avals
    return [
        x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype)
        for x, aval in zip(made, avals, strict=True)
    ]


def open_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without the constants that it may be closed over."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def rule_of(eqn: Any) -> Any:
    """The rule of a call of a `custom_vmap` function, `None` for any other equation."""
    return eqn.params["rule"] if eqn.primitive.name == "custom_vmap_call" else None


def jaxprs_of(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    values = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [open_jaxpr(value) for value in values if _is_jaxpr(value)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def runs(jaxpr: Any) -> Callable[..., list[Any]]:
    """An open jaxpr as a function of arrays."""
    run: Callable[..., list[Any]] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return run


def with_own_derivative(eqn: Any) -> bool:
    """Whether an equation runs a jaxpr that has a derivative of its own."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def with_jaxprs(eqn: Any, new: Mapping[int, Any]) -> Any:
    """An equation that runs other jaxprs, each found by the `id` of the one whose place it takes."""

    def one(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(one, value)) if any(map(_is_jaxpr, value)) else value
        if not _is_jaxpr(value):
            return value
        opened = open_jaxpr(value)
        found = new.get(id(opened), opened)
        return found if opened is value else value.replace(jaxpr=found)

    return eqn.replace(params={name: one(value) for name, value in eqn.params.items()})


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr with other equations."""
    effects = set(jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=list(eqns), effects=effects)


def with_open(closed: Any, jaxpr: Any) -> Any:
    """A closed jaxpr with another one inside."""
    return jaxpr if open_jaxpr(closed) is closed else closed.replace(jaxpr=jaxpr)


def calling(fun: Callable[..., list[Any]], eqn: Any) -> Any:
    """An equation that runs `fun` on the operands of `eqn`, in its place."""

    def named(*operands: Any) -> list[Any]:
        # An operand returned as it came in would be no result of the call; a name makes it one.
        return [checkpoint_name(x, "settled") for x in fun(*operands)]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    (call,) = open_jaxpr(jax.make_jaxpr(jax.jit(named))(*avals)).eqns
    return call.replace(invars=list(eqn.invars), outvars=list(eqn.outvars))


def _as_inside(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(a.aval.shape == b.aval.shape for a, b in pairs)


def under_jit() -> bool:
    """Whether operations are being recorded into a jaxpr now."""
    return bool(core.unsafe_am_i_under_a_jit_DO_NOT_USE())


# Whether anything is being traced or transformed, as the quickest question there is:
# `current_trace(()) is TOP_LEVEL`.
current_trace: Any = core.find_top_trace
TOP_LEVEL: Any = current_trace(())


def runs_at_once() -> bool:
    """Whether what is called on concrete arrays runs although something is traced.

    So it is inside `jax.ensure_compile_time_eval`.
    """
    return bool(getattr(jax.config, "eager_constant_folding", False))


# What tracing a function raises that goes by the values of its arguments.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclasses.dataclass(frozen=True)
class FollowedAxes:
    """A program that is traced to be followed from its arguments on, over these axes.

    While it is traced, this is bound as the name of an axis, beside the true ones.
    """

    axis_names: tuple[AxisName, ...]
    # Whether its axes are lanes, each of which may have a loss of its own.
    lanes: bool


@dataclasses.dataclass(frozen=True)
class FollowedStates:
    """A program that is traced with the links of states in it.

    It is bound as `FollowedAxes` are. JAX knows what it has traced by the names that are bound: so what was
    traced without links is not taken.
    """


def trace_marked(
    fun: Callable[..., Any], arrays: list[Any], marks: Sequence[FollowedAxes | FollowedStates]
) -> Any:
    """The jaxpr of `fun`; all that is called while it is traced can ask for the marks."""
    return jax.make_jaxpr(fun, axis_env=[(mark, 1) for mark in marks])(*arrays)


def followed() -> tuple[FollowedAxes, ...]:
    """Those that are being traced, the outermost first."""
    names = core.unsafe_get_axis_names_DO_NOT_USE()
    return tuple(name for name in names if isinstance(name, FollowedAxes))


def bound_axis_names() -> tuple[AxisName, ...]:
    """The axis names that collectives may use here."""
    names = core.unsafe_get_axis_names_DO_NOT_USE()
    return tuple(name for name in names if not isinstance(name, FollowedAxes | FollowedStates))


def context_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` (or of an enclosing `shard_map`), if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` with its devices, if there is one; not while a jaxpr is recorded."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        # In an eager transformation JAX does not say it, but lays an array out on it.
        with jax.ensure_compile_time_eval():
            try:
                there = jax.device_put(np.zeros(()), PartitionSpec()).sharding
            except ValueError:  # None is set, or its types only.
                return None
        mesh = there.mesh
    return None if mesh.empty else mesh


def manual_axes(mesh: Mesh | AbstractMesh | None) -> Axes:
    """The axes of `mesh` that an enclosing `shard_map` has already taken."""
    return frozenset(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else NO_AXES


def left_by_vmap(mesh: Mesh | AbstractMesh, names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    """Those of a mesh's axes over which no `vmap` around spreads its lanes, so that they can be mapped over.

    With an operand that is split over Explicit axes a `vmap` takes these; which, JAX tells only inside a map.
    """
    found: list[AxisName] = []

    def look() -> Any:
        taken = manual_axes(jax.sharding.get_abstract_mesh())
        found.extend(name for name in names if name in taken)
        return jax.numpy.zeros(())

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    return tuple(found)


def inside_checked_shard_map() -> bool:
    """Whether the types of an enclosing `shard_map` say what varies."""
    taken = manual_axes(jax.sharding.get_abstract_mesh())
    return any(varying(jax.lax.axis_index(name)) for name in taken)


def explicit_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The axes of `mesh` that are a part of the types of what lies on it."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    return bool(explicit_axes(mesh))


def type_of(x: Any) -> Any:
    """The type of an array, or of the one that a reference refers to; `None` for anything else."""
    if not isinstance(x, jax.Array | jax.Ref | jax.core.Tracer):
        return None
    kind = jax.typeof(x)
    return getattr(kind, "inner_aval", kind)


def is_explicitly_typed(x: Any) -> bool:
    """Whether the type of `x` carries a sharding, as on Explicit mesh axes."""
    mesh = getattr(getattr(type_of(x), "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and has_explicit_axes(mesh)


def unless_explicit(info: jax.stages.ArgInfo) -> jax.stages.ArgInfo:
    """What is known of an argument, without its sharding where that is no part of its type."""
    kind: Any = info._aval
    if has_explicit_axes(kind.sharding.mesh):
        return info
    return dataclasses.replace(info, _aval=kind.update(sharding=None))


def auto_twin(mesh: Mesh) -> Mesh:
    """The same devices and names with every axis `Auto`."""
    return Mesh(
        mesh.devices,
        mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(mesh.axis_names),
    )


def one_device_mesh(mesh: Mesh | AbstractMesh) -> Mesh:
    """A mesh with the same axis names, every one of size 1."""
    # One of this process: it could not read what lies on others.
    local = mesh.local_devices if isinstance(mesh, Mesh) else jax.local_devices()
    devices = np.array(local[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def reshard(x: Any, sharding: NamedSharding) -> Any:
    """Lay a traced value out, in its type, on Explicit axes."""
    return jax.sharding.reshard(x, sharding)


def explicit_part(sharding: NamedSharding) -> NamedSharding:
    """What a type says of a sharding: its Explicit axes."""
    mesh = sharding.mesh
    return NamedSharding(mesh, only(sharding.spec, explicit_axes(mesh)))


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def is_batched(x: Any) -> bool:
    """Whether an eager `vmap` traces a value, with or without an eager derivative in it."""
    while is_tracer(x):
        if hasattr(x, "batch_dim"):
            return True
        x = getattr(x, "primal", None)
    return False


def concrete_value(x: Any) -> Any:
    """The array beneath what eager transformations trace, with all lanes of a `vmap`; no array where none
    is known."""
    while is_tracer(x):
        x = getattr(x, "primal", getattr(x, "val", None))
    return x


def onto_devices(x: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A value that an eager `grad` or `vmap` traces, on the devices of `mesh`.

    Only where its concrete value is committed to others, from which JAX takes nothing. The value is
    put there, not the tracer, and its cotangent is put back.
    """
    value = x.to_concrete_value() if hasattr(x, "to_concrete_value") else None
    if not isinstance(value, jax.Array) or not isinstance(mesh, Mesh) or not value.committed:
        return x
    here, there = value.sharding, NamedSharding(mesh, PartitionSpec())
    if _devices(here) == _devices(there):
        return x

    def move(_: tuple[()], value: Any) -> Any:
        return jax.device_put(value, there)

    def back(_: tuple[()], cotangent: Any) -> Any:
        return jax.device_put(cotangent, here)

    return jax.custom_derivatives.linear_call(move, back, (), x)


def _devices(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """The devices in the order in which a sharding goes through them."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def off_explicit_axes(x: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A traced value typed by Explicit axes as one that is not, on the Auto axes of `mesh`.

    Its cotangent goes back to the layout of `x`, on a mesh that has devices. JAX itself would use the
    mesh in the type of `x`, which has none, and could not run that where nothing is jitted.
    """
    here = jax.typeof(x).sharding
    back: Mesh | AbstractMesh = here.mesh
    if isinstance(mesh, Mesh):
        back = Mesh(mesh.devices, mesh.axis_names, axis_types=here.mesh.axis_types)

    def there(_: tuple[()], value: Any) -> Any:
        return reshard(value, NamedSharding(mesh, PartitionSpec()))

    def again(_: tuple[()], cotangent: Any) -> Any:
        return reshard(cotangent, NamedSharding(back, here.spec))

    return jax.custom_derivatives.linear_call(there, again, (), x)


_JAX = os.path.dirname(jax.__file__) + os.sep


def raised_by_jax(error: BaseException) -> bool:
    """Whether it was raised in JAX's own code."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and _is_of_jax(frames[-1])


def traceback_filtering() -> str:
    """How JAX leaves its own frames out of tracebacks: `'off'`, `'tracebackhide'` or by removing them."""
    mode: str | None = jax.config.jax_traceback_filtering
    if mode in (None, "auto"):
        ipython = sys.modules.get("IPython")
        return "tracebackhide" if ipython and ipython.get_ipython() else "quiet_remove_frames"
    return mode


def typed_apart(error: BaseException) -> list[str]:
    """What has two types in a loop or in branches, by the paths in JAX's error about what varies."""
    text = str(error)
    if "to='varying'" not in text:
        return []
    return re.findall(r"(?:component|path) (\S+?)(?:\.value)? has type", text)


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
    return frame.f_code.co_filename.startswith(_JAX)


def explicit_around(values: Iterable[Any]) -> bool:
    """Whether Explicit axes type what is around: by the mesh that is set, or some of these values."""
    mesh = context_mesh()
    return (mesh is not None and has_explicit_axes(mesh)) or any(map(is_explicitly_typed, values))


def in_mesh(mesh: Mesh | AbstractMesh, traced: bool) -> AbstractContextManager[Any]:
    """Another mesh than the one that is set; while something is traced, its types only."""
    if traced or isinstance(mesh, AbstractMesh):
        abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(abstract)
        return context
    return jax.set_mesh(mesh)


def inputs_read(jaxpr: Any) -> list[bool]:
    """Which inputs of a traced program its results, or its effects, come of.

    Inside a `shard_map`, what a shard uses.
    """
    used = {id(v) for v in open_jaxpr(jaxpr).outvars}
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(id(v) in used for v in eqn.outvars):
            continue
        inner = open_jaxpr(eqn.params["jaxpr"]) if eqn.primitive.name == "shard_map" else None
        read = [True] * len(eqn.invars) if inner is None else inputs_read(inner)
        used |= {id(v) for v, hit in zip(eqn.invars, read, strict=True) if hit}
    return [id(v) in used for v in open_jaxpr(jaxpr).invars]
