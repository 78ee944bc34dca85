"""What tests call before they start: simulated devices, and profiles of Hypothesis."""

import os
from typing import Any

import jax
from hypothesis import Phase, settings
from hypothesis.errors import InvalidArgument

import statemesh as sm

from . import _errors as errors


def set_devices(count: int = 8) -> None:
    """Make JAX simulate this many devices on the CPU, or fail.

    Call it in the first lines of `conftest.py`. JAX reads the number of simulated devices once, when it is
    first used: a test file that asks later comes too late.

    **Arguments:**

    - `count`: the number of devices that there must be. Real devices serve too, if there are enough.

    **Raises:** `StatemeshError` for a number below 1, and where there are fewer, because JAX has started
    already: tests on fewer devices than they are written for would prove nothing.

    !!! example

        ```python
        >>> import jax
        >>> from statemesh.testing import set_devices
        >>> set_devices(8)
        >>> jax.device_count() >= 8
        True

        ```
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        whole = isinstance(count, int) and not isinstance(count, bool)
        kind = sm.StatemeshError if whole else TypeError
        raise kind(
            f"set_devices: count is {count!r}, but must be an int, 1 or more, as in set_devices(8)."
        )
    flag = "--xla_force_host_platform_device_count="
    others = [part for part in os.environ.get("XLA_FLAGS", "").split() if not part.startswith(flag)]
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{flag}{count}"])
    if (available := jax.device_count()) < count:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before
        raise sm.StatemeshError(
            f"set_devices({count}): JAX has started already, with {available} "
            f"{errors.plural('device', available)}. Call it in the first lines of conftest.py, before "
            f"anything asks JAX for its devices or makes an array; in a shell, `export "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}` does the same."
        )


def load_profile(name: str | None = None) -> None:
    """Set Hypothesis up for tests that compile: no deadline, and in CI the same examples each time.

    **Arguments:**

    - `name`: `'quick'` for 25 examples of each test, `'deep'` for 1,000, or a profile of yours. Left out, the
        value of the environment variable `HYPOTHESIS_PROFILE`, or else `'quick'`. In CI (where the variable
        `CI` is set) the examples of `'quick'` come from a fixed seed.

    **Raises:** `StatemeshError` for a profile that nobody has registered.

    !!! example

        ```python
        >>> from hypothesis import settings
        >>> from statemesh.testing import load_profile
        >>> load_profile("deep")
        >>> settings().max_examples, settings().deadline
        (1000, None)
        >>> load_profile("quick")
        >>> settings().max_examples
        25

        ```
    """
    # Explaining a failure takes as many compiles as finding it.
    common = settings(
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    settings.register_profile("quick", common, max_examples=25, derandomize="CI" in os.environ)
    settings.register_profile("deep", common, max_examples=1000)
    chosen: Any = os.environ.get("HYPOTHESIS_PROFILE", "quick") if name is None else name
    try:
        settings.get_profile(chosen)
    except (InvalidArgument, TypeError) as error:
        raise sm.StatemeshError(
            f"load_profile: no profile is called {chosen!r}. Use 'quick' or 'deep', or register it first: "
            "hypothesis.settings.register_profile(name, max_examples=100)."
        ) from error
    settings.load_profile(chosen)
