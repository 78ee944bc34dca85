"""A loss and its gradients, reduced over mapped axes exactly once.

Which sum is the right one depends on where values differ. Inside a checked `shard_map` JAX's types say so at
once. For lanes only the rule of a `vmap` knows, and where nothing is checked only a walk along the finished
program. In these two cases the reduction is written into the program as a `Pending`, and decided later.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from .._base._errors import StatemeshError, axes_argument, error_listing, listed, quoted
from .._base._types import NO_AXES, Axes, AxisName, Size
from .._jax._jaxprs import Rule
from ._joined import AnyArray, after_sum, before_sum
from ._ordered import AT_ONCE, IN_ORDER, Sums


Operand = TypeVar("Operand")

# In the program each reduced gradient is given a name that begins so.
GRADIENT = "gradient of "
# And the reduced loss is given this one.
LOSS = "reduced loss"
# Gradients and the loss are reduced in the scope of this name, by which `explain` knows their collectives.
REDUCING = "statemesh reduces gradients"
# The name of what statemesh itself sums. A cotangent may be a reduced gradient up to a constant factor, and
# its sum is right.
SUMMAND = "summed by statemesh"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one array is reduced: the axes over which it is summed, and those by whose sizes it is divided."""

    sum: Axes
    divide: Axes


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the losses of all instances become one loss.

    **Attributes:**

    - `named`: the axes over which the losses are taken together.
    - `mean`: whether the one loss is their mean; else it is their sum.
    - `name`, `params`: what messages call the function and each parameter.
    - `blocks`: over how many blocks of rows the sums go by a fixed tree. The mean is then taken once, after
        the sum.
    """

    named: Axes
    mean: bool
    name: str
    params: tuple[str, ...]
    blocks: Size | None = None

    @property
    def sums(self) -> Sums:
        return AT_ONCE if self.blocks is None else IN_ORDER

    def _divided(self, over: Axes) -> Axes:
        """Those of the axes, over which losses differ, by whose sizes a sum is divided at once."""
        return over if self.mean and self.blocks is None else NO_AXES

    def check(self, loss: Axes, params: Sequence[Axes], axes: Sequence[AxisName]) -> None:
        """Refuse a loss that differs over an axis that is not named, where a parameter is the same.

        **Arguments:**

        - `loss`, `params`: the axes over which these differ.
        - `axes`: the mesh axes. Lanes may each have a loss of their own.
        """
        apart = (loss & frozenset(axes)) - self.named
        if shared := [p for p, axes in zip(self.params, params, strict=True) if apart - axes]:
            differs = [axis for axis in axes if axis in apart]
            raise error_listing(
                StatemeshError,
                f"{loss_str(self.name)} differs over {quoted(differs)}, which axis_name does not name, but "
                "all shards there share one copy of",
                shared,
                listed(
                    "JAX would sum their gradients over the shards. Write one of",
                    loss_remedies(differs),
                ),
            )

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
        same = (self.named & axes) - loss
        if same and self.blocks is not None:
            raise StatemeshError(
                f"value_and_grad: blocks={self.blocks} counts blocks of rows over "
                f"{quoted(sorted(same, key=str))} too, but the loss that {self.name} returns is the same "
                "there on every shard. Name in axis_name the axes that split the rows, and no others."
            )
        if same and not self.mean:
            raise StatemeshError(
                f"value_and_grad: reduce='sum' is to sum the loss over {quoted(sorted(same, key=str))}, but "
                "it is the same there on every shard: the sum would count it once for each shard. If the "
                "function has reduced it already, write reduce='mean', which leaves such a loss as it is, or "
                "leave the axis out of axis_name."
            )
        over = self.named & axes & loss
        return Plan(over, self._divided(over))

    def typed(self, param: Axes, loss: Axes, axes: Axes) -> Plan:
        """How a gradient is reduced where JAX counts a loss once over the axes along which it is the same.

        **Arguments:**

        - `param`, `loss`: the axes over which these differ. The parameters were typed as varying over all
            named axes.
        - `axes`: the axes whose values are typed.
        """
        over = self.named & axes
        return Plan(over - param, self._divided(over & loss))

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
        return Plan((over | same) - param, same | self._divided(over))


@jax.named_scope(REDUCING)
def reduce_on_mesh(
    values: Sequence[AnyArray],
    plans: Sequence[Plan],
    axis_names: Sequence[AxisName],
    sums: Sums,
) -> list[AnyArray]:
    """Arrays reduced as planned: those over the same axes together, narrow floats in float32."""
    sizes = [math.prod(map(jax.lax.axis_size, plan.divide)) for plan in plans]
    parts = list(map(before_sum, values, sizes))
    for over in dict.fromkeys(plan.sum for plan in plans if plan.sum):
        at = [k for k, plan in enumerate(plans) if plan.sum == over]
        names = tuple(name for name in axis_names if name in over)
        summands = [checkpoint_name(parts[k], SUMMAND) for k in at]
        for k, x in zip(at, sums.over_shards(summands, names), strict=True):
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
        that cotangents differ where gradients are the same.
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
            raise loss_exchanged(self.reduction.name, [a for a in self.axis_names if a in apart])
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
            values = _halves(operands[1:])[1]
            values = reduce_on_mesh(values, plans, self.axis_names, self.reduction.sums)
            return self.reduction.with_names(values) if is_reduced else values

        return reduced

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
        # It is computed out here because JAX turns a value that is computed inside into one more operand, and
        # then takes one residual for the next.
        mark = jax.lax.axis_index(self.axis_names[0]) if vmapped else 0
        return self._function(vmapped, reverse)(mark, *keys, *values)

    def _function(self, vmapped: bool, reverse: int) -> Callable[..., list[AnyArray]]:
        """The values as they are, by an equation that a rule or a walk decides; with derivatives."""

        @custom_vmap
        def pending(*operands: AnyArray) -> list[AnyArray]:
            return list(_halves(operands[1:])[1])

        def rule(
            count: int, batched: Any, *operands: Any
        ) -> tuple[Sequence[AnyArray], Sequence[bool]]:
            values, hits = _halves(operands[1:])[1], _halves(batched[1:])[1]
            if not (vmapped and batched[0]):
                # A `vmap` further in, over another axis: each of its entries is reduced by itself.
                return pending(*operands), list(hits)
            over = frozenset(self.axis_names)
            plans = self.plans([over if hit else NO_AXES for hit in batched])
            results = []
            for plan, x, hit in zip(plans, values, hits, strict=True):
                divisor = count if plan.divide else 1
                part = before_sum(x, divisor)
                if plan.sum:
                    part = self.reduction.sums.of_entries(part) if hit else part * count
                results.append(after_sum(part, x.dtype, divisor))
            return results, [hit and not plan.sum for plan, hit in zip(plans, hits, strict=True)]

        pending.def_vmap(Rule(rule, pending=self))

        # In forward mode it is linear in the values, and does not depend on the keys.
        @jax.custom_jvp
        def forward(*operands: AnyArray) -> list[AnyArray]:
            return pending(*operands)

        @forward.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            mark, *operands = primals
            along = _halves(tangents[1:])[1]
            # Where nothing is reduced, derivatives of any order and mode are those of the values.
            keys = _halves(operands)[0]
            derivative = forward(mark, *keys, *along) if self.reduced_over else [*along]
            return forward(*primals), derivative

        if not (reverse and self.reduced_over):
            return forward

        # JAX cannot transpose a `custom_vmap` function: https://github.com/jax-ml/jax/pull/25259 says why.
        # So the derivative in reverse mode is written out.
        @jax.custom_vjp
        def both(*operands: AnyArray) -> list[AnyArray]:
            return pending(*operands)

        def there(mark: Any, *operands: Any) -> Any:
            outputs = self._function(vmapped, reverse - 1)(mark, *operands)
            return outputs, (mark, *_halves(operands)[0])

        def back(keys: Any, cotangents: Any) -> Any:
            transposed = dataclasses.replace(self, backward=True)
            outputs = transposed._function(vmapped, reverse - 1)(*keys, *cotangents)
            return (*(None for _ in keys), *outputs)

        both.defvjp(there, back)
        return both


def _halves(operands: Sequence[Operand]) -> tuple[Sequence[Operand], Sequence[Operand]]:
    half = len(operands) // 2
    return operands[:half], operands[half:]


def loss_exchanged(name: str, axes: Sequence[AxisName]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{loss_str(name)} varies over {quoted(axes)}, which axis_name does not name, and depends on what "
        "the shards exchange there. JAX would sum the gradients of all shards' losses. Write one of",
        loss_remedies(axes),
    )


def loss_str(name: str) -> str:
    return f"value_and_grad: the loss that {name} returns"


def loss_remedies(axes: Sequence[AxisName]) -> list[str]:
    axis = axes_argument(axes)
    return [
        f"`axis_name={axis!r}` (and any other axes to reduce over), for the mean of the shards' losses",
        f"`jax.lax.psum(..., {axis!r})` in the function, if each shard computes a part of one result",
    ]
