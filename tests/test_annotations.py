"""The checks of annotations are made once, but they apply at each definition of a function."""

from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest

from . import annotations


def defined(kind: Any, start: int) -> Callable[[Any], Any]:
    @jaxtyping.jaxtyped(typechecker=annotations.checked)
    def add(x: kind, more: int = start) -> kind:
        return x + more if x else "none"

    return add


def test_each_definition_is_checked_and_has_its_own_closure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The checks also run if the environment turns them off.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    first, second, other = defined(int, 1), defined(int, 2), defined(float, 0)
    count = len(annotations._made)
    assert (first(1), second(1), other(0.5)) == (2, 3, 0.5)
    for add, bad in ((first, "1"), (second, "1"), (other, "1"), (second, 0), (other, 0.0)):
        with pytest.raises(jaxtyping.TypeCheckError):
            add(bad)
    defined(int, 3)
    assert len(annotations._made) == count
