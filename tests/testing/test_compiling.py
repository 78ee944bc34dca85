"""How programs of a check are compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from statemesh.testing._program._doubled import compile_unfused
from statemesh.testing._program._stepped import compile_fast


def test_operations_stay_apart_in_programs_that_run_a_few_times() -> None:
    def of_next(x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x + 1)
        return x

    def text(options: Callable[[], Any]) -> str:
        lowered = jax.jit(of_next).lower(jnp.ones((8, 4)))
        return str(lowered.compile(compiler_options=options()).as_text())

    assert "fused_computation" in text(compile_fast)
    # XLA wraps each operation by itself.
    assert "fused_computation" not in text(compile_unfused)
    assert "wrapped_tanh" in text(compile_unfused)
