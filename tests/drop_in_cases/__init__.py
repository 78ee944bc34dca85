"""Code written for `jax.shard_map` and `jax.pmap`, with one function for each of their features."""

from . import arguments as arguments
from . import transformations as transformations
from ._case import CASES as CASES
from ._case import beside_a_state as beside_a_state
from .lanes import LANES as LANES
from .lanes import lanes_beside_a_state as lanes_beside_a_state
