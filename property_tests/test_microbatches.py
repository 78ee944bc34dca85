"""Microbatches: the same loss, gradients, statistics and noise on every mesh, and in NumPy."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import meshes

from .base.settings import fewer


ROWS, SIZE = 32, 2
# A draw of each row.
BITS = 2**16


class Net(sm.Module):
    """Statistics of a microbatch, numbers of each row, and a state with each policy."""

    norm: sm.nn.BatchNorm
    w: sm.ParamState
    total: sm.State
    high: sm.State
    rng: sm.RandomState


def net_of(names: Any, seed: int) -> Net:
    return Net(
        sm.nn.BatchNorm(SIZE, axis_name=names, momentum=None),
        sm.ParamState(jnp.array([0.5, -1.5])),
        sm.State(jnp.zeros(SIZE), reduce="sum"),
        sm.State(jnp.full(SIZE, -jnp.inf), reduce="max"),
        sm.RandomState(jax.random.key(seed)),
    )


@cache
def mapped(mesh: Mesh | None, count: int, names: Any, checked: bool) -> Any:
    """A gradient on a mesh, or of all rows on one device."""

    def loss(net: Net, x: Any) -> Any:
        keys, rng = net.rng.rows(len(x), names)
        drawn = jax.vmap(lambda key: jax.random.randint(key, (), 0, BITS))(keys)
        y, norm = net.norm(x)
        new = net.replace(
            norm=norm,
            total=net.total.value + x.sum(0),
            high=jnp.maximum(net.high.value, x.max(0)),
            rng=rng,
        )
        noise = drawn / BITS
        return (((y @ net.w.value) * noise).mean(), drawn), new

    def step(net: Net, x: Any) -> Any:
        return sm.value_and_grad(loss, axis_name=names, has_aux=True, microbatches=count)(net, x)

    if mesh is None:
        return eqx.filter_jit(step)
    rows = P(mesh.axis_names)
    out = (((P(), P(None, mesh.axis_names)), P()), P())
    return sm.shard_map(step, mesh, (None, rows), out, check_vma=checked)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mesh, int, Any, bool]:
    mesh = draw(meshes())
    count = draw(st.sampled_from([k for k in (2, 4, 1, 8) if ROWS // mesh.size % k == 0]))
    names: Any = mesh.axis_names
    if len(names) == 1 and draw(st.booleans()):
        (names,) = names
    return mesh, count, names, draw(st.booleans())


def by_hand(x: Any, w: Any, drawn: Any, count: int) -> tuple[Any, Any]:
    """The loss and its gradient by the weights, in float64."""
    losses, grads = [], []
    for k in range(count):
        rows, noise = x[k::count], drawn[k::count, None] / BITS
        y = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
        losses.append((y @ w * noise[:, 0]).mean())
        grads.append((y * noise).mean(0))
    return np.mean(losses), np.mean(grads, 0)


@fewer(1 / 8)  # Each example compiles two programs of its own.
@given(call=calls(), seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_a_microbatch_is_the_same_set_of_rows_on_every_mesh(
    call: tuple[Mesh, int, Any, bool], seeds: list[int]
) -> None:
    mesh, count, names, checked = call
    for seed in seeds:
        x = np.random.default_rng(seed).normal(seed, 3, (ROWS, SIZE)).astype(np.float32)
        net = net_of(names, seed)
        ((loss, drawn), new), grads = jax.block_until_ready(
            mapped(mesh, count, names, checked)(net, x)
        )
        # Entry `[i, j]` belongs to row `j * count + i`.
        drawn = np.asarray(drawn).T.ravel()
        keys, after = net.rng.rows(ROWS)
        wanted = jax.vmap(lambda key: jax.random.randint(key, (), 0, BITS))(keys)
        np.testing.assert_array_equal(drawn, wanted)
        assert new.rng.key == after.key

        wide, w = x.astype(np.float64), np.float64(net.w.value)
        wanted_loss, wanted_grad = by_hand(wide, w, drawn, count)
        np.testing.assert_allclose(loss, wanted_loss, 1e-3, 1e-4)
        np.testing.assert_allclose(grads.w.value, wanted_grad, 1e-3, 1e-4)
        np.testing.assert_allclose(new.total.value, wide.sum(0), 1e-4, 1e-3)
        np.testing.assert_array_equal(new.high.value, x.max(0))
        mean, var = new.norm.statistics
        np.testing.assert_allclose(mean, wide.mean(0), 1e-4, 1e-4)
        np.testing.assert_allclose(var, wide.var(0), 1e-3)
        # And as on one device.
        ((alone, _), _), alone_grads = mapped(None, count, names, True)(net, x)
        np.testing.assert_allclose(loss, alone, 1e-3, 1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(alone_grads), strict=True):
            np.testing.assert_allclose(a, b, 1e-3, 1e-4)
