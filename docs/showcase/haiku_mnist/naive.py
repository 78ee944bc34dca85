"""The batch is split, and nothing else is changed."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import statemesh as sm
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

NUM_CLASSES = 10  # MNIST has 10 classes (hand-written digits).


class Batch(NamedTuple):
  image: np.ndarray  # [B, H, W, 1]
  label: np.ndarray  # [B]


class TrainingState(NamedTuple):
  params: hk.Params
  avg_params: hk.Params
  opt_state: optax.OptState


def net_fn(images: jax.Array) -> jax.Array:
  """Standard LeNet-300-100 MLP network."""
  x = images.astype(jnp.float32) / 16.
  mlp = hk.Sequential([
      hk.Flatten(),
      hk.Linear(64), jax.nn.relu,
      hk.Linear(32), jax.nn.relu,
      hk.Linear(NUM_CLASSES),
  ])
  return mlp(x)


# First, make the network and optimiser.
network = hk.without_apply_rng(hk.transform(net_fn))
optimiser = optax.adam(1e-2)


def loss(params: hk.Params, batch: Batch) -> jax.Array:
  """Cross-entropy classification loss, regularised by L2 weight decay."""
  batch_size, *_ = batch.image.shape
  logits = network.apply(params, batch.image)
  labels = jax.nn.one_hot(batch.label, NUM_CLASSES)

  l2_regulariser = 0.5 * sum(
      jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params)
  )
  log_likelihood = jnp.sum(labels * jax.nn.log_softmax(logits))

  return -log_likelihood / batch_size + 1e-2 * l2_regulariser


@jax.jit
def evaluate(params: hk.Params, batch: Batch) -> jax.Array:
  """Evaluation metric (classification accuracy)."""
  logits = network.apply(params, batch.image)
  predictions = jnp.argmax(logits, axis=-1)
  return jnp.mean(predictions == batch.label)


@sm.shard_map(in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
def update(state: TrainingState, batch: Batch) -> TrainingState:
  """Learning rule (stochastic gradient descent)."""
  grads = jax.lax.psum(jax.grad(loss)(state.params, batch), "data")
  updates, opt_state = optimiser.update(grads, state.opt_state)
  params = optax.apply_updates(state.params, updates)
  # Compute avg_params, the exponential moving average of the "live" params.
  # We use this only for evaluation (cf. https://doi.org/10.1137/0330046).
  avg_params = optax.incremental_update(
      params, state.avg_params, step_size=0.05)
  return TrainingState(params, avg_params, opt_state)


digits = load_digits()
images, labels = digits.images[..., None].astype(np.float32), digits.target


def start() -> TrainingState:
  # Initialise network and optimiser; note we draw an input to get shapes.
  initial_params = network.init(jax.random.PRNGKey(seed=0), images[:1])
  initial_opt_state = optimiser.init(initial_params)
  return TrainingState(initial_params, initial_params, initial_opt_state)


def batch(k: int) -> Batch:
  rows = np.random.default_rng(k).permutation(len(images))[:256]
  return Batch(images[rows], labels[rows])
