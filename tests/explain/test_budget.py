"""`assert_budget`: planted regressions fail and name the line or the state; harmless rewrites do not."""

import functools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget
from tests.explain import explained_programs
from tests.helpers import assert_says, make_mesh


jnp: Any = jax.numpy
line = functools.partial(explained_programs.line, file=pathlib.Path(__file__))
X = np.arange(256, dtype=np.float32).reshape(16, 16) / 256


class Net(sm.Module):
    w: sm.ParamState
    table: sm.ParamState
    mean: sm.BatchState
    rng: sm.RandomState


def net() -> Net:
    return Net(
        sm.ParamState(jnp.ones((16, 16)) / 16),
        sm.ParamState(jnp.ones((64, 16)), spec=P("x")),
        sm.BatchState(jnp.zeros(16), reduce="mean"),
        sm.RandomState(jax.random.key(0)),
    )


def loss_fn(net: Net, x: Any) -> Any:
    keys, rng = net.rng.rows(len(x), "x")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, x.shape[1:]))(keys)
    rows = jnp.where(keep, x - net.mean.value, 0) @ net.w.value
    return (rows**2).mean() + (net.table.value**2).sum(), net.replace(mean=x.mean(0), rng=rng)


def step(net: Net, x: Any, loss_fn: Callable[..., Any] = loss_fn) -> Any:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="x")(net, x)
    return loss, net.replace(w=net.w.value - 0.1 * grads.w.value)


SPECS: dict[str, Any] = {"in_specs": (None, P("x")), "out_specs": (P(), P()), "donate": "states"}
BUDGET: dict[str, Any] = {
    "collectives": {
        "the gradient of net.w": 1,
        "the gradient of net.w and the loss": 1,
        "the loss": 1,
        "the policy of net.mean": 1,
    },
    "bytes": 1913,
    "held": 2692,
    "moved": 0,
}


def mapped(fun: Callable[..., Any] = step, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("8", AxisType.Explicit), **{**SPECS, **options})


def placed() -> tuple[Any, ...]:
    args: tuple[Any, ...] = mapped().place(net(), X)
    return args


def with_loss(loss: Callable[..., Any]) -> Any:
    return mapped(lambda net, x: step(net, x, loss))


@functools.cache
def peak() -> int:
    memory = mapped().explain(*placed()).memory
    size: int = memory.peak
    return size


def check(make: Callable[[], Any]) -> None:
    """Hold a changed program, as its call, or as its call and arguments, to what it took before."""
    made = make()
    call, args = made if isinstance(made, tuple) else (made, placed())
    # The compiler may lay out temporaries in another way.
    assert_budget(call, *args, **BUDGET, peak=int(peak() * 1.02))


# What makes the call worse, with what the failure has to name; then what changes nothing.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {}
FINE: dict[str, Callable[[], Any]] = {}


def regression(names: str) -> Callable[[Callable[[], Any]], None]:
    def add(make: Callable[[], Any]) -> None:
        WRONG[make.__name__] = make, names

    return add


def rewrite(make: Callable[[], Any]) -> None:
    FINE[make.__name__] = make


@regression("net.table: 4096 B, as P() (default)")
def lost_spec() -> Any:
    model = net()
    model = model.replace(table=model.table.replace(spec=None))
    mesh = make_mesh()
    return mapped(), sm.shard_map(step, mesh, **SPECS).place(model, X)


@regression("line second")
def second_psum() -> Any:
    def loss(net: Net, x: Any) -> Any:
        value, net = loss_fn(net, x)
        return value + jax.lax.pmean(net.mean.value.sum() + x.sum(), "x") * 0.1, net  # line: second

    return with_loss(loss)


@regression("line in a loop")
def gather_in_a_loop() -> Any:
    def loss(net: Net, x: Any) -> Any:
        def turn(total: Any, k: Any) -> Any:
            rows = jax.lax.all_gather(x * (total + k), "x", tiled=True)  # line: in a loop
            return jnp.sin(rows.sum()) + total, None

        total, _ = jax.lax.scan(turn, jax.lax.pcast(0.0, "x", to="varying"), jnp.arange(5.0))
        value, net = loss_fn(net, x)
        return value + total, net

    return with_loss(loss)


@regression("bytes moved: 128 B where 0 B are allowed.\n  - x: 128 B")
def rows_from_the_host() -> Any:
    return mapped(), (placed()[0], X)


