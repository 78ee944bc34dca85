"""8 simulated devices, set up before JAX starts."""

import os


COUNT = 8


def set_devices() -> None:
    """Ask for the devices, or fail: a suite that runs on fewer would prove nothing."""
    flag = f"--xla_force_host_platform_device_count={COUNT}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import jax

    if jax.device_count() != COUNT:
        raise RuntimeError(
            f"the suites need {COUNT} devices, JAX has {jax.device_count()}: it was started before the "
            "suites could set XLA_FLAGS"
        )
