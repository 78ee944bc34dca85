"""Copies that devices hold of what is promised to be one value, on each of several shards."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from .checked import check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
NAN, INF = np.nan, np.inf
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
# Two numbers of this are too large for float16, but not in the double precision of the replay.
HALF = np.full((8, 2), 300, np.float16)
KEYS = [jax.random.key_data(jax.random.key(k)).tolist() for k in (0, 1)]

# What the first shard holds, what the last one does, and what is said of it.
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "numbers": (0.0, 1.0, "it is 0 on shard x=0 and 1 on shard x=1 (off by 1"),
    "one_of_two": ([1.0, 5.0], [1.0, 7.5], "at [1] it is 5 on shard x=0 and 7.5"),
    "not_a_number": (1.0, NAN, "it is 1 on shard x=0 and nan on shard x=1 (off by inf"),
    "infinite": ([NAN, INF, 2], [NAN, -INF, 1], "at [1] it is inf on shard x=0 and -inf"),
    "integers": (-(2**31), 2**31 - 1, "(off by 4.295e+09)"),
    "truths": (False, True, "it is False on shard x=0 and True on shard x=1 (off by 1)"),
    "complex": (1j, 1 + 2j, "it is 0+1j on shard x=0 and 1+2j on shard x=1 (off by 1"),
    "unsigned": (np.uint8(1), np.uint8(4), "it is 1 on shard x=0 and 4 on shard x=1 (off by 3)"),
    "bfloat16": (jnp.bfloat16(2), jnp.bfloat16(4), "it is 2 on shard x=0 and 4"),
    "float8": (jnp.float8_e4m3fn(2), jnp.float8_e4m3fn(4), "it is 2 on shard x=0 and 4"),
}
SAME: dict[str, Any] = {"nan": NAN, "infinite": -INF, "empty": np.ones((0, 2))}


def on_the_last(x: Any) -> Any:
    """Whether this is the last shard along x: by an overflow that only devices have."""
    last = lax.axis_index("x") == lax.axis_size("x") - 1
    return last & jnp.isinf(x[0, 0] * jnp.where(last, x[0, 0], 1))


def held(x: Any) -> Any:
    last = on_the_last(x)

    def either(on_first: Any, on_last: Any) -> Any:
        return jnp.where(last, jnp.asarray(on_last), jnp.asarray(on_first))

    return {
        "keys": jax.random.wrap_key_data(either(*map(np.uint32, KEYS))),
        "zeros": either(0.0, -0.0),
        **{f"same_{name}": either(x, x) for name, x in SAME.items()},
        **{name: either(*pair) for name, (*pair, _) in PAIRS.items()},
    }


@pytest.mark.slow
def test_copies_that_differ_on_devices_only_are_named_in_every_dtype() -> None:
    options: Any = {"unsharded": False, "check_vma": False}
    lines = [line for line in report(held, HALF, **options).splitlines() if "  - held" in line]
    for name, (_, _, text) in {**PAIRS, "keys": (0, 0, f"it is {KEYS[0]} on shard x=0")}.items():
        (line,) = [line for line in lines if f"['{name}']" in line]
        assert "with spec P() has one value for all shards along 'x', but " in line
        assert text in line
    assert len(lines) == len(PAIRS) + 1


def test_of_a_split_array_the_copies_of_each_part_are_compared() -> None:
    def rows(x: Any) -> Any:
        off = jnp.where(on_the_last(x), 0.5, 0) * (lax.axis_index("y") == 1)
        return {"rows": x[:, :1].astype(jnp.float32) + off}

    text = report(
        *(rows, HALF),
        meshes=[{"x": 2, "y": 2}],
        in_specs=P("y"),
        out_specs=P("y"),
        check_vma=False,
        unsharded=False,
    )
    assert (
        "  - rows(...)['rows']: float32[8,1] with spec P('y') has one value for all shards along 'x', but at "
        "[4, 0] it is 300 on shard x=0, y=1 and 300.5 on shard x=1, y=1 (off by 0.5" in text
    )
    assert (
        "    Reduce it (jax.lax.psum, pmean), let a state's `reduce` do it, or name its axes"
        in text
    )


@pytest.mark.slow
def test_copies_that_differ_in_the_replay_too_are_found_on_every_mesh() -> None:
    def numbered(x: Any) -> Any:
        return lax.psum(x.sum(0), "x") + lax.axis_index("x")

    text = report(numbered, X, meshes=[{"x": 4}, {"x": 1}], check_vma=False)
    assert "On mesh x=4" in text
    line = "is one copy for all shards along 'x', but differs by 3 at [0] between x=0 and x=3"
    assert line in text


def test_copies_may_differ_by_rounding_and_no_more() -> None:
    def rotated(x: Any) -> Any:
        """A sum in another order on each shard."""
        rows = lax.all_gather(x, "x", tiled=True)
        order = (jnp.arange(len(rows)) + lax.axis_index("x")) % len(rows)
        return jnp.cumsum(rows[order], axis=0)[-1]

    check(rotated, X, check_vma=False)
    nearly = lambda x: lax.psum(x.sum(0), "x") * (1 + 1e-3 * lax.axis_index("x"))
    text = report(nearly, jnp.asarray(X, jnp.bfloat16), check_vma=False)
    assert "is one copy for all shards along 'x', but differs by" in text


def test_of_many_copies_that_differ_four_are_shown() -> None:
    """A report stays short, whatever the size of the model."""
    text = report(lambda x: [k * x.sum() for k in range(1, 41)], X, check_vma=False)
    assert text.count("is one copy for all shards along 'x'") == 4
    assert "\n  and 36 more.\n" in text
    assert len(text.splitlines()) <= 25
