"""What a check that found no mistake has checked."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `assert_equivalent` compared, and what it could not judge.

    **Attributes:**

    - `agreed`: the calls that agree, in words.
    - `fed_back`: what the next call got: pairs of a path in the arguments and a path in the results.
    - `differentiated`: the paths by which the gradient was compared; empty if it was not.
    - `constant`: the paths of the results that have no derivative.
    - `unjudged`: for each path how many of its numbers were not judged: rounding alone may change them by
        more than a few per cent, or they jump where the function is discontinuous.
    - `only_double`: for each path how many of its numbers were judged in double precision only, because
        rounding in the dtypes of the program may change them by more than a few per cent.
    - `untested`: what was not tested at all, in words. Each is an `UntestedWarning` too.
    - `own_dtype`: the operations that could not run in double precision. In what they compute, mistakes as
        small as rounding were not seen.

    !!! example

        ```python
        >>> import jax.numpy as jnp, numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import assert_equivalent
        >>> checked = assert_equivalent(
        ...     jnp.sin, (np.arange(4.0),), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x")
        ... )
        >>> checked.differentiated
        ('the gradient by args[0]',)

        ```
    """

    agreed: tuple[str, ...]
    fed_back: tuple[tuple[str, str], ...]
    differentiated: tuple[str, ...]
    constant: tuple[str, ...]
    unjudged: dict[str, int]
    only_double: dict[str, int]
    untested: tuple[str, ...]
    own_dtype: tuple[str, ...]
