"""How a check feels: what pytest and a terminal show of it."""

import contextlib
import logging
import os
import pathlib
import pty
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent, emulate, locate
from tests.helpers import make_mesh


ROOT = pathlib.Path(__file__).parents[2]
OWN = str(pathlib.Path(sm.__file__).parent)
X = np.sin(np.arange(8, dtype=np.float32))

# A test file of a user's.
TEST = """
import numpy as np
from jax.sharding import PartitionSpec as P
from statemesh.testing import assert_equivalent, set_devices

set_devices(2)

def centred(x):
    return x - x.mean()

def test_centred():
    x = np.sin(np.arange(8, dtype=np.float32))
    assert_equivalent(centred, (x,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x"))
"""


def environment(**more: str) -> dict[str, str]:
    """That of this suite, except for what its own tests set up."""
    left_out = ("XLA_", "PYTEST_", "JAX_TRACEBACK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out) and k != "CI"}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1"} | more


def centred(x: Any) -> Any:
    return x - x.mean()


def failing_check() -> Any:
    return assert_equivalent(
        centred, (X,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x"), gradients=False
    )


def failing_budget() -> Any:
    mapped = sm.shard_map(lambda x: sm.pmean(x.mean(), "x"), make_mesh(), P("x"), P())
    return assert_budget(mapped, jnp.asarray(X), collectives=0)


# Frames


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (failing_check, AssertionError),
        (failing_budget, AssertionError),
        (lambda: assert_equivalent(centred, (X,), meshes=[{"x": 2}]), TypeError),
        (lambda: emulate(None), TypeError),
        (lambda: locate(None), TypeError),
    ],
)
def test_tracebacks_end_at_the_users_line(
    call: Callable[[], Any], kind: type[Exception], as_users_run_it: None
) -> None:
    with pytest.raises(kind) as info:
        call()
    files = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    assert not [file for file in files if file.startswith(OWN)]
    assert "jaxtyping" in files[-1] or files[-1] == __file__
    # The report stands alone. Other errors have the note that tells how to see our frames.
    notes = "".join(getattr(info.value, "__notes__", ()))
    assert ("JAX_TRACEBACK_FILTERING" in notes) == (kind is not AssertionError)


@pytest.mark.slow
def test_pytest_shows_the_report_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        env=environment(CI="true"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    # Each frame ends in the name of its file and the number of its line.
    frames = re.findall(r"^(\S+\.py):\d+: ?\w*$", done.stdout, re.M)
    assert frames == ["test_mine.py"], done.stdout
    assert "statemesh has left" not in done.stdout
    # In CI the summary shows the whole first line of the error.
    line = TEST[: TEST.index("return x - x.mean()")].count("\n") + 1
    summary = re.search(r"^FAILED .*", done.stdout, re.M)
    assert summary is not None
    first = r"centred\(\.\.\.\) is off by 0\.4\d+ on mesh x=2\."
    where = rf"the calls do not agree, see test_mine\.py:{line}: {first}"
    assert re.search(rf"::test_centred - AssertionError: centred: {where}$", summary[0]), summary[0]


# What is compiled


def compiled(call: Callable[[], object]) -> list[str]:
    """The names of the programs that a call compiles, without those of single operations of JAX."""
    names: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: names.extend(  # type: ignore[method-assign]
        re.findall(r"^Compiling (?:jit\()?(\S+?)\)? with global shapes", record.getMessage())
    )
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            call()
    finally:
        logger.removeHandler(handler)
    return names


def test_each_program_has_a_name_that_tells_what_it_is() -> None:
    def halved(total: sm.State, x: Any) -> Any:
        return x / 2, total.set(total.value + x.sum())

    args = sm.State(0.0, reduce="sum"), X
    specs: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), P())}
    names = compiled(lambda: assert_equivalent(halved, args, meshes=[{"x": 2}, {"x": 4}], **specs))
    assert [name for name in names if name.startswith("halved")] == [
        *("halved", "halved", "halved_on_mesh_in_jit")
    ]
    assert not [name for name in names if "unnamed" in name or name in ("run", "whole", "both")]
    mapped = sm.shard_map(halved, make_mesh(), **specs)
    assert "halved_emulated" in compiled(lambda: emulate(mapped, *args))
    assert compiled(lambda: sm.explain(mapped, *args)) == ["halved"]


# What a terminal shows meanwhile

SCRIPT = """
import sys, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from statemesh.testing import assert_equivalent, set_devices

set_devices(4)
x = np.sin(np.arange(8, dtype=np.float32))
more = {"in_specs": P("x"), "out_specs": P("x"), "gradients": False}
assert_equivalent(jnp.sin, (x,), meshes=[{"x": 2}, {"x": 4}], **more)
print("done", file=sys.stderr)
"""


def on_a_terminal(**more: str) -> str:
    """What a script of a user's writes to a terminal."""
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-c", SCRIPT]
        with subprocess.Popen(command, env=environment(**more), stderr=its) as script:
            os.close(its)
            written = b""
            with contextlib.suppress(OSError):  # Linux says so that the other end is closed.
                while part := terminal.read(4096):
                    written += part
        assert script.returncode == 0, written.decode()
    return written.decode()


@pytest.mark.slow
def test_a_terminal_shows_what_is_being_compared_and_then_nothing() -> None:
    *shown, last = re.split(r"\r(?!\n)", on_a_terminal(COLUMNS="60").replace("\x1b[K", "<"))
    texts = [text.removesuffix("<") for text in shown if text.removesuffix("<")]
    assert texts[0] == "sin: tracing"
    assert texts[1] == "sin: comparing on mesh x=2 (mesh 1 of 2)"
    # A line that wraps could not be erased.
    assert max(map(len, texts)) < 60
    assert last.strip() == "<done"
    # Each is erased, by the next or by nothing.
    assert all(text.endswith("<") for text in shown if text)


@pytest.mark.slow
def test_ci_shows_nothing() -> None:
    assert on_a_terminal(CI="true").strip() == "done"
