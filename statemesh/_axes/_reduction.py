"""A loss and its gradients, reduced over mapped axes exactly once.

Which sum is the right one depends on where values differ. JAX's types tell it inside a checked `shard_map`;
in lanes `vmap` knows; where nothing is checked it comes of following the program. So in the latter two what
is to be done is written down, as a `Pending`, and decided by who knows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from .._base import errors
from .._base._types import NO_AXES, Axes, AxisName
from ._wide import after_sum, before_sum


# How the name begins that a reduced gradient is given in the program.
GRADIENT = "gradient of "
# What is given to what statemesh itself sums: a cotangent of a reduced gradient may look like one.
SUMMAND = "summed by statemesh"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done to one array: summed over some axes, divided by the sizes of some."""

    sum: Axes
    divide: Axes

    def of_lanes(self, x: Any, count: int, batched: bool) -> Any:
        """The same for all lanes of one `vmap` at once, their axis the first of `x` if it is `batched`."""
        divisor = count if self.divide else 1
        part = before_sum(x, divisor)
        if self.sum:
            part = jnp.sum(part, 0, dtype=part.dtype) if batched else part * count
        return after_sum(part, x.dtype, divisor)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the losses of all instances are one loss.

    **Attributes:**

    - `named`: the axes over which it is taken together.
    - `mean`: whether it is the mean of them; else their sum.
    - `name`, `params`: what messages call the function, and each parameter.
    """

    named: Axes
    mean: bool
    name: str
    params: tuple[str, ...]

    def check(self, loss: Axes, params: Sequence[Axes], axes: Sequence[AxisName]) -> None:
        """Refuse a loss that differs over an axis that is not named, where one copy of a parameter is kept.

        **Arguments:**

        - `loss`, `params`: where these differ.
        - `axes`: those of a mesh. Lanes may each have a loss of their own.
        """
        apart = (loss & frozenset(axes)) - self.named
        if shared := [p for p, axes in zip(self.params, params, strict=True) if apart - axes]:
            raise errors.loss_differs(self.name, [a for a in axes if a in apart], shared)

    def with_names(self, values: Sequence[Any]) -> list[Any]:
        """Reduced gradients, then the loss; each gradient by the name of its parameter.

        By this name a gradient that is summed a second time is found in the traced program.
        """
        *grads, loss = values
        names = [GRADIENT + path for path in self.params]
        return [*map(checkpoint_name, grads, names), loss]

    def of_loss(self, loss: Axes, axes: Axes) -> Plan:
        """What is done to the loss, which differs over some of `axes`."""
        if not self.mean and (same := (self.named & axes) - loss):
            raise errors.loss_counted_twice(sorted(same, key=str))
        over = self.named & axes & loss
        return Plan(over, over if self.mean else NO_AXES)

    def typed(self, param: Axes, loss: Axes, axes: Axes) -> Plan:
        """What is done to the gradient where JAX counts a loss once over the axes over which it is the same.

        **Arguments:**

        - `param`, `loss`: where these differ. The parameters were typed as varying over all named axes.
        - `axes`: the axes whose values are typed.
        """
        over = self.named & axes
        return Plan(over - param, over & loss if self.mean else NO_AXES)

    def untyped(self, param: Axes, loss: Axes, gradient: Axes, axes: Axes) -> Plan:
        """What is done to the gradient where JAX takes that of the sum of all instances' losses.

        A loss that is the same on all `n` of them is in that sum `n` times. Where the gradient is the same
        too, the mean of all changes nothing.

        **Arguments:**

        - `param`, `loss`, `gradient`: where these differ.
        - `axes`: those that are named, and those over which some of the gradient comes of others' losses.
        """
        same = (axes - loss) & (param | gradient)
        over = self.named & axes & loss
        return Plan((over | same) - param, same | (over if self.mean else NO_AXES))


def reduce_on_mesh(
    values: Sequence[Any], plans: Sequence[Plan], axis_names: Sequence[AxisName]
) -> list[Any]:
    """Arrays as planned, those over the same axes in one collective, narrow floats in float32."""
    sizes = [math.prod(map(jax.lax.axis_size, plan.divide)) for plan in plans]
    parts = list(map(before_sum, values, sizes))
    for over in dict.fromkeys(plan.sum for plan in plans if plan.sum):
        at = [k for k, plan in enumerate(plans) if plan.sum == over]
        names = tuple(name for name in axis_names if name in over)
        summands = [checkpoint_name(parts[k], SUMMAND) for k in at]
        for k, x in zip(at, jax.lax.psum(summands, names), strict=True):
            parts[k] = x
    triples = zip(parts, values, sizes, strict=True)
    return [after_sum(part, x.dtype, n) for part, x, n in triples]


@dataclasses.dataclass(frozen=True)
class Pending:
    """A reduction that is decided where it is known which values differ.

    Its operands are a mark of the lanes, keys (the parameters, then the loss) and as many values (the
    gradients, then the loss).

    **Attributes:**

    - `reduction`: what is to be done.
    - `axis_names`: over which axes: one axis of lanes, or those of a mesh.
    - `lanes`: whether these are lanes, in a `vmap` or on devices.
    - `crossed`: the axes over which some of the gradient comes of other instances' losses.
    - `backward`: whether the values are cotangents of its results. It is its own transpose, but that
        cotangents differ where gradients are the same.
    """

    reduction: Reduction
    axis_names: tuple[AxisName, ...]
    lanes: bool
    crossed: Axes
    backward: bool = False

    def is_over(self, axes: Axes) -> bool:
        return axes.issuperset(self.axis_names)

    @property
    def reduced_over(self) -> Axes:
        """The axes over which anything may be reduced; over others the loss is looked at, no more."""
        return frozenset(self.axis_names) & (self.reduction.named | self.crossed)

    def plans(self, operands: Sequence[Axes]) -> list[Plan]:
        """What is done to each value, given over which axes the operands differ."""
        axes = frozenset(self.axis_names)
        (*params, loss), (*grads, _) = _halves(operands[1:])
        if not self.lanes:
            self.reduction.check(loss, params, self.axis_names)
        if apart := (loss & axes & self.crossed) - self.reduction.named:
            raise errors.loss_exchanged(
                self.reduction.name, [a for a in self.axis_names if a in apart]
            )
        if self.backward:
            grads = [axes] * len(grads)
        plans = [
            self.reduction.untyped(param, loss, gradient, self.reduced_over)
            for param, gradient in zip(params, grads, strict=True)
        ]
        return [*plans, self.reduction.of_loss(loss, axes)]

    def results_differ(self, operands: Sequence[Axes]) -> list[Axes]:
        """Over which axes its results may differ, given the same of its operands."""
        (*params, loss), (*grads, value) = _halves(operands[1:])
        axes = frozenset(self.axis_names)
        joined = (self.reduction.named & axes) | (self.reduced_over - loss)
        pairs = zip(params, grads, strict=True)
        return [*(x - (joined - param) for param, x in pairs), value - joined]

    def decided(self, operands: Sequence[Axes]) -> Callable[..., list[Any]]:
        """What it is on a mesh, given over which axes its operands differ."""
        plans = self.plans(operands)
        # Lanes that are not named may each have a gradient of their own, to be summed as their author likes.
        is_last = not self.backward and (
            not self.lanes or self.reduction.named.issuperset(self.axis_names)
        )

        def reduced(*operands: Any) -> list[Any]:
            values = reduce_on_mesh(_halves(operands[1:])[1], plans, self.axis_names)
            return self.reduction.with_names(values) if is_last else values

        return reduced

    def decided_for_lanes(
        self, batched: Sequence[bool], count: int, values: Sequence[Any]
    ) -> tuple[list[Any], list[bool]]:
        """What it makes of the values in lanes, given which operands are batched; and which results are."""
        over = frozenset(self.axis_names)
        plans = self.plans([over if hit else NO_AXES for hit in batched])
        triples = list(zip(plans, values, _halves(batched[1:])[1], strict=True))
        results = [plan.of_lanes(x, count, hit) for plan, x, hit in triples]
        return results, [hit and not plan.sum for plan, _, hit in triples]

    def __call__(
        self, keys: Sequence[Any], values: Sequence[Any], vmapped: bool, reverse: int
    ) -> list[Any]:
        """Write it down here.

        **Arguments:**

        - `keys`, `values`: its operands but for the mark.
        - `vmapped`: whether its one axis is one of a `vmap`.
        - `reverse`: how often it is differentiated in reverse mode, before anything is in forward mode.
        """

        # The lane's own number is batched over it, so that these lanes are told from others. It is made out
        # here: of what is made inside, JAX makes another operand, and takes one residual for the next.
        mark = jax.lax.axis_index(self.axis_names[0]) if vmapped else 0
        return self._derived(vmapped, reverse)(mark, *keys, *values)

    def _derived(self, vmapped: bool, reverse: int) -> Callable[..., list[Any]]:
        run = self._pending(vmapped)
        if reverse and self.reduced_over:
            return self._in_reverse(run, vmapped, reverse - 1)
        return self._in_forward(run)

    def _pending(self, vmapped: bool) -> Callable[..., list[Any]]:
        @custom_vmap
        def reduced(*operands: Any) -> list[Any]:
            return list(_halves(operands[1:])[1])

        def rule(count: int, batched: Any, *operands: Any) -> Any:
            if vmapped and batched[0]:
                return self.decided_for_lanes(batched, count, _halves(operands[1:])[1])
            # Another axis than this one, further in: entry by entry.
            return reduced(*operands), list(_halves(batched[1:])[1])

        # By this who follows the program finds it.
        rule.pending = self  # type: ignore[attr-defined]
        reduced.def_vmap(rule)
        run: Callable[..., list[Any]] = reduced
        return run

    def _in_forward(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """It is linear in the values, and the keys only say where they differ."""

        @jax.custom_jvp
        def forward(*operands: Any) -> list[Any]:
            return run(*operands)

        @forward.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            mark, *operands = primals
            along = _halves(tangents[1:])[1]
            # Where nothing is reduced, derivatives of any order and mode are those of the values.
            made = forward(mark, *_halves(operands)[0], *along) if self.reduced_over else [*along]
            return forward(*primals), made

        return forward

    def _in_reverse(
        self, run: Callable[..., list[Any]], vmapped: bool, still: int
    ) -> Callable[..., list[Any]]:
        """The same with a transpose, which JAX has none of for what is pending."""
        transposed = dataclasses.replace(self, backward=True)

        @jax.custom_vjp
        def reverse(*operands: Any) -> list[Any]:
            return run(*operands)

        def there(mark: Any, *operands: Any) -> Any:
            return self._derived(vmapped, still)(mark, *operands), (mark, *_halves(operands)[0])

        def back(keys: Any, cotangents: Any) -> Any:
            return (*(None for _ in keys), *transposed._derived(vmapped, still)(*keys, *cotangents))

        reverse.defvjp(there, back)
        return reverse


def _halves(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    half = len(operands) // 2
    return operands[:half], operands[half:]
