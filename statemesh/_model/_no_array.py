"""A State is not an array: array operations on it are refused with an error that says what to write."""

import jax
import numpy as np

from .._base import errors
from .._base._types import PyTree


class NoArray:
    """Refuses the operations of arrays with an error that says what to write instead."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise self._no_array("==")
        return self is other

    __hash__ = object.__hash__

    def _no_array(self, what: str) -> TypeError:
        """The error of an operation of arrays."""
        return errors.state_is_no_array(type(self).__name__, what)


def _refusing(what: str) -> PyTree:
    def refuse(self: NoArray, *others: object, **options: object) -> PyTree:
        raise self._no_array(what)

    return refuse


_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}

for _name, _sign in _OPERATORS.items():
    setattr(NoArray, f"__{_name}__", _refusing(_sign))
    setattr(NoArray, f"__r{_name}__", _refusing(_sign))
for _name, _sign in {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "neg": "-",
    "invert": "~",
    "getitem": "[...]",
}.items():
    setattr(NoArray, f"__{_name}__", _refusing(_sign))
for _name in ("bool", "int", "float", "complex", "index", "abs"):
    setattr(NoArray, f"__{_name}__", _refusing(f"{_name}()"))
# The functions of NumPy and `jax.numpy` look for these methods.
for _name in ("array", "array_ufunc", "jax_array"):
    setattr(NoArray, f"__{_name}__", _refusing("a function of arrays"))
