"""The tests run on 8 simulated devices."""

from statemesh.testing import load_profile, set_devices


set_devices(8)
load_profile()
