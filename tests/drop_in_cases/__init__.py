"""Code written for `jax.shard_map` and `jax.pmap`, one function for each thing that these can do."""

from . import arguments as arguments
from . import transformations as transformations
from ._case import CASES as CASES
from ._case import beside_a_state as beside_a_state
from .lanes import LANES as LANES
from .lanes import lanes_beside_a_state as lanes_beside_a_state
