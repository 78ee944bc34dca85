"""Simulated devices, requested before JAX starts."""

import os

import jax

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
        raise errors.bad_device_count(count)
    flag = "--xla_force_host_platform_device_count="
    others = [part for part in os.environ.get("XLA_FLAGS", "").split() if not part.startswith(flag)]
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{flag}{count}"])
    if (found := jax.device_count()) < count:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before
        raise errors.too_few_devices(count, found)
