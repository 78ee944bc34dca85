"""To test sharded code: what its program gives on one device."""

from ._emulate import emulate as emulate
from ._loop import loop as loop
