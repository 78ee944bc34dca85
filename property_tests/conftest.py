"""Property tests run on 8 simulated devices, few examples at a time unless asked for more.

`HYPOTHESIS_PROFILE=deep` draws many examples, and `CI` set to anything draws the same ones every time.
"""

from jaxtyping import install_import_hook


install_import_hook("statemesh", "beartype.beartype")

from statemesh.testing import load_profile, set_devices  # noqa: E402


set_devices(8)
load_profile()
