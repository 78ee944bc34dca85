"""How long an import takes, beside that of Equinox: `python -m tests.scripts.benchmarks.imports`.

Each is imported in processes of their own, by turns. On some versions Equinox's import ends a few hundred
objects short of a garbage collection of everything, and whatever is imported after it pays for that. So it is
measured without collections too. The engine is what `import statemesh` leaves for its first use.
"""

import resource
import statistics
import subprocess
import sys


ROUNDS = 9
PROGRAMS = {
    "equinox": "import equinox",
    "statemesh": "import statemesh",
    "statemesh and its engine": "import statemesh; statemesh.shard_map",
}


def seconds(program: str) -> float:
    """The processor time that a process takes which runs a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print the medians, and how often each is that of Equinox."""
    for collector in ("", "import gc; gc.disable(); "):
        times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
        for _ in range(ROUNDS + 1):
            for name, program in PROGRAMS.items():
                times[name].append(seconds(collector + program))
        # The first round writes bytecode, where Python may.
        medians = {name: statistics.median(each[1:]) for name, each in times.items()}
        print("without garbage collection" if collector else "as Python is")
        for name, median in medians.items():
            print(f"  {name:25} {median:6.3f} s  {median / medians['equinox']:.2f}")


if __name__ == "__main__":
    main()
