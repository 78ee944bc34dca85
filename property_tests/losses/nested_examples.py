"""Fixed losses that contain gradients. Each is a check to call."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .nested import NestedCase, check_nested


def nested(how: str, **given: Any) -> Callable[[], None]:
    return lambda: check_nested(NestedCase(how, **given))


def map_in_a_loss() -> None:
    """A derivative around a map that reduces a gradient inside."""

    def curve(w: Any, x: Any) -> Any:
        return jnp.mean(x * w**3), w

    def lane(w: Any, x: Any) -> Any:
        return sm.grad(curve, axis_name="x")(w, x)[0]

    x = np.arange(4.0, dtype=np.float32).reshape(2, 2)
    for transform in (sm.vmap2, sm.pmap2):
        lanes = transform(lane, in_axes=(None, 0), out_axes=None, axis_name="x")
        found, _ = sm.grad(lambda w, lanes=lanes: (lanes(w, x), w))(jnp.float32(2))
        np.testing.assert_allclose(found, 6 * 2 * x.mean(), rtol=1e-6)


PARTS: dict[str, Any] = {"parts": 2, "order": 2}
CHECKS: dict[str, Callable[[], None]] = {
    "map in a loss": map_in_a_loss,
    "separate, through, vmap2": nested("vmap2", named=False, order=0, exchange="through"),
    "separate, stopped, pmap2": nested("pmap2", named=False, exchange="stopped", remat=True),
    "inside, through, unchecked": nested("unchecked", exchange="through"),
    "inside, through, checked": nested("checked", exchange="through", explicit=True),
    "parts, unchecked": nested("unchecked", **PARTS, own=(True, False, True)),
    "parts, checked": nested("checked", **PARTS, own=(False, True, False), explicit=True),
    "parts, vmap2": nested("vmap2", **PARTS, scan=True),
    "parts around lanes": nested("vmap2 in unchecked", **PARTS, named=False, exchange="rows"),
}
