"""One peer in its own process. It makes its program and calls it on command.

It reads commands as lines from standard input and answers each with a line of JSON.
"""

import json
import sys
import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from tests.scripts.benchmarks.peers._case import Case, Made, timed
from tests.scripts.benchmarks.peers._peers import maker


EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/backend_compile_duration": "compiles",
}


def answer(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def sizes(made: Made) -> dict[str, float]:
    """XLA's account of the compiled program: the bytes that a device holds at once and that it moves."""
    if made.lower is None:
        return {}
    compiled = made.lower().compile()
    held = compiled.memory_analysis()
    peak = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes
    cost = compiled.cost_analysis()
    return {"peak": peak - held.alias_size_in_bytes, "moved": cost["bytes accessed"]}


def main(name: str, kind: Any, axes: Any, devices: str, states: str) -> None:
    count: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **more: Any) -> None:
        del duration_secs, more
        count[EVENTS.get(event, "")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        made = maker(kind, name)(Case(kind, axes, int(devices), int(states)))
        first, second = timed(made.step)[0], timed(made.step)[0]
        state = np.asarray(made.state(), float).ravel().tolist()
    except Exception as error:
        answer(refused=f"{type(error).__name__}: {error}".splitlines()[0])
        return
    answer(first=first, second=second, state=state)
    calls = 0
    for line in sys.stdin:
        command, _, seconds = line.strip().partition(" ")
        if command == "calls":
            if not calls:
                count.clear()
            end = time.perf_counter() + float(seconds)
            found = [timed(made.step)]
            while time.perf_counter() < end:
                found.append(timed(made.step))
            calls += len(found)
            answer(times=found)
        else:
            seen = {what: count[what] / max(calls, 1) for what in ("traces", "compiles")}
            answer(**seen, **(sizes(made) if command == "sizes" else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
