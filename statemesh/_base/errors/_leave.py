"""Errors of what leaves a mapped call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._paths import describe
from .._types import AxisName
from ._classes import DivergedStateError, SpecError, StructureError
from ._text import axes_argument, error_listing, listed, policy_name, quoted, spec_str


@dataclasses.dataclass(frozen=True)
class Diverged:
    """A written state that still varies over `axis_names`, which `spec` does not mention."""

    path: str
    state: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None
    # The spec or axis that `state_out_specs` or `state_out_axes` declares for it.
    declared: Any

    @property
    def item(self) -> str:
        axes = quoted(self.axis_names)
        return f"{self.path}: {describe(self.state)} varies over {axes} but leaves with {spec_str(self.spec)}"


@dataclasses.dataclass(frozen=True)
class Varying:
    """A returned array that varies over `axis_names`, which `spec` does not mention."""

    path: str
    value: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None


def diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    if merged := [one for one in bad if one.state.needs_old]:
        return _policies_diverged(name, merged)
    axes = bad[0].axis_names
    own = quoted(axes)
    return error_listing(
        DivergedStateError,
        f"{name}: shards wrote different values to states that keep one copy",
        [f"{one.item}, which keeps one copy" for one in bad],
        "Mend it in one of three ways:\n"
        f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axes_argument(axes)!r}));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. keep one value per shard: State(value, spec=sm.PerShard({own})), or a spec that names "
        f"{own}, as in state_out_specs.",
    )


def _policies_diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    items, mends = [], []
    for one in bad:
        if one.state.reduce == "sum":
            axes = quoted(one.axis_names)
            items.append(
                f"{one.item}: reduce='sum' adds the increments to the old value, which entered "
                f"split over {axes}"
            )
            mends.append(
                "let it leave as it entered; or write what the shards' values become, as in "
                "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)"
            )
        else:
            own, axis = policy_name(one.state), axes_argument(one.axis_names)
            items.append(
                f"{one.item}: {own} returned it, but must return the same value on every shard"
            )
            mends.append(
                f"reduce it in {own}, as with jax.lax.psum(value, {axis!r}) or "
                f"jax.lax.all_gather(value, {axis!r}, to='invarying')"
            )
    head = (
        f"{name}: the policies of these states gave values that differ between shards, but one copy is "
        "kept"
    )
    return error_listing(DivergedStateError, head, items, listed("Mend it", mends))


def tied(name: str, groups: Sequence[Sequence[str]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{name}: a state that stands in several places was written",
        [f"{' and '.join(paths)} are one State object" for paths in groups],
        "As soon as one is written, each place has a state of its own. Keep the state in one place; tie "
        "what must be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`.",
    )


def unsure_origin(name: str, unsure: Sequence[tuple[str, Sequence[str]]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{name}: these states differ only in where they came from, and nothing shows which of them each "
        "result continues",
        [f"{path} may be {' or '.join(several)}" for path, several in unsure],
        "That is lost if the branches of a `cond` return different states, or if a loop exchanges them. "
        "Distinguish them by a name or tag: State(value, name='a'); or write the values into the states "
        "that came in, after the `cond` or loop: `state.set(new.value)`.",
    )


def out_varies(name: str, bad: Sequence[Varying]) -> SpecError:
    axes = bad[0].axis_names
    return error_listing(
        SpecError,
        f"{name}: out_specs require replication, but these results vary",
        [
            f"{one.path}: {describe(one.value)} varies over {quoted(one.axis_names)} but its out_spec is "
            f"{spec_str(one.spec)}"
            for one in bad
        ],
        f"Reduce it, as with jax.lax.psum(value, {axes_argument(axes)!r}), or name {quoted(axes)} in "
        "out_specs to join the shards' parts.",
    )
