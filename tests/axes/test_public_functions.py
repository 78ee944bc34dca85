"""No public function of JAX makes shards differ in silence, nor a gradient wrong."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.axes.public_functions import (
    COLLECTIVE,
    OWN,
    SAME,
    SHARDS,
    Tried,
    every,
    public_functions,
)
from tests.helpers import make_mesh


# What can be called in none of the forms of `public_functions`. Most of it makes no arrays.
UNTRIED = {
    "jax.lax.after_all",
    "jax.lax.axis_size",
    "jax.lax.conv_dimension_numbers",
    "jax.lax.conv_general_permutations",
    "jax.lax.conv_general_shape_tuple",
    "jax.lax.conv_shape_tuple",
    "jax.lax.conv_transpose_shape_tuple",
    "jax.lax.padtype_to_pads",
    "jax.lax.psum_scatter_start",
    "jax.lax.reduce_window_shape_tuple",
    "jax.lax.with_sharding_constraint",
    "jax.nn.get_scaled_dot_general_config",
    "jax.numpy.array_repr",
    "jax.numpy.array_str",
    "jax.numpy.from_dlpack",
    "jax.numpy.frombuffer",
    "jax.numpy.fromfile",
    "jax.numpy.fromiter",
    "jax.numpy.frompyfunc",
    "jax.numpy.fromstring",
    "jax.numpy.get_printoptions",
    "jax.numpy.mask_indices",
    "jax.numpy.trim_zeros",
    "jax.random.key_dtype",
}


@dataclasses.dataclass
class Outcomes:
    """What came of functions that were tried, by name and which operand varies: "jax.numpy.sort first".

    **Attributes:**

    - `values`: `"refused"` by statemesh, `"raised"` by JAX, `"equal"` on all shards, or `"WRONG"`.
    - `inside`: the same of gradients taken inside of the mapped call, held to one device's; `"none"` where
        JAX has none there.
    - `losing`: where JAX's types lose something.
    - `outside`: of these, the gradients taken outside of the mapped call.
    - `untried`: the functions that can be called in no form.
    """

    values: dict[str, str] = dataclasses.field(default_factory=dict)
    inside: dict[str, str] = dataclasses.field(default_factory=dict)
    outside: dict[str, str] = dataclasses.field(default_factory=dict)
    losing: list[str] = dataclasses.field(default_factory=list)
    untried: list[str] = dataclasses.field(default_factory=list)


Batch: TypeAlias = dict[str, Tried]


def parts(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def is_one(x: jax.Array) -> bool:
    """Whether all shards have the same bits."""
    first, *others = (part.tobytes() for part in parts(x))
    return all(other == first for other in others)


def is_right(x: jax.Array, expected: Any) -> bool:
    return is_one(x) and np.allclose(parts(x)[0], expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def failure(error: Exception) -> str:
    return "refused" if isinstance(error, sm.StatemeshError) else "raised"


def sweep(names: Iterable[str], kind: AxisType) -> Outcomes:
    mesh = make_mesh(str(SHARDS), kind)
    by_name, untried = every(names)
    batch = {f"{name} {t.varying}": t for name, each in by_name.items() for t in each}
    found = Outcomes(untried=untried)
    accepted: Batch = {}
    for name, tried in batch.items():
        mapped = sm.shard_map(tried.values, mesh, (P("x"), P()), P())
        tried.traces = 0
        try:
            jax.eval_shape(mapped, OWN, SAME)
        except Exception as error:
            found.values[name] = failure(error)
        else:
            accepted[name] = tried
        if tried.traces > 1:
            found.losing.append(name)
    for each in programs(accepted, found):
        try_values(each, mesh, found)
    batch = {name: tried for name, tried in batch.items() if name.split()[0] not in COLLECTIVE}
    for each in programs(batch, found):
        try:
            try_gradients(each, mesh, found)
        except Exception:
            for name, tried in each.items():
                try_gradients({name: tried}, mesh, found)
    return found


def programs(batch: Batch, found: Outcomes) -> Iterator[Batch]:
    """Many functions in one program; those alone of which types lose something, which changes all of it."""
    usual = [name for name in batch if name not in found.losing]
    for start in range(0, len(usual), 40):
        yield {name: batch[name] for name in usual[start : start + 40]}
    for name in found.losing:
        if name in batch:
            yield {name: batch[name]}


def run(fun: Callable[..., Any]) -> Any:
    """It compiles quickly: each program runs once."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fun, compiler_options=options)(OWN, SAME)


