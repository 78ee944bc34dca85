"""Whether the copies that devices hold of one array are still the same."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax._frames import without_own_frames
from ._errors import array_str, check, plural
from ._program._numbers import data_of
from ._program._stacked import names_of_spec
from ._types import Fun, Numbers, PyTree, tree_util


@functools.partial(without_own_frames, says_so=False)
def assert_same_replicas(tree: PyTree, name: str = "model") -> None:
    """Fail if devices that should hold the same copy of an array, or of a part of it, do not.

    JAX takes copies for equal and reads one of them. A flipped bit in the memory of one device makes them
    differ, and nothing tells. Call it every so many steps of a training loop: each device reads what it holds
    once, and sends 4 bytes for each array. With several processes all of them must call it.

    **Arguments:**

    - `tree`: any pytree, such as a model and the slots of its optimizer. Arrays on one device have no copies.
    - `name`: what the report calls the tree.

    **Raises:** `AssertionError` that names every array whose copies differ, the devices, and the first number
    that does. Which copy is right is not known: the one that most devices hold is taken for right.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from statemesh.testing import assert_same_replicas
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> weights = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P()))
        >>> assert_same_replicas({"weights": weights})

        ```
    """
    check("assert_same_replicas", "name", name, str, "a string: what the report calls the tree")
    by_mesh: defaultdict[Mesh, list[_Named]] = defaultdict(list)
    for keys, x in tree_util.tree_flatten_with_path(tree)[0]:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and x.size:
            by_mesh[sharding.mesh].append((f"{name}{jax.tree_util.keystr(keys)}", x, sharding.spec))
    lines = [line for mesh, named in by_mesh.items() for line in _unequal(mesh, named)]
    if lines:
        count = len(lines)
        first = f"devices hold different copies of {count} {plural('array', count)}:"
        raise AssertionError("\n".join([first, *lines]))


# The path, the array and its spec.
_Named: TypeAlias = tuple[str, jax.Array, PartitionSpec]


def _unequal(mesh: Mesh, named: Sequence[_Named]) -> Iterator[str]:
    """What the report says of each array whose copies differ."""
    _, arrays, specs = zip(*named, strict=True)
    sums = np.asarray(_checksums(mesh, specs)(list(arrays))).reshape(
        *mesh.devices.shape, len(arrays)
    )
    for k, (path, x, spec) in enumerate(named):
        # Devices along these axes hold other parts.
        split = [at for at, axis in enumerate(mesh.axis_names) if axis in names_of_spec(spec)]
        copies: defaultdict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        for place in np.ndindex(mesh.devices.shape):
            copies[tuple(place[at] for at in split)].append(place)
        for places in copies.values():
            ((usual, _), *others) = Counter(int(sums[place][k]) for place in places).most_common()
            if others:
                odd = [place for place in places if int(sums[place][k]) != usual]
                first = next(place for place in places if int(sums[place][k]) == usual)
                devices = [mesh.devices[place] for place in (odd[0], first)]
                names = ", ".join(str(mesh.devices[place]) for place in odd)
                yield f"  - {path}: {array_str(x)}, on {names}{_first_difference(x, *devices)}"


def _first_difference(x: jax.Array, odd: jax.Device, usual: jax.Device) -> str:
    """The first number that differs, where this process can read both copies."""
    copies = {shard.device: shard.data for shard in x.addressable_shards}
    if odd not in copies or usual not in copies:
        return ""
    values = [np.asarray(data_of(copies[device])) for device in (odd, usual)]
    differs = _bytes(values[0]) != _bytes(values[1])
    if not differs.any():
        return ""
    at = tuple(map(int, np.unravel_index(int(np.argmax(differs)), values[0].shape)))
    return f": at {list(at)} of its part {values[0][at]!r}, and {values[1][at]!r} on {usual}"


def _bytes(x: Numbers) -> Numbers:
    """For each number the bytes that it consists of, as one value."""
    return np.ascontiguousarray(x).reshape(-1).view(f"V{x.dtype.itemsize}")


@functools.lru_cache(16)
def _checksums(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Fun:
    """A function of arrays with these specs: for each device a checksum of what it holds of each."""
    names = mesh.axis_names

    def of_shard(arrays: list[jax.Array]) -> jax.Array:
        # JAX gathers only what varies over all of the axes by its type.
        varying = 0 * jax.lax.axis_index(names).astype(jnp.uint32)
        sums = jnp.stack(list(map(_checksum, arrays))) + varying
        return jax.lax.all_gather(sums, names, to="invarying")

    whole = PartitionSpec()
    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=(list(specs),), out_specs=whole)
    return jax.jit(mapped)


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of the bits of all numbers, each times an odd number of its own, modulo 2^32.

    A flipped bit changes it in any case, because an odd number times a power of two is not 0 modulo 2^32.
    """
    x = data_of(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    # Of 8 bytes this makes two words along a further axis.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
    flat = words.reshape(-1).astype(jnp.uint32)
    return jnp.sum(flat * (2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)
