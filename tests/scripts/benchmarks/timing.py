"""What the scripts that measure share."""

import time
from collections.abc import Callable
from typing import Any

import jax


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds until the result is there, and the thread's seconds until the call returns."""
    wall, thread = time.perf_counter(), time.thread_time()
    result = call()
    thread = time.thread_time() - thread
    jax.block_until_ready(result)
    return time.perf_counter() - wall, thread
