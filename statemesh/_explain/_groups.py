"""Which devices a collective of a compiled program exchanges between."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from .._base._types import AxisName


Groups = list[tuple[int, ...]]


def groups_in(text: str, devices: int) -> Groups:
    """The groups that an instruction names; one of all devices where it names none."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", text):
        return _linked(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        return _mesh_groups(mesh[1], mesh[2])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota_groups(*iota.groups())
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", text):
        return [tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [tuple(range(devices))]


def _linked(pairs: Sequence[tuple[str, str]]) -> Groups:
    """The devices that a permutation links, in groups."""
    groups: list[set[int]] = []
    for pair in pairs:
        ends = set(map(int, pair))
        joined = [group for group in groups if group & ends]
        groups = [group for group in groups if not group & ends]
        groups.append(ends.union(*joined))
    return [tuple(sorted(group)) for group in groups]


def _mesh_groups(sizes: str, over: str) -> Groups:
    shape: dict[AxisName, int] = {
        name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)
    }
    return groups_over(shape, re.findall(r"'([^']*)'", over))


def groups_over(shape: Mapping[AxisName, int], over: Sequence[AxisName]) -> Groups:
    """The numbers of the devices that exchange over these axes of a mesh."""
    names, sizes = list(shape), list(shape.values())
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    at = [names.index(name) for name in over]
    moved = np.moveaxis(numbers, at, range(numbers.ndim - len(at), numbers.ndim))
    size = math.prod(sizes[k] for k in at)
    return [tuple(group) for group in moved.reshape(-1, size).tolist()]


def _iota_groups(dims: str, reshaped: str, order: str | None) -> Groups:
    whole = tuple(map(int, reshaped.split(",")))
    numbers = np.arange(math.prod(whole)).reshape(whole)
    if order is not None:
        numbers = numbers.transpose(tuple(map(int, order.split(","))))
    groups = numbers.reshape(tuple(map(int, dims.split(","))))
    return [tuple(group) for group in groups.reshape(len(groups), -1).tolist()]


def axes_of(
    groups: Sequence[Sequence[int]], shape: Mapping[AxisName, int]
) -> tuple[AxisName, ...] | None:
    """The mesh axes over which groups of devices exchange; `None` where no axes make these groups."""
    wanted = {frozenset(group) for group in groups if len(group) > 1}
    names = [name for name, size in shape.items() if size > 1]
    for count in range(len(names) + 1):
        for over in itertools.combinations(names, count):
            made = groups_over(shape, over) if over else []
            if {frozenset(group) for group in made} == wanted:
                return over
    return None
