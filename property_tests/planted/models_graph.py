"""Message passing on a graph whose nodes are split, each with the edges that lead to it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
NODES, DEGREE, WIDTH, CLASSES = 24, 3, 4, 3


class Graph(NamedTuple):
    """Features and incoming edges of each node; the labels of all nodes, -1 where there is none.

    An edge has the number of its sender in the whole graph, and a weight, zero where there is no edge.
    """

    features: Any
    senders: Any
    weights: Any
    labels: Any


class Net(sm.Module):
    enter: sm.ParamState
    attention: sm.ParamState
    leave: sm.ParamState
    mean: sm.BatchState
    var: sm.BatchState
    history: sm.HiddenState
    seen: sm.State
    accuracy: sm.State
    busiest: sm.State
    rng: sm.RandomState


def make_net(dtype: str) -> Net:
    return Net(
        enter=sm.ParamState(normal(dtype, WIDTH, WIDTH, seed=1)),
        attention=sm.ParamState(normal(dtype, WIDTH, seed=2)),
        leave=sm.ParamState(normal(dtype, WIDTH, CLASSES, seed=3)),
        mean=sm.BatchState(jnp.zeros(WIDTH, dtype), reduce="mean"),
        var=sm.BatchState(jnp.ones(WIDTH, dtype), reduce="mean"),
        history=sm.HiddenState(normal(dtype, NODES, WIDTH, seed=4), spec=P("nodes")),
        seen=sm.State(jnp.zeros(CLASSES, "int32"), reduce="sum"),
        # mistake: seen-by-the-busiest-shard (wrong reduction)
        #     seen=sm.State(jnp.zeros(CLASSES, "int32"), reduce="max"),
        accuracy=sm.State(jnp.zeros((), "float32"), reduce="mean"),
        busiest=sm.State(jnp.zeros((), dtype)),
        rng=sm.RandomState(jax.random.key(0)),
    )


def own(whole: jax.Array, count: int) -> jax.Array:
    """Of what belongs to all nodes, that of this shard's."""
    first = lax.axis_index("nodes") * count
    # mistake: first-node-forgotten (axis_index forgotten)
    #     first = 0
    # mistake: first-node-off-by-one (off by one)
    #     first = lax.axis_index("nodes") * (count - 1)
    return lax.dynamic_slice_in_dim(whole, first, count)


def without_loops(graph: Graph) -> jax.Array:
    """The weights of the edges, zero for those that lead from a node to itself."""
    count = len(graph.senders)
    number = lax.axis_index("nodes") * count + jnp.arange(count)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(count)
    return jnp.where(graph.senders == number[:, None], 0, graph.weights)


def thinned(rng: sm.RandomState, weights: jax.Array) -> tuple[jax.Array, sm.RandomState]:
    """Some edges are left out, at random."""
    keys, rng = rng.rows(len(weights), "nodes")
    # mistake: edges-left-out-alike (shared key)
    #     keys, rng = rng.rows(len(weights))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, weights.shape[1:]))(keys)
    return jnp.where(keep, weights / 0.8, 0), rng


def by_sender(graph: Graph, values: jax.Array) -> jax.Array:
    """For each node of the whole graph the sum over this shard's edges that it sends."""
    nodes = len(graph.senders) * lax.axis_size("nodes")
    flat = values.reshape(-1, *values.shape[2:])
    return jax.ops.segment_sum(flat, graph.senders.ravel(), nodes)


def convolved(graph: Graph, weights: jax.Array, h: jax.Array, old: jax.Array) -> jax.Array:
    """With the messages of all neighbours, less from those that send many and to those that get many."""
    count, first = len(h), lax.axis_index("nodes") * len(h)
    leaving = lax.psum(by_sender(graph, weights), "nodes")
    # mistake: degree-of-the-shards-edges (dropped psum)
    #     leaving = by_sender(graph, weights)
    # mistake: degree-averaged (pmean for psum)
    #     leaving = lax.pmean(by_sender(graph, weights), "nodes")
    mine = lax.dynamic_slice_in_dim(leaving, first, count)
    # mistake: degrees-of-the-first-nodes (wrong part)
    #     mine = leaving[:count]
    arriving = weights.sum(1)
    # mistake: arriving-at-other-nodes-too (psum in the wrong place)
    #     arriving = lax.psum(weights.sum(1), "nodes")
    everyone = lax.all_gather(h, "nodes", tiled=True)
    # mistake: own-nodes-repeated (all_gather forgotten)
    #     everyone = jnp.tile(h, (lax.axis_size("nodes"), 1))
    # mistake: nodes-in-another-order (wrong order of parts)
    #     everyone = jnp.swapaxes(lax.all_gather(h, "nodes"), 0, 1).reshape(-1, WIDTH)
    # mistake: other-shards-are-old (stale value)
    #     everyone = lax.dynamic_update_slice(lax.all_gather(old, "nodes", tiled=True), h, (first, 0))
    messages = everyone[graph.senders]
    # mistake: senders-in-the-shard (wrong rows)
    #     messages = everyone[first + graph.senders % count]
    scale = weights * lax.rsqrt(1 + leaving)[graph.senders] * lax.rsqrt(1 + arriving)[:, None]
    # mistake: degrees-in-the-shard (wrong rows)
    #     scale = weights * lax.rsqrt(1 + leaving)[graph.senders % count] * lax.rsqrt(1 + arriving)[:, None]
    kept = h * lax.rsqrt(1 + mine)[:, None] + 0.1 * old
    return kept + jnp.einsum("nd,ndw->nw", scale, messages)


