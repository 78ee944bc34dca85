"""The rows of the table: functions of JAX and of libraries, each with one line that calls it.

A line is a Python expression. In it `f` is the function, `a` and `b` are two matrices, and what
`_operands.py` defines can be used. What a line makes of `a` and `b` are the operands: they are made first, so
that `f` alone meets what is sharded.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._base._checks import is_key
from . import _operands


PACKAGES = ("jax.numpy", "jax.lax", "jax.random", "jax.nn", "jax.scipy")
# They write files or change settings. The last one is compiled for no CPU.
NOT_CALLED = ("save", "savez", "load", "set_printoptions", "printoptions", "mulhi")

# Tried in this order, for what has no line of its own.
FORMS = [
    "f(a, b)",
    "f(a[0], b[0])",
    "f(a)",
    "f(a[0])",
    "f(whole(a), whole(b))",
    "f(whole(a[0]), whole(b[0]))",
    "f(whole(a))",
    "f(whole(a[0]))",
    "f(a > 0.5, b > 0.5)",
    "f(a > 0.5)",
    "f(a, b, a + b)",
    "f(a[0], b[0], a[1])",
    "f(a, whole(b))",
    "f(a[0], whole(b[0]) % 4)",
    "f(whole(a[0]) % 4, b[0])",
    "f(a > 0.5, a, b)",
    "f([a, b])",
    "f((a[0], b[0]))",
    "f(key(a))",
    "f(key(a), (3,))",
    "f(key(a), b[0])",
    "f(key(a), b[0], b[1])",
    "f(key(a), b[0], positive(b))",
    "f(key(a), 3, 0.5)",
    "f(key(a), 3, (2,))",
    "f(key(a), 3)",
    "f(key(a), (3,), 0, 5)",
    "f(key(a), 0.0, 1.0, (3,))",
    "f(key(a), 3.0, 2.0, 1.0)",
    "f(a, 1)",
    "f(a, 1, 0)",
    "f(a[0], 2)",
    "f(a, (0, 1))",
    "f(a, (1, 0))",
    "f(a, (2, 8))",
    "f(a, 1, b)",
    "f(a, 1, 2)",
    "f(a, b, 1)",
    "f(a[0], b[0], 2)",
    "f(a, jnp.float32)",
    "f(a, jnp.int32)",
    "f(jnp.float32, (4,), 0)",
    "f((4, 4), a[0, 0])",
    "f((4, 4))",
    "f(4)",
    "f(4, 4)",
    "f(a[0, 0], b[0, 0], 4)",
    "f(lax.complex(a, b))",
    "f(a[0], b[0], a[1], b[1])",
    "f(a[0, 0], b[0, 0], a[1, 1], b[1, 1])",
    "f(a[0], b[0], a[1], b[1], a[2])",
    "f(positive(a), b)",
    "f(jnp.cumsum(a[0]), b[0], jnp.cumsum(b[1]))",
    "f('ij,jk->ik', a, b)",
    "f(lambda x: x * 2, a)",
    "f(lambda x: x.sum(), 0, a)",
    "f(lambda x, y: x * y, a, b)",
]

# Arguments that no form fits, or that it does not vary.
LINES = {
    "jax.numpy.argwhere": "f(a > b, size=4)",
    "jax.numpy.bincount": "f(whole(a[0]), b[0], length=7)",
    "jax.numpy.choose": "f(whole(a) % 2, [b, 2 * b], mode='clip')",
    "jax.numpy.compress": "f(a[0] > 0.5, b, axis=0, size=2)",
    "jax.numpy.cross": "f(a[:, :3], b[:, :3])",
    "jax.numpy.dsplit": "f(a.reshape(2, 2, 4), 2)",
    "jax.numpy.extract": "f(a > 0.5, b, size=4)",
    "jax.numpy.fill_diagonal": "f(a, b[0], inplace=False)",
    "jax.numpy.flatnonzero": "f(a > b, size=4)",
    "jax.numpy.fromfunction": "f(lambda i, j: a[0, 0] * i + j, (2, 2))",
    "jax.numpy.intersect1d": "f(whole(a[0]), whole(b[0]), size=4)",
    "jax.numpy.nonzero": "f(a > b, size=4)",
    "jax.numpy.place": "f(a, a > 0.5, b[0], inplace=False)",
    "jax.numpy.put": "f(a, whole(b[0]), b[0], inplace=False)",
    "jax.numpy.put_along_axis": "f(a, whole(b) % 4, b, 0, inplace=False)",
    "jax.numpy.ravel_multi_index": "f((whole(a[0]), whole(b[0])), (7, 7), mode='clip')",
    "jax.numpy.setdiff1d": "f(whole(a[0]), whole(b[0]), size=4)",
    "jax.numpy.setxor1d": "f(whole(a[0]), whole(b[0]), size=8)",
    "jax.numpy.union1d": "f(whole(a[0]), whole(b[0]), size=8)",
    "jax.numpy.unique": "f(whole(a[0]), size=4, return_inverse=True)",
    "jax.numpy.unique_all": "f(whole(a[0]), size=4)",
    "jax.numpy.unique_counts": "f(whole(a[0]), size=4)",
    "jax.numpy.unique_inverse": "f(whole(a[0]), size=4)",
    "jax.numpy.unique_values": "f(whole(a[0]), size=4)",
    "jax.numpy.unpackbits": "f(whole(a).astype(jnp.uint8))",
    "jax.numpy.linalg.cross": "f(a[:, :3], b[:, :3])",
    "jax.lax.argmax": "f(a, 0, jnp.int32)",
    "jax.lax.argmin": "f(a, 0, jnp.int32)",
    "jax.lax.associative_scan": "f(lambda x, y: x * y, (a, b)[0] + b)",
    "jax.lax.broadcast_in_dim": "f(a, (2, 4, 4), (1, 2))",
    "jax.lax.concatenate": "f([a, b], 0)",
    "jax.lax.cond": "f(whole(a)[0, 0] % 2 == 0, lambda x: 2 * x, lambda x: x, b)",
    "jax.lax.conv": "f(image(a), image(b)[..., :2, :2], (1, 1), 'SAME')",
    "jax.lax.conv_general_dilated": "f(image(a), image(b)[..., :2, :2], (1, 1), 'SAME')",
    "jax.lax.conv_general_dilated_local": (
        "f(image(a), jnp.stack([b[:, :3]] * 3, -1)[None], (1, 1), 'VALID', (2, 2))"
    ),
    "jax.lax.conv_general_dilated_patches": "f(image(a), (2, 2), (1, 1), 'SAME')",
    "jax.lax.conv_transpose": "f(a.reshape(1, 4, 4, 1), b.reshape(4, 4, 1, 1), (1, 1), 'SAME')",
    "jax.lax.conv_with_general_padding": "f(image(a), image(b), (1, 1), 'SAME', None, None)",
    "jax.lax.custom_linear_solve": "f(lambda x: a[0] * x, b[0], lambda _, y: y / a[0], symmetric=True)",
    "jax.lax.custom_root": "f(lambda x: x - a[0], b[0], lambda g, x: x - g(x), lambda g, y: y / g(1.0))",
    "jax.lax.dot_general": "f(a, b, MATMUL)",
    "jax.lax.dynamic_slice": "f(b, (whole(a)[0, 0] % 2, whole(a)[0, 1] % 2), (2, 2))",
    "jax.lax.dynamic_update_index_in_dim": "f(b, b[0], whole(a)[0, 0] % 4, 0)",
    "jax.lax.dynamic_update_slice": "f(b, b[:2, :2], (whole(a)[0, 0] % 2, whole(a)[0, 1] % 2))",
    "jax.lax.dynamic_update_slice_in_dim": "f(b, b[:2], whole(a)[0, 0] % 2, 0)",
    "jax.lax.empty": "f((4,), jnp.float32)",
    "jax.lax.fft": "f(lax.complex(a, b), 'fft', (4,))",
    "jax.lax.fori_loop": "f(0, 3, lambda i, x: x * a, a + b)",
    "jax.lax.gather": "f(b, whole(a[:2, :1]) % 4, GATHER, (1, 4))",
    "jax.lax.index_take": "f(b, (whole(a[0]) % 4,), (0,))",
    "jax.lax.iota": "f(jnp.int32, 4)",
    "jax.lax.pad": "f(a, b[0, 0], [(1, 0, 0), (0, 1, 0)])",
    "jax.lax.platform_dependent": "f(a, default=lambda x: x * b)",
    "jax.lax.ragged_dot": "f(a, jnp.stack([b, b]), jnp.array([1, 3]))",
    "jax.lax.ragged_dot_general": "f(a, jnp.stack([b, b]), jnp.array([1, 3]), RAGGED)",
    "jax.lax.reduce": "f((a, b), (0 * a[0, 0], 0 * b[0, 0]), lambda x, y: (x[0] + y[0], x[1] + y[1]), (0,))",
    "jax.lax.reduce_and": "f(whole(a), [0])",
    "jax.lax.reduce_or": "f(whole(a), [0])",
    "jax.lax.reduce_xor": "f(whole(a), [0])",
    "jax.lax.reduce_window": "f(a, 0.0, lax.add, (2, 2), (1, 1), 'SAME')",
    "jax.lax.rng_uniform": "f(a[0, 0], b[0, 0] + 1, (3,))",
    "jax.lax.scan": "f(lambda x, y: (x * y, x), a[0] * b[0], a + b)",
    "jax.lax.scatter": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_add": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_sub": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_mul": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_min": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_max": "f(a, whole(b[:2, :1]) % 4, b[:2], SCATTER)",
    "jax.lax.scatter_apply": "f(b, whole(a[:2, :1]) % 4, jnp.sin, SCATTER, update_shape=(2, 4))",
    "jax.lax.slice": "f(a, (0, 1), (2, 3))",
    "jax.lax.split": "f(a, (1, 3))",
    "jax.lax.squeeze": "f(a[None], (0,))",
    "jax.lax.switch": "f(whole(a)[0, 0] % 2, [lambda x: 2 * x, lambda x: x], b)",
    "jax.lax.while_loop": "f(lambda c: c[0] < whole(a)[0, 0], lambda c: (c[0] + 1, c[1] * 2), (0, b))",
    "jax.lax.linalg.cholesky_update": "f(jnp.tril(a) + jnp.eye(4), b[0])",
    "jax.lax.linalg.householder_product": "f(a, b[0])",
    "jax.lax.linalg.lu_pivots_to_permutation": "f(whole(a[0]) % 4, 4)",
    "jax.lax.linalg.ormqr": "f(a, b[0], b)",
    "jax.lax.linalg.tridiagonal_solve": "f(a[0], b[0] + 4, a[1], b)",
    "jax.lax.reduce_precision": "f(a * b, 8, 10)",
    "jax.lax.rng_bit_generator": "f(whole(a[0]).astype(jnp.uint32), (3,))",
    "jax.random.wrap_key_data": "f(whole(a[0, :2]).astype(jnp.uint32))",
    "jax.nn.scaled_dot_general": "f(a, b, MATMUL)",
    "jax.nn.scaled_matmul": "f(narrow(a), narrow(b), scales(), scales())",
    "jax.scipy.linalg.cho_solve": "f((jnp.tril(a) + jnp.eye(4), True), b[0])",
    "jax.scipy.linalg.eigh_tridiagonal": "f(a[0], b[0, :3], eigvals_only=True)",
    "jax.scipy.linalg.leslie": "f(a[0], b[0, :3])",
    "jax.scipy.linalg.lu_solve": "f((positive(a), jnp.arange(4, dtype=jnp.int32)), b[0])",
    "jax.scipy.ndimage.map_coordinates": "f(a, [4 * b[0], 4 * b[1]], 1)",
    # It differentiates where it starts. From a start that shards share JAX's types would sum that gradient.
    "jax.scipy.optimize.minimize": "(lambda t: f(lambda x: ((x - t)**2).sum(), 3*t, method='BFGS').x)(a[0])",
    "jax.scipy.sparse.linalg.bicgstab": "f(a, b, tol=1e-13)[0]",
    "jax.scipy.special.bessel_jn": "f(a[0], v=2)",
    "jax.scipy.special.sph_harm_y": "f(jnp.array([1]), jnp.array([0]), a[0, :1], b[0, :1], n_max=2)",
    "jax.scipy.stats.multinomial.logpmf": "f(whole(a[0]), 20, b[0])",
    "jax.scipy.stats.multinomial.pmf": "f(whole(a[0]), 20, b[0])",
    "jax.numpy.frexp": "f(10 * a * b)",
    "jax.lax.sort": "f((a, b), num_keys=1)",
    "jax.lax.sort_key_val": "f(a[0], b[0])",
    "jax.random.permutation": "f(key(a), b)",
    "jax.random.choice": "f(key(a), b[0], (3,), replace=False)",
    "jax.lax.scaled_dot": (
        "f(narrow(a)[0], narrow(b)[0].T, lhs_scale=scales()[0], rhs_scale=scales()[0].T, "
        "preferred_element_type=jnp.float32)"
    ),
}

# They name the mesh axis.
COLLECTIVES = {
    "jax.lax.all_gather": "f(a, 'x')",
    "jax.lax.all_to_all": "f(a, 'x', 0, 0, tiled=True)",
    "jax.lax.axis_index": "f('x')",
    "jax.lax.pbroadcast": "f(a, 'x', 0)",
    "jax.lax.pcast": "f(b, 'x', to='varying')",
    "jax.lax.pmax": "f(a, 'x')",
    "jax.lax.pmean": "f(a, 'x')",
    "jax.lax.pmin": "f(a, 'x')",
    "jax.lax.ppermute": "f(a, 'x', [(0, 1), (1, 0)])",
    "jax.lax.pshuffle": "f(a, 'x', [1, 0])",
    "jax.lax.psum": "f(a, 'x')",
    "jax.lax.psum_scatter": "f(a, 'x', tiled=True)",
    "jax.lax.pswapaxes": "f(a[:2], 'x', 0)",
    "jax.lax.ragged_all_to_all": (
        "f(a[0], b[0], *[jnp.array(x, jnp.int32) for x in ([0, 2], [2, 2], [0, 2], [2, 2])], axis_name='x')"
    ),
}

# Layers, optimizers and solvers. What is not installed is left out.
LIBRARIES = {
    "equinox.nn.Linear": "f(4, 3, key=KEY)(a[0])",
    "equinox.nn.MLP": "f(4, 2, 8, 1, key=KEY)(a[0])",
    "equinox.nn.Conv1d": "f(4, 2, 3, key=KEY)(a)",
    "equinox.nn.Conv2d": "f(1, 2, 3, key=KEY)(a[None])",
    "equinox.nn.ConvTranspose1d": "f(4, 2, 3, key=KEY)(a)",
    "equinox.nn.LayerNorm": "f(4)(a[0])",
    "equinox.nn.RMSNorm": "f(4)(a[0])",
    "equinox.nn.GroupNorm": "f(2, 4)(a)",
    "equinox.nn.GRUCell": "f(4, 4, key=KEY)(a[0], b[0])",
    "equinox.nn.LSTMCell": "f(4, 4, key=KEY)(a[0], (b[0], b[1]))",
    "equinox.nn.MultiheadAttention": "f(2, 4, key=KEY)(a, b, b)",
    "equinox.nn.RotaryPositionalEmbedding": "f(4)(a)",
    "equinox.nn.Embedding": "f(7, 3, key=KEY)(whole(a)[0, 0])",
    "equinox.nn.Dropout": "f(0.5)(a, key=key(b))",
    "equinox.nn.AvgPool1d": "f(2)(a)",
    "equinox.nn.MaxPool1d": "f(2)(a)",
    "equinox.nn.AvgPool2d": "f(2)(a[None])",
    "equinox.nn.MaxPool2d": "f(2)(a[None])",
    "equinox.nn.AdaptiveAvgPool1d": "f(2)(a)",
    "equinox.nn.AdaptiveMaxPool1d": "f(2)(a)",
    "equinox.nn.PReLU": "f(0.2)(a - b)",
    "statemesh.nn.BatchNorm": "f(4)(a)",
    "statemesh.nn.Dropout": "f(0.5, key(b))(a)",
    "statemesh.nn.EMA": "f(a)(b)",
    "statemesh.nn.GRUCell": "f(4, 4, key=KEY).init_state(4)(a)",
    "optax.adabelief": "updates(f(0.1), a, b)",
    "optax.adadelta": "updates(f(0.1), a, b)",
    "optax.adafactor": "updates(f(0.1), a, b)",
    "optax.adagrad": "updates(f(0.1), a, b)",
    "optax.adam": "updates(f(0.1), a, b)",
    "optax.adamax": "updates(f(0.1), a, b)",
    "optax.adamaxw": "updates(f(0.1), a, b)",
    "optax.adamw": "updates(f(0.1), a, b)",
    "optax.adan": "updates(f(0.1), a, b)",
    "optax.amsgrad": "updates(f(0.1), a, b)",
    "optax.fromage": "updates(f(0.1), a, b)",
    "optax.lamb": "updates(f(0.1), a, b)",
    "optax.lars": "updates(f(0.1), a, b)",
    "optax.lion": "updates(f(0.1), a, b)",
    "optax.nadam": "updates(f(0.1), a, b)",
    "optax.nadamw": "updates(f(0.1), a, b)",
    "optax.optimistic_gradient_descent": "updates(f(0.1), a, b)",
    "optax.radam": "updates(f(0.1), a, b)",
    "optax.rmsprop": "updates(f(0.1), a, b)",
    "optax.rprop": "updates(f(0.1), a, b)",
    "optax.sgd": "updates(f(0.1), a, b)",
    "optax.sign_sgd": "updates(f(0.1), a, b)",
    "optax.sm3": "updates(f(0.1), a, b)",
    "optax.yogi": "updates(f(0.1), a, b)",
    "optax.noisy_sgd": "updates(f(0.1, key=0), a, b)",
    "optax.novograd": "updates(f(0.1), a, b)",
    "optax.clip_by_global_norm": "updates(f(0.5), a, b)",
    "optax.clip": "updates(f(0.5), a, b)",
    "optax.clip_by_block_rms": "updates(f(0.5), a, b)",
    "optax.adaptive_grad_clip": "updates(f(0.5), a, b)",
    "optax.add_decayed_weights": "updates(f(0.1), a, b)",
    "optax.normalize_by_update_norm": "updates(f(), a, b)",
    "optax.scale_by_trust_ratio": "updates(f(), a, b)",
    "optax.centralize": "updates(f(), a, b)",
    "optax.ema": "updates(f(0.9), a, b)",
    "optax.trace": "updates(f(0.9), a, b)",
    "optax.softmax_cross_entropy": "f(a, b)",
    "optax.sigmoid_binary_cross_entropy": "f(a, b)",
    "optax.softmax_cross_entropy_with_integer_labels": "f(a, whole(b)[0] % 4)",
    "optax.huber_loss": "f(a, b)",
    "optax.cosine_similarity": "f(a, b)",
    "optax.hinge_loss": "f(a, b)",
    "optax.log_cosh": "f(a, b)",
    "optax.kl_divergence": "f(a, b)",
    "optax.ctc_loss": "f(a[None], jnp.zeros((1, 4)), whole(b)[:1, :2] % 3 + 1, jnp.zeros((1, 2)))",
    "optax.global_norm": "f([a, b])",
    "flax.linen.Dense": "initialised(f(3), a)",
    "flax.linen.DenseGeneral": "initialised(f(3), a)",
    "flax.linen.Conv": "initialised(f(2, (3,)), a)",
    "flax.linen.ConvTranspose": "initialised(f(2, (3,)), a)",
    "flax.linen.Embed": "initialised(f(7, 3), whole(a))",
    "flax.linen.LayerNorm": "initialised(f(), a)",
    "flax.linen.RMSNorm": "initialised(f(), a)",
    "flax.linen.GroupNorm": "initialised(f(2), a)",
    "flax.linen.BatchNorm": "initialised(f(use_running_average=False), a)",
    "flax.linen.MultiHeadDotProductAttention": "initialised(f(2), a, b)",
    "flax.linen.Dropout": "initialised(f(0.5, deterministic=False), a)",
    "flax.nnx.Linear": "f(4, 3, rngs=rngs())(a)",
    "flax.nnx.Conv": "f(4, 2, (3,), rngs=rngs())(a)",
    "flax.nnx.Embed": "f(7, 3, rngs=rngs())(whole(a))",
    "flax.nnx.LayerNorm": "f(4, rngs=rngs())(a)",
    "flax.nnx.RMSNorm": "f(4, rngs=rngs())(a)",
    "flax.nnx.GroupNorm": "f(4, num_groups=2, rngs=rngs())(a)",
    "flax.nnx.BatchNorm": "f(4, rngs=rngs())(a)",
    "flax.nnx.Dropout": "f(0.5, rngs=rngs())(a)",
    "flax.nnx.MultiHeadAttention": "f(2, 4, rngs=rngs(), decode=False)(a, b)",
    "flax.nnx.GRUCell": "f(4, 4, rngs=rngs())(a, b)",
    "flax.nnx.LSTMCell": "f(4, 4, rngs=rngs())((a, a), b)",
    "lineax.LU": "linear(f(), positive(a), b[0])",
    "lineax.QR": "linear(f(), positive(a), b[0])",
    "lineax.SVD": "linear(f(), positive(a), b[0])",
    "lineax.Cholesky": "linear(f(), positive(a), b[0])",
    "lineax.CG": "linear(f(rtol=1e-12, atol=1e-12), positive(a), b[0])",
    "lineax.GMRES": "linear(f(rtol=1e-12, atol=1e-12), positive(a), b[0])",
    "lineax.BiCGStab": "linear(f(rtol=1e-12, atol=1e-12), positive(a), b[0])",
    "optimistix.Newton": "root(f(rtol=1e-12, atol=1e-12), a[0], b[0])",
    "optimistix.Chord": "root(f(rtol=1e-12, atol=1e-12), a[0], b[0])",
    "optimistix.Dogleg": "root(f(rtol=1e-12, atol=1e-12), a[0], b[0])",
    "optimistix.BFGS": "least(f(rtol=1e-10, atol=1e-10), a[0], b[0])",
    "optimistix.NonlinearCG": "least(f(rtol=1e-10, atol=1e-10), a[0], b[0])",
    "optimistix.LevenbergMarquardt": "least(f(rtol=1e-10, atol=1e-10), a[0], b[0])",
    "optimistix.GaussNewton": "least(f(rtol=1e-10, atol=1e-10), a[0], b[0])",
    "diffrax.Euler": "path(f(), a[0], b[0])",
    "diffrax.Heun": "path(f(), a[0], b[0])",
    "diffrax.Midpoint": "path(f(), a[0], b[0])",
    "diffrax.Tsit5": "path(f(), a[0], b[0])",
    "diffrax.Dopri5": "path(f(), a[0], b[0])",
    "diffrax.Bosh3": "path(f(), a[0], b[0])",
    "diffrax.ImplicitEuler": "path(f(), a[0], b[0])",
    "diffrax.Kvaerno3": "path(f(), a[0], b[0])",
    "diffrax.Kvaerno5": "path(f(), a[0], b[0])",
}

KEY = jax.random.key(7)

SHARDS = 2
# For each shard `a` and `b`. With this seed whatever the lines decide by differs between both shards:
# parities of integers, orders, exponents.
MATRICES = np.random.default_rng(2).uniform(0.2, 0.9, (SHARDS, 2, 4, 4))


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions of JAX that make arrays or might, by the first name of each."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for module in _modules():
        with warnings.catch_warnings():
            # Names on their way out.
            warnings.simplefilter("ignore")
            for name in sorted(dir(module)):
                fun: Any = None if name.startswith("_") else getattr(module, name, None)
                is_function = callable(fun) and not inspect.isclass(fun) and id(fun) not in seen
                if is_function and name not in NOT_CALLED and not _is_dtype(fun):
                    seen.add(id(fun))
                    found[f"{module.__name__}.{name}"] = fun
    return found


def primitives() -> set[str]:
    """The names of the primitives that `jax.lax` shows."""
    return {getattr(lax, name).name for name in dir(lax) if name.endswith("_p")}


def _modules() -> Iterator[types.ModuleType]:
    for name in PACKAGES:
        module = importlib.import_module(name)
        yield module
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
            if not any(part.startswith("_") for part in info.name.split(".")):
                with contextlib.suppress(ImportError):
                    yield importlib.import_module(info.name)


def _is_dtype(x: Any) -> bool:
    return hasattr(x, "dtype") and not callable(getattr(x, "__wrapped__", None))


@dataclasses.dataclass(frozen=True)
class Row:
    """A function, and how it is called.

    **Attributes:**

    - `name`: where the function is found, as `jax.numpy.sort`.
    - `line`: how it is called.
    - `operands`: the expressions of `a` and `b` in it.
    - `call`: the line with `x0`, `x1`, … in their places.
    """

    name: str
    line: str
    operands: tuple[str, ...]
    call: str

    @functools.cached_property
    def fun(self) -> Callable[..., list[Array]]:
        """A function of the operands that returns the arrays in what is made, keys as integers."""
        names = ", ".join(f"x{i}" for i in range(len(self.operands)))
        called = eval(f"lambda f, {names}: {self.call}", namespace())
        f = found(self.name)
        return lambda *operands: arrays(called(f, *operands))

    def drawn(self, shard: int) -> list[Array]:
        """The operands of a shard."""
        return [drawn(expression, shard) for expression in self.operands]


def row(name: str, line: str) -> Row:
    tree = ast.parse(line, mode="eval")
    taken = _Operands()
    call = ast.unparse(taken.visit(tree.body))
    return Row(name, line, tuple(taken.expressions), call)


@functools.lru_cache(1000)
def drawn(expression: str, shard: int) -> Array:
    """An operand of a shard."""
    a, b = map(jnp.asarray, MATRICES[shard])
    return jnp.asarray(eval(expression, {**namespace(), "a": a, "b": b}))


@functools.cache
def namespace() -> dict[str, Any]:
    return {**vars(_operands), "jax": jax, "jnp": jnp, "lax": lax, "KEY": KEY}


class _Operands(ast.NodeTransformer):
    """Puts `x0`, `x1`, … in place of the largest parts that are made of `a` and `b` alone."""

    def __init__(self) -> None:
        self.expressions: list[str] = []
        self._local = {"f"}

    def visit(self, node: ast.AST) -> Any:
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        if not names & {"a", "b"}:
            return node
        if isinstance(node, ast.Lambda):
            self._local |= {x.arg for x in node.args.args}
        is_whole = isinstance(node, ast.expr) and not names & self._local
        if not is_whole or isinstance(node, ast.List | ast.Tuple | ast.Lambda | ast.Starred):
            return self.generic_visit(node)
        if (expression := ast.unparse(node)) not in self.expressions:
            self.expressions.append(expression)
        return ast.Name(f"x{self.expressions.index(expression)}", ast.Load())


def found(name: str) -> Callable[..., Any]:
    """What stands under a dotted name, of which the first parts are modules."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(".".join(parts[:end]))
            return functools.reduce(getattr, parts[end:], module)
    raise ImportError(name)


def arrays(tree: Any) -> list[Array]:
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def row_of(name: str) -> Row | bool | None:
    """How a function of JAX is called; `None` if it makes no arrays, `False` if no line fits it."""
    lines = {**LINES, **COLLECTIVES, **LIBRARIES}
    if name in COLLECTIVES:
        return row(name, lines[name])
    runs = False
    for line in [lines[name]] if name in lines else FORMS:
        tried = row(name, line)
        with contextlib.suppress(Exception):
            if jax.eval_shape(tried.fun, *tried.drawn(0)):
                return tried
            runs = True
    return None if runs else False


def rows(names: Sequence[str]) -> tuple[dict[str, Row], list[str]]:
    """The rows of these names; and the functions that no line fits.

    A function that makes no arrays is in neither.
    """
    named, left = {}, []
    for name in names:
        with contextlib.suppress(ImportError):
            match row_of(name):
                case Row() as found:
                    named[name] = found
                case False:
                    left.append(name)
    return named, left
