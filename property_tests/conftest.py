"""Property tests run on 8 simulated devices, and draw few examples of each test by default.

`HYPOTHESIS_PROFILE=deep` draws many examples. Where `CI` is set, every run draws the same examples.
"""

import os

from jaxtyping import install_import_hook

import tests.annotations  # noqa: F401


# Programs here run a few times each, so that compiling them takes longer than running them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
install_import_hook("statemesh", "tests.annotations.checked")

from statemesh.testing import load_profile, set_devices  # noqa: E402


set_devices(8)
load_profile()
