"""The README's table of libraries: its cells say what each library does in these programs."""

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.docs.test_pages import README
from tests.helpers import compiles


# What other libraries warn of is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

N = 4
ROWS = np.arange(1, 9, dtype=np.float32)

# What a shard or lane does with its state and its rows: the new value of the state.
Body = Callable[[jax.Array, jax.Array], jax.Array]
# A call, which returns the new value of the state.
Call = Callable[[], Any]


@functools.cache
def mesh() -> Mesh:
    return jax.make_mesh((N,), ("data",), (AxisType.Auto,), devices=jax.devices()[:N])


def brainstate() -> Any:
    return importlib.import_module("brainstate")


class OfNnx(nnx.Module):
    def __init__(self) -> None:
        self.state = nnx.Param(jnp.array(-1.0))


def in_statemesh(body: Body, lanes: bool) -> Call:
    def fun(net: dict[str, sm.State], x: jax.Array) -> dict[str, sm.State]:
        return {"mean": net["mean"].set(body(net["mean"].value, x))}

    by_lane = sm.pmap2(fun, "data", in_axes=(None, 0))
    mapped: Any = by_lane if lanes else sm.shard_map(fun, mesh(), (None, P("data")), P())
    net, x = {"mean": sm.State(-1.0)}, ROWS[:N] if lanes else ROWS
    return lambda: mapped(net, x)["mean"].value


def in_brainstate(body: Body, lanes: bool) -> Call:
    state = brainstate().State(jnp.array(-1.0))

    def fun(x: jax.Array) -> jax.Array:
        state.value = body(state.value, x)
        return x

    def anything(path: Any, state: Any) -> bool:
        return True

    if lanes:
        every = {"state_in_axes": {None: anything}, "state_out_axes": {None: anything}}
        devices = jax.devices()[:N]
        mapped = brainstate().transform.pmap2(fun, "data", devices=devices, **every)
    else:
        mapped = brainstate().transform.shard_map(fun, mesh(), (P("data"),), P("data"))

    def call() -> Any:
        mapped(ROWS[:N] if lanes else ROWS)
        return state.value

    return call


def in_nnx(body: Body, lanes: bool) -> Call:
    module = OfNnx()

    def fun(module: OfNnx, x: jax.Array) -> jax.Array:
        module.state.value = body(module.state.value, x)
        return x

    mapped: Any
    if lanes:
        shared, devices = nnx.StateAxes({...: None}), jax.devices()[:N]
        mapped = nnx.pmap(fun, axis_name="data", in_axes=(shared, 0), devices=devices)
    else:
        mapped = nnx.shard_map(fun, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data"))

    def call() -> Any:
        mapped(module, ROWS[:N] if lanes else ROWS)
        return module.state.value

    return call


def in_jax(body: Body, lanes: bool, filtered: bool = False) -> Call:
    mapped: Any
    if lanes:
        by_lane: Any = eqx.filter_pmap if filtered else jax.pmap
        axes, devices = {"in_axes": (None, 0), "out_axes": None}, jax.devices()[:N]
        mapped = by_lane(body, axis_name="data", devices=devices, **axes)
        return lambda: mapped(jnp.array(-1.0), ROWS[:N])
    mapped = jax.shard_map(body, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    if filtered:
        mapped = eqx.filter_jit(mapped)
    value = jax.device_put(jnp.array(-1.0), NamedSharding(mesh(), P()))
    rows = jax.device_put(ROWS, NamedSharding(mesh(), P("data")))
    return lambda: mapped(value, rows)


IN: dict[str, Callable[[Body, bool], Call]] = {
    "statemesh": in_statemesh,
    "brainstate": in_brainstate,
    "flax.nnx": in_nnx,
    "Equinox": functools.partial(in_jax, filtered=True),
    "JAX": in_jax,
}


def table() -> dict[str, dict[str, str]]:
    """The cells of the README's table, by row and by library, without links."""
    lines = [line for line in README.read_text().splitlines() if line[:1] == "|"]
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line) for line in lines]
    (_, *names), _, *rows = ([cell.strip() for cell in x[1:-1].split("|")] for x in plain)
    return {row: dict(zip(names, cells, strict=True)) for row, *cells in rows}


def test_the_table_has_these_libraries_and_rows() -> None:
    assert [list(cells) for cells in table().values()] == [list(IN)] * len(table())


