"""Hypothesis is there, or it is said how to get it."""

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError(
        "statemesh.testing needs Hypothesis: pip install 'statemesh[testing]'."
    ) from error