def try_values(batch: Batch, mesh: jax.sharding.Mesh, found: Outcomes) -> None:
    def values(own: Any, same: Any) -> Any:
        return {name: tried.values(own, same) for name, tried in batch.items()}

    try:
        made = run(sm.shard_map(values, mesh, (P("x"), P()), P()))
    except Exception:
        # What can be traced cannot always be compiled.
        if len(batch) == 1:
            found.values.update(dict.fromkeys(batch, "raised"))
        else:
            for name, tried in batch.items():
                try_values({name: tried}, mesh, found)
        return
    for name, results in made.items():
        found.values[name] = "equal" if all(map(is_one, results)) else "WRONG"


def try_gradients(batch: Batch, mesh: jax.sharding.Mesh, found: Outcomes) -> None:
    """Of all functions in one program, each of which is left out if it raises."""
    failures: dict[str, str] = {}

    def each(made: Callable[[str, Tried], Any]) -> dict[str, Any]:
        results = {}
        for name, tried in batch.items():
            if name not in failures:
                try:
                    results[name] = made(name, tried)
                except Exception as error:
                    failures[name] = failure(error)
        return results

    def compared(gradients: Callable[..., Any], outcomes: dict[str, str]) -> None:
        failures.clear()
        results: Mapping[str, Any] = {}
        try:
            results = run(gradients)
        except Exception as error:
            if len(batch) > 1:
                raise
            failures.update(dict.fromkeys(batch, failure(error)))
        for name in batch:
            if name in failures:
                outcomes[name] = failures[name]
            else:
                outcomes[name] = "equal" if is_right(results[name], expected[name]) else "WRONG"

    try:
        expected = run(lambda own, same: each(lambda _, tried: tried.on_one_device(own, same)))
    except Exception:
        if len(batch) > 1:
            raise
        expected = {}
    batch, all_ = {name: batch[name] for name in expected}, batch
    found.inside.update(dict.fromkeys(all_.keys() - batch.keys(), "none"))

    def inside(own: Any, same: Any) -> Any:
        return each(lambda _, tried: tried.inside(own, same))

    compared(sm.shard_map(inside, mesh, (P("x"), P()), P()), found.inside)
    if not set(batch) <= set(found.losing):
        # JAX differentiates what is typed alike in the same way there.
        return

    def outside(own: Any, same: Any) -> Any:
        def summed(ws: dict[str, Any], own: Any, same: Any) -> Any:
            return each(lambda name, tried: tried.summed(ws[name], own, same))

        def total(ws: dict[str, Any]) -> Any:
            totals = sm.shard_map(summed, mesh, (P(), P("x"), P()), P())(ws, own, same)
            return sum(totals.values(), jnp.float32(0))

        return jax.grad(total)(dict.fromkeys(batch, jnp.float32(1)))

    compared(outside, found.outside)


# A whole sweep takes a quarter of an hour, so the test tries one function in 24, half of them on each kind of
# mesh, and those whose types JAX loses. By hand, with all functions, on an Explicit mesh (or `Auto`):
# XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.axes.test_public_functions Explicit
STEP = 48
LOSERS = {
    AxisType.Auto: ("jax.numpy.argsort", "jax.numpy.frexp", "jax.lax.switch", "jax.random.choice"),
    AxisType.Explicit: (
        *("jax.numpy.ldexp", "jax.lax.sort_key_val", "jax.lax.rng_bit_generator"),
        "jax.random.permutation",
    ),
}


def wrong(found: Outcomes) -> list[str]:
    each = (found.values, found.inside, found.outside)
    return [name for outcomes in each for name, outcome in outcomes.items() if outcome == "WRONG"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LOSERS, ids=lambda kind: kind.name)
def test_no_function_makes_shards_or_gradients_wrong_in_silence(kind: AxisType) -> None:
    first = 0 if kind is AxisType.Auto else STEP // 2
    found = sweep(dict.fromkeys([*LOSERS[kind], *[*public_functions()][first::STEP]]), kind)
    assert not wrong(found)
    assert Counter(found.inside.values())["equal"] > 20
    assert {name.split()[0] for name in found.losing} >= {*LOSERS[kind]} & {*public_functions()}
    assert set(found.untried) <= UNTRIED


if __name__ == "__main__":
    everything = sweep(public_functions(), AxisType[sys.argv[1]])
    for title, outcomes in (
        ("values", everything.values),
        ("gradients inside", everything.inside),
        ("gradients outside", everything.outside),
    ):
        print(title, dict(Counter(outcomes.values())))
    print("types are lost:", everything.losing)
    print("wrong:", wrong(everything))
    print("not tried:", sorted(everything.untried))
