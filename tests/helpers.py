"""Meshes, models and counters that many test files use."""

import contextlib
import dataclasses
import gc
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


jnp: Any = jax.numpy

DOCS = pathlib.Path(__file__).parents[1] / "docs"

SHAPES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "1": ((1,), ("x",)),
    "2": ((2,), ("x",)),
    "4": ((4,), ("x",)),
    "8": ((8,), ("x",)),
    "2x2": ((2, 2), ("x", "y")),
    "4x2": ((4, 2), ("x", "y")),
    "2x2x2": ((2, 2, 2), ("x", "y", "z")),
}


def slow(*values: Any) -> Any:
    """One case of a parametrized test, which the quick suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


_default_kind = AxisType.Auto


@contextlib.contextmanager
def default_kind(kind: AxisType) -> Iterator[None]:
    """Make the meshes of `make_mesh` of this type where none is asked for, while the context is open."""
    global _default_kind
    before, _default_kind = _default_kind, kind
    try:
        yield
    finally:
        _default_kind = before


def make_mesh(name: str = "8", *kinds: AxisType) -> Mesh:
    """One of the meshes of `SHAPES` with these axis types; the last type is for all remaining axes.

    Without types all axes are Auto; in files that use the fixture `each_kind`, Explicit and Auto in turn.
    """
    shape, axes = SHAPES[name]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    kinds = kinds or (_default_kind,)
    types = tuple(kinds[min(k, len(kinds) - 1)] for k in range(len(axes)))
    return Mesh(devices, axes, axis_types=types)


def elsewhere(x: np.ndarray) -> dict[str, Any]:
    """`x`, whose number of rows is divisible by 8, in every place from which a call accepts it."""

    def on(mesh: Mesh, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    return {
        "numpy": x,
        "on one device": jnp.asarray(x),
        "committed to another": jax.device_put(x, jax.devices()[3]),
        "replicated": on(make_mesh(), P(None, None)),
        "on devices in another order": on(Mesh(jax.devices()[::-1], ("x",)), P("x")),
        "on fewer devices": on(make_mesh("2"), P("x")),
        "on a mesh of other axes": on(make_mesh("4x2"), P("y", None)),
        "on an Explicit mesh": on(make_mesh("8", AxisType.Explicit), P("x")),
        "on an Explicit mesh of other axes": on(make_mesh("4x2", AxisType.Explicit), P("x")),
    }


def assert_same(a: Any, b: Any) -> None:
    """Assert that two trees are equal in structure and bit for bit."""
    structure: Any = jax.tree.structure
    assert structure(a) == structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(x, y)
        else:
            assert x is y


def module_at(path: pathlib.Path) -> Any:
    """A script of the documentation, imported under the name of its file."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(
    script: pathlib.Path, *options: str, folder: pathlib.Path
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder as users run it, without the devices and the precision of this suite."""
    ours = ("XLA_FLAGS", "JAX_ENABLE_X64")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    paths = [str(DOCS.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONIOENCODING": "utf-8",
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, str(script), *options]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", cwd=folder, env=environment, check=False
    )


def label(parameter: Any) -> str:
    """The name of a test's parameter, the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(parameter))


Making: TypeAlias = Callable[..., Any]


def mistakes_in(
    cases: list[Any],
) -> Callable[[type[BaseException], str], Callable[[Making], Making]]:
    """A decorator that registers mistakes: a call, and the exact error that it must raise."""

    def mistake(error: type[BaseException], text: str) -> Callable[[Making], Making]:
        def add(make: Making) -> Making:
            cases.append(pytest.param(make, error, text, id=make.__name__))
            return make

        return add

    return mistake


def assert_says(
    make: Callable[[], Any], error: type[BaseException], text: str, until: str | None = None
) -> None:
    """Assert that the call raises exactly this error type and text, up to the part that JAX adds."""
    with pytest.raises(error) as raised:
        make()
    assert type(raised.value) is error
    message = str(raised.value)
    assert (message if until is None else message.split(until)[0]) == text


@dataclasses.dataclass
class Count:
    """A counter."""

    times: int = 0


def counted(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Count]:
    """Wrap `fun` to count how often its body runs."""
    count = Count()

    def body(*args: Any, **kwargs: Any) -> Any:
        count.times += 1
        return fun(*args, **kwargs)

    return body, count


_events = {"backend_compile_duration": Count(), "jaxpr_trace_duration": Count()}


def _listen(event: str, duration_secs: float, **kwargs: Any) -> None:
    del duration_secs, kwargs
    for end, count in _events.items():
        count.times += event.endswith(end)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def _times(event: str) -> Iterator[Count]:
    before, seen = _events[event].times, Count()
    try:
        yield seen
    finally:
        seen.times = _events[event].times - before


def compiles() -> contextlib.AbstractContextManager[Count]:
    """Count XLA's compilations while the context is open, by JAX's own events."""
    return _times("backend_compile_duration")


def traces() -> contextlib.AbstractContextManager[Count]:
    """Count what JAX traces while the context is open."""
    return _times("jaxpr_trace_duration")


@contextlib.contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Let the garbage collector see only what is made inside: all else takes it seconds late in a suite."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def without_names(hlo: str | None) -> list[str]:
    """The computations of a program without metadata, with every name replaced by its order of appearance."""
    assert hlo is not None
    # The module's name comes first, then tables of files and frames.
    hlo = hlo[re.search(r"^(%|ENTRY)", hlo, re.M).start() :]  # type: ignore[union-attr]
    hlo = re.sub(r", metadata=\{[^}]*\}", "", hlo)
    order: dict[str, str] = {}

    def rank(found: re.Match[str]) -> str:
        return order.setdefault(found.group(0), f"%{len(order)}")

    hlo = re.sub(r"%[\w.\-]+", rank, hlo)
    # The heads of computations give parameters their own names.
    hlo = re.sub(r"(?<=[( ])[\w.\-]+: (?=[\w(])", "", hlo)
    lines = [re.sub(r"^(ENTRY )?%\d+ ", r"\1", line) for line in hlo.splitlines() if line.strip()]
    assert any(line.startswith("ENTRY") for line in lines)
    return lines
