"""The ways in which the rows of a batch reach a layer: all at once, over shards, in lanes, and both."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


Forward = Callable[..., Any]


def forward(layer: Any, *rows: Any) -> Any:
    return layer(*rows)


def sharded(
    name: str, kind: AxisType, check_vma: bool = True, fun: Forward = forward, by_row: bool = True
) -> Forward:
    """Over a mesh, with a result for each row or one for all."""
    spec = P(("x", "y")) if name == "4x2" else P("x")

    def run(layer: Any, *rows: Any) -> Any:
        return mapped(layer, rows)

    out_specs = (spec if by_row else P(), P())
    mapped = sm.shard_map(
        lambda layer, rows: fun(layer, *rows),
        make_mesh(name, kind),
        (None, spec),
        out_specs,
        check_vma=check_vma,
    )
    return run


def in_lanes(transform: Any, count: int, fun: Forward = forward, by_row: bool = True) -> Forward:
    """In so many lanes, which are called "lanes"."""

    def run(layer: Any, *rows: Any) -> Any:
        parts = [x.reshape(count, -1, *x.shape[1:]) for x in rows]
        axes = (None, *[0] * len(rows))
        mapped = transform(fun, in_axes=axes, out_axes=0 if by_row else None, axis_name="lanes")
        y, layer = mapped(layer, *parts)
        return y.reshape(rows[0].shape) if by_row else y, layer

    return run


def ways(fun: Forward = forward, by_row: bool = True) -> dict[str, tuple[Any, Forward]]:
    """The names of the axes for the layer, and the call."""
    in_shards = in_lanes(sm.vmap2, 2, fun, by_row)
    explicit, auto = AxisType.Explicit, AxisType.Auto
    return {
        "unsharded": ("x", eqx.filter_jit(fun)),
        "vmap2": ("lanes", eqx.filter_jit(in_lanes(sm.vmap2, 4, fun, by_row))),
        "pmap2": ("lanes", eqx.filter_jit(in_lanes(sm.pmap2, 8, fun, by_row))),
        "8": ("x", sharded("8", explicit, True, fun, by_row)),
        "4x2, unchecked": (("x", "y"), sharded("4x2", auto, False, fun, by_row)),
        "vmap2 in shards": (("x", "lanes"), sharded("4", explicit, True, in_shards, by_row)),
    }


def key_data(layer: Any) -> Any:
    return jax.random.key_data(layer.rng.key)
