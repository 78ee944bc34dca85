"""Programs whose collectives are known: where each stands, over which axes it goes, how often it runs.

A comment `# line: NAME` marks a line. A program lists its collectives by these names, or by the state or the
parameter for which statemesh itself makes them.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm


jnp: Any = jax.numpy
FILE = pathlib.Path(__file__)


class Expected(NamedTuple):
    """A collective of the trace: its operation, its axes, how often it runs, and its cause or line."""

    operation: str
    axes: tuple[str, ...]
    times: int
    cause: str
    unknown_loop: bool = False
    branch: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of a model and rows, its arguments, and its collectives."""

    fun: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    expected: Sequence[Expected]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    packed: bool = False

    def mapped(self, mesh: Any) -> Any:
        return sm.shard_map(self.fun, mesh, (None, P("x")), (P("x"), P()), **self.options)

    def expected_rows(self) -> list[Expected]:
        """Its collectives, with the places of the lines."""
        return [
            row if row.cause.startswith("the ") else row._replace(cause=line(row.cause))
            for row in self.expected
        ]

    def arguments(self, mesh: Any) -> tuple[Any, ...]:
        args = self.args()
        return (sm.pack(args[0], mesh), *args[1:]) if self.packed else args


def line(name: str, file: pathlib.Path = FILE) -> str:
    """The number of a marked line, as an explanation shows it."""
    lines = file.read_text().splitlines()
    (number,) = [k for k, text in enumerate(lines, 1) if re.search(rf"# line: {name}$", text)]
    return f"{file}:{number}".removeprefix(f"{pathlib.Path.cwd()}/")


PROGRAMS: dict[str, Program] = {}
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48


