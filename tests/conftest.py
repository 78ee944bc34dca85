"""Both suites run on 8 simulated devices, and every annotation of the package is checked at run time."""

import os

from jaxtyping import install_import_hook

import tests.annotations  # noqa: F401


# Each program runs only a few times here, so fast compilation matters more than fast programs.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
install_import_hook("statemesh", "tests.annotations.checked")

from statemesh.testing import load_profile, set_devices  # noqa: E402


set_devices(8)
load_profile()
