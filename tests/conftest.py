"""Both suites run on 8 simulated devices, with every annotation of the package checked at run time."""

from tests.devices import set_devices


set_devices()

from jaxtyping import install_import_hook  # noqa: E402


install_import_hook("statemesh", "beartype.beartype")
