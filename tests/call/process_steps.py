"""The tasks of the processes that `test_processes.py` starts.

`python -m tests.call.process_steps PROCESS COUNT PORT OUT` runs all tasks as one of COUNT processes and saves
the results. One process on all devices runs those that nobody refuses as the reference.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import Count, compiles, counted


LANES, CALLS = 8, 3

Found = tuple[dict[str, Any], dict[str, Any]]


def held(tree: Any, under: str) -> dict[str, Any]:
    """The part of every array of a tree on each device of this process, in the order of the devices."""
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
        found[under + jax.tree_util.keystr(path)] = np.stack([s.data for s in shards])
    return found


def buffers(tree: Any) -> list[int]:
    """The start address of the memory of every array of a tree, on each device."""
    return [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    ]


def refusal(call: Callable[[], Any]) -> str:
    """The message of a call that is refused."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def own_lanes(devices: Sequence[jax.Device] | None = None) -> list[int]:
    """The lanes of this process's devices."""
    chosen = jax.devices() if devices is None else devices
    mine = jax.process_index()
    return [i for i, device in enumerate(chosen) if device.process_index == mine]


def state_by_lanes(own: Sequence[int]) -> dict[str, sm.State]:
    """States of every kind; those with a lane axis have the lanes `own`."""
    own = list(own)
    rows = np.arange(LANES * 3, dtype=np.int32).reshape(LANES, 3)
    keys = jax.random.split(jax.random.key(7), LANES)
    return {
        "rows": sm.ShortTermState(jnp.asarray(rows[own]), tag="lanes"),
        "columns": sm.ShortTermState(rows.T[:, own] * 0.5, tag="columns"),
        "count": sm.State(5, reduce="sum"),
        "mean": sm.State(np.zeros(2, np.float32), reduce="mean"),
        "weights": sm.ParamState(np.linspace(0, 1, 3, dtype=np.float32)),
        "rng": sm.RandomState(jax.random.key(0)),
        "streams": sm.RandomState(keys[np.array(own)], tag="lanes"),
    }


def lane_step(states: dict[str, Any], x: Any, scale: Any, *, shift: Any) -> Any:
    key, rng = states["rng"].split()
    other, streams = states["streams"].split()
    drawn = jax.random.bits(key, (2,), "uint32")
    everyone = jax.lax.psum(x, "lanes")
    out = {
        "drawn": drawn,
        "own": jax.random.bits(other, (2,), "uint32"),
        "total": everyone,
        "x": x * 2 + shift,
        "scaled": states["weights"].value * scale,
    }
    moments = jnp.stack([x.sum(), (x * x).sum()]).astype(jnp.float32)
    return out, {
        **states,
        "rows": states["rows"].set(states["rows"].value + x),
        "columns": states["columns"].set(states["columns"].value / 3 + x),
        "count": states["count"].set(states["count"].value + x[0]),
        "mean": states["mean"].set(states["mean"].value * 0.5 + moments / 7),
        "rng": rng,
        "streams": streams,
    }


