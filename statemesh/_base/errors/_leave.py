"""Errors of what leaves a mapped call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._paths import describe
from .._types import AxisName
from ._classes import DivergedStateError, SpecError, StructureError
from ._text import bullets, policy_name, quoted, spec_str


@dataclasses.dataclass(frozen=True)
class Diverged:
    """A written state that still varies over `axis_names`, which `spec` does not mention."""

    path: str
    state: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None
    # What `state_out_specs` or `state_out_axes` says of it.
    said: Any


@dataclasses.dataclass(frozen=True)
class Varying:
    """A returned array that varies over `axis_names`, which `spec` does not mention."""

    path: str
    value: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None


def diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    if declared := [one for one in bad if one.state.needs_old]:
        return _merged_apart(name, declared)
    items = [
        f"{one.path}: {describe(one.state)} varies over {quoted(one.axis_names)} but leaves with "
        f"{spec_str(one.spec)}, which keeps one copy"
        for one in bad
    ]
    axes = bad[0].axis_names
    axis = axes[0] if len(axes) == 1 else axes
    own = ", ".join(map(repr, axes))
    return DivergedStateError(
        f"{name}: shards wrote different values to states of which one copy is kept:\n{bullets(items)}\n"
        "Mend it in one of three ways:\n"
        f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axis!r}));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. keep one value per shard: State(value, spec=sm.PerShard({own})), or a spec that names "
        f"{own}, as in state_out_specs."
    )


def _merged_apart(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    """The policy was declared and followed, and what it gave differs."""
    items, mends = [], []
    for one in bad:
        axes = quoted(one.axis_names)
        axis = one.axis_names[0] if len(one.axis_names) == 1 else one.axis_names
        if one.state.reduce == "sum":
            reason = f"adds the increments to the old value, which entered split over {axes}"
            mend = (
                "let it leave as it entered; or say what the shards' values become, as in "
                "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)"
            )
        else:
            own = policy_name(one.state)
            reason = f"returned by {own}, which is to return the same on every shard"
            mend = (
                f"reduce it in {own}, as with jax.lax.psum(value, {axis!r}) or "
                f"jax.lax.all_gather(value, {axis!r}, to='invarying')"
            )
        items.append(
            f"{one.path}: {describe(one.state)} varies over {axes} but leaves with "
            f"{spec_str(one.spec)}: {reason}"
        )
        mends.append(mend)
    return DivergedStateError(
        f"{name}: the policies of these states leave values that differ between shards, of which one copy is "
        f"kept:\n{bullets(items)}\nMend it:\n{bullets(list(dict.fromkeys(mends)))}"
    )


def tied(name: str, groups: Sequence[Sequence[str]]) -> StructureError:
    items = [f"{' and '.join(paths)} are one State object" for paths in groups]
    return StructureError(
        f"{name}: a state that stands in several places was written:\n{bullets(items)}\n"
        "Each place is a state of its own as soon as one is written. Keep it in one place; tie what must "
        "be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`."
    )


def diverged_in_branch(
    name: str, found: Sequence[tuple[str, tuple[AxisName, ...], PartitionSpec]]
) -> DivergedStateError:
    items = [
        f"{path} may differ over {quoted(axes)}, but its spec is {spec_str(spec)}"
        for path, axes, spec in found
    ]
    return DivergedStateError(
        f"{name}: shards that take different branches write different values to states of which one copy is "
        f"kept:\n{bullets(items)}\n"
        "JAX's types do not follow a `cond` or `while` whose predicate differs between shards. Choose with "
        "`jnp.where(predicate, new, old)` instead; or make the predicate the same on all shards, as with "
        "jax.lax.pmax(predicate, axis)."
    )


def unsure_origin(name: str, unsure: Sequence[tuple[str, Sequence[str]]]) -> StructureError:
    items = [f"{path} may be {' or '.join(several)}" for path, several in unsure]
    return StructureError(
        f"{name}: these states are alike in all but where they came from, and it cannot be known which one "
        f"each of them continues:\n{bullets(items)}\n"
        "It is lost where the branches of a `cond` return different states, and where a loop exchanges them. "
        "Tell them apart by a name or tag: State(value, name='a'); or write the values into the states that "
        "came in, after that: `state.set(new.value)`."
    )


def out_varies(name: str, bad: Sequence[Varying]) -> SpecError:
    items = [
        f"{one.path}: {describe(one.value)} varies over {quoted(one.axis_names)} but its out_spec is "
        f"{spec_str(one.spec)}"
        for one in bad
    ]
    axes = bad[0].axis_names
    axis = axes[0] if len(axes) == 1 else axes
    return SpecError(
        f"{name}: out_specs require replication, but results were statically inferred to vary:\n"
        f"{bullets(items)}\n"
        f"Reduce it, as with jax.lax.psum(value, {axis!r}), or name {quoted(axes)} in out_specs to join the "
        "shards' parts."
    )
