"""Property tests run on 8 simulated devices, and draw few examples of each test by default.

`HYPOTHESIS_PROFILE=deep` draws many examples. Where `CI` is set, every run draws the same examples.
"""

import tests.annotations
import tests.compiling


tests.annotations.install()

from statemesh.testing import load_profile, set_devices  # noqa: E402
from statemesh.testing._locate import _locate  # noqa: E402


set_devices(8)
load_profile()
# A report tells users of a failure of `locate`. Here it fails the test.
_locate.RAISE_FAILURES = True
