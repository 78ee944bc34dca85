"""Tracebacks lead from the user's call to the user's line, without frames of ours in between."""

import importlib
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


OWN = str(pathlib.Path(sm.__file__).parent)
X = jnp.ones(8)


class Mine(Exception):
    pass


def broken(model: Any, x: Any) -> Any:
    raise Mine("of the user")


class Net(sm.Module):
    w: sm.ParamState

    def update(self, x: Any) -> Any:
        return broken(self, x)

    def init_state(self) -> Any:
        return broken(self, 0)


NET = Net(sm.ParamState(jnp.ones(3)))
MAPPED: list[Any] = [
    sm.shard_map(broken, make_mesh(), (None, P("x")), P()),
    sm.shard_map(broken, make_mesh(), (None, P("x")), P(), jit=False, check_vma=False),
    sm.vmap2(broken, in_axes=(None, 0)),
    sm.pmap2(broken, in_axes=(None, 0), static_broadcasted_argnums=()),
]
LANES = sm.Map(NET, 8)

CALLS: dict[str, Callable[[], Any]] = {
    f"{name} {k}": call
    for k, f in enumerate(MAPPED)
    for name, call in {
        "call": lambda f=f: f(NET, X),
        "jit": lambda f=f: jax.jit(f)(NET, X),
        "lower": lambda f=f: f.lower(NET, X),
        "unsharded": lambda f=f: f.unsharded(NET, X),
        "grad": lambda f=f: jax.grad(lambda x: f(NET, x).sum())(X),
    }.items()
} | {
    "value_and_grad": lambda: sm.value_and_grad(broken)(NET, X),
    "sm.grad": lambda: sm.grad(broken)(NET, X),
    "init_all_states": lambda: NET.init_all_states(),
    "Map.init_all_states": lambda: LANES.init_all_states(),
    "vmap2_new_states": lambda: sm.vmap2_new_states(NET, {}, axis_size=2),
}  # fmt: skip


def frames(error: BaseException) -> list[str]:
    """The files of a traceback, without those that check annotations in these tests."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [f for f in files if not f.startswith("<@beartype") and "jaxtyping" not in f]


def own(error: BaseException) -> list[str]:
    return [file for file in frames(error) if file.startswith(OWN)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_users_frames_only(call: Callable[[], Any]) -> None:
    with pytest.raises(Mine) as info:
        call()
    assert not own(info.value)
    # The last frame is the user's line.
    assert traceback.extract_tb(info.value.__traceback__)[-1].name == "broken"
    notes = "".join(info.value.__notes__)
    assert notes.count("JAX_TRACEBACK_FILTERING=off") == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: MAPPED[0](NET),
        lambda: MAPPED[0].place(NET, jnp.ones(9)),
        lambda: sm.place(sm.State(jnp.ones(9), spec=P("x")), make_mesh()),
        lambda: sm.Map(NET, 3).map("update")(),
    ],
)  # fmt: skip
def test_our_own_errors_end_at_the_users_line(call: Callable[[], Any]) -> None:
    with pytest.raises((sm.StatemeshError, TypeError)) as info:
        call()
    assert not own(info.value)
    assert set(frames(info.value)) - {__file__} <= {f for f in frames(info.value) if "equinox" in f}


def test_what_an_error_comes_of_is_shortened_too() -> None:
    def chained(model: Any, x: Any) -> Any:
        try:
            MAPPED[2](model, x)
        except Mine as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as info:
        sm.vmap2(chained, in_axes=(None, None), axis_size=2)(NET, X)
    assert info.value.__cause__ is not None
    assert not own(info.value.__cause__)


@pytest.fixture
def filtering() -> Iterator[Callable[[str], None]]:
    config: Any = jax.config
    before = config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize(
    "mode", ["off", "tracebackhide", "remove_frames", "quiet_remove_frames", "auto"]
)
def test_jax_is_asked_whether(mode: str, filtering: Callable[[str], None]) -> None:
    filtering(mode)
    with pytest.raises(Mine) as info:
        MAPPED[2](NET, X)
    found = [f for f, _ in traceback.walk_tb(info.value.__traceback__)]
    ours = [f for f in found if f.f_code.co_filename.startswith(OWN)]
    assert bool(ours) == (mode in ("off", "tracebackhide"))
    if ours:
        hidden = [f.f_locals.get("__tracebackhide__", False) for f in ours]
        assert set(hidden) == {mode == "tracebackhide"}


def test_jax_decides_so_too(filtering: Callable[[str], None]) -> None:
    """If JAX decides by another rule, our rule has to change."""
    path = str(pathlib.Path(importlib.import_module("jax").__file__ or "").parent)
    for mode in ("off", "quiet_remove_frames"):
        filtering(mode)
        with pytest.raises(Mine) as info:
            jax.jit(broken)(NET.w.value, X)
        assert any(file.startswith(path) for file in frames(info.value)) == (mode == "off")
