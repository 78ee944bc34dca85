"""A loss and its gradients, reduced over mapped axes exactly once.

Which sum is the right one depends on where values differ. Inside a checked `shard_map` JAX's types say so at
once. For lanes only the rule of a `vmap` knows, and where nothing is checked only a walk along the finished
program. In these two cases the reduction is written into the program as a `Pending`, and decided later.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from .._base import _errors as errors
from .._base._errors import (
    StatemeshError,
    _loss,
    _loss_mends,
    error_listing,
    listed,
    quoted,
)
from .._base._types import NO_AXES, Axes, AxisName
from ._joined import AnyArray, after_sum, before_sum, together


Operand = TypeVar("Operand")

# In the program each reduced gradient is given a name that begins so.
GRADIENT = "gradient of "
# And the reduced loss is given this one.
LOSS = "reduced loss"
# The name of what statemesh itself sums. A cotangent may be a reduced gradient up to a constant factor, and
# its sum is right.
SUMMAND = "summed by statemesh"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one array is reduced: the axes over which it is summed, and those by whose sizes it is divided."""

    sum: Axes
    divide: Axes

    def of_lanes(self, x: AnyArray, count: int, batched: bool) -> AnyArray:
        """The array of all lanes of one `vmap`, reduced.

        **Arguments:**

        - `count`: how many lanes there are.
        - `batched`: whether the first axis of `x` is that of the lanes; else all of them have the same `x`.
        """
        divisor = count if self.divide else 1
        part = before_sum(x, divisor)
        if self.sum:
            part = jnp.sum(part, 0, dtype=part.dtype) if batched else part * count
        return after_sum(part, x.dtype, divisor)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the losses of all instances become one loss.

    **Attributes:**

    - `named`: the axes over which the losses are taken together.
    - `mean`: whether the one loss is their mean; else it is their sum.
    - `name`, `params`: what messages call the function and each parameter.
    """

    named: Axes
    mean: bool
    name: str
    params: tuple[str, ...]

    def check(self, loss: Axes, params: Sequence[Axes], axes: Sequence[AxisName]) -> None:
        """Refuse a loss that differs over an axis that is not named, where a parameter is the same.

        **Arguments:**

        - `loss`, `params`: the axes over which these differ.
        - `axes`: the mesh axes. Lanes may each have a loss of their own.
        """
        apart = (loss & frozenset(axes)) - self.named
        if shared := [p for p, axes in zip(self.params, params, strict=True) if apart - axes]:
            raise _loss_differs(self.name, [a for a in axes if a in apart], shared)

    def with_names(self, values: Sequence[AnyArray]) -> list[AnyArray]:
        """Reduced gradients, then the loss; each gradient by the name of its parameter.

        By these names a gradient that is summed a second time is found in the traced program, and what a
        collective has reduced.
        """
        *grads, loss = values
        names = [GRADIENT + path for path in self.params]
        return [*map(checkpoint_name, grads, names), checkpoint_name(loss, LOSS)]

    def of_loss(self, loss: Axes, axes: Axes) -> Plan:
        """How the loss is reduced over those of `axes` that are named, given where it differs."""
        if not self.mean and (same := (self.named & axes) - loss):
            raise _loss_counted_twice(sorted(same, key=str))
        over = self.named & axes & loss
        return Plan(over, over if self.mean else NO_AXES)

    def typed(self, param: Axes, loss: Axes, axes: Axes) -> Plan:
        """How a gradient is reduced where JAX counts a loss once over the axes along which it is the same.

        **Arguments:**

        - `param`, `loss`: the axes over which these differ. The parameters were typed as varying over all
        named
            axes.
        - `axes`: the axes whose values are typed.
        """
        over = self.named & axes
        return Plan(over - param, over & loss if self.mean else NO_AXES)

    def untyped(self, param: Axes, loss: Axes, gradient: Axes, axes: Axes) -> Plan:
        """How a gradient is reduced where JAX takes that of the sum of all instances' losses.

        A loss that is the same on all `n` instances counts `n` times in that sum. Where the gradient is the
        same too, the mean over all instances changes nothing.

        **Arguments:**

        - `param`, `loss`, `gradient`: the axes over which these differ.
        - `axes`: the named axes, and those over which part of the gradient comes from other instances'
        losses.
        """
        same = (axes - loss) & (param | gradient)
        over = self.named & axes & loss
        return Plan((over | same) - param, same | (over if self.mean else NO_AXES))


def reduce_on_mesh(
    values: Sequence[AnyArray], plans: Sequence[Plan], axis_names: Sequence[AxisName]
) -> list[AnyArray]:
    """Arrays reduced as planned: those over the same axes together, narrow floats in float32."""
    sizes = [math.prod(map(jax.lax.axis_size, plan.divide)) for plan in plans]
    parts = list(map(before_sum, values, sizes))
    for over in dict.fromkeys(plan.sum for plan in plans if plan.sum):
        at = [k for k, plan in enumerate(plans) if plan.sum == over]
        names = tuple(name for name in axis_names if name in over)
        summands = [checkpoint_name(parts[k], SUMMAND) for k in at]
        for k, x in zip(at, together(jax.lax.psum, summands, names), strict=True):
            parts[k] = x
    triples = zip(parts, values, sizes, strict=True)
    return [after_sum(part, x.dtype, n) for part, x, n in triples]


@dataclasses.dataclass(frozen=True)
class Pending:
    """A reduction in a program that is decided once it is known which values differ.

    Its operands are a number that marks the lanes, then keys (the parameters and the loss), then as many
    values (the gradients and the loss). What differs among the keys decides how the values are reduced.

    **Attributes:**

    - `reduction`: how losses become one.
    - `axis_names`: the axes: one axis of lanes, or all those of a mesh.
    - `lanes`: whether these are lanes, of a `vmap` or on devices.
    - `crossed`: the axes over which part of the gradient comes from other instances' losses.
    - `backward`: whether the values are cotangents of its results. A reduction is its own transpose, except
    that
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
        """The axes over which anything may be reduced. Over the others the loss is only checked."""
        return frozenset(self.axis_names) & (self.reduction.named | self.crossed)

    def plans(self, operands: Sequence[Axes]) -> list[Plan]:
        """How each value is reduced, given over which axes the operands differ."""
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
        """The axes over which each result may differ, given those over which the operands do."""
        (*params, loss), (*grads, value) = _halves(operands[1:])
        axes = frozenset(self.axis_names)
        joined = (self.reduction.named & axes) | (self.reduced_over - loss)
        pairs = zip(params, grads, strict=True)
        return [*(x - (joined - param) for param, x in pairs), value - joined]

    def decided(self, operands: Sequence[Axes]) -> Callable[..., list[AnyArray]]:
        """The function that it is on a mesh, given over which axes its operands differ."""
        plans = self.plans(operands)
        # The sum of gradients over lanes that are not named is the author's own affair.
        is_reduced = not self.backward and (
            not self.lanes or self.reduction.named.issuperset(self.axis_names)
        )

        def reduced(*operands: AnyArray) -> list[AnyArray]:
            values = reduce_on_mesh(_halves(operands[1:])[1], plans, self.axis_names)
            return self.reduction.with_names(values) if is_reduced else values

        return reduced

    def decided_for_lanes(
        self, batched: Sequence[bool], count: int, values: Sequence[AnyArray]
    ) -> tuple[list[AnyArray], list[bool]]:
        """The reduced values of all lanes, and which are batched, given which operands are batched."""
        over = frozenset(self.axis_names)
        plans = self.plans([over if hit else NO_AXES for hit in batched])
        triples = list(zip(plans, values, _halves(batched[1:])[1], strict=True))
        results = [plan.of_lanes(x, count, hit) for plan, x, hit in triples]
        return results, [hit and not plan.sum for plan, _, hit in triples]

    def __call__(
        self, keys: Sequence[AnyArray], values: Sequence[AnyArray], vmapped: bool, reverse: int
    ) -> list[AnyArray]:
        """Write it into the program that is being traced.

        **Arguments:**

        - `keys`, `values`: its operands.
        - `vmapped`: whether its one axis is that of a `vmap`.
        - `reverse`: how often it will be differentiated in reverse mode before anything is in forward mode.
        """

        # A lane's own number is batched over its `vmap` only: by this the rule knows these lanes from others.
        # It is made out here because JAX turns what is made inside into one more operand, and then takes one
        # residual for the next.
        mark = jax.lax.axis_index(self.axis_names[0]) if vmapped else 0
        return self._derived(vmapped, reverse)(mark, *keys, *values)

    def _derived(self, vmapped: bool, reverse: int) -> Callable[..., list[AnyArray]]:
        run = self._pending(vmapped)
        if reverse and self.reduced_over:
            return self._in_reverse(run, vmapped, reverse - 1)
        return self._in_forward(run)

    def _pending(self, vmapped: bool) -> Callable[..., list[AnyArray]]:
        @custom_vmap
        def reduced(*operands: AnyArray) -> list[AnyArray]:
            return list(_halves(operands[1:])[1])

        def rule(count: int, batched: Any, *operands: Any) -> Any:
            if vmapped and batched[0]:
                return self.decided_for_lanes(batched, count, _halves(operands[1:])[1])
            # A `vmap` further in, over another axis: each of its entries is reduced by itself.
            return reduced(*operands), list(_halves(batched[1:])[1])

        # By this attribute the walk along the program finds it.
        rule.pending = self  # type: ignore[attr-defined]
        reduced.def_vmap(rule)
        return reduced

    def _in_forward(self, run: Callable[..., list[AnyArray]]) -> Callable[..., list[AnyArray]]:
        """With a derivative in forward mode: it is linear in the values, and does not depend on the keys."""

        @jax.custom_jvp
        def forward(*operands: AnyArray) -> list[AnyArray]:
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
        self, run: Callable[..., list[AnyArray]], vmapped: bool, still: int
    ) -> Callable[..., list[AnyArray]]:
        """With a derivative in reverse mode too: JAX cannot transpose a `custom_vmap` function."""
        transposed = dataclasses.replace(self, backward=True)

        @jax.custom_vjp
        def reverse(*operands: AnyArray) -> list[AnyArray]:
            return run(*operands)

        def there(mark: Any, *operands: Any) -> Any:
            return self._derived(vmapped, still)(mark, *operands), (mark, *_halves(operands)[0])

        def back(keys: Any, cotangents: Any) -> Any:
            return (*(None for _ in keys), *transposed._derived(vmapped, still)(*keys, *cotangents))

        reverse.defvjp(there, back)
        return reverse


def _halves(operands: Sequence[Operand]) -> tuple[Sequence[Operand], Sequence[Operand]]:
    half = len(operands) // 2
    return operands[:half], operands[half:]


def _loss_differs(name: str, axes: Sequence[AxisName], params: Sequence[str]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{_loss(name)} differs over {quoted(axes)}, which axis_name does not name, but all shards there "
        "share one copy of",
        params,
        listed("JAX would sum their gradients over the shards. Write one of", _loss_mends(axes)),
    )


def _loss_counted_twice(axes: Iterable[AxisName]) -> StatemeshError:
    return StatemeshError(
        f"value_and_grad: reduce='sum' is to sum the loss over {quoted(axes)}, but it is the same there on "
        "every shard: the sum would count it once for each shard. If the function has reduced it already, "
        "write reduce='mean', which leaves such a loss as it is, or leave the axis out of axis_name."
    )
