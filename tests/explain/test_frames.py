"""Tracebacks lead from the user's call to the user's line, without frames of ours in between."""

import functools
import pathlib
import traceback
from collections.abc import Callable
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


def frames(error: BaseException) -> list[str]:
    """The files of a traceback, without those that check annotations in these tests."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [f for f in files if not f.startswith("<@beartype") and "jaxtyping" not in f]


def own(error: BaseException) -> list[str]:
    return [file for file in frames(error) if file.startswith(OWN)]


def assert_users_frames_only(call: Callable[[], Any]) -> None:
    with pytest.raises(Mine) as info:
        call()
    assert not own(info.value)
    # The last frame is the user's line.
    assert traceback.extract_tb(info.value.__traceback__)[-1].name == "broken"
    notes = "".join(info.value.__notes__)
    assert notes.count("JAX_TRACEBACK_FILTERING=off") == 1


@pytest.mark.parametrize("mapped", MAPPED)
def test_the_users_frames_only(mapped: Any) -> None:
    for call in (mapped, jax.jit(mapped), mapped.lower, mapped.unsharded):
        assert_users_frames_only(functools.partial(call, NET, X))
    assert_users_frames_only(lambda: jax.grad(lambda x: mapped(NET, x).sum())(X))


def test_the_users_frames_only_around_other_functions() -> None:
    for call in (
        lambda: sm.value_and_grad(broken)(NET, X),
        lambda: sm.grad(broken)(NET, X),
        NET.init_all_states,
        LANES.init_all_states,
        lambda: sm.vmap2_new_states(NET, {}, axis_size=2),
    ):
        assert_users_frames_only(call)


def test_our_own_errors_end_at_the_users_line() -> None:
    for call in (
        lambda: MAPPED[0](NET),
        lambda: MAPPED[0].place(NET, jnp.ones(9)),
        lambda: sm.place(sm.State(jnp.ones(9), spec=P("x")), make_mesh()),
        lambda: sm.Map(NET, 3).map("update")(),
    ):
        with pytest.raises((sm.StatemeshError, TypeError)) as info:
            call()
        assert {f for f in frames(info.value) if "equinox" not in f} == {__file__}


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


@pytest.mark.parametrize(
    "mode", ["off", "tracebackhide", "remove_frames", "quiet_remove_frames", "auto"]
)
def test_jax_is_asked_whether(mode: str) -> None:
    config: Any = jax.config
    before = config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(Mine) as info:
            MAPPED[2](NET, X)
        with pytest.raises(Mine) as of_jax:
            jax.jit(broken)(NET.w.value, X)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    walked = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    ours = [frame for frame in walked if frame.f_code.co_filename.startswith(OWN)]
    assert bool(ours) == (mode in ("off", "tracebackhide"))
    # JAX decides so too.
    jaxs = str(pathlib.Path(jax.__file__ or "").parent)
    assert any(file.startswith(jaxs) for file in frames(of_jax.value)) == bool(ours)
    hidden = {frame.f_locals.get("__tracebackhide__", False) for frame in ours}
    assert hidden == ({mode == "tracebackhide"} if ours else set())
