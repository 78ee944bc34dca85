"""Names for types that several files use."""

from typing import Any, TypeAlias

import jax


# The stubs of `PyTreeDef` cannot be found, so that a type checker would allow none of its methods.
PyTreeDef: TypeAlias = Any
tree_util: Any = jax.tree_util
