"""Losses that contain steps along gradients, and losses that each shard has for itself.

The reference stacks the parameters of all shards. It uses JAX, but no maps and no collectives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm

from ..base.models import mesh_of
from ..programs import MeshShape


WIDTH, ROWS, STEPS, RATE = 4, 3, 2, 0.05
NAMES = ("weights", "scale", "shift")
HOW = ("checked", "unchecked", "vmap2", "pmap2", "vmap2 in checked", "vmap2 in unchecked")


@dataclasses.dataclass(frozen=True)
class NestedCase:
    """A loss of shards (or lanes) over "x", whose features are split over "y".

    **Attributes:**

    - `how`: the map over "x", and what surrounds it.
    - `shards`, `parts`: the sizes of both axes.
    - `own`: for each parameter, whether each shard has its own.
    - `named`: whether `axis_name` names "x", so that its losses are averaged.
    - `order`: how many gradients are nested in the loss.
    - `scan`, `remat`: whether an inner gradient makes several steps, and whether they are recomputed.
    - `wave`: the function of the features.
    - `exchange`: what the shards over "x" get from each other: `'none'`, their `'rows'`, parameters without
        gradients (`'stopped'`), or parameters with gradients (`'through'`).
    - `explicit`: whether the axes of the mesh are Explicit.
    """

    how: str
    shards: int = 2
    parts: int = 1
    own: tuple[bool, bool, bool] = (False, False, False)
    named: bool = True
    order: int = 1
    scan: bool = False
    remat: bool = False
    wave: str = "tanh"
    exchange: str = "none"
    explicit: bool = False

    @property
    def on_mesh(self) -> bool:
        return self.how in ("checked", "unchecked")

    @property
    def refused(self) -> str | None:
        """A part of the error where this gradient does not exist."""
        if self.exchange == "through" and self.named and self.order:
            return "inside the loss of another"
        differ = self.exchange == "through" or (self.on_mesh and not all(self.own))
        return r"(differs|varies) over 'x'" if differ and not self.named else None


@st.composite
def nested_cases(draw: st.DrawFn) -> NestedCase:
    how = draw(st.sampled_from(HOW))
    # JAX has no collectives over lanes inside a checked `shard_map`.
    some = ["none", "rows", "stopped", "through"] if how != "vmap2 in checked" else ["none"]
    named = draw(st.sampled_from([True, True, False]))
    each = not named and draw(st.sampled_from([True, True, False]))
    a, b, c = (each or draw(st.booleans()) for _ in NAMES)
    return NestedCase(
        how,
        draw(st.sampled_from([2, 4])),
        1 if how == "pmap2" else draw(st.sampled_from([1, 2])),
        (a, b, c),
        named,
        draw(st.sampled_from([1, 2, 0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["tanh", "sin"])),
        draw(st.sampled_from(some)),
        draw(st.booleans()),
    )


def check_nested(case: NestedCase, seed: float = 0.0) -> None:
    """Compares losses and gradients of all shards with the reference, or expects the refusal."""
    stack, x = values_of(case, seed)
    model = {
        name: w if own else w[0] for own, (name, w) in zip(case.own, stack.items(), strict=True)
    }
    if case.refused is not None:
        with pytest.raises(sm.StatemeshError, match=case.refused):
            mapped(case)(model, x)
        return
    found, wanted = mapped(case)(model, x), jax.jit(functools.partial(reference, case))(stack, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(np.reshape(a, b.shape), b, rtol=0, atol=1e-4 * scale)


def values_of(case: NestedCase, seed: float) -> tuple[dict[str, Any], Any]:
    def some(*shape: int, start: float) -> Any:
        return np.cos(seed + start + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)

    n = case.shards
    stack = {"weights": some(n, WIDTH, start=1.0), "scale": some(n, start=2.0)}
    stack["shift"] = some(n, start=3.0)
    for own, name in zip(case.own, NAMES, strict=True):
        stack[name] = stack[name] if own else np.stack([stack[name][0]] * n)
    return stack, some(n, ROWS, WIDTH, start=4.0)


# The reference.


def reference(case: NestedCase, stack: Any, x: Any) -> Any:
    def base(stack: Any) -> Any:
        rows = x - x.mean((0, 1)) if case.exchange == "rows" else x
        y = jnp.einsum("nrw,nw->nr", rows, stack["weights"])
        y = getattr(jnp, case.wave)(y * stack["scale"][:, None] + stack["shift"][:, None])
        if case.exchange == "stopped":
            y = y + 0.1 * jax.lax.stop_gradient(stack["shift"]).sum()
        if case.exchange == "through":
            y = y * (1 + 0.1 * stack["scale"].sum())
        return ((y - 0.5) ** 2).mean(1)

    def slopes(losses: Callable[..., Any], stack: Any) -> Any:
        return jax.grad(lambda stack: losses(stack).sum())(stack)

    def after(losses: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(stack: Any) -> Any:
            for _ in range(STEPS if case.scan else 1):
                stack = jax.tree.map(lambda w, g: w - RATE * g, stack, slopes(losses, stack))
            return base(stack)

        return stepped

    losses = base
    for _ in range(case.order):
        losses = after(losses)
    each, grads = losses(stack), slopes(losses, stack)
    if not case.named:
        return each, grads
    shared = dict(zip(NAMES, [not own for own in case.own], strict=True))
    whole = {k: jnp.broadcast_to(g.sum(0), g.shape) if shared[k] else g for k, g in grads.items()}
    mean = jnp.broadcast_to(each.mean(), each.shape)
    return mean, {k: g / case.shards for k, g in whole.items()}


# The same with statemesh.


def base_of(case: NestedCase, model: Any, x: Any) -> Any:
    """The loss of one shard, as a user would write it."""
    weights = model["weights"].reshape(-1)
    scale, shift = model["scale"].sum(), model["shift"].sum()
    rows = x.reshape(ROWS, -1)
    if case.exchange == "rows":
        rows = rows - jax.lax.pmean(rows.mean(0), "x")
    y = rows @ weights
    if case.how != "pmap2":
        y = jax.lax.psum(y, "y")
    y = getattr(jnp, case.wave)(y * scale + shift)
    if case.exchange == "stopped":
        y = y + 0.1 * jax.lax.psum(jax.lax.stop_gradient(shift), "x")
    if case.exchange == "through":
        y = y * (1 + 0.1 * jax.lax.psum(scale, "x"))
    return ((y - 0.5) ** 2).mean(), model


def step(case: NestedCase, model: Any, x: Any) -> Any:
    base = functools.partial(base_of, case)

    def after(loss: Callable[..., Any]) -> Callable[..., Any]:
        def along(model: Any, x: Any) -> Any:
            grads, _ = sm.grad(loss)(model, x)
            return jax.tree.map(lambda w, g: w - RATE * g, model, grads)

        one = jax.checkpoint(along) if case.remat else along

        def stepped(model: Any, x: Any) -> Any:
            if not case.scan:
                return base(one(model, x), x)[0], model
            # The carry must keep its type, so that the first step comes before the scan.
            near = one(model, x)
            near, _ = jax.lax.scan(lambda m, _: (one(m, x), None), near, None, STEPS - 1)
            return base(near, x)[0], model

        return stepped

    loss: Callable[..., Any] = base
    for _ in range(case.order):
        loss = after(loss)
    over = "x" if case.named else None
    (value, _), grads = sm.value_and_grad(loss, axis_name=over)(model, x)
    return (value[None], jax.tree.map(lambda g: g[None], grads)) if case.on_mesh else (value, grads)


def mapped(case: NestedCase) -> Callable[..., Any]:
    run = functools.partial(step, case)
    own = dict(zip(NAMES, case.own, strict=True))
    if case.on_mesh:
        # A parameter that each shard has for itself has a leading axis, of size one inside.
        lead = {name: ("x",) if own[name] else () for name in NAMES}
        specs = {name: P(*lead[name]) for name in NAMES} | {"weights": P(*lead["weights"], "y")}
        out = P("x"), {"weights": P("x", None, "y") if own["weights"] else P("x", "y")}
        out[1].update(scale=P("x"), shift=P("x"))
        mesh = mesh_of(MeshShape((case.shards, case.parts), case.explicit))
        call: Callable[..., Any] = sm.shard_map(
            run, mesh, (specs, P("x", None, "y")), out, check_vma=case.how == "checked"
        )
        return call
    axes = {name: 0 if own[name] else None for name in NAMES}
    transform = sm.pmap2 if case.how == "pmap2" else sm.vmap2
    lanes: Any = transform(run, in_axes=(axes, 0), axis_name="x", axis_size=case.shards)
    if case.how == "pmap2":
        on_devices: Callable[..., Any] = lanes
        return on_devices
    if case.how == "vmap2":
        return _cut(
            case,
            sm.vmap2(
                lanes,
                in_axes=({"weights": -2, "scale": None, "shift": None}, -2),
                out_axes=(None, {"weights": -2, "scale": None, "shift": None}),
                axis_name="y",
            ),
        )
    parts = {"weights": P(*[None] * own["weights"], "y"), "scale": P(), "shift": P()}
    outputs = P(), {"weights": P(None, "y"), "scale": P(), "shift": P()}
    checked = case.how == "vmap2 in checked"
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    mesh = Mesh(np.array(jax.devices()[: case.parts]), ("y",), axis_types=(kind,))
    each = parts, P(None, None, "y")
    on_shards: Callable[..., Any] = sm.shard_map(lanes, mesh, each, outputs, check_vma=checked)
    return on_shards


def _cut(case: NestedCase, lanes: Callable[..., Any]) -> Callable[..., Any]:
    """The same call with the features cut in parts."""

    def parts(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], case.parts, -1)

    return lambda model, x: lanes({**model, "weights": parts(model["weights"])}, parts(x))