def of_differing(library: str, lanes: bool) -> str:
    """What becomes of different values for one state."""
    try:
        found = IN[library](lambda value, x: x.mean(), lanes)()
    except ValueError as error:
        (named,) = re.findall(r"net\['mean'\]: State|out_specs is", str(error))[:1]
        return f"an error that names {'`out_specs`' if named == 'out_specs is' else 'the state'}"
    assert float(found) == 1
    return "lane 0's value"


@pytest.mark.parametrize("library", IN)
def test_what_becomes_of_different_values(library: str) -> None:
    in_shards = table()["without a rule, shards write different values to one state"]
    assert of_differing(library, lanes=False) == in_shards[library]
    in_lanes = table()["so do lanes on different devices"]
    assert of_differing(library, lanes=True) == in_lanes[library]


@pytest.mark.parametrize("library", IN)
def test_what_a_third_call_compiles(library: str) -> None:
    call = IN[library](lambda value, x: jax.lax.pmean(x.mean(), "data"), False)
    for _ in range(2):
        assert float(call()) == 4.5
    with compiles() as count:
        call()
    cell = table()["programs that the third equal call compiles"][library]
    assert cell.split(",")[0] == ("several" if count.times else "none")


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return (w * x).sum()


def gradient(library: str) -> Any:
    """The gradient of a sum over all rows by a weight that the shards share."""
    rows: Any = ROWS
    if library == "statemesh":

        def ours(w: sm.ParamState, x: jax.Array) -> Any:
            def pair(w: sm.ParamState, x: jax.Array) -> Any:
                return loss(w.value, x), w

            grads, _ = sm.grad(pair, axis_name="data", reduce="sum")(w, x)
            return grads.value

        return sm.shard_map(ours, mesh(), (None, P("data")), P())(sm.ParamState(1.0), rows)
    if library == "brainstate":
        weight = brainstate().ParamState(jnp.array(1.0))

        def reads(x: jax.Array) -> Any:
            grad = brainstate().transform.grad(lambda: loss(weight.value, x), weight)()
            return jax.lax.psum(grad, "data")

        return brainstate().transform.shard_map(reads, mesh(), (P("data"),), P())(rows)
    specs: Any = {"mesh": mesh(), "in_specs": (P(), P("data")), "out_specs": P()}
    if library == "flax.nnx":

        def by_module(module: OfNnx, x: jax.Array) -> Any:
            grads: Any = nnx.grad(lambda module: loss(module.state.value, x))(module)
            return jax.lax.psum(grads.state.value, "data")

        return nnx.shard_map(by_module, **specs)(OfNnx(), rows)
    grad: Any = eqx.filter_grad(loss) if library == "Equinox" else jax.grad(loss)
    by_array = jax.shard_map(lambda w, x: jax.lax.psum(grad(w, x), "data"), **specs)
    return jax.jit(by_array)(jnp.array(1.0), rows)


@pytest.mark.parametrize("library", IN)
def test_how_large_a_reduced_gradient_is(library: str) -> None:
    factor = float(gradient(library)) / float(ROWS.sum())
    cell = table()["the gradient of a shared parameter, reduced over n shards"][library]
    assert {1.0: "right, by `value_and_grad`", N: "n times too large, with `psum`"}[factor] == cell


def masks(library: str) -> Any:
    """The dropout of eight rows on four shards, or numbers drawn there."""
    ones: Any = jnp.ones((8, 16))
    specs: Any = {"mesh": mesh(), "in_specs": (P(), P("data")), "out_specs": P("data")}
    if library == "statemesh":
        dropout = sm.nn.Dropout(0.5, jax.random.key(0), axis_name="data")
        mapped = sm.shard_map(lambda d, x: d(x)[0], mesh(), (None, P("data")), P("data"))
        found, alone = mapped(dropout, ones), dropout(ones)[0]
        assert np.array_equal(found, alone)
        return found
    if library == "flax.nnx":
        return nnx.shard_map(lambda d, x: d(x), **specs)(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), ones)
    draw = brainstate().random.normal
    specs["in_specs"] = (P("data"),)
    return brainstate().transform.shard_map(lambda x: x * (draw(size=x.shape) > 0), **specs)(ones)


@pytest.mark.parametrize("library", ["statemesh", "brainstate", "flax.nnx"])
def test_which_masks_shards_draw(library: str) -> None:
    shards = np.split(np.asarray(masks(library)), N)
    alike = all(np.array_equal(shards[0], shard) for shard in shards)
    cell = table()["dropout of the rows of n shards"][library]
    assert cell == ("the same mask on every shard" if alike else "the masks of one device")
