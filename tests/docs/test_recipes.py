"""The recipes check themselves; the tests read what they print."""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import DOCS, run_script


RECIPES = {path.stem: path for path in sorted((DOCS / "recipes").glob("*.py"))}


class Recipe(NamedTuple):
    """What a recipe prints: that what it compares agrees, other output, and by how much its loss falls."""

    agrees: str
    shows: tuple[str, ...]
    falls: float = 1 / 3


FOUR = "four devices agree with one"
GRID = "a mesh of 2x2 agrees with one device"
PRINTED = {
    "clipping": Recipe(GRID, (" 4 collectives,", r"clipped steps: 13 of 60")),
    "data_parallel": Recipe(FOUR, (" 7 collectives,",)),
    "ensemble": Recipe(
        "pmap2, vmap2 and vmap2 on a mesh agree", (r"members=8.* 0 collectives",), 0.1
    ),
    "experts": Recipe(FOUR, (r"tokens without a seat: \d+\.\d%",), 0.8),
    "fsdp": Recipe(
        FOUR,
        (
            "parameters and slots: 795652 bytes in all, 99460 bytes on a device",
            r"all_gather +data +4 ",
        ),
    ),
    "mixed_precision": Recipe(FOUR, (" 1 collective,", "steps skipped: 9,")),
    "pipeline": Recipe(
        "the pipeline agrees with a plain loop over the layers",
        (r"each stage is idle in 3 of 9 ticks, 33%",),
        0.5,
    ),
    "processes": Recipe(
        "two devices agree with one",
        (
            r"Mesh\(data=4\).* 1 collective,",
            "a process holds 12480 of 24960 bytes of the batch",
            "two processes agree with one",
        ),
    ),
    "recurrent": Recipe(FOUR, (r"on each device: \(2, 16\) of \(16, 16\)",), 0.1),
    "ring_attention": Recipe(
        "the ring agrees with plain attention", (r"7 x 1.0 KiB +ppermute",), 0.2
    ),
    "tensor_parallel": Recipe(GRID, (" 3 collectives,",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_agrees_keeps_its_budget_and_learns(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of the processes that a recipe starts.
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    runpy.run_path(str(RECIPES[name]))["main"]()
    output = capfd.readouterr().out
    recipe, lines = PRINTED[name], output.splitlines()
    assert lines[0] == recipe.agrees
    for pattern in recipe.shows:
        assert re.search(pattern, output), pattern
    losses = re.fullmatch(r"loss (\S+) -> (\S+)", lines[-1])
    assert losses is not None
    assert float(losses[2]) < recipe.falls * float(losses[1])


def test_every_recipe_is_run_is_short_and_has_a_section_with_a_picture() -> None:
    # `test_elastic.py` runs the other one.
    assert set(RECIPES) == {*PRINTED, "elastic"}
    pages = [path.read_text() for path in (DOCS / "pages").glob("recipes*.md")]
    sections = [section for page in pages for section in page.split("\n## ")[1:]]
    for name, path in RECIPES.items():
        assert len(path.read_text().splitlines()) <= 105, name
        (section,) = [x for x in sections if f"`docs/recipes/{name}.py`" in x.split("```")[0]]
        assert re.search(rf"!\[.+\]\(assets/recipes-{name}\.svg\)", section), name
        assert f"python docs/recipes/{name}.py" in section, name
        assert section.count("```text") == 1, name


def test_the_script_draws_the_pictures_as_they_are(tmp_path: Path) -> None:
    assets = DOCS / "pages" / "assets"
    done = run_script(assets / "recipes_pictures.py", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(drawn) == {f"recipes-{name}.svg" for name in RECIPES}
    assert drawn == {name: (assets / name).read_text() for name in drawn}
    assert all(len(picture) < 15_000 for picture in drawn.values())
