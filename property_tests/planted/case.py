"""What a model or a delicate program hands to the check, and how a delicate program is written down."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

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


Values = Callable[[str], Any]
Fun = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Delicate:
    """A program that is right on every mesh, in these dtypes."""

    name: str
    dtypes: tuple[str, ...]
    case: Callable[[str], Case]


DELICATE: dict[str, Delicate] = {}


def rows(dtype: str) -> jax.Array:
    return normal(dtype, 16, 3)


def right(
    *dtypes: str,
    values: Values = rows,
    model: Values | None = None,
    out: Any = None,
    steps: int = 2,
) -> Callable[[Fun], Fun]:
    """Lists a function of rows, or of a model and rows, with the arrays that tempt.

    **Arguments:**

    - `dtypes`: float32 where none is given.
    - `values`, `model`: make the rows and the model in a dtype.
    - `out`: the out specs; left out, rows, and the model after them if there is one.

    The derivatives are compared too, as they are where a user says nothing.
    """

    def listed(fun: Fun) -> Fun:
        def case(dtype: str) -> Case:
            models = () if model is None else (model(dtype),)
            specs: Any = (*(None for _ in models), P("data"))
            leave: Any = (P("data"), P()) if models else P("data")
            return Case(
                fun,
                (*models, values(dtype)),
                mesh={"data": 4},
                in_specs=specs,
                out_specs=leave if out is None else out,
                steps=steps,
                gradients=True,
            )

        name = fun.__name__.replace("_", "-")
        DELICATE[name] = Delicate(name, dtypes or ("float32",), case)
        return fun

    return listed
