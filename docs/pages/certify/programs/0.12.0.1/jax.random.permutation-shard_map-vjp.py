import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, jax.random
from jax import lax; from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True); KEY = jax.random.key(7)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
def key(x):
    return jax.random.fold_in(jax.random.key(0), (x[0, 0] * 1000).astype(jnp.uint32))
a_and_b = np.random.default_rng(2).uniform(0.2, 0.9, (2, 2, 4, 4))
of_shards = [(key(a), b,) for a, b in map(jnp.asarray, a_and_b)]
call = lambda x0, x1: jax.random.permutation(x0, x1)
def total(x0, x1):
    ys = [y for y in jax.tree.leaves(call(x0, x1)) if jnp.issubdtype(y.dtype, jnp.inexact)]
    weights = [jnp.cos(jnp.arange(y.size)).reshape(y.shape) for y in ys]
    return sum(jnp.sum(w * (jnp.real(y) + jnp.imag(y))) for w, y in zip(weights, ys))
as_integers = lambda y: jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y
results = lambda x0, x1: [as_integers(y) for y in jax.tree.leaves((lambda y, pull: pull(jnp.ones_like(y)))(*jax.vjp(lambda x1: total(x0, x1) + 0.0 * lax.axis_index('x'), x1))) if y.dtype != jax.dtypes.float0]
specs, stacked = (P('x'),P(),), (jnp.stack([s[0] for s in of_shards]),of_shards[0][1],)
inputs = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(stacked, specs)]
each = [(lambda x0, x1: jax.vjp(lambda x1: total(x0, x1), x1)[1](jnp.ones(())))(s[0], of_shards[0][1]) for s in of_shards]
want = [sum(e[0] for e in each),]
with jax.set_mesh(mesh): got = jax.jit(jax.shard_map(lambda x0, x1: (lambda g: [g[0],])(results(x0[0], x1)), mesh=mesh, in_specs=(P('x'),P(),), out_specs=[P(),]))(*inputs)
for g, w in zip(got, want, strict=True):
    for shard in g.addressable_shards:
        np.testing.assert_allclose(shard.data, w[shard.index], rtol=1e-6, atol=1e-9)
