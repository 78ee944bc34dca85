"""What all of the compared programs compute, and what each of them offers to the one who times it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# A perceptron's layers, and the batch that it is trained with.
WIDTH, ROWS, RATE = 16, 64, 0.01

Kind: TypeAlias = Literal["sharded", "reduced", "deep", "training"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is computed, by how many devices, with how many states.

    **Attributes:**

    - `kind`: "sharded" adds the input to every state, each device to its part; "reduced" moves every
        state, of which each device has all, towards the mean of the input, and takes the mean over the
        devices; "deep" is "sharded" with every state in a module of its own, one inside the other;
        "training" is a data-parallel step of gradient descent, its states the weights and biases.
    """

    kind: Kind
    devices: int
    states: int

    @property
    def size(self) -> int:
        """The length of a state where there is no training."""
        return max(16, self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.devices]), ("x",))

    @functools.cached_property
    def split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("x"))

    @functools.cached_property
    def state_spec(self) -> P:
        """Of every state."""
        return P("x") if self.kind in ("sharded", "deep") else P()

    @functools.cached_property
    def inputs(self) -> tuple[jax.Array, ...]:
        """The arguments beside the states, split over the devices."""
        if self.kind == "training":
            x, y = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
            return jax.device_put(x, self.split), jax.device_put(y, self.split)
        return (jax.device_put(np.ones(self.size, np.float32), self.split),)

    def initial(self) -> list[np.ndarray]:
        """Every state's first value; in training a weight and a bias in turn."""
        if self.kind != "training":
            return [np.full(self.size, k % 7, np.float32) for k in range(self.states)]
        numbers = np.random.default_rng(0)
        shapes = [(WIDTH, WIDTH), (WIDTH,)] * (self.states // 2)
        return [numbers.normal(size=shape).astype(np.float32) / 4 for shape in shapes]

    def placed(self) -> list[jax.Array]:
        """The same on the mesh, each an array of its own."""
        sharding = NamedSharding(self.mesh, self.state_spec)
        return [jax.device_put(value, sharding) for value in self.initial()]


@dataclasses.dataclass(frozen=True)
class Made:
    """A program to be timed.

    **Attributes:**

    - `step`: one call, with the states that the call before left; gives an array to wait for. All that a
        program computes is ready at once, and to look through a tree for arrays would be timed with the call.
    - `state`: the first state's value.
    - `lower`: the lowered program, where the library shows it.
    """

    step: Callable[[], Any]
    state: Callable[[], Any]
    lower: Callable[[], Any] | None = None


def mapped(case: Case, program: Callable[..., Any]) -> Any:
    """`jax.shard_map` of what takes a tree of all states and gives the result and a new one."""
    return jax.shard_map(
        program,
        mesh=case.mesh,
        in_specs=(case.state_spec, *[case.split.spec] * len(case.inputs)),
        out_specs=(result_spec(case), case.state_spec),
    )


def fed_back(
    case: Case, call: Any, model: Any, first: Callable[[Any], Any], lower: bool = True
) -> Made:
    """A call that gives the result and a new model, which goes into the next one.

    **Arguments:**

    - `first`: the value of a model's first state.
    - `lower`: whether the call has a `lower` like that of `jax.jit`.
    """

    def step() -> Any:
        nonlocal model
        result, model = call(model, *case.inputs)
        return result

    shown = (lambda: call.lower(model, *case.inputs)) if lower else None
    return Made(step, lambda: first(model), shown)


def moved(kind: Kind, value: jax.Array, x: jax.Array) -> jax.Array:
    """A state's new value on one device, before a mean over devices is taken."""
    return 0.9 * value + 0.1 * x.mean() if kind == "reduced" else value + x


def loss(values: Sequence[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Of the perceptron with these weights and biases, on one device's rows."""
    hidden = x
    for weight, bias in zip(values[::2], values[1::2], strict=True):
        hidden = jnp.tanh(hidden @ weight + bias)
    return ((hidden - y) ** 2).mean()


def by_hand(case: Case, values: Sequence[jax.Array], *inputs: jax.Array) -> Any:
    """What one device computes: the result that is waited for, and the states."""
    if case.kind == "training":
        own = jax.lax.pcast(list(values), "x", to="varying")
        found = jax.value_and_grad(loss)(own, *inputs)
        found = jax.lax.pmean(found, "x")
        return found[0], [v - RATE * g for v, g in zip(values, found[1], strict=True)]
    (x,) = inputs
    new = [moved(case.kind, value, x) for value in values]
    return 2 * x, (jax.lax.pmean(new, "x") if case.kind == "reduced" else new)


def result_spec(case: Case) -> P:
    """Of the result that is waited for."""
    return P() if case.kind == "training" else P("x")
