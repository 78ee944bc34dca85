"""`given_meshes`: run a test on drawn meshes."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from .._types import Fun
from ._meshes import meshes


def given_meshes(
    *,
    axis_names: Sequence[str] | None = None,
    max_devices: int | None = None,
    **given_by: st.SearchStrategy[Any],
) -> Callable[[Fun], Fun]:
    """`hypothesis.given` for a test that takes a mesh as its argument `mesh`.

    **Arguments:**

    - `axis_names`, `max_devices`: as for `meshes`.
    - `given_by`: strategies for the other arguments of the test, by name.

    **Returns:** a decorator.

    !!! example

        ```python
        >>> import jax
        >>> from hypothesis import settings
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import arrays, assert_equivalent, given_meshes
        >>> def share(x):
        ...     return x / (1 + jax.lax.psum(abs(x).sum(), "data"))
        >>> @settings(max_examples=5, deadline=None)
        ... @given_meshes(axis_names=["data"], x=arrays(shape=(8, 2)))
        ... def test_share(mesh, x):
        ...     assert_equivalent(share, (x,), meshes=[mesh], in_specs=P("data"), out_specs=P("data"))
        >>> test_share()

        ```
    """
    drawn: st.SearchStrategy[Any] = meshes(axis_names=axis_names, max_devices=max_devices)
    return given(mesh=drawn, **given_by)
