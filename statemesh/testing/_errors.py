"""Every error that `statemesh.testing` raises, except the report of a failed check."""

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, get_args

from jax.sharding import PartitionSpec

import statemesh as sm

from ._types import DType


@dataclasses.dataclass(frozen=True)
class BrokenPromise:
    """A result of which one copy is kept, although shards have different ones; or a predicate of that kind.

    **Attributes:**

    - `path`: the path of the result, as the user would type it.
    - `what`: its dtype and shape.
    - `spec`: its out spec.
    - `axis_names`: the axes that the spec leaves out.
    - `amount`: the largest difference.
    - `index`: the index of the largest difference.
    - `shards`: the coordinates of the two shards that differ there.
    - `control`, `collectives`: for a predicate, its primitive and the collectives inside; else empty.
    """

    path: str
    what: str
    spec: PartitionSpec | None
    axis_names: tuple[Hashable, ...]
    amount: float
    index: tuple[int, ...]
    shards: tuple[str, str]
    control: str = ""
    collectives: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.control:
            inside = ", ".join(f"`{name}`" for name in self.collectives)
            return (
                f"  - a `{self.control}` with {inside} over {_names(self.axis_names)} inside goes one way on "
                f"{self.shards[0]}, another on {self.shards[1]}"
            )
        at = f"at {list(self.index)} " if self.index else ""
        return (
            f"  - {self.path}: {self.what} with out spec {spec_str(self.spec or ())} is one copy for all "
            f"shards along {_names(self.axis_names)}, but differs by {self.amount:.6g} {at}between "
            f"{self.shards[0]} and {self.shards[1]}"
        )


def _names(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def spec_str(spec: Iterable[object]) -> str:
    """A spec as one types it."""
    return f"P({_names(tuple(spec))})"


def unequal(name: str, promises: Iterable[BrokenPromise]) -> sm.StatemeshError:
    lines = "\n".join(map(str, promises))
    return sm.StatemeshError(
        f"{name}: results that are promised to be the same on several shards differ:\n{lines}\n"
        "Reduce them over these axes inside (jax.lax.psum, pmean), let a state's `reduce` do it, or name the "
        "axes in the out specs."
    )


def not_replayed(name: str, primitive: str, why: str = "") -> sm.StatemeshError:
    return sm.StatemeshError(
        f"{name}: `{primitive}` cannot be replayed on one device{why and f': {why}'}. Run the call on "
        "devices; simulated ones will do (XLA_FLAGS=--xla_force_host_platform_device_count=8)."
    )


def uneven(name: str, promises: Iterable[BrokenPromise]) -> sm.StatemeshError:
    lines = "\n".join(map(str, promises))
    return sm.StatemeshError(
        f"{name}: on devices some shards would wait in collectives for others that never come:\n{lines}\n"
        "Move the collectives out, or make the predicate the same on all shards (jax.lax.pmax)."
    )


def too_few_devices(count: int, found: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"set_devices({count}): JAX has started already, with {found} {_plural('device', found)}. Call it in "
        "the first lines of conftest.py, before anything asks JAX for its devices or makes an array; in a "
        f"shell, `export XLA_FLAGS=--xla_force_host_platform_device_count={count}` does the same."
    )


def bad_device_count(count: object) -> Exception:
    text = f"set_devices: count is {count!r}, but must be an int, 1 or more, as in set_devices(8)."
    whole = isinstance(count, int) and not isinstance(count, bool)
    return sm.StatemeshError(text) if whole else TypeError(text)


def unknown_profile(name: object) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"load_profile: no profile is called {name!r}. Use 'quick' or 'deep', or register it first: "
        "hypothesis.settings.register_profile(name, max_examples=100)."
    )


def not_mapped(given: object) -> TypeError:
    return TypeError(
        f"locate: mapped is {given!r} of type {type(given).__name__}, but must be what shard_map, pmap2 or "
        "vmap2 returned."
    )


def bad_keyword(what: str, argument: str, value: object, expected: str) -> TypeError:
    kind = type(value).__name__
    return TypeError(f"{what}: {argument} is {value!r} of type {kind}, but must be {expected}.")


def check(what: str, argument: str, value: object, kinds: Any, expected: str) -> None:
    """Refuse what is not of these types. A truth value is no number."""
    is_flag = isinstance(value, bool) and bool not in (kinds, *get_args(kinds))
    if is_flag or not isinstance(value, kinds):
        raise bad_keyword(what, argument, value, expected)


def unknown_paths(unknown: Sequence[str], known: Sequence[str]) -> sm.StructureError:
    return sm.StructureError(
        f"keep: no argument has the path {', '.join(map(repr, unknown))}. The paths of the arguments are "
        f"{', '.join(known)}; a shorter one, such as 'args[0]', stands for all that begin with it."
    )


def not_a_mesh(given: object) -> TypeError:
    return TypeError(
        f"meshes: {given!r} is a {type(given).__name__}. Give a list of jax.sharding.Mesh, or of the sizes "
        'of their axes: meshes=[{"x": 2}, {"x": 4, "y": 2}].'
    )


def no_meshes() -> ValueError:
    return ValueError('meshes: the list is empty. Give at least one mesh: meshes=[{"x": 2}].')


def mesh_too_large(sizes: Mapping[Hashable, int], count: int, found: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"meshes: {axes_str(sizes)} needs {count} devices, and JAX has {found}. Simulate them: "
        f"statemesh.testing.set_devices({count}) in the first lines of conftest.py; or emulate "
        "the mesh on one device with statemesh.testing.emulate."
    )


def not_arguments(args: object) -> TypeError:
    return TypeError(
        f"args: a {type(args).__name__}. Give the arguments of the function in a tuple: args=(model, x)."
    )


