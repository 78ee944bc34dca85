"""The generator of random programs: functions of shards as Python source, each with a mesh and arguments.

What they compute is compared between meshes, with `emulate`, and with the same source run as plain Python on
whole arrays. Models and programs for the NumPy reference, which cannot run source, are drawn by
`property_tests.cases`.
"""

from .source import Program as Program
from .strategy import programs as programs
