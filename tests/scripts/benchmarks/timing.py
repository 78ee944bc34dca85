"""What the scripts that measure share: programs that go on with their states, and calls in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


Call = Callable[[], Any]
Name = TypeVar("Name")


def mesh_of(axes: str, devices: int, name: str = "x") -> Mesh:
    """A mesh of one axis, "Explicit" or "Auto"."""
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(AxisType[axes],))


def fed_back(call: Callable[..., Any], states: Any, *inputs: Any) -> Call:
    """A program that goes on with the states that it returned beside its result."""

    def again() -> Any:
        nonlocal states
        result, states = call(states, *inputs)
        return result

    return again


def fed_back_flat(call: Callable[..., Any], arrays: Any, *inputs: Any) -> Call:
    """The same of a program whose states are its first arguments, each by itself."""

    def again() -> Any:
        nonlocal arrays
        result, *arrays = call(*arrays, *inputs)
        return result

    return again


def timed(call: Call) -> tuple[float, float]:
    """The seconds until the result is there, and the thread's seconds until the call returns."""
    wall, thread = time.perf_counter(), time.thread_time()
    result = call()
    thread = time.thread_time() - thread
    jax.block_until_ready(result)
    return time.perf_counter() - wall, thread


def medians(calls: Mapping[Name, Call], turns: int) -> dict[Name, float]:
    """The median wall time of each call, in seconds. They are called in turn, in an order that changes."""
    for call in [*calls.values()] * 3:
        timed(call)
    names = list(calls)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        k = turn % len(names)
        order = [*names[k:], *names[:k]]
        for name in order[:: -1 if turn % 2 else 1]:
            times[name].append(timed(calls[name])[0])
    return {name: statistics.median(column) for name, column in times.items()}


def print_row(*cells: object) -> None:
    """Print a row of a table, numbers with three digits."""
    shown = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(shown)} |", flush=True)


def print_head(*cells: object) -> None:
    print_row(*cells)
    print_row(*["---"] * len(cells))