def called(
    kind: str, step: Any, traces: Count, states: Any, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """Several calls, each with the states that the one before returned.

    **Returns:** all results, facts about the calls, and the result and the states of the last one.
    """
    results = [jax.block_until_ready(step(states, *args, **kwargs))]
    weights = results[0][1]["weights"].value
    with compiles() as again:
        for _ in range(CALLS - 1):
            results.append(jax.block_until_ready(step(results[-1][1], *args, **kwargs)))
    out, states = results[-1]
    facts = {"traces": traces.times, "compiled again": again.times}
    facts["untouched"] = states["weights"].value is weights
    arrays = {
        name: x
        for call, result in enumerate(results)
        for name, x in held(result, f"{kind}{call}").items()
    }
    return arrays, facts, out, states


def lane_data(own: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    data = np.arange(3 * LANES, dtype=np.int32).reshape(3, LANES)
    return data[:, list(own)], np.arange(10, 10 + LANES, dtype=np.int32)[list(own)]


def lanes() -> Found:
    """A `pmap2` step, called several times with the results of the last call."""
    own = own_lanes()
    body, count = counted(lane_step)
    step = sm.pmap2(
        body,
        "lanes",
        in_axes=(None, -1, None),
        out_axes=({"drawn": 0, "own": 0, "total": None, "x": 1, "scaled": 0}, None),
        state_in_axes={0: "lanes", 1: "columns"},
        global_arg_shapes=(None, (3, LANES), None),
    )
    x, shift = lane_data(own)
    first = state_by_lanes(own)
    arrays, facts, out, states = called("lanes", step, count, first, x, 2.5, shift=shift)
    facts["local"] = all(leaf.is_fully_addressable for leaf in jax.tree.leaves((out, states)))
    facts["shapes"] = [leaf.shape for leaf in jax.tree.leaves((out, states))]
    placed = step.place(states, x, 2.5, shift=shift)[0]
    facts["placed"] = buffers(placed) == buffers(states)
    lowered = step.lower(states, x, 2.5, shift=shift).as_text()
    facts["lowered"] = f"tensor<3x{LANES}xi32>" in lowered
    return arrays, facts


def shard_step(states: dict[str, Any], x: Any) -> Any:
    keys, rng = states["rng"].rows(x.shape[0], ("data", "model"))
    drawn = jax.vmap(lambda key: jax.random.bits(key, (), "uint32"))(keys)
    key, rng = rng.split()
    everyone = jax.lax.psum(x.sum(), ("data", "model"))
    out = drawn, jax.random.bits(key, (1,), "uint32"), everyone
    return out, {
        **states,
        "cache": states["cache"].set(states["cache"].value + x),
        "count": states["count"].set(states["count"].value + x.sum()),
        "mean": states["mean"].set(states["mean"].value * 0.5 + x.mean()),
        "ticks": states["ticks"].set(states["ticks"].value + x.max()),
        "rng": rng,
    }


def shards() -> Found:
    """A `shard_map` step on a mesh of all devices; every process passes the same host arrays."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    body, count = counted(shard_step)
    rows = P(("data", "model"))
    step = sm.shard_map(body, mesh, in_specs=(P(), rows), out_specs=((rows, rows, P()), P()))
    x = np.arange(2 * LANES, dtype=np.int32) ** 2
    states: dict[str, sm.State] = {
        "cache": sm.ShortTermState(np.arange(2 * LANES, dtype=np.int32), spec=rows),
        "count": sm.State(np.int32(3), reduce="sum"),
        "mean": sm.State(np.float32(0), reduce="mean"),
        "ticks": sm.State(np.arange(LANES), spec=sm.PerShard("data", "model")),
        "weights": sm.ParamState(jnp.linspace(0, 1, 3)),
        "rng": sm.RandomState(jax.random.key(3)),
    }
    arrays, facts, *_ = called("shards", step, count, states, x)
    return arrays | held(sm.place(states, mesh), "placed"), facts


def others() -> Found:
    """Other calls: other devices, donation, new states, and results of one mapped call in another one."""
    devices = jax.devices()
    mixed = [devices[i] for i in (6, 1, 4, 3, 0)]
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}

    index = sm.pmap2(lambda x: (jax.lax.axis_index("i"), x), "i", devices=mixed)
    x = np.arange(5, dtype=np.int32) * 10
    arrays |= held(index(x[own_lanes(mixed)]), "mixed")

    give = sm.pmap2(lambda s, x: s.set(s.value + x), in_axes=0, state_in_axes=..., donate_argnums=0)
    x = np.arange(LANES, dtype=np.int32)[own_lanes()]
    (state, _) = give.place(sm.State(x), x)
    after = give(state, x)
    arrays |= held(after, "donated")
    facts["donated"] = state.value.is_deleted()

    both = sm.pmap2(lambda a, b: (a + 1, b * 2), donate_argnums=0)
    twice = give.place(sm.State(x), x)[1]
    arrays |= held(both(twice, twice), "given twice")
    facts["kept where it is only read"] = not twice.is_deleted()

    fed = sm.pmap2(
        lambda s, x: (x, s.set(s.value + x)), unexpected_out_state_mapping="auto", in_axes=(None, 0)
    )
    arrays |= held(fed(sm.State(x * 3), x), "fed")

    module, _ = sm.pmap2_new_states(Layer(sm.RandomState(jax.random.key(1))), {"size": 4})
    arrays |= held(module, "made")
    layers = sm.Map(
        Layer(sm.RandomState(jax.random.key(2))), LANES, behavior="pmap", axis_name="i"
    ).init_all_states(size=4)
    out, layers = layers(np.arange(4 * LANES, dtype=np.int32).reshape(LANES, 4)[own_lanes()])
    arrays |= held((out, layers), "map")

    mesh = Mesh(np.array(devices), ("i",))
    draw = sm.shard_map(
        lambda rng: rng.split()[1], mesh, in_specs=P(), out_specs=P(), donate="states"
    )
    key = jax.random.key(5)
    arrays |= held(draw(draw(sm.RandomState(key))), "redrawn")
    facts["copied"] = not key.is_deleted()

    # Nothing that is traced may depend on the order of a set of axis names. That of these differs between the
    # processes.
    several = Mesh(np.array(devices).reshape(2, 4), ("x", "y"))

    def loss_fn(w: Any, x: Any) -> Any:
        return (w.value * x).mean(), w.set(w.value + x.max())

    options: dict[str, Any] = {"microbatches": 4, "blocks": 8}
    for option, count in options.items():
        gradient = sm.value_and_grad(loss_fn, axis_name="x", **{option: count})
        step = sm.shard_map(gradient, several, in_specs=(None, P("x")), out_specs=P())
        weight = sm.ParamState(np.float32(2), reduce="max")
        arrays |= held(step(weight, np.arange(8, dtype=np.float32)), option)
    norm = sm.shard_map(sm.global_norm, several, in_specs=None, out_specs=P())
    parts = sm.ParamState(np.ones((8, 4), np.float32), spec=P(("x", "y")))
    arrays |= held(norm({"parts": parts}), "norm")

    # The same arrays whole in every process: one mapped call takes what the other returns.
    whole = sm.shard_map(lambda s: s.set(s.value * 2), mesh, in_specs=P(), out_specs=P())
    lane = sm.pmap2(lambda s, x: (s.value + x, s.set(s.value + 1)), in_axes=(None, 0))
    doubled = whole(sm.ParamState(np.arange(3, dtype=np.int32)))
    out, state = lane(doubled, x)
    arrays |= held((out, state, whole(state)), "handed over")
    return arrays, facts


class Layer(sm.Module):
    rng: sm.RandomState
    weight: sm.State | None = None
    total: sm.State | None = None

    def init_state(self, size: int) -> "Layer":
        key, rng = self.rng.split()
        bits = jax.random.bits(key, (size,), "uint32").astype(jnp.int32) % 100
        return self.replace(
            weight=sm.ParamState(bits), total=sm.NonBatchState(0, reduce="sum"), rng=rng
        )

    def update(self, x: Any) -> tuple[Any, "Layer"]:
        assert self.weight is not None and self.total is not None
        y = self.weight.value * x
        return y, self.replace(total=self.total.value + y.sum())


def refusals() -> Found:
    """Calls that several processes refuse before they send anything to each other."""
    here = len(own_lanes())
    double = sm.pmap2(lambda x: x * 2, "i")
    theirs = [d for d in jax.devices() if d.process_index != jax.process_index()]
    x = jnp.ones(here)
    facts = {
        "too few": refusal(lambda: double(jnp.ones(here - 1))),
        "all": refusal(lambda: double(np.ones(2 * here))),
        "too many": refusal(lambda: sm.pmap2(lambda: 0, axis_size=2 * here + 1)()),
        "not ours": refusal(lambda: sm.pmap2(lambda x: x * 2, devices=theirs)(x)),
        "jit": refusal(lambda: jax.jit(double)(x)),
        "grad": refusal(lambda: jax.grad(lambda x: double(x).sum())(x)),
        "unsharded": refusal(lambda: double.unsharded(x)),
    }
    for lanes in (here, 2 * here - 1, 2 * here + 1):
        shaped = sm.pmap2(lambda x: x * 2, "i", global_arg_shapes=((lanes, 3),))
        facts[f"shape of {lanes}"] = refusal(functools.partial(shaped, jnp.ones((here, 3))))
    gone = jax.device_put(x)
    gone.delete()
    facts["deleted"] = refusal(lambda: double(gone))
    return {}, facts


AT_LEAST_3 = functools.partial(max, 3)


@dataclasses.dataclass(frozen=True)
class Config:
    """An object that is no array."""

    rate: float
    words: frozenset[str] = frozenset({"one", "two", "three", "four"})
    act: Any = jax.nn.relu
    more: Any = AT_LEAST_3


def here(x: Any) -> Any:
    """An array on a device of this process."""
    return jax.device_put(np.float32(x), jax.local_devices()[0])


def counters(count: Any, seed: int = 0, tag: str = "t") -> Any:
    return {
        "count": sm.State(count, reduce="sum", tag={"one", "two", "three", tag}),
        "rng": sm.RandomState(jax.random.key(seed)),
    }


def configured(states: Any, x: Any, config: Any, key: Any) -> Any:
    count = states["count"].set(states["count"].value + x.sum())
    return x * config.rate, {**states, "count": count}


def mapped_configured() -> Any:
    mesh, rows = jax.make_mesh((LANES,), ("i",)), P("i")
    return sm.shard_map(configured, mesh, (P(), rows, None, P()), (rows, P()))


X, CONFIG = np.arange(LANES, dtype=np.float32), Config(2.0)


def other_arguments() -> Found:
    """Arguments that must be the same in every process, and differ."""
    own, key = jax.process_index(), jax.random.key(1)
    mesh, rows = jax.make_mesh((LANES,), ("i",)), P("i")
    call = mapped_configured()
    facts: dict[str, Any] = {
        what: refusal(functools.partial(call, *args))
        for what, args in {
            "committed": (counters(here(own)), X, CONFIG, key),
            "key": (counters(1.0, seed=own), X, CONFIG, key),
            "several": (counters(np.float32(own), seed=own), X + own, CONFIG, key),
            "static": (counters(1.0), X, Config(2.0 + own), key),
            "within": (counters(1.0), X, Config(2.0, more=functools.partial(max, own)), key),
            "function": (counters(1.0), X, Config(2.0, act=[jnp.tanh, jnp.sin][own]), key),
            "structure": (counters(1.0, tag=f"of {own}"), X, CONFIG, key),
            "leaves": (counters(1.0), X, CONFIG, [key] * (own + 1)),
            "more": (counters(1.0), X, [CONFIG] * (own + 1), key),
        }.items()
    }
    double = sm.shard_map(lambda x, n: x * n, mesh, (rows, P()), rows)
    facts["number"] = refusal(lambda: double(X, float(own)))
    facts["grad"] = refusal(lambda: jax.grad(lambda x: double(x, here(own)).sum())(jnp.ones(LANES)))
    facts["place"] = refusal(lambda: sm.place(counters(1.0, seed=own), mesh))
    facts["pack"] = refusal(lambda: sm.pack(counters(here(own)), mesh))
    lanes = np.ones(len(own_lanes()), np.float32)
    shared = sm.pmap2(lambda s, x: x * s.value, in_axes=(None, 0))
    facts["shared"] = refusal(lambda: shared(sm.State(here(own)), lanes))
    static = sm.pmap2(lambda x, n: x * n, static_broadcasted_argnums=1)
    facts["argument"] = refusal(lambda: static(lanes, own))
    return {}, facts


def same_arguments() -> Found:
    """Arguments that are the same in every process. What lies right is not compared again."""
    call, args = mapped_configured(), (X, CONFIG, jax.random.key(1))
    arrays = held(call(counters(here(3.0), seed=4), *args), "same")
    shared = sm.pmap2(lambda s, x: x * s.value, in_axes=(None, 0))
    state, lanes = sm.State(here(4.0)), np.ones(len(own_lanes()), np.float32)
    state, lanes = shared.place(state, lanes)
    arrays |= held(shared(state, lanes), "same lanes")
    ready = call.place(counters(here(3.0), seed=4), *args)
    call(*ready)
    # To compare anything, a process has to send it from the host.
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        for _ in range(2):
            _, after = call(*ready)
            ready = (after, *ready[1:])
            shared(state, lanes)
    return arrays, {}


def other_programs() -> Found:
    """Programs that must be the same in every process, and differ."""
    own = jax.process_index()
    facts: dict[str, Any] = {}
    rows = P("i")

    def run(what: str, fun: Any, specs: Any = (rows, rows), devices: Any = None) -> None:
        mesh = jax.make_mesh((LANES,), ("i",), devices=devices)
        facts[what] = refusal(lambda: sm.shard_map(fun, mesh, *specs)(X))

    def stops(x: Any) -> Any:
        if own:
            raise KeyError("only in process 1")
        return x

    # A primitive with a dictionary, which each process has in another order.
    marked = Primitive("marked")
    marked.def_abstract_eval(lambda x, sizes: x)
    sizes = [{"a": 5, "b": 0}, {"b": 1, "a": 5}][own]

    run("mapping", lambda x: marked.bind(x, sizes=sizes))
    run("number", lambda x: x * [1.0, 2.0][own])
    run("operation", lambda x: [jnp.sin, jnp.cos][own](x))
    run("inside", lambda x: jax.lax.scan(lambda c, _: (c * (own + 2.0), None), x, None, 3)[0])
    run("longer", lambda x: x * 2 if own else x * 2 + 1)
    run("constant", lambda x: x * jnp.arange(own, own + 3.0)[:, None], (rows, P(None, "i")))
    run("raised", stops)
    run("in_specs", lambda x: x * 2, ([rows, P()][own], rows))
    run("out_specs", lambda x: x.sum()[None], (P(), [rows, P()][own]))
    run("mesh", lambda x: x * 2, devices=jax.devices()[:: 1 - 2 * own])
    lanes = np.ones(len(own_lanes()), np.float32)
    facts["pmap2"] = refusal(lambda: sm.pmap2(lambda x: x * [1.0, 2.0][own])(lanes))
    mesh = jax.make_mesh((LANES,), ("i",))
    double = sm.shard_map(lambda x: x * [1.0, 2.0][own], mesh, rows, rows)
    facts["grad"] = refusal(lambda: jax.grad(lambda x: double(x).sum())(jnp.asarray(X)))

    def train(x: Any) -> Any:
        return x * 2

    def evaluate(x: Any) -> Any:
        return x.sum()[None]

    # Process 0 is at a call that process 1 does not make.
    at = evaluate if own == 0 else train
    facts["other_call"] = refusal(lambda: sm.shard_map(at, mesh, rows, rows)(X))
    return {}, facts


def same_program() -> Found:
    """A program with sets, names, functions, constants and addresses that its text would show."""

    def everything(s: Any, x: Any) -> Any:
        names = tuple(sorted({"data", "model"}))
        noise = jax.random.normal(jax.random.key(1), x.shape)
        called = jax.pure_callback(
            lambda x: np.asarray(x),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            vmap_method="sequential",
        )
        y = jax.checkpoint(jax.nn.gelu)(x) + jax.jit(lambda x: jnp.where(x > 0, x, noise))(called)
        y = jax.lax.cond(y.sum() > 0, lambda: y + np.arange(2.0), lambda: y - jnp.arange(2.0))
        y = y + sm.vmap2(lambda x: sm.psum(x, "ln"), axis_name="ln")(y)
        total = sm.psum(jnp.linalg.norm(y), names) + sm.pmax(y.sum(), names)
        return y, s.set(s.value + total)

    mesh, rows = jax.make_mesh((2, 4), ("data", "model")), P(("data", "model"))
    step = sm.shard_map(everything, mesh, (P(), rows), (rows, P()))
    state = sm.State(0.0, tag=frozenset({"one", "two", "three"}))
    return held(step(state, np.arange(2.0 * LANES, dtype=np.float32)), "program"), {}


# The tasks whose results do not depend on the number of processes, and those that only several refuse.
SHARED = (lanes, shards, others, same_arguments, same_program)
REFUSED = (refusals, other_arguments, other_programs)


def run(tasks: Sequence[Callable[[], Found]]) -> Found:
    """The arrays of several tasks, and the facts by their names."""
    results = {task.__name__: task() for task in tasks}
    arrays = {name: x for own, _ in results.values() for name, x in own.items()}
    return arrays, {name: facts for name, (_, facts) in results.items()}


def main(process: str, count: str, port: str, out: str) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(count),
        int(process),
        coordinator_bind_address=f"127.0.0.1:{port}",
    )
    arrays, facts = run([*SHARED, *REFUSED])
    path = pathlib.Path(out)
    np.savez(path.with_suffix(".npz"), **arrays)
    path.with_suffix(".json").write_text(json.dumps(facts))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
