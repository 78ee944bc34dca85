"""No public function of JAX makes shards differ in silence, nor a gradient wrong."""

import dataclasses
import re
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


# What can be called in none of the forms of `public_functions`.
UNTRIED: set[str] = set()


@dataclasses.dataclass
class Outcomes:
    """What came of functions that were tried, by name and operand, as in "jax.numpy.sort, first operand varying".

    **Attributes:**

    - `values`: `"refused"` by statemesh, `"raised"` by JAX, `"equal"` on all shards, or `"WRONG"`.
    - `inside`, `outside`: the same of the gradients that are taken inside and outside of the mapped call, held to
        one device's; `"none"` where JAX has none there.
    - `losing`: where JAX's types lose something.
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


def chunks(batch: Batch, size: int) -> Iterator[Batch]:
    items = list(batch.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])


def sweep(names: Iterable[str]) -> Outcomes:
    mesh = make_mesh(str(SHARDS), AxisType.Auto)
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
    # Types that lose something make the whole program another one.
    usual = {name: tried for name, tried in accepted.items() if name not in found.losing}
    alone = [{name: tried} for name, tried in accepted.items() if name in found.losing]
    for each in [*chunks(usual, 40), *alone]:
        mapped = sm.shard_map(
            lambda own, same, each=each: {k: t.values(own, same) for k, t in each.items()},
            mesh,
            (P("x"), P()),
            P(),
        )
        for name, results in mapped(OWN, SAME).items():
            found.values[name] = "equal" if all(map(is_one, results)) else "WRONG"
    batch = {name: t for name, t in batch.items() if name.split()[0] not in COLLECTIVE}
    usual = {name: tried for name, tried in batch.items() if name not in found.losing}
    alone = [{name: tried} for name, tried in batch.items() if name in found.losing]
    for each in [*chunks(usual, 40), *alone]:
        try_gradients(each, mesh, found)
    return found


def try_gradients(batch: Batch, mesh: jax.sharding.Mesh, found: Outcomes) -> None:
    """Of all functions in one program, each of which is left out if it raises."""
    failures: dict[str, str] = {}

    def each(made: Callable[[Tried], Any]) -> dict[str, Any]:
        results = {}
        for name, tried in batch.items():
            if name not in failures:
                try:
                    results[name] = made(tried)
                except Exception as error:
                    failures[name] = failure(error)
        return results

    expected = jax.jit(lambda own, same: each(lambda t: t.on_one_device(own, same)))(OWN, SAME)
    found.inside |= dict.fromkeys(failures, "none")
    found.outside |= dict.fromkeys(failures, "none")
    batch = {name: batch[name] for name in expected}
    inside = sm.shard_map(
        lambda own, same: each(lambda t: t.inside(own, same)), mesh, (P("x"), P()), P()
    )
    compare(inside, batch, failures, expected, found.inside)

    def outside(own: Any, same: Any) -> Any:
        def total(ws: dict[str, Any]) -> Any:
            summed = sm.shard_map(
                lambda ws, own, same: each(lambda t: t.summed(ws[names[id(t)]], own, same)),
                mesh,
                (P(), P("x"), P()),
                P(),
            )
            return sum(summed(ws, own, same).values(), jnp.float32(0))

        return jax.grad(total)(dict.fromkeys(batch, jnp.float32(1)))

    names = {id(tried): name for name, tried in batch.items()}
    compare(outside, batch, failures, expected, found.outside)


def compare(
    gradients: Callable[..., Any],
    batch: Batch,
    failures: dict[str, str],
    expected: Mapping[str, Any],
    outcomes: dict[str, str],
) -> None:
    failures.clear()
    try:
        results = jax.jit(gradients)(OWN, SAME)
    except Exception as error:
        assert len(batch) == 1, error
        failures |= dict.fromkeys(batch, failure(error))
        results = {}
    for name in batch:
        if name in failures:
            outcomes[name] = failures[name]
        else:
            outcomes[name] = "equal" if is_right(results[name], expected[name]) else "WRONG"


PARTS = {
    "numpy": r"jax\.numpy\.",
    "lax": r"jax\.lax\.",
    "random and nn": r"jax\.(random|nn)\.",
    "scipy": r"jax\.scipy\.",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_no_function_makes_shards_or_gradients_wrong_in_silence(part: str) -> None:
    found = sweep(name for name in public_functions() if re.match(PARTS[part], name))
    for outcomes in (found.values, found.inside, found.outside):
        assert not [name for name, outcome in outcomes.items() if outcome == "WRONG"]
        assert Counter(outcomes.values())["equal"] > 20
    assert set(found.untried) <= UNTRIED
