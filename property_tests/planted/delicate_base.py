"""How a right program that tempts the check is written down."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .case import Case, normal


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
