"""The recipes run as users run them. Each checks itself, and the tests read what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "recipes"

# For each recipe what it prints besides its losses.
PRINTED = {
    "data_parallel": ["one device and four agree", "7 collectives"],
    "fsdp": [
        "one device and four agree",
        "parameters and slots: 795652 bytes in all, 99460 bytes on a device",
        f"{'all_gather':14}  data  4 ",
    ],
    "tensor_parallel": ["one device and a mesh of 2x2 agree", "3 collectives"],
    "mixed_precision": ["one device and four agree", "1 collective,", "steps skipped: 9,"],
    "clipping": ["one device and a mesh of 2x2 agree", "4 collectives", "clipped steps: 13 of 60"],
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_agrees_keeps_to_its_budget_and_learns(name: str, tmp_path: Path) -> None:
    # The devices of this suite are left out, because a recipe sets up its own.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, str(RECIPES / f"{name}.py")],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in PRINTED[name]:
        assert text in done.stdout
    ((first, last),) = re.findall(r"^loss: (\S+) at first, (\S+) in the end$", done.stdout, re.M)
    assert float(last) < float(first) / 3


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_is_short(name: str) -> None:
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) <= 100
