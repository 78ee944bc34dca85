"""Both suites run on 8 simulated devices, with every annotation of the package checked at run time."""

from jaxtyping import install_import_hook


install_import_hook("statemesh", "beartype.beartype")

from statemesh.testing import set_devices  # noqa: E402


set_devices(8)
