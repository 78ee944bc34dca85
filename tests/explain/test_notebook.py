"""What `explain` shows in a notebook, in a real one."""

import textwrap
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient


CELLS = (
    """
    from statemesh.testing import set_devices
    set_devices(4)
    import jax, jax.numpy as jnp, statemesh as sm
    from jax.sharding import PartitionSpec as P

    def step(seen, x):
        return x / jax.lax.psum(x.sum(), "data"), seen.set(seen.value + x.sum())

    mesh = jax.make_mesh((4,), ("data",))
    step = sm.shard_map(step, mesh, (None, P("data")), (P("data"), P()))
    """,
    "step.explain(sm.State(0.0, reduce='sum'), jnp.ones((8, 2)))",
    "step.explain(sm.State(0.0, reduce='sum'), jnp.ones((8, 2))).draw()",
)


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows, by its type."""
    (output,) = [out for out in cell.outputs if out.output_type == "execute_result"]
    found: dict[str, str] = output.data
    return found


@pytest.mark.slow
# What the packages of Jupyter warn of is not ours.
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_shows_a_table_and_a_picture() -> None:
    new: Any = nbformat.v4
    cells = [new.new_code_cell(textwrap.dedent(cell)) for cell in CELLS]
    notebook = new.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    table, picture = shown(notebook.cells[1]), shown(notebook.cells[2])
    assert table["text/html"].count("<table") >= 2 and "psum" in table["text/html"]
    assert "the policy of" in table["text/html"] and "step" in table["text/plain"]
    assert picture["image/svg+xml"].startswith("<svg") or "<svg" in picture["text/html"]