@regression("nothing is donated")
def donation_lost_inside_jit() -> Any:
    call = mapped()
    return jax.jit(lambda net, x: call(net, x)), placed()


@regression("the policy of call(...)[1].table")
def parameter_written_with_a_policy() -> Any:
    def worse(net: Net, x: Any) -> Any:
        value, net = step(net, x)
        return value, net.replace(table=sm.ParamState(net.table.value + x.sum(), reduce="mean"))

    def call(net: Net, x: Any) -> Any:
        return worse(net.replace(table=net.table.replace(reduce="mean", spec=None)), x)

    replicated = mapped(call, state_in_specs={sm.filters.PathContains("table"): P()})
    return replicated, replicated.place(net(), X)


@regression("collectives (the gradient of net.w and the loss): 2 where 1 is allowed.")
def step_made_twice() -> Any:
    def twice(net: Net, x: Any) -> Any:
        value, net = step(net, x)
        return step(net, jnp.sin(x))

    return mapped(twice)


@regression("worse(...)[0][1]: 4096 B, a result")
def activations_returned() -> Any:
    def worse(net: Net, x: Any) -> Any:
        value, after = step(net, x)
        return (value, jnp.sin(x[:, None, :] * jnp.arange(32.0)[:, None])), after

    return mapped(worse, out_specs=((P(), P("x")), P()))


@rewrite
def rematerialized() -> Any:
    return with_loss(lambda net, x: loss_fn(net, jax.checkpoint(lambda x: x * 1.0)(x)))


@rewrite
def fed_back() -> Any:
    call = mapped()
    _, model = call(*placed())
    return call, (model, placed()[1])


@rewrite
def scanned_once() -> Any:
    def rewritten(net: Net, x: Any) -> Any:
        return step(net, jax.lax.map(lambda row: row * 1.0, x))

    return mapped(rewritten)


@pytest.mark.parametrize("name", WRONG)
def test_regressions_are_named(name: str) -> None:
    make, names = WRONG[name]
    with pytest.raises(AssertionError) as raised:
        check(make)
    mark = re.fullmatch(r"line (.*)", names)
    assert (line(mark[1]) if mark else names) in str(raised.value)


@pytest.mark.parametrize("name", FINE)
def test_rewrites_are_within_the_budget(name: str) -> None:
    check(FINE[name])


def small(mesh: Any = None) -> Any:
    def total(count: Any, x: Any) -> Any:
        largest = jax.lax.pmax(x.max(), "x")  # line: small
        return largest, count.set(count.value + x.sum())

    return sm.shard_map(total, mesh or make_mesh("2"), (None, P("x")), (P(), P()))


SMALL = (sm.State(0.0, reduce="sum"), np.ones(4, np.float32))


def test_the_exact_texts() -> None:
    at = line("small")
    assert_says(
        lambda: assert_budget(small(), *SMALL, collectives=1, bytes=7, held=11, moved=4),
        AssertionError,
        f"""\
total: the call is over its budget.
collectives: 2 where 1 is allowed.
  - pmax over x, 1 time, 4 B: your code, {at}
  - psum over x, 1 time, 4 B: the policy of count
bytes sent: 8 B where 7 B are allowed.
  - pmax over x, 1 time, 4 B: your code, {at}
  - psum over x, 1 time, 4 B: the policy of count
bytes held: 12 B where 11 B are allowed.
  - x: 8 B, as P('x') (in_specs[1])
  - count: 4 B, as P() (default)
bytes moved: 12 B where 4 B are allowed.
  - x: 8 B
  - count: 4 B""",
    )
    assert_says(
        lambda: assert_budget(small(), *SMALL, collectives={"psum": 0}),
        AssertionError,
        f"""\
total: the call is over its budget.
collectives that the budget does not name: 1.
  - pmax over x, 1 time, 4 B: your code, {at}
collectives (psum): 1 where 0 are allowed.
  - psum over x, 1 time, 4 B: the policy of count""",
    )


def test_the_peak_is_shown_in_its_parts() -> None:
    memory = assert_budget(small(), *SMALL, collectives=2, bytes=8).memory
    assert memory is not None
    assert_budget(small(), *SMALL, peak=memory.peak)
    assert_says(
        lambda: assert_budget(small(), *SMALL, peak=memory.peak - 1),
        AssertionError,
        f"""\
total: the call is over its budget.
peak: {memory.peak} B where {memory.peak - 1} B are allowed.
  - arguments: 12 B
  - results: {memory.results} B
  - temporaries: {memory.temporaries} B
  - nothing is donated
  - x: 8 B, as P('x') (in_specs[1])
  - count: 4 B, as P() (default)
  - total(...)[0]: 4 B, a result""",
    )


