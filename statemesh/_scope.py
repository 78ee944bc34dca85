"""The axes that are mapped over where a gradient is taken, and what is done over each of them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from ._axes._dataflow import forwarded
from ._axes._differing import crossed
from ._axes._mesh_and_lanes import bound_names, meshes_and_lanes
from ._axes._reduction import Pending, Reduction, reduce_on_mesh
from ._base import _compat as compat
from ._base import _jaxprs as jaxprs
from ._base import errors
from ._base._compat import Jaxpr
from ._base._types import NO_AXES, Axes, AxisName, Leaf, PyTree, SeveralAxes
from ._trainable import Parts


# Of each `value_and_grad` around the axes over which it takes losses together, and all that are mapped there.
_around: ContextVar[tuple[tuple[Axes, Axes], ...]] = ContextVar("around", default=())


class Scope:
    """The axes that are mapped over here, by who knows over which of them a value differs."""

    def __init__(self, name: str, axis_name: SeveralAxes, mean: bool, parts: Parts) -> None:
        self.params = parts.params
        named = frozenset(bound_names("value_and_grad", axis_name))
        self.reduction = Reduction(named, mean, name, tuple(parts.paths))
        bound = compat.bound_axis_names()
        meshes, self.lanes = meshes_and_lanes(bound)
        self.entry = named, frozenset(bound)
        self.typed = tuple(n for n in meshes if compat.varying(jax.lax.axis_index(n)))
        self.followed = compat.followed()
        followed = [name for mark in self.followed for name in mark.axis_names]
        unknown = [name for name in meshes if name not in (*self.typed, *followed)]
        if followed and (self.typed or unknown):
            checked = [name for name in self.typed if name not in followed]
            raise errors.gradient_in_mixed_maps(unknown or followed, followed, checked)
        if unknown:
            raise errors.gradient_unchecked(unknown)
        around = NO_AXES.union(*(names for names, _ in _around.get()))
        if twice := named & around & frozenset(self.typed):
            raise errors.gradient_in_gradient(_in_order(twice, self.typed))
        # In the loss of one shard each shard has parameters of its own.
        self.own = around - named
        self.cast_over = (named | around) & frozenset(self.typed)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """While the function runs: its parameters are no more what says over which axes they are split."""
        token = _around.set((*_around.get(), self.entry))
        try:
            yield
        finally:
            _around.reset(token)

    def cast(self, params: Sequence[Leaf]) -> list[Leaf]:
        """Parameters of which JAX gives each shard its own gradient."""
        over = _in_order(self.cast_over, self.typed)
        return [compat.vary(x, over) for x in params] if over else list(params)

    def restored(self, made: Sequence[Leaf], program: Callable[[], Jaxpr]) -> list[Leaf]:
        """What the function made, with the parameters in place of what is one of them, as it was cast.

        A parameter that passes through `jax.jit` or `jax.checkpoint` comes back as another array. Whether
        it is the same, only a program of the function tells, for which it is traced again.

        **Arguments:**

        - `made`: arrays in the results, after the loss.
        - `program`: what makes the loss and these arrays of the parameters.
        """
        cast = self.cast_over
        forms = {(x.shape, x.dtype) for x in self.params if cast - compat.varying(x)}
        if not any((x.shape, x.dtype) in forms and cast <= compat.varying(x) for x in made):
            return list(made)
        sources = forwarded(program())[1:]
        pairs = zip(made, sources, strict=True)
        return [x if k is None else self.params[k] for x, k in pairs]

    def pulled(
        self, pull: Callable[..., PyTree], loss: Leaf
    ) -> tuple[list[Leaf], Callable[[], Axes]]:
        """What JAX gives as the gradients, and the axes over which some of it comes of others' losses.

        JAX gives the gradient of the sum of all instances' losses. It is that of an instance's own loss
        where no cotangent passes from one to another on its way back.
        """
        one = compat.vary(jnp.ones((), loss.dtype), compat.varying(loss))
        if not self.lanes and not self.followed:
            (grads,) = pull(one)
            return grads, functools.cache(
                lambda: crossed(jaxprs.open_jaxpr(jax.make_jaxpr(pull)(one)))
            )
        closed = jax.make_jaxpr(pull)(one)
        return jaxprs.run_jaxpr(closed, [one]), functools.cache(
            lambda: crossed(jaxprs.open_jaxpr(closed))
        )

    def reduced(
        self,
        loss: Leaf,
        grads: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> tuple[Leaf, list[Leaf]]:
        """The loss and its gradients, reduced over all axes."""
        keys, values = [*self.params, loss], [*grads, loss]
        for axis_names, lanes, vmapped in self._written_down():
            over = crossed()
            if inside := self.own & over:
                raise errors.loss_exchanged_inside(self.reduction.name, sorted(inside, key=str))
            own = self.own if not lanes else self.own | (frozenset(axis_names) - over)
            if left := tuple(n for n in axis_names if n in self.reduction.named or n not in own):
                pending = Pending(self.reduction, left, lanes, over)
                # What differentiates a map from outside has derivatives of what has been decided.
                within = [names for _, names in _around.get() if names.issuperset(left)]
                values = pending(keys, values, vmapped, reverse=len(within))
        if self.typed:
            values = self._typed(loss, values, crossed, program)
        *grads, loss = values
        return loss, list(grads)

    def _written_down(self) -> Iterator[tuple[tuple[AxisName, ...], bool, bool]]:
        """Axes over which nothing tells here what differs, whether they are lanes, and of a `vmap`."""
        for lane in self.lanes:
            yield (lane,), True, True
        for mark in self.followed:
            yield mark.axis_names, mark.lanes, False

    def _typed(
        self,
        loss: Leaf,
        values: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> list[Leaf]:
        axes, over = frozenset(self.typed), compat.varying(loss)
        own = [compat.varying(x) | (self.own & axes) for x in self.params]
        self.reduction.check(over, own, self.typed)
        # Each shard has a loss and parameters of its own there.
        apart = (over & axes) - self.reduction.named
        if apart and (shared := apart & crossed()):
            if inside := shared & self.own:
                raise errors.loss_exchanged_inside(
                    self.reduction.name, _in_order(inside, self.typed)
                )
            raise errors.loss_exchanged(self.reduction.name, _in_order(shared, self.typed))
        # Of a loss that has been made one of all shards', types have JAX pass each its cotangent in silence.
        if (one := (self.own & axes) - over) and (inside := one & jaxprs.exchanged_over(program())):
            raise errors.loss_exchanged_inside(self.reduction.name, _in_order(inside, self.typed))
        plans = [self.reduction.typed(param, over, axes) for param in own]
        plans.append(self.reduction.of_loss(over, axes))
        return self.reduction.with_names(reduce_on_mesh(values, plans, self.typed))


def _in_order(axes: Axes, names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    return tuple(name for name in names if name in axes)
