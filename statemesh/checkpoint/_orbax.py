"""Import Orbax, or say how to install it."""

try:
    import orbax.checkpoint as _checkpoint  # noqa: F401
except ImportError as error:
    raise ImportError(
        "statemesh.checkpoint needs Orbax: pip install 'statemesh[checkpoint]'."
    ) from error
