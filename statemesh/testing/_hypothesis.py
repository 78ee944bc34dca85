"""Import Hypothesis, or say how to install it."""

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError(
        "statemesh.testing needs Hypothesis: pip install 'statemesh[testing]'."
    ) from error
