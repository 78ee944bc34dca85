"""What lanes write and exchange, cell by cell, against plain loops over NumPy numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import slow


SHARDS, LANES, START = 2, 4, 5.0
# One number for each lane of each shard.
X = np.arange(1.0, 1 + SHARDS * LANES, dtype=np.float32).reshape(SHARDS, LANES)
# Inside a `shard_map`: the type of the mesh axis, and whether it checks what varies.
PLACES = {"checked": (AxisType.Explicit, True), "unchecked": (AxisType.Auto, False)}


def psum(x: Any) -> Any:
    return sm.psum(x, "ln")


def in_scan(s: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + psum(x), None), s + psum(0 * x), None, 2)[0]


def in_branch(s: Any, x: Any) -> Any:
    varying = s + psum(0 * x)
    return jax.lax.cond(psum(x) > 0, lambda s: s + psum(x), lambda s: s + psum(-x), varying)


def where_its_own_is_large(s: Any, x: Any) -> Any:
    return jax.lax.cond(x > 2, lambda s: s + psum(x), lambda s: s, s + psum(0 * x))


# What a lane writes: from the old value and the lane's number; and from the old value, the numbers of all
# lanes of all shards, and which of them the lane's own is.
Write = Callable[[Any, Any], Any]
WRITES: dict[str, tuple[Write, Callable[[float, np.ndarray, int, int], float]]] = {
    "s + x": (lambda s, x: s + x, lambda s, x, i, j: s + x[i, j]),
    "s + psum": (lambda s, x: s + psum(x), lambda s, x, i, j: s + x[i].sum()),
    "s + pmean": (lambda s, x: s + sm.pmean(x, "ln"), lambda s, x, i, j: s + x[i].mean()),
    "s + pmax": (lambda s, x: s + sm.pmax(x, "ln"), lambda s, x, i, j: s + x[i].max()),
    "s + all": (lambda s, x: s + sm.all_gather(x, "ln").sum(), lambda s, x, i, j: s + x[i].sum()),
    "s + psum * x": (lambda s, x: s + psum(x) * x, lambda s, x, i, j: s + x[i].sum() * x[i, j]),
    "s + psum of psum": (lambda s, x: s + psum(psum(x)), lambda s, x, i, j: s + 4 * x[i].sum()),
    "s + psum in jit": (lambda s, x: s + jax.jit(psum)(x), lambda s, x, i, j: s + x[i].sum()),
    "s + psum in scan": (in_scan, lambda s, x, i, j: s + 2 * x[i].sum()),
    "s + psum in a branch": (in_branch, lambda s, x, i, j: s + x[i].sum()),
    "7": (lambda s, x: jnp.float32(7), lambda s, x, i, j: 7.0),
    "s": (lambda s, x: s + 0, lambda s, x, i, j: s),
    "s + 1": (lambda s, x: s + 1, lambda s, x, i, j: s + 1),
    "s * 2": (lambda s, x: s * 2, lambda s, x, i, j: s * 2),
    "s + axis_index": (lambda s, x: s + sm.axis_index("ln"), lambda s, x, i, j: s + j),
}
ALL = WRITES | {
    # On devices it would wait for ever: some of them do not come to the collective.
    "s + psum where its own is large": (
        where_its_own_is_large,
        lambda s, x, i, j: s + (x[i].sum() if x[i, j] > 2 else 0),
    ),
    "s + psum over the mesh": (
        lambda s, x: s + sm.psum(x, "data"),
        lambda s, x, i, j: s + x[:, j].sum(),
    ),
    "s + psum over both": (
        lambda s, x: s + sm.psum(x, ("ln", "data")),
        lambda s, x, i, j: s + x.sum(),
    ),
}


def squares(old: Any, new: Any, names: Any) -> Any:
    return old + jax.lax.psum((new - old) ** 2, names)


# What a policy makes of the values of all lanes.
POLICIES: dict[Any, Callable[[float, np.ndarray], float]] = {
    "sum": lambda old, new: old + (new - old).sum(),
    "mean": lambda old, new: new.mean(),
    "max": lambda old, new: new.max(),
    "min": lambda old, new: new.min(),
    squares: lambda old, new: old + ((new - old) ** 2).sum(),
}


def merged(write: str, policy: Any, x: np.ndarray) -> list[float]:
    """What each shard keeps. A value that all lanes have alike counts once."""
    kept = []
    for i in range(len(x)):
        each = [ALL[write][1](START, x, i, j) for j in range(LANES)]
        kept.append(POLICIES[policy](START, np.asarray(each)) if differs(write) else each[0])
    return kept


def differs(write: str) -> bool:
    of_all = ALL[write][1]
    return any(len({of_all(START, X, i, j) for j in range(LANES)}) > 1 for i in range(SHARDS))


def over_shards(place: str, fun: Callable[[Any], Any]) -> Any:
    """A function of all numbers: what `fun` makes of each shard's, with the shards along the first axis."""
    kind, check_vma = PLACES[place]
    mesh = jax.make_mesh((SHARDS,), ("data",), axis_types=(kind,))
    one = lambda x: jax.tree.map(lambda y: jnp.asarray(y)[None], fun(x[0]))
    return sm.shard_map(one, mesh, P("data"), P("data"), check_vma=check_vma)


