"""The recipes of models run as users run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "recipes"

# What each recipe says of itself besides `explain`'s tables, and by how much its loss falls at least.
RUNS = {
    "ensemble": ("pmap2, vmap2 and vmap2 on a mesh agree", r"members=8.* 0 collectives", 0.1),
    "recurrent": ("four devices agree with one", r"on each device: \(2, 16\) of \(16, 16\)", 0.1),
    "ring_attention": ("the ring agrees with plain attention", r"7 x 1.0 KiB +ppermute", 0.2),
    "experts": ("four devices agree with one", r"tokens without a seat: \d+\.\d%", 0.8),
    "pipeline": (
        "the pipeline agrees with a plain loop over the layers",
        r"each stage is idle in 3 of 9 ticks, 33%",
        0.5,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_agrees_keeps_its_budget_and_learns(name: str) -> None:
    script = RECIPES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 100
    # The devices of this suite are left out, because the recipe sets up its own.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    agreed, measured, least = RUNS[name]
    lines = done.stdout.splitlines()
    assert agreed in lines
    assert re.search(measured, done.stdout)
    found = re.fullmatch(r"loss (\S+) -> (\S+)", lines[-1])
    assert found is not None
    assert float(found[2]) < least * float(found[1])
