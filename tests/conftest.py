"""Both suites run on 8 simulated devices, and every annotation of the package is checked at run time."""

from jaxtyping import install_import_hook

import tests.annotations
import tests.compiling  # noqa: F401


install_import_hook("statemesh", "tests.annotations.checked")

from statemesh.testing import load_profile, set_devices  # noqa: E402


set_devices(8)
load_profile()
