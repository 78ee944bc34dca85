"""Tests of sharded code: compare its results between meshes, with one device, and with an emulated mesh."""

from . import _hypothesis as _hypothesis
from ._budget import assert_budget as assert_budget
from ._check._assert_equivalent import assert_equivalent as assert_equivalent
from ._check._check import Checked as Checked
from ._check._untested import RangeWarning as RangeWarning
from ._check._untested import UntestedWarning as UntestedWarning
from ._locate._locate import locate as locate
from ._locate._located import Located as Located
from ._locate._located import Place as Place
from ._program._emulate import emulate as emulate
from ._replicas import assert_same_replicas as assert_same_replicas
from ._setup import load_profile as load_profile
from ._setup import set_devices as set_devices
from ._strategies._arrays import arrays as arrays
from ._strategies._filters import filters as filters
from ._strategies._meshes import given_meshes as given_meshes
from ._strategies._meshes import meshes as meshes
from ._strategies._meshes import shapes as shapes
from ._strategies._meshes import specs as specs
from ._strategies._trees import modules as modules
from ._strategies._trees import states as states
