"""The computation of all compared programs, and the interface through which they are timed."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# The layers of the perceptron, and its batch.
WIDTH, ROWS, RATE = 16, 64, 0.01

Kind: TypeAlias = Literal["sharded", "reduced", "deep", "training", "transformer", "cnn", "mlp"]
Axes: TypeAlias = Literal["Explicit", "Auto"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation on a mesh with one axis of this type, with its number of states.

    "sharded" adds the input to every state, each device to its part. "reduced" has every state on every
    device, moves it towards the mean of the input, and takes the mean over the devices. "deep" is "sharded"
    with every state in its own nested module. "training" is a data-parallel step of gradient descent, whose
    states are the weights and biases. The other kinds are models of `_models.py`.
    """

    kind: Kind
    axes: Axes
    devices: int
    states: int

    @property
    def size(self) -> int:
        """The length of a state, except in training."""
        return max(16, self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        devices = jax.devices()[: self.devices]
        return jax.make_mesh((self.devices,), ("x",), (AxisType[self.axes],), devices=devices)

    @functools.cached_property
    def split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("x"))

    @functools.cached_property
    def state_spec(self) -> P:
        """The spec of every state."""
        return P("x") if self.kind in ("sharded", "deep") else P()

    @functools.cached_property
    def inputs(self) -> tuple[jax.Array, ...]:
        """The arguments other than the states, split over the devices."""
        if self.kind == "training":
            x, y = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
            return jax.device_put(x, self.split), jax.device_put(y, self.split)
        return (jax.device_put(np.ones(self.size, np.float32), self.split),)

    def initial(self) -> list[np.ndarray]:
        """The first value of every state; in training a weight and a bias in turn."""
        if self.kind != "training":
            return [np.full(self.size, k % 7, np.float32) for k in range(self.states)]
        numbers = np.random.default_rng(0)
        shapes = [(WIDTH, WIDTH), (WIDTH,)] * (self.states // 2)
        return [numbers.normal(size=shape).astype(np.float32) / 4 for shape in shapes]

    def placed(self) -> list[jax.Array]:
        """The first values on the mesh, each in its own array."""
        sharding = NamedSharding(self.mesh, self.state_spec)
        return [jax.device_put(value, sharding) for value in self.initial()]


@dataclasses.dataclass(frozen=True)
class Made:
    """A program to be timed."""

    # Makes one call with the states that the previous call left, and returns an array to wait for. The
    # results of a program are ready at the same time, and a search for arrays in a tree would be timed too.
    step: Callable[[], Any]
    # The first state's value.
    state: Callable[[], Any]
    # The lowered program, if the library shows it.
    lower: Callable[[], Any] | None = None


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds until the result is there, and the thread's seconds until the call returns."""
    wall, thread = time.perf_counter(), time.thread_time()
    result = call()
    thread = time.thread_time() - thread
    jax.block_until_ready(result)
    return time.perf_counter() - wall, thread


def mapped(case: Case, program: Callable[..., Any]) -> Any:
    """`jax.shard_map` of a function that takes a tree of all states and returns the result and a new tree."""
    return jax.shard_map(
        program,
        mesh=case.mesh,
        in_specs=(case.state_spec, *[case.split.spec] * len(case.inputs)),
        out_specs=(result_spec(case), case.state_spec),
    )


def fed_back(
    case: Case, call: Any, model: Any, first: Callable[[Any], Any], lower: bool = True
) -> Made:
    """A call that returns the result and a new model, which goes into the next call.

    It has a `lower` like that of `jax.jit`, or not.
    """

    def step() -> Any:
        nonlocal model
        result, model = call(model, *case.inputs)
        return result

    shown = (lambda: call.lower(model, *case.inputs)) if lower else None
    return Made(step, lambda: first(model), shown)


def moved(kind: Kind, value: jax.Array, x: jax.Array) -> jax.Array:
    """The new value of a state on one device, before the mean over the devices."""
    return 0.9 * value + 0.1 * x.mean() if kind == "reduced" else value + x


def loss(values: Sequence[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of the perceptron with these weights and biases, on one device's rows."""
    hidden = x
    for weight, bias in zip(values[::2], values[1::2], strict=True):
        hidden = jnp.tanh(hidden @ weight + bias)
    return ((hidden - y) ** 2).mean()


def by_hand(case: Case, values: Sequence[jax.Array], *inputs: jax.Array) -> Any:
    """The computation of one device: the result to wait for, and the states."""
    if case.kind == "training":
        own = jax.lax.pcast(list(values), "x", to="varying")
        found = jax.value_and_grad(loss)(own, *inputs)
        found = jax.lax.pmean(found, "x")
        return found[0], [v - RATE * g for v, g in zip(values, found[1], strict=True)]
    (x,) = inputs
    new = [moved(case.kind, value, x) for value in values]
    return 2 * x, (jax.lax.pmean(new, "x") if case.kind == "reduced" else new)


def result_spec(case: Case) -> P:
    """The spec of the result to wait for."""
    return P() if case.kind == "training" else P("x")
