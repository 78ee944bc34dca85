"""To test sharded code: the same results on every mesh, and what the program gives on one device."""

from . import _hypothesis as _hypothesis
from ._arrays import arrays as arrays
from ._devices import set_devices as set_devices
from ._emulate import emulate as emulate
from ._equivalent import assert_equivalent as assert_equivalent
from ._filters import filters as filters
from ._given import given_meshes as given_meshes
from ._profiles import load_profile as load_profile
from ._strategies import meshes as meshes
from ._strategies import shapes as shapes
from ._strategies import specs as specs
from ._trees import modules as modules
from ._trees import states as states