def test_temporaries_and_what_is_donated() -> None:
    def ranks(x: Any) -> Any:
        return jnp.sort(jnp.sin(x[:, None] * x[None, :]), axis=0).sum(0)

    call = sm.shard_map(ranks, make_mesh("2"), P("x"), P("x"))
    x = np.ones(256, np.float32)
    memory = assert_budget(call, x, collectives=0).memory
    assert memory is not None
    assert memory.temporaries >= 128 * 128 * 4
    assert memory.allocated == memory.arguments + memory.results + memory.temporaries
    with pytest.raises(AssertionError, match=f"- temporaries: {memory.temporaries} B"):
        assert_budget(call, x, allocated=memory.allocated - 1)
    assert_budget(call, x, allocated=memory.allocated, peak=memory.peak)
    with pytest.raises(AssertionError, match=f"temporaries: {memory.temporaries} B where"):
        assert_budget(call, x, temporaries=memory.temporaries - 1)
    memory = assert_budget(mapped(), *placed(), donated=0, temporaries=10**6).memory
    assert memory is not None and memory.donated > 0
    assert_budget(mapped(), *placed(), donated=memory.donated, temporaries=memory.temporaries)
    assert_says(
        lambda: assert_budget(small(), *SMALL, donated=4),
        AssertionError,
        """\
total: the call is over its budget.
donated: 0 B where at least 4 B are asked for.
  - x: 8 B, as P('x') (in_specs[1])
  - count: 4 B, as P() (default)""",
    )


def test_without_devices() -> None:
    call = small(AbstractMesh((2,), ("x",)))
    assert_budget(call, *SMALL, collectives=2, bytes=8, held=12, moved=0)
    assert_says(
        lambda: assert_budget(call, *SMALL, peak=100),
        ValueError,
        "total: `peak` is known only of a compiled call, and this one has no devices. Leave it out, or give "
        "a mesh with devices.",
    )


def test_a_loop_of_unknown_length_is_over_every_number() -> None:
    def settle(x: Any) -> Any:
        def turn(carry: Any) -> Any:
            k, total = carry
            return k + 1, jax.lax.psum(jnp.sin(total + x.sum()), "x")  # line: turn

        return jax.lax.while_loop(lambda carry: carry[0] < x[0], turn, (0.0, 0.0))[1]

    at = line("turn")
    turns = f"psum over x, 1 time in each turn of a loop of unknown length, 7 B: your code, {at}"
    for mesh in (make_mesh("8", AxisType.Explicit), make_mesh(), AbstractMesh((8,), ("x",))):
        call = sm.shard_map(settle, mesh, P("x"), P(), check_vma=False)
        x = np.arange(8, dtype=np.float32)
        with pytest.raises(AssertionError) as raised:
            assert_budget(call, x, collectives=5, bytes=1_000)
        assert (
            str(raised.value)
            == f"""\
settle: the call is over its budget.
collectives: an unknown number where 5 are allowed.
  - {turns}
bytes sent: an unknown number where 1000 B are allowed.
  - {turns}"""
        )
        for budget in ({"psum": 5}, {"your code": 1}, {"your*": 1}, {}):
            with pytest.raises(AssertionError, match="unknown number"):
                assert_budget(call, x, collectives=budget)
        assert_budget(call, x, collectives={"psum": math.inf})
        assert_budget(call, x, collectives=math.inf, bytes=math.inf)


def test_bytes_are_those_of_the_dtypes_of_the_program() -> None:
    def exchanged(x: Any) -> Any:
        gathered, total = jax.lax.all_gather(x, "x"), jax.lax.psum((x, x.sum()), "x")
        return total, jax.lax.ppermute(x, "x", [(0, 1)]), gathered

    for mesh in (make_mesh("8", AxisType.Explicit), make_mesh()):
        call = sm.shard_map(exchanged, mesh, P("x"), (P(), P("x"), P("x")))
        rows = jnp.ones((8, 100), jnp.bfloat16)
        narrow = call.explain(rows).bytes
        without = sm.shard_map(exchanged, AbstractMesh((8,), ("x",)), P("x"), (P(), P("x"), P("x")))
        assert narrow == without.explain(rows).bytes
        assert_budget(call, rows, bytes=narrow)
        wide = call.explain(rows.astype(jnp.float32)).bytes
        assert wide > 1.99 * narrow
        with pytest.raises(AssertionError, match=f"bytes sent: {wide} B"):
            assert_budget(call, rows.astype(jnp.float32), bytes=narrow)