def steps_too_few(steps: int) -> ValueError:
    return ValueError(f"steps: {steps}. Give the number of calls in a row, at least 1.")


def other_leaves(mesh: Sequence[str], one: Sequence[str]) -> sm.StatemeshError:
    only = [path for path in mesh if path not in one] + [path for path in one if path not in mesh]
    return sm.StatemeshError(
        f"locate: the call on the mesh returns {len(mesh)} arrays, and the one on one device {len(one)}. "
        f"Only one of the two returns: {', '.join(only[:8])}."
    )


def axes_str(sizes: Mapping[Hashable, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def note_where(name: str, where: str) -> str:
    return f"While assert_equivalent called `{name}` {where}."


NOTE_GRADIENT = "Give gradients=False where a function has none."


def no_axis_names() -> sm.StatemeshError:
    return sm.StatemeshError(
        "meshes: axis_names is empty. Name an axis, or leave it out for axes called 'x', 'y' and 'z'."
    )


def no_devices(most: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"meshes: max_devices={most}, and a mesh has at least one device. Give a positive number, or leave "
        "it out for all devices."
    )


def too_many_devices(most: int, count: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"meshes: max_devices={most}, and JAX has {count} device{'s' * (count != 1)}. Call "
        f"statemesh.testing.set_devices({most}) before JAX starts, as in conftest.py, or allow fewer."
    )


def no_such_count(least: int, most: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"modules: no number of states is from min_states={least} to max_states={most}. Give numbers, 0 or "
        "more, the smaller one first."
    )


def unknown_axes(
    spec: PartitionSpec, unknown: Sequence[Hashable], names: Sequence[Hashable]
) -> sm.SpecError:
    return sm.SpecError(
        f"shapes: {spec_str(spec)} names {_names(unknown)}, and the mesh has the axes {_names(names)}."
    )


def rank_too_low(spec: PartitionSpec, rank: int) -> sm.SpecError:
    return sm.SpecError(
        f"shapes: min_rank={rank}, and {spec_str(spec)} has {len(tuple(spec))} entries, one for each axis of "
        "an array."
    )


def no_shapes(min_rank: int, max_rank: int, max_side: int) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"shapes: there is no shape of rank {min_rank} to {max_rank} with sides from 1 to {max_side}. Give a "
        "max_rank that is no less than min_rank, and a positive max_side."
    )


def unknown_dtype(dtype: DType) -> sm.StatemeshError:
    return sm.StatemeshError(f"arrays: JAX has no arrays of dtype {dtype}.")


def wide_dtype(dtype: DType, kept: DType) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"arrays: without jax_enable_x64, JAX makes {kept} of dtype {dtype}. Ask for {kept}, or set "
        "jax.config.update('jax_enable_x64', True)."
    )


def no_numbers(dtype: DType, least: int | float, most: int | float) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"arrays: dtype {dtype} has no number from {least} to {most} that is finite and not subnormal."
    )


def feed_back_unknown(what: str, path: str, known: Sequence[str]) -> sm.StructureError:
    near = ", ".join(difflib.get_close_matches(path, known, 4, 0.0))
    where = "the arguments have" if what == "args" else "the result has"
    return sm.StructureError(
        f"feed_back: {where} no arrays at {path}, but at {len(known)} other "
        f"{_plural('path', len(known))}{near and f', such as {near}'}."
    )


def feed_back_differs(argument: str, result: str, old: str, new: str) -> sm.StructureError:
    return sm.StructureError(
        f"feed_back: {result} cannot become {argument}, because structures or shapes differ: {new}, and the "
        f"argument is {old}."
    )


def feed_back_twice(argument: str, result: str) -> sm.StructureError:
    return sm.StructureError(
        f"feed_back: {result} becomes {argument}, and one of the two is in another pair already. Name each "
        "part once."
    )


def array_str(x: Any) -> str:
    """`float32[2,3]` for an array, `repr` for the rest."""
    if hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True)
class UnequalCopies:
    """A number of a result of which devices hold different copies.

    **Attributes:**

    - `path`: the path of the result, as the user would type it.
    - `what`: its dtype and shape.
    - `spec`: the spec that it lies by.
    - `axis_names`: the axes that the spec leaves out.
    - `amount`: the difference of the two copies.
    - `allowed`: the difference that rounding explains.
    - `index`: the index of the number.
    - `shards`: the coordinates of the two shards that differ most there.
    - `values`: what the two shards hold.
    """

    path: str
    what: str
    spec: PartitionSpec | None
    axis_names: tuple[Hashable, ...]
    amount: float
    allowed: float
    index: tuple[int, ...]
    shards: tuple[str, str]
    values: tuple[str, str]


def unequal_copies_line(one: UnequalCopies) -> str:
    at = f" at {list(one.index)}" if one.index else ""
    along = f" along {_names(one.axis_names)}" if one.axis_names else ""
    allowed = f", {one.allowed:.1g} would be rounding" if one.allowed else ""
    first, second = one.shards
    return (
        f"  - {one.path}: {one.what} with spec {spec_str(one.spec or ())} has one value for all "
        f"shards{along}, but{at} it is {one.values[0]} on shard {first} and {one.values[1]} on shard "
        f"{second} (off by {one.amount:.4g}{allowed})."
    )


def leave_out_unknown(given: object, known: Sequence[str]) -> sm.StructureError:
    listed = f"The states are {', '.join(known)}." if known else "There are no states in it."
    return sm.StructureError(f"leave_out: {given!r} names nothing in the result. {listed}")


def specs_given_twice(name: str, given: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name} is mapped already, with specs of its own: leave out {', '.join(given)}, or give the "
        "function that it was made from."
    )


def specs_missing(name: str, missing: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name} is not mapped yet: give {' and '.join(missing)}, or the function that shard_map returns."
    )
