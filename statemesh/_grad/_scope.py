"""The mapped axes around a gradient, and how the gradient is reduced over each of them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from .._axes._dataflow import forwarded
from .._axes._differing import Gathered, Recorded, crossed, whole_over
from .._axes._mesh_and_lanes import bound_names, gradients_around, meshes_and_lanes
from .._axes._reduction import Pending, Reduction, reduce_on_mesh
from .._axes._unsummed import name_varying
from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._compat import Jaxpr
from .._base._types import NO_AXES, Axes, AxisName, Leaf, PyTree, SeveralAxes
from ._trainable import Parts


class Scope:
    """Bound axes, grouped by how we learn over which of them a value differs."""

    def __init__(self, name: str, axis_name: SeveralAxes, mean: bool, parts: Parts) -> None:
        self.params = parts.params
        self.recorded = Recorded()
        self.gathered = Recorded(Gathered())
        named = frozenset(bound_names("value_and_grad", axis_name))
        self.reduction = Reduction(named, mean, name, tuple(parts.paths))
        bound = compat.bound_axis_names()
        meshes, self.lanes = meshes_and_lanes(bound)
        self.entry = named, frozenset(bound)
        self.from_types = tuple(n for n in meshes if compat.varying(jax.lax.axis_index(n)))
        self.from_dataflow = compat.axes_from_dataflow()
        from_dataflow = [name for mark in self.from_dataflow for name in mark.axis_names]
        unknown = [name for name in meshes if name not in (*self.from_types, *from_dataflow)]
        if from_dataflow and (self.from_types or unknown):
            checked = [name for name in self.from_types if name not in from_dataflow]
            raise errors.gradient_in_mixed_maps(unknown or from_dataflow, from_dataflow, checked)
        if unknown:
            raise errors.gradient_unchecked(unknown)
        around = NO_AXES.union(*(names for names, _ in gradients_around.get()))
        if twice := named & around & frozenset(self.from_types):
            raise errors.gradient_in_gradient(_in_order(twice, self.from_types))
        # Inside the loss of one shard, each shard has parameters of its own.
        self.own = around - named
        self.cast_over = (named | around) & frozenset(self.from_types)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Entered while the function runs on cast parameters: their types do not tell how they are split."""
        token = gradients_around.set((*gradients_around.get(), self.entry))
        try:
            yield
        finally:
            gradients_around.reset(token)

    def cast(self, params: Sequence[Leaf]) -> list[Leaf]:
        """The parameters, typed so that JAX gives each shard its own gradient."""
        over = _in_order(self.cast_over, self.from_types)
        return [compat.vary(x, over) for x in params] if over else list(params)

    def restored(self, made: Sequence[Leaf], program: Callable[[], Jaxpr]) -> list[Leaf]:
        """The results of the function, with the original parameter in place of each that is a cast one.

        A parameter that passes through `jax.jit` or `jax.checkpoint` comes back as another array. Only the
        jaxpr of the function tells whether it is the same one.

        **Arguments:**

        - `made`: the arrays in the results, after the loss.
        - `program`: traces the function, from the parameters to the loss and these arrays.
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
        """JAX's gradients, and a function that gives the axes over which they hold parts of other losses.

        JAX gives the gradient of the sum of all instances' losses. It is the gradient of an instance's own
        loss where no cotangent passes from one instance to another on its way back.
        """
        one = compat.vary(jnp.ones((), loss.dtype), compat.varying(loss))
        traced = functools.cache(lambda: jax.make_jaxpr(pull)(one))
        over = functools.cache(lambda: crossed(jaxprs.open_jaxpr(traced())))
        if self.lanes or self.from_dataflow:
            return jaxprs.run_jaxpr(traced(), [one]), over
        (grads,) = pull(one)
        return grads, over

    def asks_what_crosses(self, loss: Leaf) -> bool:
        """Whether the reduction of this loss depends on what passes from one instance to another."""
        apart = (self._varying(loss) & frozenset(self.from_types)) - self.reduction.named
        return bool(self.lanes or self.from_dataflow or apart)

    def reduced(
        self,
        loss: Leaf,
        grads: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> tuple[Leaf, list[Leaf]]:
        """The loss and its gradients, reduced over all axes."""
        keys, values = [*self.params, loss], [*grads, loss]
        for axis_names, lanes, vmapped in self._axes_without_types():
            over = crossed()
            if inside := self.own & over:
                raise errors.loss_exchanged_inside(self.reduction.name, sorted(inside, key=str))
            own = self.own if not lanes else self.own | (frozenset(axis_names) - over)
            if left := tuple(n for n in axis_names if n in self.reduction.named or n not in own):
                pending = Pending(self.reduction, left, lanes, over)
                # A derivative taken outside of a map differentiates what was decided inside.
                within = [names for _, names in gradients_around.get() if names.issuperset(left)]
                values = pending(keys, values, vmapped, reverse=len(within))
        if self.from_types:
            values = self._reduced_by_types(loss, values, crossed, program)
        *grads, loss = values
        return loss, list(grads)

    def _varying(self, x: Leaf) -> Axes:
        """The mesh axes over which a value may differ, by its type or by what is recorded of it."""
        typed = compat.varying(x)
        if typed.issuperset(self.from_types) or not compat.under_jit():
            return typed
        return typed | self.recorded.of(x)

    def _param_varying(self, x: Leaf, path: str) -> Axes:
        """The same of a parameter. One that `all_gather` made whole has a type that varies, yet one value.

        A cast is the word of whoever wrote it: then each shard has a parameter of its own.
        """
        typed = compat.varying(x)
        reduced = _in_order(self.reduction.named & typed, self.from_types)
        if not reduced:
            return self._varying(x)
        whole = whole_over(self.gathered.of(x)) if compat.under_jit() else NO_AXES
        name_varying(x, reduced, whole, path)
        return self._varying(x) - whole

    def _axes_without_types(self) -> Iterator[tuple[tuple[AxisName, ...], bool, bool]]:
        """The axes over which types do not tell what differs; whether they are lanes, and of a `vmap`."""
        for lane in self.lanes:
            yield (lane,), True, True
        for mark in self.from_dataflow:
            yield mark.axis_names, mark.lanes, False

    def _reduced_by_types(
        self,
        loss: Leaf,
        values: Sequence[Leaf],
        crossed: Callable[[], Axes],
        program: Callable[[], Jaxpr],
    ) -> list[Leaf]:
        axes, over = frozenset(self.from_types), self._varying(loss)
        pairs = zip(self.params, self.reduction.params, strict=True)
        own = [self._param_varying(x, path) | (self.own & axes) for x, path in pairs]
        self.reduction.check(over, own, self.from_types)
        # Over these axes each shard has a loss and parameters of its own.
        apart = (over & axes) - self.reduction.named
        if apart and (shared := apart & crossed()):
            if inside := shared & self.own:
                raise errors.loss_exchanged_inside(
                    self.reduction.name, _in_order(inside, self.from_types)
                )
            raise errors.loss_exchanged(self.reduction.name, _in_order(shared, self.from_types))
        # JAX's types let the cotangent of a loss that all shards share pass to each of them without an error.
        if (one := (self.own & axes) - over) and (inside := one & jaxprs.exchanged_over(program())):
            raise errors.loss_exchanged_inside(
                self.reduction.name, _in_order(inside, self.from_types)
            )
        plans = [self.reduction.typed(param, over, axes) for param in own]
        plans.append(self.reduction.of_loss(over, axes))
        return self.reduction.with_names(reduce_on_mesh(values, plans, self.from_types))


def _in_order(axes: Axes, names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    return tuple(name for name in names if name in axes)
