"""The loss of a function of a model, its gradients, and what else the function returns."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._compat import Jaxpr, tree_util
from .._base._nodes import is_state
from .._base._paths import path_str, positional_names
from .._base._types import Array, Axes, Dtype, Fun, Leaf, PyTree
from .._model._origin import origins, with_origins
from ._scope import Scope
from ._trainable import Parts


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The loss of one shard and its gradients, not reduced over shards yet.

    **Attributes:**

    - `result`: a pair of auxiliary values (or `None`) and the new model.
    - `crossed`: gives the axes over which the gradients hold parts of other shards' losses.
    - `program`: traces the function.
    - `dtypes`: those in which the loss and the gradients leave, if they are others than their own.
    """

    loss: Array
    grads: list[Leaf]
    result: tuple[PyTree, PyTree]
    crossed: Callable[[], Axes]
    program: Callable[[], Jaxpr]
    dtypes: Sequence[Dtype] | None = None

    def narrowed(self, values: Sequence[Leaf]) -> list[Leaf]:
        """The reduced loss and its gradients, in the dtypes in which they leave."""
        if self.dtypes is None:
            return list(values)
        return [x.astype(dtype) for x, dtype in zip(values, self.dtypes, strict=True)]


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """The function that a user gave, which returns a loss and a model.

    **Attributes:**

    - `name`: what messages call it.
    """

    fun: Fun
    has_aux: bool
    name: str

    def __call__(
        self, model: PyTree, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[Array, tuple[PyTree, PyTree]]:
        """The loss, and a pair of auxiliary values (or `None`) and the model."""
        returned = self.fun(model, *args, **kwargs)
        if not _is_pair(returned) or (self.has_aux and not _is_pair(returned[0])):
            raise errors.not_loss_and_model(self.name, returned, self.has_aux)
        value, new = returned
        (root,) = positional_names(self.fun, 1)
        before, after = _paths(model, root), _paths(new, root)
        if before != after:
            raise errors.not_the_model(
                self.name,
                model,
                new,
                [path for path in before if path not in after],
                [path for path in after if path not in before],
                self.has_aux,
            )
        loss, aux = value if self.has_aux else (value, None)
        if not isinstance(loss, jax.Array | np.ndarray | np.generic | float):
            raise errors.not_a_loss(self.name, loss)
        loss = jnp.asarray(loss)
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise errors.not_a_loss(self.name, loss)
        return loss, (aux, new)


class Result:
    """What a function returned, with its new arrays apart.

    JAX would return other arrays for results that are arguments, so these are no results of its.

    **Arguments:**

    - `tree`: what was returned.
    - `same`: by the identity of an array: the argument that it stands for.
    """

    def __init__(self, tree: PyTree, same: dict[int, Leaf]) -> None:
        leaves, self.structure = tree_util.tree_flatten(tree)
        arguments = {id(x) for x in same.values()}
        self.marks = origins(tree)
        self.leaves = [same.get(id(x), x) for x in leaves]
        # The positions of the arrays that are new.
        self.new = [
            i
            for i, x in enumerate(self.leaves)
            if isinstance(x, jax.Array) and id(x) not in arguments
        ]

    def take(self) -> list[Array]:
        """The new arrays, of which it keeps none: JAX reports a tracer that we keep as a leak."""
        made = [self.leaves[i] for i in self.new]
        for i in self.new:
            self.leaves[i] = None
        return made

    def filled(self, made: Sequence[Leaf]) -> PyTree:
        """The tree, with these arrays as the new ones."""
        leaves = list(self.leaves)
        for i, x in zip(self.new, made, strict=True):
            leaves[i] = x
        return with_origins(self.structure.unflatten(leaves), self.marks)


def at_once(
    fun: LossFunction,
    scope: Scope,
    parts: Parts,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Evaluated:
    """Evaluate the function on its arguments as they are."""
    given = {id(x): x for x in (*parts.leaves, *tree_util.tree_leaves((args, kwargs)))}
    results: list[Result] = []

    def run(params: list[Leaf]) -> tuple[Array, PyTree]:
        return fun(parts.model(params), args, kwargs)

    def local(params: list[Leaf]) -> tuple[Array, list[Array]]:
        loss, rest = run(params)
        same = given | {id(x): old for x, old in zip(params, parts.params, strict=True)}
        results[:] = [Result(rest, same)]
        return loss, results[0].take()

    with scope.casting():
        params = scope.cast(parts.params)
        loss, pull, made = jax.vjp(local, params, has_aux=True)
        grads, crossed = scope.pulled(pull, loss)
    (result,) = results

    def loss_and_made(params: list[Leaf]) -> tuple[Array, list[Array]]:
        # The same results as of the first run, even if JAX now gives other arrays for some of the arguments.
        loss, rest = run(params)
        leaves = tree_util.tree_leaves(rest)
        return loss, [jnp.asarray(leaves[i]) for i in result.new]

    # Few cases need it, and only these trace it.
    program = functools.cache(lambda: jaxprs.open_jaxpr(jax.make_jaxpr(loss_and_made)(params)))
    return Evaluated(loss, grads, result.filled(scope.restored(made, program)), crossed, program)


def _paths(model: PyTree, root: str) -> list[str]:
    """The paths of a model's states, and of its leaves outside of them."""
    flat, _ = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    return [path_str(keys, root) for keys, _ in flat]


def _is_pair(x: Leaf) -> bool:
    return isinstance(x, tuple) and len(x) == 2
