"""Every mistake is refused in exactly the words of `texts.txt`, and the documentation has a heading for each."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import DOCS

from . import calls, gradients, keywords, lanes, placing, states, table


pytestmark = pytest.mark.usefixtures("as_users_run_it")

ENTRIES: dict[str, Callable[[], str]] = dict(keywords.KEYWORDS)
for module in (states, calls, lanes, gradients, placing):
    for name, mistakes in module.MISTAKES.items():
        assert name not in ENTRIES, name
        ENTRIES[name] = table.said(mistakes)
