"""Uses of `jax.pmap` in public documentation and programs, each as a function of what maps.

What needs data or a library that is not installed is written anew, small, in the manner of its source.

```console
$ python docs/leaving_pmap/programs.py     # runs each with jax.pmap and with statemesh.pmap2
```
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import blackjax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import dynamic_scale, train_state
from jax import lax
from jax.experimental import checkify

import statemesh as sm


Pmap = Callable[..., Any]
Run = Callable[[Pmap], Any]
N = 4  # devices


@dataclasses.dataclass(frozen=True)
class Program:
    """A use of `pmap`.

    **Attributes:**

    - `source`: where it is from.
    - `changes`: what must be written otherwise; empty where a new import is all.
    - `expected`: what it gives, where `jax.pmap` itself no longer runs it.
    """

    name: str
    run: Run
    source: str
    changes: str
    expected: Callable[[], Any] | None


PROGRAMS: dict[str, Program] = {}


def program(source: str, changes: str = "", expected: Callable[[], Any] | None = None) -> Any:
    def added(run: Run) -> Run:
        name = run.__name__
        PROGRAMS[name] = Program(name, run, source, changes, expected)
        return run

    return added


def rows(*shape: int) -> Any:
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


# JAX's documentation

LAX = "`jax.lax` docstrings"
COOKBOOK = "JAX, Pmap Cookbook"


@program(COOKBOOK)
def squares(pmap: Pmap) -> Any:
    y = pmap(lambda x: x**2)(jnp.arange(8))
    return y, y / 2, np.sin(y)


@program(COOKBOOK)
def two_arguments(pmap: Pmap) -> Any:
    return pmap(jnp.add)(jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 6.0]))


@program(COOKBOOK)
def a_matrix_on_each_device(pmap: Pmap) -> Any:
    keys = jax.random.split(jax.random.key(0), N)
    mats = pmap(lambda key: jax.random.normal(key, (5, 6)))(keys)
    result = pmap(lambda x: jnp.dot(x, x.T))(mats)
    return result, pmap(jnp.mean)(result)


@program(COOKBOOK)
def normalize(pmap: Pmap) -> Any:
    @partial(pmap, axis_name="i")
    def normalize(x: Any) -> Any:
        return x / lax.psum(x, "i")

    return normalize(jnp.arange(4.0))


@program(COOKBOOK)
def rule_30(pmap: Pmap) -> Any:
    """A cellular automaton that is split in space."""
    count = jax.device_count()
    right = [(i, (i + 1) % count) for i in range(count)]
    left = [((i + 1) % count, i) for i in range(count)]

    @partial(pmap, axis_name="i")
    def step(board: Any) -> Any:
        after = lax.ppermute(board[:1], perm=left, axis_name="i")
        before = lax.ppermute(board[-1:], perm=right, axis_name="i")
        wide = jnp.concatenate([before, board, after])
        return lax.bitwise_xor(wide[:-2], lax.bitwise_or(wide[1:-1], wide[2:]))

    board = np.zeros(40, dtype=bool)
    board[20] = True
    boards = [board.reshape(count, -1)]
    for _ in range(5):
        boards.append(step(boards[-1]))
    return boards


def _rows_and_columns(outer: Pmap, inner: Pmap) -> Any:
    @partial(outer, axis_name="rows")
    @partial(inner, axis_name="cols")
    def f(x: Any) -> Any:
        return x / lax.psum(x, "rows"), x / lax.psum(x, "cols"), x / lax.psum(x, ("rows", "cols"))

    return f(jnp.arange(8.0).reshape(4, 2))


@program(
    COOKBOOK,
    "the inner `pmap` becomes `vmap2`; `jax.pmap` no longer nests either",
    lambda: _rows_and_columns(jax.vmap, jax.vmap),
)
def nested_axes(pmap: Pmap) -> Any:
    return _rows_and_columns(pmap, sm.vmap2)


def _derivatives_of_maps(outer: Pmap, inner: Pmap) -> Any:
    @outer
    def f(x: Any) -> Any:
        y = jnp.sin(x)

        @inner
        def g(z: Any) -> Any:
            return jnp.cos(z) * jnp.tan(y.sum()) * jnp.tanh(x).sum()

        return jax.grad(lambda w: jnp.sum(g(w)))(x)

    x = rows(N, 3)
    return f(x), jax.grad(lambda x: jnp.sum(f(x)))(x)


@program(
    COOKBOOK,
    "the inner `pmap` becomes `vmap2`; `jax.pmap` no longer nests either",
    lambda: _derivatives_of_maps(jax.vmap, jax.vmap),
)
def derivatives_of_nested_maps(pmap: Pmap) -> Any:
    return _derivatives_of_maps(pmap, sm.vmap2)


@program("JAX, JAX demo notebook")
def hessians_of_examples(pmap: Pmap) -> Any:
    w = rows(3, 3)
    loss = lambda x: jnp.sum(jnp.tanh(x @ w) ** 2)
    return pmap(jax.hessian(loss))(rows(N, 3))


@program("JAX, `jax.pmap` docstring")
def mapped_and_whole_arguments(pmap: Pmap) -> Any:
    x, y = rows(3, N, 2), rows(2, 4)
    whole = pmap(jnp.dot, in_axes=(0, None))(rows(N, 3, 2), y)
    of_dicts = pmap(lambda d, z: d["a"] + z, in_axes=({"a": 0, "b": None}, None))
    return (
        whole,
        pmap(lambda x: x + 1, in_axes=1, out_axes=1)(x),
        of_dicts({"a": jnp.arange(4.0), "b": 1.0}, 2.0),
    )


@program("JAX, `jax.pmap` docstring")
def on_some_devices(pmap: Pmap) -> Any:
    devices = jax.devices()
    first = pmap(lambda x: x / lax.psum(x, "i"), axis_name="i", devices=devices[:6])
    second = pmap(lambda x: x * 2, devices=devices[6:])
    return first(jnp.arange(6.0)), second(jnp.array([2.0, 3.0]))


@program("JAX, `jax.pmap` docstring")
def a_static_argument(pmap: Pmap) -> Any:
    return pmap(lambda x, k: x**k, static_broadcasted_argnums=1)(jnp.arange(4.0), 3)


@program(LAX)
def sums(pmap: Pmap) -> Any:
    x = np.arange(4)
    groups = [[0, 1], [2, 3]]
    return (
        pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x),
        pmap(lambda x: x / lax.psum(x, "i"), axis_name="i")(x),
        pmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")(x),
    )


@program(LAX)
def means_and_extremes(pmap: Pmap) -> Any:
    each = lambda x: (lax.pmean(x, "i"), x / lax.pmean(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i"))
    return pmap(each, axis_name="i")(jnp.arange(1.0, 5.0))


@program(LAX)
def gathers(pmap: Pmap) -> Any:
    groups = [[0, 2], [3, 1]]
    return (
        pmap(lambda x: lax.all_gather(x, "i"), axis_name="i")(np.arange(4)),
        pmap(lambda x: lax.all_gather(x, "i", axis_index_groups=groups), axis_name="i")(rows(4, 4)),
        pmap(lambda x: lax.all_gather(x, "i", tiled=True), axis_name="i")(rows(4, 4)),
    )


@program(LAX)
def scattered_sums(pmap: Pmap) -> Any:
    x, groups = np.arange(16).reshape(4, 4), [[0, 2], [3, 1]]
    return (
        pmap(lambda x: lax.psum_scatter(x, "i"), axis_name="i")(x),
        pmap(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_name="i")(x),
        pmap(
            lambda x: lax.psum_scatter(x, "i", axis_index_groups=groups, tiled=True), axis_name="i"
        )(x),
    )


@program(LAX)
def exchanges(pmap: Pmap) -> Any:
    turn = [(i, (i + 1) % 4) for i in range(4)]
    return (
        pmap(lambda x: lax.all_to_all(x, "i", 0, 0), axis_name="i")(rows(4, 4)),
        pmap(lambda x: lax.ppermute(x, "i", turn), axis_name="i")(rows(4)),
        pmap(lambda x: lax.pshuffle(x, "i", [3, 0, 2, 1]), axis_name="i")(rows(4)),
        pmap(lambda x: x + lax.axis_index("i"), axis_name="i")(rows(4)),
    )


@program("JAX, buffer donation")
def donated_arguments(pmap: Pmap) -> Any:
    update = lambda params, state: (params - state, 2 * state)
    params, state = jnp.asarray(rows(N, 3)), jnp.ones((N, 3))
    return pmap(update, donate_argnums=(0, 1))(params, state)


@program("JAX, checkify guide")
def functional_checks(pmap: Pmap) -> Any:
    def f(x: Any, i: Any) -> Any:
        checkify.check(i >= 0, "index needs to be non-negative!")
        return x[i]

    error, z = pmap(checkify.checkify(f))(jnp.ones((3, 5)), jnp.array([-1, 2, 4]))
    return str(error.get()).split("(")[0], z


@program("JAX, print and breakpoint")
def prints(pmap: Pmap) -> Any:
    def f(x: Any) -> Any:
        jax.debug.callback(seen.append, x)
        return x + 1

    seen: list[Any] = []
    y = pmap(f)(jnp.arange(4))
    jax.effects_barrier()
    return y, sorted(map(int, seen))


@program("JAX, Lorentz ODE solver")
def solutions_of_an_ode(pmap: Pmap) -> Any:
    def rk4(y: Any, rate: Any) -> Any:
        f = lambda y: jnp.stack(
            [10 * (y[1] - y[0]), y[0] * (rate - y[2]) - y[1], y[0] * y[1] - y[2]]
        )

        def step(y: Any, _: Any) -> Any:
            h = 0.01
            a = h * f(y)
            b = h * f(y + a / 2)
            c = h * f(y + b / 2)
            return y + (a + 2 * b + 2 * c + h * f(y + c)) / 6, y

        return lax.scan(step, y, None, 20)[1]

    return pmap(rk4)(rows(N, 3), jnp.full(N, 28.0))


@program("JAX, wave equation")
def waves_that_are_split_in_space(pmap: Pmap) -> Any:
    # A device that nobody sends to gets zeros, which is the boundary.
    right, left = [(i, i + 1) for i in range(N - 1)], [(i + 1, i) for i in range(N - 1)]

    def laplacian(u: Any) -> Any:
        up, down = lax.ppermute(u[-1:], "x", right), lax.ppermute(u[:1], "x", left)
        wide = jnp.pad(jnp.concatenate([up, u, down]), ((0, 0), (1, 1)))
        center = wide[1:-1, 1:-1]
        return wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:] - 4 * center

    @partial(pmap, axis_name="x")
    def simulate(state: Any) -> Any:
        def leapfrog(_: Any, state: Any) -> Any:
            u, u_t = state
            u_t = u_t + 0.5 * laplacian(u)
            return u + 0.5 * u_t, u_t

        return lax.fori_loop(0, 5, leapfrog, state)

    u = rows(N, 4, 8)
    return simulate((u, np.zeros_like(u)))


# Flax


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(8)(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.relu(x))


class TrainState(train_state.TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None


def _flax_state(**more: Any) -> Any:
    variables = CNN().init(jax.random.key(0), jnp.ones((1, 4)))
    return TrainState.create(
        apply_fn=CNN().apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9),
        **more,
    )


def _images() -> Any:
    return {"image": rows(N, 6, 4), "label": np.arange(6 * N).reshape(N, 6) % 3}


def _flax_train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (new, logits)

    if state.dynamic_scale:
        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        scale, is_finite, (loss, (new, _)), grads = grad_fn(state.params)
    else:
        (loss, (new, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads, scale, is_finite = lax.pmean(grads, "batch"), None, True
    stats = lax.pmean(new["batch_stats"], "batch")
    after = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=scale)
    kept = jax.tree.map(partial(jnp.where, is_finite), after.params, state.params)
    return after.replace(params=kept), lax.pmean({"loss": loss}, "batch")


@program("Flax, imagenet example: training")
def flax_training(pmap: Pmap) -> Any:
    step = pmap(_flax_train_step, axis_name="batch", donate_argnums=(0,))
    state = jax_utils.replicate(_flax_state(), jax.devices()[:N])
    for _ in range(2):
        state, metrics = step(state, _images())
    return jax_utils.unreplicate(state).params, state.batch_stats, metrics


@program("Flax, imagenet example: mixed precision")
def flax_training_with_a_loss_scale(pmap: Pmap) -> Any:
    step = pmap(_flax_train_step, axis_name="batch")
    scaled = _flax_state(dynamic_scale=dynamic_scale.DynamicScale())
    state, metrics = step(jax_utils.replicate(scaled, jax.devices()[:N]), _images())
    return state.params, metrics


@program("Flax, imagenet example: evaluation")
def flax_evaluation(pmap: Pmap) -> Any:
    def eval_step(state: Any, batch: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch["image"], train=False)
        return lax.pmean((logits.argmax(-1) == batch["label"]).mean(), "batch")

    return pmap(eval_step, in_axes=(None, 0), axis_name="batch")(_flax_state(), _images())


@program("Flax, ensembling guide")
def flax_ensemble(pmap: Pmap) -> Any:
    @partial(pmap, static_broadcasted_argnums=(1, 2))
    def create_train_state(rng: Any, learning_rate: float, momentum: float) -> Any:
        params = nn.Dense(3).init(rng, jnp.ones((1, 4)))["params"]
        tx = optax.sgd(learning_rate, momentum)
        return train_state.TrainState.create(apply_fn=nn.Dense(3).apply, params=params, tx=tx)

    @partial(pmap, axis_name="ensemble")
    def apply_model(state: Any, images: Any, labels: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        probs = lax.pmean(jax.nn.softmax(logits), axis_name="ensemble")
        return grads, loss, jnp.mean(jnp.argmax(probs, -1) == labels)

    @pmap
    def update_model(state: Any, grads: Any) -> Any:
        return state.apply_gradients(grads=grads)

    state = create_train_state(jax.random.split(jax.random.key(0), N), 0.1, 0.9)
    batch = jax_utils.replicate((rows(6, 4), np.arange(6) % 3), jax.devices()[:N])
    grads, loss, accuracy = apply_model(state, *batch)
    return update_model(state, grads).params, loss, jax_utils.unreplicate(accuracy)


@program("Flax, full evaluation guide")
def flax_padded_batches(pmap: Pmap) -> Any:
    w = rows(4, 3)

    def eval_step(metrics: Any, batch: Any) -> Any:
        hits = batch["mask"] & (batch["label"] == (batch["image"] @ w).argmax(-1))
        added = (("correct", hits.sum()), ("total", batch["mask"].sum()))
        return {key: metrics[key] + lax.psum(value, axis_name="batch") for key, value in added}

    eval_step = jax_utils.pad_shard_unpad(
        pmap(eval_step, axis_name="batch"), static_argnums=(0,), static_return=True
    )
    metrics = {"correct": jnp.zeros(8, int), "total": jnp.zeros(8, int)}
    batch = {"image": rows(13, 4), "label": np.arange(13) % 3, "mask": np.ones(13, bool)}
    return eval_step(metrics, batch)


@program("Flax, WMT example")
def a_sum_over_hosts(pmap: Pmap) -> Any:
    host_psum = pmap(lambda x: lax.psum(x, "i"), "i", devices=[jax.devices()[0]])
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (1, *x.shape)), {"a": rows(3)})
    return jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), host_psum(wide))


@program("Flax, NLP example")
def dropout_by_device(pmap: Pmap) -> Any:
    def train_step(w: Any, x: Any, rng: Any) -> Any:
        rng, new = jax.random.split(jax.random.fold_in(rng, lax.axis_index("batch")))
        keep = jax.random.bernoulli(rng, 0.5, x.shape)
        grad = jax.grad(lambda w: jnp.mean(jnp.where(keep, x, 0) @ w))(w)
        return w - lax.pmean(grad, "batch"), new

    keys = jax.random.split(jax.random.PRNGKey(0), N)
    whole = jax_utils.replicate(rows(4), jax.devices()[:N])
    return pmap(train_step, "batch", donate_argnums=(0,))(whole, rows(N, 6, 4), keys)


# Haiku


def _loss_of_haiku(x: Any, labels: Any) -> Any:
    logits = hk.nets.MLP([8, 4, 3])(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@program("Haiku, README")
def haiku_training(pmap: Pmap) -> Any:
    loss_fn = hk.without_apply_rng(hk.transform(_loss_of_haiku))
    batch = _images()
    params = loss_fn.init(jax.random.PRNGKey(428), batch["image"][0], batch["label"][0])
    params = jax.tree.map(lambda x: np.stack([x] * N), params)

    def update(params: Any, inputs: Any, labels: Any, axis_name: str = "i") -> Any:
        grads = lax.pmean(jax.grad(loss_fn.apply)(params, inputs, labels), axis_name)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    for _ in range(2):
        params = pmap(update, axis_name="i")(params, batch["image"], batch["label"])
    return params


@program("Haiku, imagenet example")
def haiku_batch_norm(pmap: Pmap) -> Any:
    def net(x: Any, is_training: bool) -> Any:
        x = hk.Linear(6)(x)
        x = hk.BatchNorm(True, True, 0.9, cross_replica_axis="i")(x, is_training)
        return hk.Linear(3)(jax.nn.relu(x))

    forward, tx = hk.transform_with_state(net), optax.sgd(0.1, momentum=0.9, nesterov=True)

    def initial(rng: Any, batch: Any) -> Any:
        params, state = forward.init(rng, batch["image"], is_training=True)
        return params, state, tx.init(params)

    def step(carry: Any, batch: Any) -> Any:
        params, state, slots = carry

        def loss_fn(params: Any) -> Any:
            logits, new = forward.apply(params, state, None, batch["image"], is_training=True)
            labels = jax.nn.one_hot(batch["label"], 3)
            return optax.softmax_cross_entropy(logits, labels).mean(), new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, slots = tx.update(lax.pmean(grads, axis_name="i"), slots)
        return (optax.apply_updates(params, updates), state, slots), lax.pmean(loss, axis_name="i")

    rng = jnp.broadcast_to(jax.random.PRNGKey(0), (N, 2))
    carry = pmap(initial, axis_name="i")(rng, _images())
    return pmap(step, axis_name="i", donate_argnums=(0,))(carry, _images())


# Reinforcement learning, evolution, sampling


@program("Brax, PPO")
def an_epoch_of_reinforcement_learning(pmap: Pmap) -> Any:
    """Statistics of observations, and gradients of a policy, over environments on all devices."""

    def training_epoch(params: Any, stats: Any, key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            params, (count, mean) = carry
            obs = jax.random.normal(key, (5, 3)) + 1
            count = count + lax.psum(5.0, "i")
            mean = mean + lax.psum((obs - mean).sum(0), "i") / count
            loss, grads = jax.value_and_grad(lambda w: jnp.tanh((obs - mean) @ w).mean())(params)
            return (params - 0.1 * lax.pmean(grads, "i"), (count, mean)), loss

        (params, stats), losses = lax.scan(step, (params, stats), jax.random.split(key, 3))
        return params, stats, jax.tree.map(jnp.mean, losses)

    params, stats = jax_utils.replicate(
        (rows(3), (0.0, np.zeros(3, np.float32))), jax.devices()[:N]
    )
    keys = jax.random.split(jax.random.PRNGKey(0), N)
    return pmap(training_epoch, axis_name="i", donate_argnums=(0, 1))(params, stats, keys)


@program("Brax, augmented random search")
def episodes_of_many_policies(pmap: Pmap) -> Any:
    def run_episode(mean: Any, policies: Any, key: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            obs, reward = carry
            obs = jnp.tanh(obs + jnp.einsum("pi,pij->pj", obs - mean, policies))
            return (obs, reward + obs.sum(-1)), obs

        first = jax.random.normal(key, (5, 3))
        (_, reward), obs = lax.scan(step, (first, jnp.zeros(5)), None, 4)
        return reward, obs

    keys = jax.random.split(jax.random.PRNGKey(0), N)
    return pmap(run_episode, in_axes=(None, 0, 0))(rows(3), rows(N, 5, 3, 3), keys)


@program("evosax, changelog")
def an_evolution_strategy(pmap: Pmap) -> Any:
    def ask(key: Any, mean: Any) -> Any:
        noise = jax.random.normal(key, (6, *mean.shape))
        return mean + 0.1 * noise, noise

    def tell(noise: Any, fitness: Any, mean: Any) -> Any:
        center = lax.pmean(fitness.mean(), "device")
        return mean - 0.1 * lax.pmean((fitness - center) @ noise / 6, "device")

    mean = jnp.tile(rows(3)[None], (N, 1))
    keys = jax.random.split(jax.random.PRNGKey(1), N)
    x, noise = pmap(ask, axis_name="device")(keys, mean)
    return pmap(tell, axis_name="device")(noise, (x**2).sum(-1), mean)


@program("NumPyro, `MCMC` docstring")
def hamiltonian_chains(pmap: Pmap) -> Any:
    """`pmap(do_mcmc)(rng_keys)`, with several chains on each device."""
    logdensity = lambda x: -0.5 * jnp.sum(x**2 * jnp.array([1.0, 4.0]))

    def do_mcmc(key: Any, chains: int = 2) -> Any:
        def chain(key: Any) -> Any:
            def step(x: Any, key: Any) -> Any:
                of_momentum, of_choice = jax.random.split(key)
                p = jax.random.normal(of_momentum, x.shape)
                y, q = x, p + 0.05 * jax.grad(logdensity)(x)
                for _ in range(3):
                    y = y + 0.1 * q
                    q = q + 0.1 * jax.grad(logdensity)(y)
                q = q - 0.05 * jax.grad(logdensity)(y)
                gain = logdensity(y) - logdensity(x) + (p @ p - q @ q) / 2
                x = jnp.where(jnp.log(jax.random.uniform(of_choice)) < gain, y, x)
                return x, x

            return lax.scan(step, jnp.zeros(2), jax.random.split(key, 5))[1]

        return {"x": jax.vmap(chain)(jax.random.split(key, chains))}

    return pmap(do_mcmc)(jax.random.split(jax.random.PRNGKey(0), N))


@program("BlackJAX, sampling with several chains")
def nuts_chains(pmap: Pmap) -> Any:
    nuts = blackjax.nuts(
        lambda x: -0.5 * jnp.sum(x**2), step_size=0.5, inverse_mass_matrix=np.ones(2)
    )

    def inference_loop(key: Any, start: Any) -> Any:
        def one_step(state: Any, key: Any) -> Any:
            state, info = nuts.step(key, state)
            return state, (state.position, info.num_integration_steps)

        return lax.scan(one_step, nuts.init(start), jax.random.split(key, 4))[1]

    keys = jax.random.split(jax.random.key(0), N)
    return pmap(inference_loop, in_axes=(0, 0))(keys, rows(N, 2))


# Optimizers, metrics, kernels


@program("JAXopt, distributed custom loop")
def a_solver_on_all_devices(pmap: Pmap) -> Any:
    """The solver gets the value and the gradient of the mean over devices."""
    solver = optax.lbfgs(learning_rate=0.5, memory_size=3, linesearch=None)

    def update(w: Any, state: Any, data: Any) -> Any:
        x, y = data
        objective = lambda w: optax.sigmoid_binary_cross_entropy(x @ w, y).mean()
        value, grad = lax.pmean(jax.value_and_grad(objective)(w), "b")
        updates, state = solver.update(grad, state, w)
        return optax.apply_updates(w, updates), state, value

    w = rows(3)
    params, state = jax_utils.replicate((w, solver.init(w)), jax.devices()[:N])
    data = rows(N, 6, 3), (np.arange(6 * N).reshape(N, 6) % 2).astype(np.float32)
    step = pmap(update, axis_name="b")
    for _ in range(3):
        params, state, value = step(params, state, data)
    return params, value


@program("KFAC-JAX, example training")
def statistics_where_there_is_an_axis(pmap: Pmap) -> Any:
    def pmean_if_pmap(x: Any, axis_name: str) -> Any:
        try:
            return lax.pmean(x, axis_name)
        except NameError:
            return x

    def train_batch(w: Any, x: Any) -> Any:
        factor = pmean_if_pmap(x.T @ x / len(x), "kfac") + 0.1 * jnp.eye(3)
        grad = pmean_if_pmap(jax.grad(lambda w: jnp.sin(x @ w).mean())(w), "kfac")
        return w - jnp.linalg.solve(factor, grad)

    mapped = pmap(train_batch, axis_name="kfac")(
        jax_utils.replicate(rows(3), jax.devices()[:N]), rows(N, 6, 3)
    )
    return mapped, train_batch(rows(3), rows(6, 3))


@program("CLU, synopsis")
def metrics_of_all_devices(pmap: Pmap) -> Any:
    def eval_step(metrics: Any, batch: Any) -> Any:
        hits = (batch["image"].argmax(-1) == batch["label"]).astype(jnp.float32)
        each = lax.all_gather({"total": hits.sum(), "count": jnp.float32(hits.size)}, "batch")
        merge = lambda a, b: (jax.tree.map(jnp.add, a, b), None)
        return lax.scan(merge, metrics, each)[0]

    empty = jax_utils.replicate({"total": 0.0, "count": 0.0}, jax.devices()[:N])
    return jax_utils.unreplicate(pmap(eval_step, axis_name="batch")(empty, _images()))


@program("big_vision, evaluators")
def predictions(pmap: Pmap) -> Any:
    def predict(params: Any, x: Any) -> Any:
        logits = x @ params["w"]
        return lax.all_gather(logits.argmax(-1), "data"), jax.nn.softmax(logits)

    params = jax_utils.replicate({"w": rows(4, 3)}, jax.devices()[:N])
    return pmap(predict, axis_name="data")(params, rows(N, 5, 4))


@program("Neural Tangents, batching")
def kernels_of_parts(pmap: Pmap) -> Any:
    """What is not an array is closed over; arrays are broadcast to all devices."""
    cache: dict[str, Any] = {}

    def kernel(x: Any, y: Any, kind: str) -> Any:
        if kind not in cache:
            act = {"relu": jax.nn.relu, "erf": jax.scipy.special.erf}[kind]
            cache[kind] = pmap(lambda x, y: act(x @ y.T))
        return cache[kind](x, jnp.broadcast_to(y, (N, *y.shape)))

    return kernel(rows(N, 5, 3), rows(7, 3), "relu"), kernel(rows(N, 5, 3), rows(7, 3), "erf")


@program("Equinox, BERT example", "`eqx.filter_pmap` becomes `sm.pmap2`; the model is one argument")
def an_equinox_model(pmap: Pmap) -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))

    def make_step(model: Any, x: Any) -> Any:
        loss = lambda model: lax.pmean(jnp.mean(jax.vmap(model)(x) ** 2), "devices")
        grads = lax.pmean(eqx.filter_grad(loss)(model), "devices")
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    if pmap is jax.pmap:
        new = eqx.filter_pmap(make_step, axis_name="devices", in_axes=(None, 0), out_axes=None)
    else:
        new = pmap(make_step, axis_name="devices", in_axes=(None, 0), out_axes=None)
    return eqx.filter(new(model, rows(N, 5, 4)), eqx.is_array)


def main() -> None:
    for name, each in PROGRAMS.items():
        expected = each.expected() if each.expected else each.run(jax.pmap)
        for x, y in zip(*map(jax.tree.leaves, (expected, each.run(sm.pmap2))), strict=True):
            if isinstance(x, str):
                assert x == y
            elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(*map(jax.random.key_data, (x, y)))
            else:
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
        print(f"{name}: {each.changes or 'unchanged'} ({each.source})")


if __name__ == "__main__":
    main()
