"""Numbers of Python: the check knows them as they are written, and not as a dtype rounds them."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import locate
from statemesh.testing._program._jaxprs import all_equations, is_literal, opened
from statemesh.testing._program._numbers import is_inexact
from statemesh.testing._program._trace import trace_exactly
from tests.helpers import slow

from .checked import assert_accused, check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
HERE = pathlib.Path(__file__)
FOUR: list[Any] = [{"x": 4}]
NARROW = ["bfloat16", "float16", "float32"]


def rows(dtype: str) -> Any:
    return jnp.asarray(np.sin(np.arange(32)).reshape(8, 4) + 2, dtype)


def line_with(text: str) -> str:
    """The file, and the number of its line that ends with a comment."""
    lines = HERE.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))
    return f"{HERE.name}:{number}:"


def shards() -> Any:
    return lax.axis_size("x")


# Mistakes in them


def decayed(weight: sm.State, x: Any) -> Any:
    grads = lax.pmean(x.mean(0), "x")
    kept = weight.value * (1 - 0.01 * shards())  # decays by shards
    return weight.set(kept - 0.1 * grads)


def test_a_decay_that_grows_with_the_mesh_is_found() -> None:
    """In bfloat16, 0.96 and 0.99 are four numbers apart."""
    weight = sm.State(jnp.ones(4, "bfloat16"))
    specs = {"in_specs": (None, P("x")), "meshes": FOUR, "steps": 3}
    text = report(decayed, weight, rows("bfloat16"), **specs)
    assert line_with("decays by shards") in text


def scaled(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x")
    return {
        "right": total * (0.3 / 8),
        "mistaken": total * (1 if shards() == 1 else 1.0078),
        "slightly_mistaken": total * (1 if shards() == 1 else 1.0003),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", *map(slow, ("float16", "float32"))])
def test_a_small_factor_is_found_that_only_one_program_has(dtype: str) -> None:
    assert_accused({"mistaken", "slightly_mistaken"}, scaled, rows(dtype), meshes=FOUR)


def averaged(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x") * (0.1 / shards()) * shards()
    return total if shards() == 1 else total + total / 32  # a little more


def test_a_right_number_hides_no_mistake_on_another_line() -> None:
    text = report(averaged, rows("bfloat16"), meshes=FOUR)
    assert line_with("a little more") in text


def looped(x: Any) -> Any:
    def step(total: Any, row: Any) -> Any:
        factor = 0.9 if shards() == 1 else 0.9003  # in bfloat16 both are one number
        return total * factor + row, None  # another factor

    return lax.scan(step, jnp.zeros_like(x[0]), x)[0]


def test_a_number_in_a_loop_is_located() -> None:
    mapped = sm.shard_map(looped, jax.sharding.AbstractMesh((4,), ("x",)), P(), P())
    found = locate(mapped, rows("bfloat16"))
    assert found is not None
    assert line_with("another factor") in str(found)


# Right programs


def right(x: Any) -> Any:
    count, width = len(x) * shards(), x.shape[1]
    centred = x - lax.psum(x.sum(0), "x") / count
    mean = lax.psum(x.sum(0) * (1 / count), "x")
    scores = jnp.einsum("ij,ij->i", x, x) * width**-0.5
    # On four shards 0.3 / 4 is another number than on one, and rounded otherwise.
    parts = lax.psum(x.mean(0) * (0.3 / shards()), "x")
    steps = lax.fori_loop(0, 3, lambda _, y: 0.99 * y + 1e-3, mean)
    clipped = jnp.clip(lax.pmean(jnp.tanh(0.1 * x).mean(0), "x"), 1e-3, 0.7)
    return {
        "spread": jnp.sqrt(lax.psum((centred**2).sum(0), "x") * count**-1 + 1e-3),
        "mean": mean,
        "scores": lax.psum(scores.sum(0), "x") * (count * width) ** -0.5,
        "parts": parts,
        "steps": steps,
        "clipped": jnp.where(mean > 0.3, clipped, -1e30),
        "power": jnp.abs(mean) ** 0.7,
        "seventh": lax.psum(x.sum(0) / (7 * shards()), "x") * shards(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_right_numbers_pass(dtype: str) -> None:
    checked = check(right, rows(dtype), meshes=FOUR, gradients=True, keep=["args[0]"])
    assert not checked.unjudged


def thirds(x: Any) -> Any:
    return lax.psum(x.sum(0) * (0.1 / shards()), "x") * shards()


def thirds_in_its_dtype(x: Any) -> Any:
    return lax.psum(x.sum(0) * jnp.float32(0.1 / shards()), "x") * shards()


def thirds_in_one_dtype(x: Any) -> Any:
    """In double precision it cannot be traced: `lax.mul` takes no two dtypes."""
    factor = jnp.full(x.shape, 0.1 / shards(), jnp.float32)
    return lax.psum(lax.mul(x, factor).sum(0), "x") * shards()


@pytest.mark.parametrize("fun", [thirds, thirds_in_its_dtype, thirds_in_one_dtype])
def test_thirds_are_rounded_otherwise_than_the_whole(fun: Callable[..., Any]) -> None:
    """What the program itself rounds cannot be known, and may be off by as much as its dtype rounds."""
    check(fun, rows("float32")[:6], meshes=[{"x": 3}])


MARK = -1e30


def marked(x: Any) -> Any:
    """Counts marks that came in, marks that were set here, and what is at a limit."""
    own = jnp.where(x > 2.5, jnp.full_like(x, MARK), x)
    counts = (x == MARK).sum(), (own == MARK).sum(), (x <= 0.1).sum(), (x < 0.1).sum()
    return lax.psum(jnp.stack(counts), "x")


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_data_hold_numbers_as_their_dtype_rounds_them(dtype: str) -> None:
    x = rows(dtype).at[1, :3].set(MARK).at[2:4, 0].set(0.1)
    checked = check(marked, x, keep=["args[0]"])
    assert not checked.unjudged
    assert not checked.only_double


# What a dtype makes of them


def slowly_decayed(weight: sm.State, x: Any) -> Any:
    kept = weight.value * (1 - 1e-4)  # decays not at all
    # Where a number meets what differs between shards, JAX may make it float32 first.
    return weight.set(kept + lax.pmean((x * (1 + 1e-5)).mean(0), "x"))  # grows not at all


def test_numbers_are_named_of_which_a_dtype_leaves_one() -> None:
    weight, specs = sm.State(jnp.ones(4, "bfloat16")), {"in_specs": (None, P("x"))}
    lost = check(slowly_decayed, weight, rows("bfloat16"), **specs).lost
    assert [line.partition(", at ")[0] for line in lost] == [
        "0.9999 is 1 in bfloat16",
        "1.00001 is 1 in bfloat16",
    ]
    for line, text in zip(lost, ("decays not at all", "grows not at all"), strict=True):
        assert f"{line}:".endswith(line_with(text))


def test_a_report_names_them_too() -> None:
    text = report(lambda x: scaled(x)["slightly_mistaken"], rows("bfloat16"), meshes=FOUR)
    assert "What dtypes leave of numbers:\n  - 1.0003 is 1 in bfloat16, at " in text


# What is known


def known(fun: Callable[..., Any], x: Any) -> list[float | None]:
    """For each literal of a program the number that it stands for; `None` where it is not known."""
    traced = trace_exactly(fun, *reversed(jax.tree.flatten(((x,), {}))))
    atoms: list[Any] = [a for eqn in all_equations(opened(traced.closed)) for a in eqn.invars]
    floats = [a for a in filter(is_literal, atoms) if is_inexact(jnp.result_type(a.val))]
    exact = map(traced.exact.of, floats)
    return [None if x is None else float(x) for x in exact]


def test_numbers_are_known_as_they_are_written() -> None:
    x = rows("bfloat16")
    assert known(lambda x: jnp.tanh(x * 0.99) - 1e-3, x) == [0.99, 1e-3]
    assert known(lambda x: x * 100 + 0.5, x) == [100, 0.5]
    assert known(lambda x: x * (1 - 1e-4), x) == [1 - 1e-4]
    branches = lambda x: lax.cond(x[0, 0] > 0.3, lambda: x * 0.1, lambda: x / 7)
    assert {0.3, 0.1, 7} <= {*known(branches, x)}
    # Counters are as wide as JAX makes them, or as the program does.
    assert known(lambda x: x * 0.1 + jnp.arange(4), x) == [0.1]
    loop = lambda x: lax.fori_loop(0, 3, lambda _, n: n + jnp.int32(len(x)), jnp.int32(0)) * 0.7 * x
    assert 0.7 in known(loop, x)


def test_numbers_that_the_program_rounds_are_not_known() -> None:
    assert known(lambda x: x * np.float32(0.1), rows("float32")) == [None]
    assert known(lambda x: x * jnp.asarray(0.1, "bfloat16"), rows("bfloat16")) == [None]
    # What depends on the dtype is another number in double precision.
    assert known(lambda x: x + jnp.finfo(x.dtype).eps * 3, rows("float32")) == [None]
    with np.errstate(over="ignore"):
        assert known(lambda x: x - 1e9, rows("float16")) == [None]
    assert known(lambda x: lax.mul(x, x.astype("float32")) * 0.1, rows("float32")) == [None]
