"""Every error that `statemesh.testing` raises, and every word that it says."""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import statemesh as sm


@dataclasses.dataclass(frozen=True)
class Unequal:
    """A result of which one copy is kept, although shards have different ones.

    **Attributes:**

    - `path`: as the user would type it.
    - `what`: its dtype and shape.
    - `spec`: its out spec.
    - `axis_names`: the axes that the spec leaves out.
    - `amount`: the largest difference.
    - `index`: where in the array that is.
    - `shards`: the two shards that differ there, each by its place on the axes.
    """

    path: str
    what: str
    spec: Any
    axis_names: tuple[Hashable, ...]
    amount: float
    index: tuple[int, ...]
    shards: tuple[str, str]


def _names(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def spec_str(spec: Any) -> str:
    """A spec as one types it."""
    return repr(spec) if isinstance(spec, sm.PerShard) else f"P({_names(tuple(spec))})"


def unequal(name: str, found: Sequence[Unequal]) -> sm.StatemeshError:
    def line(one: Unequal) -> str:
        at = f"at {list(one.index)} " if one.index else ""
        return (
            f"  - {one.path}: {one.what} with out spec {spec_str(one.spec)} is one copy for all shards along "
            f"{_names(one.axis_names)}, but differs by {one.amount:.6g} {at}between {one.shards[0]} and "
            f"{one.shards[1]}"
        )

    lines = "\n".join(map(line, found))
    return sm.StatemeshError(
        f"{name}: results that are promised to be the same on several shards differ:\n{lines}\n"
        "Reduce them over these axes inside (jax.lax.psum, pmean), let a state's `reduce` do it, or name the "
        "axes in the out specs."
    )


def not_replayed(name: str, primitive: str, why: str = "") -> sm.StatemeshError:
    return sm.StatemeshError(
        f"{name}: `{primitive}` cannot be replayed on one device{why and f': {why}'}. Run the call on "
        "devices, be they simulated (XLA_FLAGS=--xla_force_host_platform_device_count=8)."
    )


def uneven(name: str, found: Sequence[tuple[str, Sequence[str], Unequal]]) -> sm.StatemeshError:
    def line(control: str, collectives: Sequence[str], one: Unequal) -> str:
        return (
            f"  - a `{control}` with {', '.join(f'`{c}`' for c in collectives)} over "
            f"{_names(one.axis_names)} inside goes one way on {one.shards[0]}, another on {one.shards[1]}"
        )

    lines = "\n".join(line(*each) for each in found)
    return sm.StatemeshError(
        f"{name}: on devices some shards would wait in collectives for others that never come:\n{lines}\n"
        "Move the collectives out, or make the predicate the same on all shards (jax.lax.pmax)."
    )


def loop_arity(name: str, specs: int, args: int) -> TypeError:
    return TypeError(
        f"{name}: in_specs has {specs} entries for {args} positional arguments. Give one entry for each, or "
        "one spec for all."
    )


def loop_collective(name: str, error: Exception) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"{name}: a loop runs one shard after the other, without collectives ({error}). Use "
        "statemesh.testing.emulate, which has them."
    )


def loop_state(name: str, path: str, state: Any) -> sm.StatemeshError:
    kind = type(state).__name__
    what = (
        "a function as its `reduce`"
        if callable(state.reduce)
        else "an `enter` or `leave` of its own"
    )
    return sm.StatemeshError(
        f"{name}: {path} is a {kind} with {what}, which may use collectives, and a loop has none. Use "
        "statemesh.testing.emulate."
    )


def loop_axes(
    name: str, path: str, spec: Any, unknown: Sequence[str], sizes: Mapping[Hashable, int]
) -> sm.SpecError:
    return sm.SpecError(
        f"{name}: {path} is placed by {spec_str(spec)}, and there is no {_names(unknown)} among the axes "
        f"{_names(sizes)}."
    )


def loop_rank(name: str, path: str, spec: Any, shape: Sequence[int]) -> sm.SpecError:
    return sm.SpecError(
        f"{name}: {path} of shape {tuple(shape)} has fewer axes than {spec_str(spec)} has entries."
    )


def loop_size(name: str, path: str, spec: Any, dim: int, size: int, count: int) -> sm.SpecError:
    return sm.SpecError(
        f"{name}: {path} has size {size} on axis {dim}, which {spec_str(spec)} shares among {count} shards."
    )
