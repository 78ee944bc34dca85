"""The program with statemesh, on the mesh that is set."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax  # https://github.com/deepmind/optax
import statemesh as sm
from jax.sharding import PartitionSpec as P


# This model is just a weird mish-mash of stateful and non-stateful layers for
# demonstration purposes, it isn't doing any clever.
class Model(eqx.Module):
    norm1: eqx.nn.BatchNorm
    spectral_linear: eqx.nn.SpectralNorm[eqx.nn.Linear]
    norm2: eqx.nn.BatchNorm
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3, key4 = jr.split(key, 4)
        self.norm1 = eqx.nn.BatchNorm(input_size=3, axis_name=("batch", "data"))
        self.spectral_linear = eqx.nn.SpectralNorm(
            layer=eqx.nn.Linear(in_features=3, out_features=32, key=key1),
            weight_name="weight",
            key=key2,
        )
        self.norm2 = eqx.nn.BatchNorm(input_size=32, axis_name=("batch", "data"))
        self.linear1 = eqx.nn.Linear(in_features=32, out_features=32, key=key3)
        self.linear2 = eqx.nn.Linear(in_features=32, out_features=3, key=key4)

    def __call__(self, x, state):
        x, state = self.norm1(x, state)
        x, state = self.spectral_linear(x, state)
        x = jax.nn.relu(x)
        x, state = self.norm2(x, state)
        x = self.linear1(x)
        x = jax.nn.relu(x)
        x = self.linear2(x)
        return x, state


def compute_loss(model, state, xs, ys):
    batch_model = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    pred_ys, state = batch_model(xs, state)
    loss = jnp.mean((pred_ys - ys) ** 2)
    return (loss, state), model


@sm.shard_map(in_specs=(None, None, None, P("data"), P("data")), out_specs=P())
def make_step(model, state, opt_state, xs, ys):
    grad = sm.grad(compute_loss, axis_name="data", has_aux=True)
    (grads, state), model = grad(model, state, xs, ys)
    updates, opt_state = optim.update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    return model, state, opt_state


dataset_size = 64
learning_rate = 3e-4
seed = 5678

key = jr.PRNGKey(seed)
mkey, xkey, xkey2 = jr.split(key, 3)

optim = optax.adam(learning_rate)


def start():
    model, state = eqx.nn.make_with_state(Model)(mkey)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    return model, state, opt_state


def batch(k):
    # Full-batch gradient descent in this simple example.
    xs = jr.normal(xkey, (dataset_size, 3))
    ys = jnp.sin(xs) + 1
    return xs, ys


@eqx.filter_jit
def evaluate(model, state, xs):
    # discard state
    inference_model = eqx.nn.inference_mode(model)
    inference_model = eqx.Partial(inference_model, state=state)
    out, _ = jax.vmap(inference_model)(xs)
    return out
