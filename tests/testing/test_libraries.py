"""The line that is named is the user's: not a library's that it calls, wherever that is installed."""

import importlib
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import UntestedWarning, locate

from .checked import check


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


def test_a_cell_of_a_notebook_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/tmp/ipykernel_1/23.py"
    names = {file: ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    code = "def doubled(x):\n    return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y * 1, x)\n"
    cell: dict[str, Any] = {"jax": jax}
    exec(compile(code, file, "exec"), cell)
    with pytest.warns(UntestedWarning, match=r"The `while_loop` at Cell In\[3\]:2 was stopped"):
        check(cell["doubled"], np.zeros(4, np.float32), in_specs=P(), out_specs=P())


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
