"""What statemesh needs to know of JAX beyond its stable surface, each found by feature."""

import importlib
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._types import AxisName


# `jax.shard_map`'s own default for `in_specs`; it is exported under no public name.
INFER: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default

# Where JAX keeps what its trace is doing; its stubs do not export these names.
_core: Any = importlib.import_module("jax.extend.core")
# The stubs of `PyTreeDef` cannot be found, so that a checker would allow none of its methods.
tree_util: Any = jax.tree_util
_NOWHERE: frozenset[AxisName] = frozenset()


# Whether a compiled call refuses a buffer that was given up. In older releases it crashes the process if
# there are several devices. Nothing in JAX tells which it is; this name came with the mended release.
REFUSES_DELETED: bool = hasattr(jax, "get_mesh")


def varying(x: Any) -> frozenset[AxisName]:
    """The mesh axes over which the type of `x` says that it may differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_type(aval: Any) -> frozenset[AxisName]:
    """The same of a variable's type in a jaxpr; a token's says nothing."""
    mark = getattr(aval, "manual_axis_type", None)
    return _NOWHERE if mark is None else frozenset(mark.varying)


def is_literal(atom: Any) -> bool:
    """Whether an operand in a jaxpr is a constant written out."""
    return isinstance(atom, _core.Literal)


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
            return "cond", [_open(branch) for branch in params["branches"]]
        case "while":
            cond, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
            return "while", cond, body, params["cond_nconsts"], params["body_nconsts"]
        case "scan":
            body = _open(params["jaxpr"])
            # What is scanned over or stacked has an axis more outside.
            carry = _as_inside(eqn.outvars, body.outvars)
            return "scan", body, _as_inside(eqn.invars, body.invars) - carry, carry
    called = [_open(j) for name in ("jaxpr", "call_jaxpr") if (j := params.get(name)) is not None]
    if len(called) == 1 and len(called[0].invars) == len(eqn.invars):
        return "call", called[0]
    return None


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _as_inside(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(a.aval.shape == b.aval.shape for a, b in pairs)


def under_jit() -> bool:
    """Whether operations are being recorded into a jaxpr now."""
    return bool(_core.unsafe_am_i_under_a_jit_DO_NOT_USE())


# Whether anything is being traced or transformed, as the quickest question there is:
# `current_trace(()) is TOP_LEVEL`.
current_trace: Any = _core.find_top_trace
TOP_LEVEL: Any = current_trace(())


def bound_axis_names() -> tuple[AxisName, ...]:
    """The axis names that collectives may use here."""
    return tuple(_core.unsafe_get_axis_names_DO_NOT_USE())


def context_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` (or of an enclosing `shard_map`), if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` with its devices, if there is one."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def manual_axes(mesh: Mesh | AbstractMesh | None) -> frozenset[AxisName]:
    """The axes of `mesh` that an enclosing `shard_map` has already taken."""
    return frozenset(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else _NOWHERE


def inside_checked_shard_map() -> bool:
    """Whether the types of an enclosing `shard_map` say what varies."""
    taken = manual_axes(jax.sharding.get_abstract_mesh())
    return any(varying(jax.lax.axis_index(name)) for name in taken)


def traced_apart(
    fun: Callable[..., Any], types: Sequence[Any], sizes: Sequence[tuple[AxisName, int]]
) -> Callable[..., Any]:
    """`fun`, traced where no mesh and no check is known, only the axes of these sizes."""
    x64 = bool(jax.config.jax_enable_x64)
    found: list[Any] = []

    def trace() -> None:
        try:
            with jax.enable_x64(x64):
                found.append(jax.make_jaxpr(fun, axis_env=list(sizes))(*types))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    replay: Callable[..., Any] = _core.jaxpr_as_fun(found[0])
    return replay


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def has_only_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    return all(kind == AxisType.Explicit for kind in mesh.axis_types)


def is_explicitly_typed(x: Any) -> bool:
    """Whether the type of `x` carries a sharding, as on Explicit mesh axes."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else None
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and has_explicit_axes(mesh)


def auto_twin(mesh: Mesh) -> Mesh:
    """The same devices and names with every axis `Auto`."""
    return Mesh(
        mesh.devices,
        mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(mesh.axis_names),
    )


def one_device_mesh(mesh: Mesh) -> Mesh:
    """A mesh with the same axis names, every one of size 1."""
    devices = mesh.devices.reshape(-1)[:1].reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def reshard(x: Any, sharding: NamedSharding) -> Any:
    """Lay a traced value out, in its type, on Explicit axes."""
    return jax.sharding.reshard(x, sharding)


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


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
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_JAX)


def inputs_read(jaxpr: Any) -> list[bool]:
    """Which inputs of a traced program some equation uses: inside a `shard_map`, what a shard uses."""
    used = set()
    for eqn in jaxpr.eqns:
        inner = _open(eqn.params["jaxpr"]) if eqn.primitive.name == "shard_map" else None
        read = [True] * len(eqn.invars) if inner is None else inputs_read(inner)
        used |= {id(v) for v, hit in zip(eqn.invars, read, strict=True) if hit}
    return [id(v) in used for v in _open(jaxpr).invars]
