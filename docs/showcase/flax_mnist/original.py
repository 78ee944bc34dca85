"""Flax, docs_nnx/mnist_tutorial.md at 18f8f31. Copyright the Flax authors, Apache-2.0.

Changed here: the digits of scikit-learn take the place of MNIST, so `linear1` has 64 inputs; the layers have 8, 16 and
64 channels in the place of 32, 64 and 256, and `conv2` has no bias; the cells are one file; the training loop is cut
into `start`, `batch` and `train_step`; `nnx.display`, the predictions, the plots, TensorBoard and the export are left
out.
"""

import numpy as np
from sklearn.datasets import load_digits

batch_size = 32

dataset = load_digits()
shuffled = np.random.default_rng(1).permutation(len(dataset.target))
train_ds, test_ds = shuffled[:1280], shuffled[1280:]

def make_batch(rows):
  """A batch of normalized (image, label) numpy arrays."""
  images = dataset.images[rows].astype(np.float32)[..., None] / 16.0
  return {'image': images, 'label': dataset.target[rows].astype(np.int32)}

from flax import nnx  # The Flax NNX API.
from functools import partial
from typing import Optional

class CNN(nnx.Module):
  """A simple CNN model."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
    self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
    self.dropout1 = nnx.Dropout(rate=0.025)
    self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), use_bias=False, rngs=rngs)
    self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
    self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
    self.linear1 = nnx.Linear(64, 64, rngs=rngs)
    self.dropout2 = nnx.Dropout(rate=0.025)
    self.linear2 = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x, rngs: nnx.Rngs | None = None):
    x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
    x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
    x = x.reshape(x.shape[0], -1)  # flatten
    x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
    x = self.linear2(x)
    return x

# Instantiate the model.
model = CNN(rngs=nnx.Rngs(0))

import optax

learning_rate = 0.005
momentum = 0.9

optimizer = nnx.Optimizer(
  model, optax.adamw(learning_rate, momentum), wrt=nnx.Param
)
metrics = nnx.MultiMetric(
  accuracy=nnx.metrics.Accuracy(),
  loss=nnx.metrics.Average('loss'),
)

def loss_fn(model: CNN, batch, rngs: nnx.Rngs | None = None):
  logits = model(batch['image'], rngs)
  loss = optax.softmax_cross_entropy_with_integer_labels(
    logits=logits, labels=batch['label']
  ).mean()
  return loss, logits

@nnx.jit
def train_step(model: CNN, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, rngs: nnx.Rngs, batch):
  """Train for a single step."""
  grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
  (loss, logits), grads = grad_fn(model, batch, rngs)
  metrics.update(loss=loss, logits=logits, labels=batch['label'])  # In-place updates.
  optimizer.update(model, grads)  # In-place updates.

@nnx.jit
def eval_step(model: CNN, metrics: nnx.MultiMetric, batch):
  loss, logits = loss_fn(model, batch)
  metrics.update(loss=loss, logits=logits, labels=batch['label'])  # In-place updates.

train_model = nnx.view(model, deterministic=False, use_running_average=False)

def start():
  return nnx.clone((train_model, optimizer, metrics, nnx.Rngs(0)))

def batch(k):
  first = k * batch_size % len(train_ds)
  return make_batch(train_ds[first : first + batch_size])

def evaluate(model: CNN):
  """The metrics on the test set."""
  metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(),
    loss=nnx.metrics.Average('loss'),
  )
  eval_model = nnx.view(model, deterministic=True, use_running_average=True)
  eval_step(eval_model, metrics, make_batch(test_ds))
  return metrics.compute()
