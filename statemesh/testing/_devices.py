"""Simulated devices, asked for before JAX starts."""

import os

import jax

from . import _errors as errors


def set_devices(count: int = 8) -> None:
    """Have JAX simulate this many devices on the CPU, or fail.

    For the first lines of a `conftest.py`: JAX reads how many devices to simulate when it is first used, and
    never again, so that a test file that asks for itself comes too late once any other has used JAX.

    **Arguments:**

    - `count`: how many devices there must be. Where there are as many of another kind, or more, those
        serve.

    **Raises:** `StatemeshError` where there are fewer, because JAX has started before: tests that run on
    fewer devices than they are written for would prove nothing.

    !!! example

        ```python
        >>> import jax
        >>> from statemesh.testing import set_devices
        >>> set_devices(8)
        >>> jax.device_count() >= 8
        True

        ```
    """
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