def add(*expected: Expected, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a model and rows, which returns an array and the model."""
    args = options.pop("args", with_net)
    packed = options.pop("packed", False)

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fun.__name__] = Program(fun, args, expected, options, packed)
        return fun

    return register


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    seen: sm.State


def net() -> Net:
    return Net(
        sm.ParamState(jnp.ones(3)),
        sm.BatchState(jnp.zeros(3), reduce="mean"),
        sm.State(0.0, reduce="sum"),
    )


def with_net() -> tuple[Any, ...]:
    return net(), X


@add(Expected("psum", ("x",), 15, "nested"))
def nested_scans(net: Net, x: Any) -> Any:
    def outer(total: Any, _: Any) -> Any:
        def inner(total: Any, _: Any) -> Any:
            return total + jax.lax.pmean(jnp.sin(total + x.sum()), "x"), None  # line: nested

        return jax.lax.scan(inner, total, None, length=5)

    total, _ = jax.lax.scan(outer, jnp.float32(0), None, length=3)
    return x + total, net


@add(
    Expected("pmax", ("x",), 1, "taken", branch=True),
    Expected("psum", ("x",), 1, "other", branch=True),
)
def branches(net: Net, x: Any) -> Any:
    return x + jax.lax.cond(
        net.seen.value > 0,
        lambda: jax.lax.pmax(x.sum(), "x"),  # line: taken
        lambda: jax.lax.psum(x.sum(), "x"),  # line: other
    ), net


@add(Expected("psum", ("x",), 1, "turn", unknown_loop=True))
def unknown_loop(net: Net, x: Any) -> Any:
    def turn(total: Any) -> Any:
        return total + jax.lax.psum(jnp.cos(total) * x.sum(), "x")  # line: turn

    return x + jax.lax.while_loop(lambda total: total < 9, turn, net.seen.value), net


@add(
    Expected("all_gather", ("x",), 1, "gathered"),
    Expected("reduce_scatter", ("x",), 1, "gathered"),
    Expected("psum", ("x",), 1, "summed"),
)
def gradient_through_gather(net: Net, x: Any) -> Any:
    def loss(x: Any) -> Any:
        rows = jax.lax.all_gather(x @ net.w.value, "x", tiled=True)  # line: gathered
        return jnp.sum(jnp.sin(rows) * rows[0])

    grad = jax.grad(loss)(x)
    return x + jax.lax.psum(grad.sum(), "x"), net  # line: summed


class Policies(sm.Module):
    mean: sm.State
    top: sm.State
    low: sm.State
    count: sm.State
    own: sm.State


def merged(old: Any, new: Any, axis_names: Any) -> Any:
    return old + jax.lax.psum(new, axis_names)  # line: merged


def policies() -> tuple[Any, ...]:
    kinds = ("mean", "max", "min", "sum", merged)
    return Policies(*(sm.State(jnp.zeros(3), reduce=reduce) for reduce in kinds)), X


@add(
    Expected("psum", ("x",), 1, "the policy of model.count, model.mean"),
    Expected("pmax", ("x",), 1, "the policy of model.top"),
    Expected("pmin", ("x",), 1, "the policy of model.low"),
    Expected("psum", ("x",), 1, "merged"),
    args=policies,
)
def all_policies(model: Policies, x: Any) -> Any:
    row = jnp.sin(x).sum(0)
    model = model.replace(
        mean=row, top=row * 2, low=row * 3, count=model.count.value + row * 5, own=row * 7
    )
    return x, model


def squared(net: Net, x: Any) -> Any:
    loss = ((x - net.mean.value) @ net.w.value - 1) ** 2
    return loss.mean(), net.replace(mean=x.mean(0), seen=net.seen.value + x.sum())


TRAINING = (
    Expected("psum", ("x",), 1, "the gradient of net.w and the loss"),
    Expected("psum", ("x",), 1, "the policy of net.mean, net.seen"),
)


def train(net: Net, x: Any) -> Any:
    (loss, net), grads = sm.value_and_grad(squared, axis_name="x")(net, x)
    return x + loss, net.replace(w=net.w.value - 0.1 * grads.w.value)


@add(*TRAINING, donate="states")
def donated(net: Net, x: Any) -> Any:
    return train(net, x)


@add(*TRAINING, packed=True)
def packed(net: Net, x: Any) -> Any:
    return train(net, x)


@add(
    Expected("ppermute", ("x",), 1, "shifted"),
    Expected("reduce_scatter", ("x",), 1, "scattered"),
    Expected("all_to_all", ("x",), 1, "exchanged"),
)
def exchanges(net: Net, x: Any) -> Any:
    n = jax.lax.axis_size("x")
    table = jnp.outer(jnp.arange(n * 2.0), x.sum(0))
    x = x + jax.lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)])  # line: shifted
    part = jax.lax.psum_scatter(table + x.sum(), "x", tiled=True)  # line: scattered
    rows = jax.lax.all_to_all(jnp.sin(table) * x.sum(), "x", 0, 0, tiled=True)  # line: exchanged
    return x + part.sum() + rows.max(), net


@add(Expected("psum", ("x",), 1, "over lanes"))
def lanes_inside(net: Net, x: Any) -> Any:
    def lane(row: Any) -> Any:
        return row + sm.psum(jnp.sin(row), "x")  # line: over lanes

    return sm.vmap2(lane)(x), net


@add(*[Expected("psum", ("x",), 2, "several")] * 2)
def a_tree_in_a_loop(net: Net, x: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        both = jnp.sin(carry[0]) + x.sum(), jnp.cos(carry[1]) * x[0]
        return jax.lax.psum(both, "x"), None  # line: several

    carry, _ = jax.lax.scan(turn, (jnp.float32(1), jnp.ones(3)), None, length=2)
    return x + carry[0] + carry[1], net


@add(
    Expected("psum", ("x",), 3, "in the loss"),
    Expected("psum", ("x",), 3, "own"),
    Expected("psum", ("x",), 1, "product"),
    Expected("psum", ("x",), 1, "the gradient of net.w and the loss"),
)
def gradient_of_a_scan(net: Net, x: Any) -> Any:
    def loss(net: Net, x: Any) -> Any:
        def turn(total: Any, _: Any) -> Any:
            own = (x @ net.w.value * total).mean()  # line: own
            return jnp.tanh(total + sm.pmean(own, "x")), None  # line: in the loss

        total, _ = jax.lax.scan(turn, jnp.float32(1), None, length=3)
        return total * (x @ net.w.value).mean(), net  # line: product

    (value, net), grads = sm.value_and_grad(loss, axis_name="x")(net, x)
    return x + value, net.replace(w=grads.w.value)