@pytest.mark.parametrize("place", ["vmap2", slow("pmap2"), "checked", slow("unchecked")])
def test_what_lanes_write(place: str) -> None:
    writes = ALL if place in PLACES else WRITES
    policies = [*POLICIES, None]
    if place.startswith("checked"):
        policies.remove(squares)
    cells = [
        (write, policy)
        for write in writes
        for policy in policies
        if not (policy is None and differs(write))
    ]

    def lane(states: Any, x: Any) -> Any:
        # All states of one write start alike, so that its value is computed once.
        old = {write: s.value for (write, _), s in zip(cells, states, strict=True)}
        new = {write: of_lane(old[write], x) for write, (of_lane, _) in writes.items()}
        return [s.set(new[write]) for (write, _), s in zip(cells, states, strict=True)]

    def step(transform: Any, x: Any) -> Any:
        states = [sm.State(START, reduce=policy) for _, policy in cells]
        mapped = transform(lane, in_axes=(None, 0), out_axes=None, axis_name="ln")
        return [state.value for state in mapped(states, x)]

    if place in PLACES:
        got = over_shards(place, lambda x: step(sm.vmap2, x))(X)
    else:
        # Without the mesh, each shard is a call of its own.
        rows = [step(getattr(sm, place), x) for x in X]
        got = [np.stack(values) for values in zip(*rows, strict=True)]
    wrong = {
        cell: (np.asarray(value).tolist(), merged(*cell, X))
        for cell, value in zip(cells, got, strict=True)
        if not np.allclose(value, merged(*cell, X), rtol=1e-6)
    }
    assert not wrong


@pytest.mark.parametrize("place", ["vmap2", slow("pmap2"), "checked", slow("unchecked")])
def test_without_a_policy_lanes_that_write_differently_are_refused(place: str) -> None:
    def step(x: Any) -> Any:
        lane = lambda states, x: {
            w: states[w].set(WRITES[w][0](states[w].value, x)) for w in states
        }
        mapped = getattr(sm, place, sm.vmap2)(lane, in_axes=(None, 0), axis_name="ln")
        return mapped({write: sm.State(START) for write in WRITES}, x)

    with pytest.raises(sm.BatchAxisError, match="lanes wrote different values") as raised:
        over_shards(place, step)(X) if place in PLACES else step(X[0])
    refused = [write for write in WRITES if f"states[{write!r}]:" in str(raised.value)]
    assert refused == [write for write in WRITES if differs(write)]


@pytest.mark.parametrize("place", ["checked", slow("unchecked")])
def test_what_is_alike_in_all_lanes(place: str) -> None:
    shared = sm.vmap2(
        lambda x: (sm.psum(x, "ln"), x - sm.pmean(x, "ln")), out_axes=(None, 0), axis_name="ln"
    )
    total, centred = over_shards(place, shared)(X)
    np.testing.assert_allclose(total, X.sum(1))
    np.testing.assert_allclose(centred, X - X.mean(1, keepdims=True))

    # Its gradient, from outside the mesh, along a state that counts it once.
    def lane(s: Any, x: Any) -> Any:
        return s.set(s.value + sm.psum(jnp.sin(x), "ln") * 3)

    def one(x: Any) -> Any:
        state = sm.State(START, reduce="sum")
        return sm.vmap2(lane, in_axes=(None, 0), axis_name="ln")(state, x).value

    mapped = over_shards(place, one)
    gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(jnp.asarray(X))
    value = START + 3 * np.sin(X).sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, 2 * value * 3 * np.cos(X), rtol=1e-4)


