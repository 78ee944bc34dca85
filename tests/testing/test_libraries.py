"""The line that is named is the user's: not a library's that it calls, wherever that is installed."""

import importlib
import pathlib
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import locate


MESH = AbstractMesh((4,), ("data",))


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_in_a_folder_of_its_own(
    installed: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip --target` installs it, which writes down what it has installed; or a module of the user's."""
    name = f"means_{installed}"
    (tmp_path / f"{name}.py").write_text("def mean(x):\n    return x.mean(0)\n")
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "RECORD").write_text(f"{name}.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)

    def centred(x: Any) -> Any:
        return x - module.mean(x)

    mapped = sm.shard_map(centred, MESH, in_specs=P("data"), out_specs=P("data"))
    found = locate(mapped, jnp.arange(8.0))
    assert found is not None
    expected = "return x - module.mean(x)" if installed else "return x.mean(0)"
    assert found.places[0].source == expected


CELLS = """
import statemesh.testing
statemesh.testing.set_devices(4)
import jax, jax.numpy as jnp, statemesh as sm
from statemesh.testing import assert_equivalent
rows, x = jax.P("data"), jnp.arange(12.0).reshape(4, 3)
mesh = jax.make_mesh((4,), ("data",))

# a cell
def centred(x):
    return x - x.mean(0)

# a cell
try:
    assert_equivalent(sm.shard_map(centred, mesh, rows, rows), (x,))
except AssertionError as error:
    print(error)

# a cell
print(sm.shard_map(lambda x: sm.psum(x, "data"), mesh, rows, jax.P()).explain(x))
"""


def test_cells_of_a_notebook_are_named_by_their_numbers() -> None:
    run_cells = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in {CELLS!r}.split('# a cell'):\n"
        "    shell.run_cell(cell.strip(), store_history=True).raise_error()\n"
    )
    command = [sys.executable, "-c", run_cells]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert "centred: the calls do not agree, see Cell In[2]:2: " in run.stdout
    assert "\n    Cell In[2]:2: return x - x.mean(0)\n" in run.stdout
    assert "your code, Cell In[4]:1" in run.stdout


def test_explain_names_the_code_of_the_command_line() -> None:
    code = (
        "import jax, statemesh as sm\n"
        "from jax.sharding import AbstractMesh, PartitionSpec as P\n"
        "total = lambda x: jax.lax.psum(x, 'x')\n"
        "mapped = sm.shard_map(total, AbstractMesh((2,), ('x',)), in_specs=P('x'), out_specs=P())\n"
        "print(sm.explain(mapped, jax.numpy.ones(4)))\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert "your code, <string>:3" in run.stdout
