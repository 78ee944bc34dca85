"""What a model or a delicate program hands to the check."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

import statemesh as sm
from statemesh.testing import Checked, assert_equivalent


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of shards, with all that `assert_equivalent` asks for.

    **Attributes:**

    - `steps`: the number of calls in a row.
    - `gradients`: False where the results hold the gradients already, or where there are none.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: dict[str, int]
    in_specs: Any
    out_specs: Any
    check_vma: bool = True
    steps: int = 2
    gradients: bool = False

    def check(self) -> Checked:
        """Fail unless the function gives on the mesh what it gives on one device."""
        return assert_equivalent(
            self.fun,
            self.args,
            meshes=[self.mesh],
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            check_vma=self.check_vma,
            steps=self.steps,
            gradients=self.gradients,
        )

    @property
    def numbers(self) -> int:
        """How many numbers the results of a call have, and the gradient where it is compared."""
        mesh = AbstractMesh((1,) * len(self.mesh), tuple(self.mesh))
        mapped = sm.shard_map(
            self.fun, mesh, self.in_specs, self.out_specs, check_vma=self.check_vma
        )
        compared = jax.tree.leaves(jax.eval_shape(mapped.unsharded, *self.args))
        if self.gradients:
            arrays = jax.tree.leaves(self.args)
            compared += [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(x.size for x in compared)


def normal(dtype: str, *shape: int, seed: int = 0) -> jax.Array:
    """Normal numbers, the same in every dtype but for rounding."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(*shape: int, below: int, seed: int = 0, dtype: str = "int32") -> jax.Array:
    """Integers from zero on."""
    return jnp.asarray(np.random.default_rng(seed).integers(below, size=shape), dtype)