def test_each_array_of_several_calls_is_held() -> None:
    call = sm.shard_map(
        lambda w, x: (x * w.value).sum()[None],
        make_mesh("8", AxisType.Explicit),
        (None, P("x")),
        P("x"),
    )
    inside = jax.jit(call)

    def twice(w: Any, x: Any, y: Any) -> Any:
        return call(w, x) + call(w, y)

    def turn(w: Any, total: Any, x: Any) -> Any:
        return total + call(w, x), None

    def loops(w: Any, x: Any, y: Any) -> Any:
        body = functools.partial(turn, w)
        total, _ = jax.lax.scan(body, jnp.zeros(8), jnp.stack([x] * 3))
        return jax.lax.scan(body, total, jnp.stack([y] * 3))[0]

    def recomputed(w: Any, x: Any, y: Any) -> Any:
        loss = jax.checkpoint(lambda x: jnp.sin(call(w, jnp.cos(x))).sum())
        return jax.grad(loss)(x) + jax.grad(loss)(y)

    w, x, y = sm.State(jnp.ones(())), np.ones(800, np.float32), np.ones(800, np.float32)
    several: list[Callable[..., Any]] = [
        twice,
        loops,
        recomputed,
        lambda w, x, y: inside(w, x) + inside(w, y),
        lambda w, x, y: jax.lax.cond(x[0] > 0, call, lambda w, x: call(w, y), w, x),
    ]
    for fun in several:
        found = assert_budget(fun, w, x, y, held=804)
        assert [row.path for row in found.leaves] == ["w", "x", "x"]
        with pytest.raises(AssertionError, match=r"bytes held: 804 B where 803 B are allowed"):
            assert_budget(fun, w, x, y, held=803)
    # An array that several calls get counts once, and a loop makes one call of its rows.
    once: list[Callable[..., Any]] = [
        lambda w, x: inside(w, x) + inside(w, x),
        lambda w, x: jax.lax.scan(functools.partial(turn, w), jnp.zeros(8), jnp.stack([x] * 3))[0],
    ]
    for fun in once:
        assert [row.path for row in assert_budget(fun, w, x, held=404).leaves] == ["w", "x"]


def test_patterns_of_causes() -> None:
    call, args = mapped(), placed()
    total = len(call.explain(*args).collectives)
    alike = {"the gradient of *": total - 1, "the loss": 1, "the policy of ?et.mean": 1}
    assert_budget(call, *args, collectives=alike)
    # A name counts before any pattern, and an earlier pattern before a later one.
    assert_budget(call, *args, collectives={"the *": total - 1, "the policy of net.mean": 1})
    assert_budget(call, *args, collectives={"the *": total, "*": 0})
    with pytest.raises(AssertionError, match=r"collectives \(the \*\): "):
        assert_budget(call, *args, collectives={"the *": total - 1, "*": 1})


def test_brackets_are_no_pattern() -> None:
    def change(model: Any, x: Any) -> Any:
        return {"layers": [s.set(s.value + x.sum()) for s in model["layers"]]}

    model = {"layers": [sm.State(jnp.ones(2), reduce="mean"), sm.State(jnp.ones(3), reduce="max")]}
    args = model, np.ones(8, np.float32)
    call = mapped(change, out_specs=P(), donate="none")
    causes = {f"the policy of model['layers'][{k}]": 1 for k in range(2)}
    assert_budget(call, *args, collectives=causes)
    assert_budget(call, *args, collectives={"*['layers'][*]": 2})
    with pytest.raises(AssertionError, match="that the budget does not name: 1"):
        assert_budget(call, *args, collectives={"*['layers'][0]": 2})


@pytest.mark.usefixtures("as_users_run_it")
def test_a_limit_of_a_cause_is_a_number() -> None:
    for limits in ({"psum": True}, {"psum": None}):
        with pytest.raises(TypeError, match="must be a number, or a dictionary with a number for"):
            assert_budget(small(), *SMALL, collectives=limits)
