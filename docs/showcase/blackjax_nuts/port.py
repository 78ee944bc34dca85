"""The program with statemesh, on the mesh that is set."""

import blackjax
import jax
import jax.numpy as jnp
import jax.scipy.stats as stats
import numpy as np
import statemesh as sm
from jax.sharding import PartitionSpec as P

num_chains, num_samples = 16, 5

loc, scale = 10, 20
observed = np.random.default_rng(0).normal(loc, scale, size=1_000)


def logdensity_fn(loc, log_scale, observed=observed):
    """Univariate Normal"""
    scale = jnp.exp(log_scale)
    logjac = log_scale
    logpdf = stats.norm.logpdf(observed, loc, scale)
    return logjac + jnp.sum(logpdf)


def logdensity(x):
    return logdensity_fn(**x)


inv_mass_matrix = np.array([0.5, 0.01])
step_size = 5e-2

nuts = blackjax.nuts(logdensity, step_size, inv_mass_matrix)


def inference_loop_multiple_chains(
    rng_key, kernel, initial_state, num_samples, num_chains
):

    @jax.jit
    def one_step(states, rng_key):
        keys = jax.random.split(rng_key, num_chains)
        keys = keys.reshape(jax.lax.axis_size("data"), -1)[jax.lax.axis_index("data")]
        states, _ = jax.vmap(kernel)(keys, states)
        return states, states

    keys = jax.random.split(rng_key, num_samples)
    _, states = jax.lax.scan(one_step, initial_state, keys)

    return states


def start():
    initial_positions = {"loc": np.ones(num_chains), "log_scale": np.ones(num_chains)}
    initial_states = jax.vmap(nuts.init, in_axes=(0))(initial_positions)
    return jax.random.key(20261127), initial_states


@sm.shard_map(in_specs=(P(), P("data")), out_specs=(P(), P("data")))
def step(rng_key, states):
    rng_key, sample_key = jax.random.split(rng_key)
    states = inference_loop_multiple_chains(
        sample_key, nuts.step, states, num_samples, num_chains
    )
    return rng_key, jax.tree.map(lambda x: x[-1], states)
