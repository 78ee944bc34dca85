"""Code written for `jax.shard_map`, one function for each thing that it can do."""

from . import arguments as arguments
from . import transformations as transformations
from ._case import CASES as CASES
from ._case import beside_a_state as beside_a_state
