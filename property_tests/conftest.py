"""Property tests run on 8 simulated devices, few examples at a time unless asked for more.

`HYPOTHESIS_PROFILE=deep` draws many examples, and `CI` set to anything draws the same ones every time.
"""

import os

from tests.devices import set_devices


set_devices()

from hypothesis import Phase, settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402


install_import_hook("statemesh", "beartype.beartype")


# An example may have to compile; that is no reason to fail it. To explain a failure costs as many
# compiles as to find it.
settings.register_profile(
    "common",
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.register_profile(
    "quick", settings.get_profile("common"), max_examples=25, derandomize="CI" in os.environ
)
settings.register_profile("deep", settings.get_profile("common"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
