"""States as immutable leaves of a module tree, and mapped calls that thread them explicitly."""

from . import filters as filters
from . import legacy as legacy
from . import nn as nn
from ._axes._collectives import all_gather as all_gather
from ._axes._collectives import axis_index as axis_index
from ._axes._collectives import axis_size as axis_size
from ._axes._collectives import pmax as pmax
from ._axes._collectives import pmean as pmean
from ._axes._collectives import pmin as pmin
from ._axes._collectives import psum as psum
from ._base._nodes import is_state as is_state
from ._base._specs import PerShard as PerShard
from ._base.errors import BatchAxisError as BatchAxisError
from ._base.errors import DivergedStateError as DivergedStateError
from ._base.errors import SpecError as SpecError
from ._base.errors import StatemeshError as StatemeshError
from ._base.errors import StructureError as StructureError
from ._call._explain import explain as explain
from ._call._mapping import StatefulMapping as StatefulMapping
from ._call._pmap2 import pmap2 as pmap2
from ._call._shard_map import shard_map as shard_map
from ._call._vmap2 import vmap2 as vmap2
from ._explain._explanation import Explanation as Explanation
from ._fsdp._fsdp import fsdp as fsdp
from ._fsdp._gather import gather as gather
from ._fsdp._gather import scatter as scatter
from ._grad._grad import grad as grad
from ._grad._grad import value_and_grad as value_and_grad
from ._grad._trainable import trainable as trainable
from ._map import Map as Map
from ._model._kinds import BatchState as BatchState
from ._model._kinds import HiddenState as HiddenState
from ._model._kinds import LongTermState as LongTermState
from ._model._kinds import NonBatchState as NonBatchState
from ._model._kinds import ParamState as ParamState
from ._model._kinds import ShortTermState as ShortTermState
from ._model._module import Module as Module
from ._model._module import field as field
from ._model._random import RandomState as RandomState
from ._model._state import State as State
from ._new_states import new_states as new_states
from ._new_states import pmap2_new_states as pmap2_new_states
from ._new_states import vmap2_new_states as vmap2_new_states
from ._packed._pack import pack as pack
from ._packed._packed import Packed as Packed
from ._partition import combine as combine
from ._partition import partition as partition
from ._partition import states as states
from ._resolve._place import place as place
from ._scan import scan as scan


__version__ = "0.1.0"
