"""How many examples a test draws."""

from hypothesis import settings


def fewer(share: float) -> settings:
    """Settings for a test whose examples take long: a share of the usual number, at least one."""
    return settings(max_examples=max(int(settings().max_examples * share), 1))
