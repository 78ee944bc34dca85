import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, jax.lax
from jax import lax; from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True); KEY = jax.random.key(7)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
def whole(x):
    return (x * 100).astype(jnp.int32) % 7
a_and_b = np.random.default_rng(2).uniform(0.2, 0.9, (2, 2, 4, 4))
of_shards = [(whole(a)[0, 0] % 2 == 0, b,) for a, b in map(jnp.asarray, a_and_b)]
call = lambda x0, x1: jax.lax.cond(x0, lambda x: 2 * x, lambda x: x, x1)
as_integers = lambda y: jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y
results = lambda x0, x1: [as_integers(y) for y in jax.tree.leaves(call(x0, x1)) if y.dtype != jax.dtypes.float0]
specs, stacked = (P('x'),P(),), (jnp.stack([s[0] for s in of_shards]),of_shards[0][1],)
inputs = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(stacked, specs)]
want = [jnp.stack(ys) for ys in zip(*[results(s[0], of_shards[0][1]) for s in of_shards])]
with jax.set_mesh(mesh): got = jax.jit(jax.shard_map(lambda x0, x1: results(x0[0], x1)[0], mesh=mesh, in_specs=(P('x'),P(),), out_specs=P()))(*inputs)  # one copy
got, want = [got], [want[0][0]]
for g, w in zip(got, want, strict=True):
    for shard in g.addressable_shards:
        np.testing.assert_allclose(shard.data, w[shard.index], rtol=1e-6, atol=1e-9)
