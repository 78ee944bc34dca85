"""The fixture of tests of what holds of `vmap2` and `pmap2` alike."""

from typing import Any

import pytest

import statemesh as sm


@pytest.fixture(params=["vmap2", "pmap2"])
def lanes(request: pytest.FixtureRequest) -> Any:
    return getattr(sm, request.param)
