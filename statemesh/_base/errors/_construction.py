"""Errors that are raised when a mapping is made."""

from collections.abc import Sequence
from typing import Any

from .._types import AxisName
from ._classes import StatemeshError
from ._text import quoted, shortened, typed_str


# What an argument must be, by its name. If a name means something else in another place, its key says where.
_EXPECTED = {
    "affine": "True or False",
    "axis": "an int: the position of the new axis, as in axis=0",
    "auto": "the names of mesh axes that are not mapped over, as in auto={'model'}",
    "axis_name": "a string, as in axis_name='data'; a number is the position of an array's axis, and a tuple "
    "is several names",
    "axis_name of several": "a string, or a tuple of several, as in axis_name=('data', 'model')",
    "axis_names": "the name of a mesh axis, or several, as in axis_names={'data'}; leave it out for all",
    "backend": "the name of a platform, as in backend='cpu'",
    "axis_name of a mesh": "a string, as in axis_name='data': JAX has no other names for the axes of devices",
    "check_rep": "True or False",
    "check_vma": "True or False",
    "debias": "True or False",
    "devices": "jax.Devices in the order of the lanes, as in devices=jax.devices()[:4]",
    "donate_argnums": "the position of an argument, or several, numbered from 0, as in donate_argnums=(0,)",
    "has_aux": "True or False",
    "inference": "True or False",
    "init_kwargs": "a dictionary of arguments by name, as in init_kwargs={'batch_size': 4}, or {} for none",
    "jit": "True or False",
    "key": "the name of a field, the key of a dictionary or an index, as in PathContains('encoder')",
    "length": "an int, 0 or more: the number of steps, as in length=10",
    "map": "the name of a method, as in map('update')",
    "mesh": "a jax.sharding.Mesh, which has devices to put arrays on",
    "model": "a model that is not packed yet, as in pack(packed.unpack(), mesh)",
    "n": "an int, 0 or more: the number of rows that this shard holds, as in rows(x.shape[0], 'data')",
    "name": "a string, as in name='mean'",
    "num": "an int, 0 or more: the number of keys, as in split(2)",
    "reverse": "True or False",
    "tiled": "True or False",
    "unroll": "an int, 1 or more, or True for all steps, as in unroll=4",
    "use_bias": "True or False",
    "spmd_axis_name": "the name of a mesh axis, or a tuple of several, as in spmd_axis_name='data'",
    "state_tag": "a string, as in state_tag='new'",
    "static_broadcasted_argnums": "the position of an argument, or several, numbered from 0, as in "
    "static_broadcasted_argnums=(0,)",
    "tag": "a string or several, as in tag='slow' or tag=('slow', 'encoder')",
    "tag of a filter": "a string, as in WithTag('slow'); for several write [WithTag('a'), WithTag('b')]",
    "type": "a class, as in OfType(sm.ParamState)",
    "where": "a function of the tree, as in Where(lambda model: model.encoder)",
}


def invalid_argument(what: str, argument: str, given: object) -> TypeError:
    """An argument of a type that it cannot have; `argument` as `_EXPECTED` lists it."""
    name, kind = argument.partition(" of ")[0], type(given).__name__
    return TypeError(
        f"{what}: {name} is {shortened(given)} of type {kind}, but must be {_EXPECTED[argument]}."
    )


def invalid_count(what: str, argument: str, given: int) -> StatemeshError:
    return StatemeshError(f"{what}: {argument} is {given}, but must be {_EXPECTED[argument]}.")


def unknown_choice(argument: str, given: object, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(f"{argument}={given!r} is not known. Use one of {quoted(known)}.")


_CALLS = {
    "shard_map": "shard_map(fun, mesh, in_specs, out_specs)",
    "explain": "explain(fun, *args)",
    "scan": "scan(f, init, xs)",
    "value_and_grad": "value_and_grad(loss_fn, axis_name='data')",
}


def not_callable(transform: str, fun: object) -> TypeError:
    takes = "takes" if transform == "value_and_grad" else "maps"
    return TypeError(
        f"{transform} {takes} a function, got {typed_str(fun)}. The function comes "
        f"first: `{_CALLS.get(transform, f'{transform}(fn, in_axes=0)')}`."
    )


def not_a_plain_function(transform: str, name: str, kind: str) -> TypeError:
    return TypeError(
        f"{transform}: {name} is {kind}: a call of it gives no values, only something that is still to run. "
        "JAX traces a function once, from its arguments to its results: write `def` without `async`, and "
        "`return` the values without `yield`."
    )


def out_specs_required() -> TypeError:
    return TypeError(
        "shard_map needs out_specs: `shard_map(fun, mesh, in_specs, out_specs)`, with P() for results that "
        "are the same on every shard."
    )


def not_an_axis(where: str, axis: object) -> TypeError:
    return TypeError(
        f"{where} is {typed_str(axis)}, not an axis. Use an int (negative ones count from the end), or None "
        "for what all lanes share."
    )


def bad_axis_size(what: str, size: object) -> StatemeshError:
    return StatemeshError(f"{what}={size!r} is not a positive int.")


def bad_axis_name(name: object) -> TypeError:
    return TypeError(f"axis_name={typed_str(name)} cannot be hashed. Use a string.")


def axis_named_twice(
    what: str, argument: str, repeated: Sequence[AxisName], names: Sequence[AxisName]
) -> StatemeshError:
    return StatemeshError(
        f"{what}: {argument} names {quoted(repeated)} more than once, in {tuple(names)!r}. Name each axis "
        "once."
    )


def no_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} is empty. Leave it out, or pass some, as in "
        "devices=jax.devices()[:4]."
    )


def bad_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} must be different jax.Devices, as in devices=jax.devices()[:4]."
    )


def unknown_backend(transform: str, backend: object, why: Exception) -> StatemeshError:
    return StatemeshError(f"{transform}: backend={backend!r} cannot be used: {why}")


def devices_not_here(
    platform: str, missing: Sequence[int], present: Sequence[int]
) -> StatemeshError:
    return StatemeshError(
        f"This was pickled with {platform} devices numbered {list(missing)}, but this process has "
        f"{list(present)}. Make the mesh here and map the function over it; or leave the mesh out, and set "
        "it with jax.set_mesh(mesh)."
    )
