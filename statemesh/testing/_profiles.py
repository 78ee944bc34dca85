"""Profiles of Hypothesis for tests that compile."""

import os
from typing import Any

from hypothesis import Phase, settings
from hypothesis.errors import InvalidArgument

import statemesh as sm


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
