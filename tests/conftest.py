"""Both suites run on 8 simulated devices, with every annotation of the package checked at run time."""

import os

from jaxtyping import install_import_hook

import tests.annotations  # noqa: F401


# Programs here run a few times each: that they compile quickly is worth more than that they are quick.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
install_import_hook("statemesh", "tests.annotations.checked")

from statemesh.testing import load_profile, set_devices  # noqa: E402


set_devices(8)
load_profile()
