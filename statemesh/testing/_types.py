"""Names for types that several files use."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef as PyTreeDef
from jaxtyping import PyTree as PyTree


Fun: TypeAlias = Callable[..., Any]
AnyMesh: TypeAlias = Mesh | AbstractMesh
DType: TypeAlias = np.dtype[Any]
# Positional arguments and keyword arguments.
Args: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
# A NumPy array, or the scalar that NumPy makes of an array without axes.
Numbers: TypeAlias = Any
# A leaf of a tree: an array, or any object that JAX does not take apart.
AnyLeaf: TypeAlias = Any
# The stubs of `PyTreeDef` cannot be found, so that a type checker would allow none of its methods.
tree_util: Any = jax.tree_util
