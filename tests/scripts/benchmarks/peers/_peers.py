"""The compared peers by name, with the modules that make them."""

import importlib
from collections.abc import Callable
from typing import get_args

from tests.scripts.benchmarks.peers._case import Case, Made
from tests.scripts.benchmarks.peers._models import Model


PEERS = {
    "by hand": "_by_hand:make",
    "by hand, donating": "_by_hand:donating",
    "Equinox module, jax.jit": "_equinox:under_jit",
    "Equinox module, eqx.filter_jit": "_equinox:under_filter_jit",
    "jax.Ref": "_by_hand:in_references",
    "flax.nnx, nnx.jit": "_flax:under_jit",
    "flax.nnx, cached_partial": "_flax:cached",
    "flax.nnx, split and merge": "_flax:split_and_merge",
    "brainstate": "_brainstate:eager",
    "brainstate, its jit": "_brainstate:under_jit",
    "statemesh": "_statemesh:make",
    "statemesh, donating": "_statemesh:donating",
    "statemesh, packed": "_statemesh:packed",
    "statemesh, packed, donating": "_statemesh:packed_donating",
}
# Those that train models, and give their states up.
TRAINERS = {
    "by hand": "_training:by_hand",
    "jax.jit with shardings": "_training:by_shardings",
    "Equinox module, eqx.filter_jit": "_training:with_equinox",
    "flax.nnx, nnx.jit": "_training_flax:under_jit",
    "statemesh": "_training:with_statemesh",
}
FLOOR = "by hand"


def peers_of(kind: str) -> dict[str, str]:
    """The peers that have a program of this kind."""
    return TRAINERS if kind in get_args(Model) else PEERS


def maker(kind: str, name: str) -> Callable[[Case], Made]:
    """Make a peer's programs. This imports the library of the peer and no other."""
    module, _, attribute = peers_of(kind)[name].partition(":")
    found: Callable[[Case], Made] = getattr(
        importlib.import_module(f".{module}", __package__), attribute
    )
    return found
