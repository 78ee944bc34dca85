"""Sharded training steps into which mistakes can be planted, for the tests of `locate`.

Each function takes the name of a mistake. The line with the mistake has the name in a comment or in an
`if ... else`. The line that first uses the value that is wrong has the comment `uses` and the name.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm


class Case(NamedTuple):
    """A function with its specs and arguments."""

    fun: Callable[..., Any]
    mesh: AbstractMesh
    in_specs: Any
    out_specs: Any
    args: tuple[Any, ...]
    check_vma: bool = True

    @property
    def mapped(self) -> Any:
        return sm.shard_map(
            self.fun, self.mesh, self.in_specs, self.out_specs, check_vma=self.check_vma
        )


def generic(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


class Net(sm.Module):
    w: sm.ParamState
    out: sm.ParamState
    mean: sm.BatchState
    var: sm.BatchState
    m: sm.State
    v: sm.State
    rng: sm.RandomState
    count: sm.State


def data_parallel(bug: str) -> Case:
    """A step with statistics, dropout and Adam."""

    def forward(net: Net, x: Any, y: Any) -> Any:
        mean = x.mean(0) if bug == "local mean" else jax.lax.pmean(x.mean(0), "data")
        square = jax.lax.pmean((x**2).mean(0), "data")
        var = x.var(0) if bug == "local variance" else square - mean**2  # uses local mean
        x = (x - mean) / jnp.sqrt(var + 1e-3)
        if bug == "whole batch in the noise":
            key, rng = net.rng.split()  # whole batch in the noise
            keep = jax.random.bernoulli(key, 0.8, x.shape)  # uses whole batch in the noise
        else:
            keys, rng = net.rng.rows(len(x), "data")
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
        x = jnp.where(keep, x / 0.8, 0)
        if bug == "index added":
            x = x + 0.1 * jax.lax.axis_index("data")  # index added
        h = jax.nn.gelu(x @ net.w.value)
        if bug == "local softmax":
            h = h * jax.nn.softmax(h, axis=0)  # local softmax
        if bug == "local centre":
            h = h - h.mean(0, keepdims=True)  # local centre
        error = (h @ net.out.value - y) ** 2
        weight = jax.lax.axis_size("data") if bug == "loss too large" else 1
        loss = weight * error.mean()  # uses loss too large
        if bug == "sum of rows":
            loss = error.sum()  # sum of rows
        if bug == "local largest":
            loss = loss + jnp.max(jnp.abs(h)) ** 2  # local largest
        count = net.count.value + (y == y).sum()
        return loss, (net, mean, var, rng, count)

    def step(net: Net, x: Any, y: Any) -> Any:
        def loss_of(net: Net) -> Any:
            loss, (_, *rest) = forward(net, x, y)
            return (loss, rest), net

        grad = sm.value_and_grad(loss_of, axis_name="data", has_aux=True)
        ((loss, (mean, var, rng, count)), _), grads = grad(net)  # uses sum of rows
        gradient = grads.w.value
        if bug == "gradient not reduced":
            part = jax.grad(lambda w: forward(net.replace(w=w), x, y)[0])  # gradient not reduced
            gradient = part(
                jax.lax.pcast(net.w.value, "data", to="varying")
            )  # uses gradient not reduced
        if bug == "gradient scaled":
            gradient = gradient / jax.lax.axis_size("data")  # gradient scaled
        if bug == "clipped locally":
            norm = jax.lax.pmax(jnp.sqrt((x**2).sum()), "data")  # clipped locally
            gradient = gradient / jnp.maximum(1.0, norm)  # uses clipped locally
        m = 0.9 * net.m.value + 0.1 * gradient  # uses gradient not reduced
        v = 0.99 * net.v.value + 0.01 * gradient**2
        if bug == "variance of slots":
            square = jax.lax.pmean(x.mean() ** 2, "data")  # variance of slots
            v = 0.99 * net.v.value + 0.01 * square
        w = net.w.value - 0.01 * m / (jnp.sqrt(v) + 1e-8)
        mean = jax.lax.pmean(mean, "data") if bug == "local mean" else mean
        if bug == "momentum":
            mean = 0.9 * net.mean.value + 0.1 * jax.lax.pmax(x.mean(0), "data")  # momentum
        if bug in ("gradient not reduced", "whole batch in the noise"):
            loss, m, v, w = jax.lax.pmean((loss, m, v, w), "data")
        new = net.replace(w=w, m=m, v=v, rng=rng, count=count, mean=mean, var=var)
        return loss, new

    net = Net(
        sm.ParamState(generic(4, 6)),
        sm.ParamState(generic(6)),
        sm.BatchState(np.zeros(4), reduce="mean"),
        sm.BatchState(np.ones(4), reduce="mean"),
        sm.State(np.zeros((4, 6))),
        sm.State(np.zeros((4, 6))),
        sm.RandomState(jax.random.key(0)),
        sm.State(0.0, reduce="sum"),
    )
    args = net, generic(16, 4), generic(16)
    mesh = AbstractMesh((4,), ("data",))
    return Case(step, mesh, (None, P("data"), P("data")), P(), args)


def tensor_parallel(bug: str) -> Case:
    """A block of a transformer with its heads, its hidden units and its vocabulary split over `model`."""

    def attention(x: Any, qkv: Any, out: Any) -> Any:
        q, k, v = jnp.einsum("btd,sdhe->sbhte", x, qkv)
        score = jnp.einsum("bhte,bhse->bhts", q, k) / np.sqrt(q.shape[-1])
        if bug == "scaled by heads":
            score = score / qkv.shape[2]  # scaled by heads
        mask = jnp.tril(jnp.ones(score.shape[-2:], bool))
        weight = jax.nn.softmax(jnp.where(mask, score, -1e9))
        mixed = jnp.einsum("bhts,bhse->bthe", weight, v)
        if bug == "heads not summed":
            return jnp.einsum("bthe,hed->btd", mixed, out)  # heads not summed
        y = jnp.einsum("bthe,hed->btd", mixed, out)
        return jax.lax.pmean(y, "model") if bug == "heads averaged" else jax.lax.psum(y, "model")

    def mlp(x: Any, up: Any, down: Any, bias: Any) -> Any:
        h = jax.nn.relu(x @ up)
        if bug == "normalized by part":
            h = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-3)  # normalized by part
        y = h @ down
        if bug == "bias on each":
            return jax.lax.psum(y + bias, "model")  # bias on each
        return jax.lax.psum(y, "model") + bias

    def embed(table: Any, tokens: Any) -> Any:
        size = len(table)
        first = jax.lax.axis_index("model") * size
        if bug == "other offset":
            first = jax.lax.axis_index("model") * (size - 1)  # other offset
        here = (tokens >= first) & (tokens < first + size)  # uses other offset
        rows = table[jnp.where(here, tokens - first, 0)]
        rows = rows if bug == "not masked" else jnp.where(here[..., None], rows, 0)
        return jax.lax.psum(rows, "model")  # uses not masked

    def loss_of(logits: Any, tokens: Any) -> Any:
        size = logits.shape[-1]
        if bug == "local maximum":
            top = jax.lax.stop_gradient(logits.max(-1))  # local maximum
        else:
            top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
        each = jnp.exp(logits - top[..., None])  # uses local maximum
        total = each.sum(-1) if bug == "local total" else jax.lax.psum(each.sum(-1), "model")
        at = tokens - jax.lax.axis_index("model") * size
        if bug == "tokens of the first":
            at = tokens  # tokens of the first
        hit = (at >= 0) & (at < size)  # uses tokens of the first
        found = jnp.take_along_axis(logits, jnp.clip(at, 0, size - 1)[..., None], -1)[..., 0]
        found = jax.lax.psum(jnp.where(hit, found, 0), "model")
        each = jnp.log(total) + top - found  # uses local total
        if bug == "loss of rows":
            return each.mean()  # loss of rows
        return jax.lax.pmean(each.mean(), "data")

    def step(params: Any, tokens: Any) -> Any:
        x = embed(params["table"], tokens)
        x = x + attention(x, params["qkv"], params["out"])  # uses heads not summed
        x = x + mlp(x, params["up"], params["down"], params["bias"])
        logits = x @ params["table"].T
        loss = loss_of(logits, jnp.roll(tokens, 1, -1))
        return jnp.log1p(loss) if bug == "loss of rows" else loss  # uses loss of rows

    specs = {
        "table": P("model"),
        "qkv": P(None, None, "model"),
        "out": P("model"),
        "up": P(None, "model"),
        "down": P("model"),
        "bias": P(),
    }
    params = {
        "table": generic(16, 6),
        "qkv": generic(3, 6, 4, 5),
        "out": generic(4, 5, 6),
        "up": generic(6, 8),
        "down": generic(8, 6),
        "bias": generic(6),
    }
    tokens = np.random.default_rng(0).integers(0, 16, (4, 5)).astype(np.int32)
    mesh = AbstractMesh((2, 2), ("data", "model"))
    return Case(step, mesh, (specs, P("data")), P(), (params, tokens), check_vma=False)


def ring(bug: str) -> Case:
    """Attention along a split sequence: keys go round, after a filter that looks at its neighbours."""

    def smooth(x: Any) -> Any:
        n = jax.lax.axis_size("seq")
        step = -1 if bug == "from the right" else 1
        pairs = [(i, (i + step) % n) for i in range(n)]  # uses from the right
        before = jax.lax.ppermute(x[-1:], "seq", pairs)  # uses from the right
        wide = jnp.concatenate([before, x])
        if bug == "edge only":
            wide = jnp.concatenate([x[-1:], x])  # edge only
        return 0.5 * wide[1:] + 0.5 * wide[:-1]

    def attend(q: Any, k: Any, v: Any) -> Any:
        n, here = jax.lax.axis_size("seq"), jax.lax.axis_index("seq")
        at = here * len(q) + jnp.arange(len(q))
        if bug == "positions of a part":
            at = here + jnp.arange(len(q))  # positions of a part
        q = q * jnp.cos(0.1 * at)[:, None]  # uses positions of a part

        def body(i: Any, state: Any) -> Any:
            k, v, top, total, mixed = state
            source = (here - i) % n
            score = q @ k.T + 0.01 * (source * len(k) + jnp.arange(len(k)))
            new = jnp.maximum(top, score.max(-1))
            shrink = jnp.exp(top - new)
            part = jnp.exp(score - new[:, None])
            total = total * shrink + part.sum(-1)
            old = mixed if bug == "not rescaled" else mixed * shrink[:, None]
            mixed = old + part @ v  # uses not rescaled
            around = [(j, (j + 1) % n) for j in range(n)]
            k, v = jax.lax.ppermute((k, v), "seq", around)
            return k, v, new, total, mixed

        start = (jnp.full(len(q), -1e9), jnp.zeros(len(q)), jnp.zeros_like(v))
        start = jax.lax.pcast(start, "seq", to="varying") if bug != "unchecked" else start
        _, _, _, total, mixed = jax.lax.fori_loop(0, n, body, (k, v, *start))
        return mixed / total[:, None]

    def step(w: Any, x: Any) -> Any:
        q, k, v = jnp.einsum("td,sde->ste", smooth(x), w)
        if bug == "keys centred":
            k = k - k.mean(0)  # keys centred
        y = x + attend(q, k, v)
        if bug == "running total":
            y = y + jnp.cumsum(x, 0)  # running total
        return y

    args = generic(3, 4, 4), generic(16, 4)
    return Case(
        step, AbstractMesh((4,), ("seq",)), (None, P("seq")), P("seq"), args, check_vma=False
    )


def layers(bug: str) -> Case:
    """A loop over layers, each of which is computed again for the gradient."""

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return 0.5 * x

    def back(_: None, g: Any) -> Any:
        g = g - g.mean(0) if bug == "derivative of a part" else 0.5 * g
        return (g,)

    scaled.defvjp(lambda x: (0.5 * x, None), back)

    def layer(x: Any, w: Any, k: Any) -> Any:
        h = jax.nn.silu(x @ w)
        mean = h.mean(0) if bug == "mean in a layer" else jax.lax.pmean(h.mean(0), "data")
        h = jnp.where(k == 2, h - mean, h) if bug == "third layer" else h
        h = h - mean  # uses mean in a layer
        if bug == "third layer":
            h = h + jnp.where(k == 2, h.max(0), 0)  # third layer
        return x + scaled(h)  # uses derivative of a part

    def loss_of(ws: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda x, wk: (layer(x, *wk), None))
        x, _ = jax.lax.scan(body, x, (ws, jnp.arange(len(ws))))
        if bug == "branch on a part":
            size = jnp.abs(x).sum()
            x = jax.lax.cond(size > 1e6, lambda x: x, lambda x: x / size, x)  # branch on a part
        return (x**2).mean(), ws

    def step(ws: Any, x: Any) -> Any:
        (loss, _), grads = sm.value_and_grad(loss_of, axis_name="data")(ws, x)
        return loss, ws - 0.1 * grads

    args = 0.5 * generic(4, 5, 5), generic(16, 5)
    return Case(step, AbstractMesh((4,), ("data",)), (None, P("data")), P(), args)


PROGRAMS = (data_parallel, tensor_parallel, ring, layers)


@functools.cache
def _source() -> list[str]:
    return pathlib.Path(__file__).read_text().splitlines()


def lines_of(bug: str) -> set[int]:
    """The lines that hold a mistake or use it first."""
    return {
        number
        for number, text in enumerate(_source(), 1)
        if text.endswith((f"# {bug}", f"# uses {bug}")) or f'if bug == "{bug}" else' in text
    }


def cases() -> Iterator[tuple[Callable[[str], Case], str]]:
    """The programs with all mistakes of each."""
    starts = {program.__code__.co_firstlineno: program for program in PROGRAMS}
    found: dict[str, Callable[[str], Case]] = {}
    program = None
    for number, text in enumerate(_source(), 1):
        program = starts.get(number, program)
        if text.startswith("PROGRAMS"):
            break
        comment = text.split("  # ")[-1].removeprefix("uses ") if "  # " in text else ""
        if program is not None and comment and f'"{comment}"' in "\n".join(_source()):
            found.setdefault(comment, program)
        for part in text.split('bug == "')[1:]:
            if program is not None and '" else' in part:
                found.setdefault(part.split('"')[0], program)
    return ((program, bug) for bug, program in found.items())