# A collective of the number of each lane, and the same for all lanes of all shards at once.
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "psum": (lambda x: sm.psum(x, "ln"), lambda x: x.sum(1, keepdims=True)),
    "pmean": (lambda x: sm.pmean(x, "ln"), lambda x: x.mean(1, keepdims=True)),
    "pmax": (lambda x: sm.pmax(x, "ln"), lambda x: x.max(1, keepdims=True)),
    "pmin": (lambda x: sm.pmin(x, "ln"), lambda x: x.min(1, keepdims=True)),
    "all_gather": (
        lambda x: sm.all_gather(x, "ln") @ jnp.arange(4.0) - x,
        lambda x: (x @ np.arange(4))[:, None] - x,
    ),
    "all_gather, tiled": (
        lambda x: sm.all_gather(x[None], "ln", tiled=True)[1] * x,
        lambda x: x[:, 1:2] * x,
    ),
    "axis_index": (lambda x: x * sm.axis_index("ln"), lambda x: x * np.arange(LANES)),
    "axis_size": (lambda x: x * sm.axis_size("ln"), lambda x: x * LANES),
    "psum over both": (
        lambda x: sm.psum(x, ("ln", "data")) + 0 * x,
        lambda x: np.full((1, 1), x.sum()),
    ),
    "pmax over both": (
        lambda x: sm.pmax(x, ("ln", "data")) + 0 * x,
        lambda x: np.full((1, 1), x.max()),
    ),
    "all_gather over both": (
        lambda x: sm.all_gather(x, ("data", "ln")) @ jnp.arange(8.0) + 0 * x,
        lambda x: np.full((1, 1), x.ravel() @ np.arange(8)),
    ),
    "axis_index over both": (
        lambda x: x * sm.axis_index(("data", "ln")) - sm.axis_index(("ln", "data")),
        lambda x: x * np.arange(8).reshape(2, 4) - np.arange(8).reshape(4, 2).T,
    ),
}

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "a scan that stacks": lambda f: (
        lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1].mean(0)
    ),
    "cond on its own number": lambda f: (
        lambda x: jax.lax.cond(x > 3, lambda x: f(x), lambda x: f(x) * 1, x)
    ),
    "switch": lambda f: lambda x: jax.lax.switch(jnp.int32(x > 3), [f, f], x),
    "while_loop": lambda f: (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]
    ),
    "another vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "jit of scan of checkpoint": lambda f: jax.jit(
        lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, None, length=1)[0]
    ),
}


@pytest.mark.parametrize("place", ["checked", slow("unchecked")])
def test_what_lanes_exchange(place: str) -> None:
    # Every kind of collective in every wrapper; the others are as one of these.
    kinds = ("pmean", "all_gather", "axis_index", "pmax over both")
    cells = [("nothing", name) for name in COLLECTIVES]
    cells += [(wrapper, name) for wrapper in WRAPPERS for name in kinds if wrapper != "nothing"]

    def lane(x: Any) -> Any:
        return [WRAPPERS[wrapper](COLLECTIVES[name][0])(x) for wrapper, name in cells]

    got = over_shards(place, sm.vmap2(lane, axis_name="ln"))(X)
    wanted = [np.broadcast_to(COLLECTIVES[name][1](X), X.shape) for _, name in cells]
    wrong = {
        cell: (a, b)
        for cell, a, b in zip(cells, got, wanted, strict=True)
        if not np.allclose(a, b, rtol=1e-6)
    }
    assert not wrong


@pytest.mark.parametrize("place", ["checked", slow("unchecked")])
def test_gradients_of_what_lanes_exchange(place: str) -> None:
    """Taken in a lane, around the lanes, and around the mesh: the sum over all that the number went to."""
    position = np.arange(LANES, dtype=np.float32)
    wanted = LANES * position * np.cos(X) + position.sum() * 2 * X

    def lane(x: Any) -> Any:
        gathered = sm.all_gather(jnp.sin(x), "ln") @ jnp.arange(4.0)
        return gathered + sm.psum(x**2, "ln") * sm.axis_index("ln")

    names = ("nothing", "jit of scan of checkpoint")
    wrapped = [WRAPPERS[name](lane) for name in names]

    def all_lanes(x: Any) -> Any:
        return [sm.vmap2(fun, axis_name="ln")(x).sum() for fun in wrapped]

    def gradients(x: Any) -> Any:
        inner = [sm.vmap2(jax.grad(fun), axis_name="ln")(x) for fun in wrapped]
        around = [jax.grad(lambda x, k=k: all_lanes(x)[k])(x) for k in range(len(names))]
        return inner, around

    mapped = over_shards(place, all_lanes)
    outside = jax.grad(lambda x: sum(total.sum() for total in mapped(x)))(jnp.asarray(X))
    np.testing.assert_allclose(outside, len(names) * wanted, rtol=1e-4)
    for each in over_shards(place, gradients)(X):
        for name, gradient in zip(names, each, strict=True):
            np.testing.assert_allclose(gradient, wanted, rtol=1e-4, err_msg=name)


def test_a_mean_may_be_of_lanes_that_cannot_be_traced() -> None:
    def lane(s: Any, x: Any) -> Any:
        return s.set(s.value + x + 0 * jax.lax.axis_index("ln"))

    lanes = sm.vmap2(lane, in_axes=(None, 0), axis_name="ln")
    mean = over_shards("checked", lambda x: lanes(sm.State(START, reduce="mean"), x).value)(X)
    np.testing.assert_allclose(mean, START + X.mean(1))