def pushed(graph: Graph, weights: jax.Array, h: jax.Array, attention: jax.Array) -> Any:
    """What the edges carry back to each sender: a mean over those who got from it, by a softmax."""
    score = jnp.tanh(h @ attention)[:, None] + jnp.tanh(weights)
    low = jnp.full(len(h) * lax.axis_size("nodes"), -10, h.dtype)
    high = lax.pmax(low.at[graph.senders].max(lax.stop_gradient(score)), "nodes")
    # mistake: highest-of-the-shards-edges (statistics of a shard)
    #     high = low.at[graph.senders].max(lax.stop_gradient(score))
    chance = weights * jnp.exp(score - high[graph.senders])
    total = lax.psum(by_sender(graph, chance), "nodes")
    # mistake: softmax-of-the-shards-edges (dropped psum)
    #     total = by_sender(graph, chance)
    chance = chance / jnp.maximum(total, 0.01)[graph.senders]
    back = by_sender(graph, chance[..., None] * h[:, None])
    return lax.psum_scatter(back, "nodes", tiled=True)
    # mistake: back-from-own-edges (dropped psum)
    #     return own(back, len(h))
    # mistake: back-averaged (pmean for psum)
    #     return lax.psum_scatter(back, "nodes", tiled=True) / lax.axis_size("nodes")


def normalized(net: Net, h: jax.Array) -> tuple[jax.Array, Net]:
    mean = lax.pmean(h.mean(0), "nodes")
    # mistake: mean-of-a-shard (statistics of a shard)
    #     mean = h.mean(0)
    var = lax.pmean(((h - mean) ** 2).mean(0), "nodes")
    # mistake: mean-of-variances (mean of variances)
    #     var = lax.pmean(h.var(0), "nodes")
    net = net.replace(
        mean=0.9 * net.mean.value + 0.1 * mean,
        var=0.9 * net.var.value + 0.1 * var,
    )
    return (h - mean) * lax.rsqrt(var + 0.01), net


def loss_fn(net: Net, graph: Graph) -> tuple[jax.Array, Net]:
    weights, rng = thinned(net.rng, without_loops(graph))
    h = convolved(graph, weights, graph.features @ net.enter.value, net.history.value)
    h, net = normalized(net, jnp.tanh(h))
    h = h + pushed(graph, weights, h, net.attention.value)
    logits = h @ net.leave.value
    labels = own(graph.labels, len(h))
    # mistake: labels-of-the-first-nodes (wrong part)
    #     labels = graph.labels[: len(h)]
    known = labels >= 0
    each = jnp.where(known, -jax.nn.log_softmax(logits)[jnp.arange(len(h)), labels], 0)
    labelled = jnp.maximum(lax.psum(known.sum(), "nodes"), 1)
    # mistake: labelled-of-a-shard (count of a shard)
    #     labelled = jnp.maximum(known.sum(), 1) * lax.axis_size("nodes")
    share = labelled / lax.axis_size("nodes")
    # mistake: mean-taken-twice (normalized twice)
    #     share = labelled * 1.0
    hits = known & (logits.argmax(1) == labels)
    accuracy = lax.psum(hits.sum(), "nodes") / labelled
    # mistake: mean-of-accuracies (mean of means)
    #     accuracy = lax.pmean(hits.sum() / jnp.maximum(known.sum(), 1), "nodes")
    net = net.replace(
        history=h,
        # mistake: history-averaged (pmean in the wrong place)
        #     history=lax.pmean(h, "nodes"),
        seen=net.seen.value + (labels[:, None] == jnp.arange(CLASSES)).sum(0),
        accuracy=accuracy,
        busiest=jnp.maximum(net.busiest.value, lax.pmax(weights.sum(1).max(), "nodes")),
        # mistake: busiest-of-the-sum (psum for pmax)
        #     busiest=jnp.maximum(net.busiest.value, lax.psum(weights.sum(1).max(), "nodes")),
        rng=rng,
    )
    return each.sum() / share.astype(h.dtype), net


def step(net: Net, graph: Graph) -> tuple[jax.Array, Net]:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="nodes")(net, graph)
    # mistake: gradients-summed (psum for pmean)
    #     (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="nodes", reduce="sum")(net, graph)
    rate = 0.2
    # mistake: rate-of-a-shards-share (branch on the mesh)
    #     rate = 0.2 / lax.axis_size("nodes")
    net = net.replace(
        enter=net.enter.value - rate * grads.enter.value,
        attention=net.attention.value - rate * grads.attention.value,
        leave=net.leave.value - rate * grads.leave.value,
    )
    return loss, net


def case(dtype: str) -> Case:
    weights = jnp.abs(normal(dtype, NODES, DEGREE, seed=5)) * integers(
        NODES, DEGREE, below=3, seed=6
    ).clip(0, 1)
    graph = Graph(
        features=normal(dtype, NODES, WIDTH, seed=7),
        senders=integers(NODES, DEGREE, below=NODES, seed=8),
        weights=weights.astype(dtype),
        labels=integers(NODES, below=CLASSES + 1, seed=9) - 1,
    )
    return Case(
        step,
        (make_net(dtype), graph),
        mesh={"nodes": 4},
        in_specs=(None, Graph(P("nodes"), P("nodes"), P("nodes"), P())),
        out_specs=P(),
    )
