"""Layers with state. Each is a `Module` whose call returns `(out, layer)`.

To be used, and to be copied from where something else is wanted. Layers without state: `equinox.nn`.
"""

from ._average import EMA as EMA
from ._average import Average as Average
from ._batch_norm import BatchNorm as BatchNorm
from ._dropout import Dropout as Dropout
from ._gru import GRUCell as GRUCell
from ._kv_cache import KVCache as KVCache
