"""How Hypothesis runs checks that compile."""

import os

from hypothesis import Phase, settings


def load_profile(name: str | None = None) -> None:
    """Let Hypothesis run checks that compile: without a deadline, the same examples each time in CI.

    **Arguments:**

    - `name`: `'quick'`, 25 examples of each test, `'deep'`, 1,000, or a profile of yours; without it, what
        the environment variable `HYPOTHESIS_PROFILE` says, else `'quick'`. In CI (where the variable `CI` is
        set) the quick ones are drawn from a fixed seed.

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
    # To explain a failure costs as many compiles as to find it.
    common = settings(
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    settings.register_profile("quick", common, max_examples=25, derandomize="CI" in os.environ)
    settings.register_profile("deep", common, max_examples=1000)
    settings.load_profile(name or os.environ.get("HYPOTHESIS_PROFILE", "quick"))
