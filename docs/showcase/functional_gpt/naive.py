"""The rows are split, and nothing else is changed."""

import jax
from jax import vmap
import jax.numpy as jnp
import numpy as np

from jaxtyping import Array, Int

from functools import partial

import statemesh as sm
from jax.sharding import PartitionSpec as P
from sklearn import datasets


@jax.tree_util.register_pytree_with_keys_class
class ParamsDict(dict):
    """A dictionary whose items are attributes too."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __hash__(self):
        return hash(tuple(self.items()))

    def tree_flatten_with_keys(self):
        items = [(jax.tree_util.GetAttrKey(k), v) for k, v in self.items()]
        return items, tuple(self)

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values))


@jax.tree_util.register_pytree_with_keys_class
class Adam:
    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps = lr, betas, eps
        self.m = jax.tree.map(jnp.zeros_like, params)
        self.v = jax.tree.map(jnp.zeros_like, params)
        self.count = jnp.zeros(())

    def step(self, params, grads):
        (beta1, beta2), self.count = self.betas, self.count + 1
        self.m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, self.m, grads)
        self.v = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, self.v, grads)
        scale1, scale2 = 1 - beta1**self.count, 1 - beta2**self.count
        return jax.tree.map(
            lambda p, m, v: p - self.lr * (m / scale1) / (jnp.sqrt(v / scale2) + self.eps),
            params,
            self.m,
            self.v,
        )

    def tree_flatten_with_keys(self):
        state = [(jax.tree_util.GetAttrKey(k), getattr(self, k)) for k in ("m", "v", "count")]
        return state, (self.lr, self.betas, self.eps)

    @classmethod
    def tree_unflatten(cls, settings, state):
        self = object.__new__(cls)
        self.lr, self.betas, self.eps = settings
        self.m, self.v, self.count = state
        return self


def rand(rng, f, shape, **kwargs):
    """
    Wrap jax.random.foo function to split the incoming rng, and return the new rng beside the payload

    rng = ... from previous code ...

    rng, vals1 = rand(rng, jax.random.uniform, (9,3), minval=-2.0, maxval=2.0)
    # ^-- rng is now newly split
    rng, vals2 = rand(rng, jax.random.normal, (3,9))
    # ^-- rng is split again
    """
    rng, rng1 = jax.random.split(rng)
    return rng, f(rng1, shape, **kwargs)


def matrix_init_uniform(rng: jax.random.PRNGKey, in_features: int, out_features: int):
    """
    Initialize a matrix with uniform weights, scaled by 1/sqrt(in_features)
    """
    params = ParamsDict()
    rnd_range = 1 / in_features**0.5
    return rand(
        rng,
        jax.random.uniform,
        (in_features, out_features),
        minval=-rnd_range,
        maxval=rnd_range,
    )


# Layer norm
def elementwise_linear_init_identity(shape):
    """
    Initialize an elementwise_linear layer with unit gain, zero bias
    """
    return ParamsDict(gain=jnp.ones(shape), bias=jnp.zeros(shape))


def linear(params, x: jnp.ndarray):
    return x @ params.weight + params.bias[None, :]


def elementwise_linear(params, x: jnp.ndarray):
    return params.gain[None, :] * x + params.bias[None, :]


def standardize(x, eps=1e-5):
    return (x - x.mean()) / (x.std() + eps)


def transformer_init(
    rng: jax.random.PRNGKey,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_k: int,
    d_ff: int,
    max_len=4096,
):
    assert d_k * n_heads == d_model

    # Build config struct for call
    config = ParamsDict()
    config.d_model = d_model
    config.d_ff = d_ff
    config.d_k = d_k
    config.heads = n_heads
    config.lambda_e = d_model**-0.5
    config.lambda_pe = 1.0
    config.tau = 1 / d_k**0.5

    # Build initializers for params
    params = ParamsDict()

    # Create embedding layer
    rng, params.embeddings = rand(rng, jax.random.normal, (n_vocab, d_model))

    # Positional encodings initialized to zeros
    params.positional_encodings = jnp.zeros((max_len, d_model))

    # For transformer layers
    params.layers = []
    for _ in range(n_layers):
        layer = ParamsDict()
        layer.norm_self_attn = jnp.ones(d_model)

        layer.heads = []
        for _ in range(n_heads):
            head = ParamsDict()
            rng, head.query = matrix_init_uniform(rng, d_model, d_k)
            rng, head.key = matrix_init_uniform(rng, d_model, d_k)
            rng, head.value = matrix_init_uniform(rng, d_model, d_k)

            layer.heads.append(head)

        layer.norm_ff = jnp.ones(d_model)

        rng, layer.ffn1 = matrix_init_uniform(rng, d_model, d_ff)
        rng, layer.ffn2 = matrix_init_uniform(rng, d_ff, d_model)

        params.layers.append(layer)

    # Final normalization and output layer
    params.pre_output_norm = jnp.ones(d_model)
    rng, params.output = matrix_init_uniform(rng, d_model, n_vocab)

    return rng, config, params


# Format off for the size annotations
# fmt: off
@partial(jax.jit, static_argnums=0)
def transformer(cfg, params, x: Int[Array, "L"]):
    """
    cfg: Config, from transformer_init, holds hyperparameters
    params: Current transformer parameters, initialized in init
    x: 1D array of L integers, representing the input sequence
    output: L x n_vocab logits

    Obviously, this is just one example of a transformer. There
    are many variations, depending where normalizations go,
    whether or not there is bias, what kinds of position
    encodings, etc.
    """
    L, = x.shape # x is just 1D. Vmap/pmap will handle batching

    # Make shape checkers for awfutils.typecheck
    LxL = lambda x: x.shape == (L, L)
    LxDk = lambda x: x.shape == (L, cfg.d_k)
    LxDff = lambda x: x.shape == (L, cfg.d_ff)
    LxDm = lambda x: x.shape == (L, cfg.d_model)

    # Create mask: 0 to attend, -Inf to ignore
    mask : LxL = jnp.log(jnp.tril(jnp.ones((L, L))))

    # Start with token embeddings
    embeddings : LxDm = cfg.lambda_e * params.embeddings[x, :]

    # Add (learned) positional encodings
    embeddings += cfg.lambda_pe * params.positional_encodings[:L, :]

    # Apply the transformer layers
    for layer in params.layers:

        # Layer-normalize embeddings
        t1 : LxDm = vmap(standardize)(embeddings)
        t1 : LxDm = t1 @ jnp.diag(layer.norm_self_attn)

        # Multi-head self-attention
        self_attns = []
        for head in layer.heads:

            # Project into this head's query/key space
            query : LxDk = t1 @ head.query
            key : LxDk = t1 @ head.key

            # Compute L x L attention matrix
            score : LxL = query @ key.T + mask
            attn : LxL = jax.nn.softmax(cfg.tau * score, axis=1)

            value : LxDk = t1 @ head.value
            self_attn : LxDk = attn @ value

            # Add this head's contribution to the list
            self_attns += [self_attn]  # [LxDk for #heads]

        embeddings += jnp.hstack(self_attns)

        # Layer-normalize embeddings
        t2 : LxDm = vmap(standardize)(embeddings)
        t2 : LxDm = t2 @ jnp.diag(layer.norm_ff)

        # Feedforward fully connected
        t2 : LxDff = t2 @ layer.ffn1
        t2 = jax.nn.relu(t2)
        t2 : LxDm = t2 @ layer.ffn2

        # Add this layer's contribution into embeddings
        embeddings += t2

    # Layer-normalize embeddings
    embeddings : LxDm = vmap(standardize)(embeddings)
    embeddings = embeddings @ jnp.diag(params.pre_output_norm)

    # And linearly project to output dimension
    return embeddings @ params.output # L x n_vocab
# fmt: on


def crossentropy(output: jnp.ndarray, target: int):
    return -jax.nn.log_softmax(output)[target]


def seq_crossentropy(output: jnp.ndarray, targets: jnp.ndarray):
    return vmap(crossentropy)(output, targets).mean()


def transformer_loss(cfg, params, x):
    """
    # Transformer loss for one example

    cfg: Config, from init
    params: Current transformer parameters, initialized in init
    x: 1D array of integers, representing the input sequence
    """
    output = transformer(cfg, params, x)

    return seq_crossentropy(output[:-1], x[1:])


seq_len, batch_size = 32, 64

names = ["iris", "wine", "breast_cancer", "digits", "diabetes", "linnerud"]
text = "".join(getattr(datasets, f"load_{name}")().DESCR for name in names)
itos = sorted(set(text))
tokens = np.array([itos.index(c) for c in text])


def sequences(seed):
    starts = np.random.default_rng(seed).integers(len(tokens) - seq_len, size=batch_size)
    return tokens[starts[:, None] + np.arange(seq_len)]


# Create PRNG key
rnd_key = jax.random.PRNGKey(42)

rnd_key, cfg, params = transformer_init(
    rnd_key,
    len(itos),
    d_model=32,
    n_layers=2,
    n_heads=2,
    d_k=16,
    d_ff=64,
    max_len=seq_len,
)


@partial(jax.jit, static_argnums=0)
def loss_batch(cfg, params, seq):
    batched = vmap(transformer_loss, in_axes=(None, None, 0), out_axes=0)
    return jnp.mean(batched(cfg, params, seq))


value_and_grad_loss_batch_unjit = jax.value_and_grad(loss_batch, argnums=1)

test_data = sequences(0)


def start():
    optimizer = Adam(params, lr=0.003, betas=(0.9, 0.99))
    return params, optimizer


def batch(k):
    return sequences(k + 1)


@sm.shard_map(in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
def step(params, optimizer, data):
    # Get loss and gradients
    loss, grads = value_and_grad_loss_batch_unjit(cfg, params, data)
    # Update parameters
    params = optimizer.step(params, grads)
    return params, optimizer
