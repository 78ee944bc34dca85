"""Code as users write it, each piece with the mistakes that are made in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm


ROWS, WIDTH = 16, 3


@dataclasses.dataclass(frozen=True)
class Code:
    """A function of a model and rows, as it is given to `assert_equivalent`.

    **Attributes:**

    - `model`: makes the model.
    - `more`: further arguments of `assert_equivalent`.
    """

    fun: Callable[..., Any]
    model: Callable[[], Any]
    in_specs: Any = (None, P("data"))
    out_specs: Any = (P("data"), P())
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Code with a mistake, and what the report names: the line, or the result where there is none."""

    code: Code
    line: str


RIGHT: dict[str, Code] = {}
WRONG: dict[str, Mistake] = {}
UNCHECKED: Any = {"check_vma": False}


# A share of the whole


def counter() -> sm.State:
    return sm.State(0.0, reduce="sum")


def share(seen: Any, x: Any) -> Any:
    total = 1 + jax.lax.psum(jnp.abs(x).sum(), "data")
    return x / total, seen.set(seen.value + x.sum())


def share_of_the_part(seen: Any, x: Any) -> Any:
    return x / (1e-3 + jnp.abs(x).sum()), seen.set(seen.value + x.sum())


def share_reduced_twice(seen: Any, x: Any) -> Any:
    total = jax.lax.psum(jax.lax.psum(jnp.abs(x).sum(), "data"), "data")
    return total, seen.set(seen.value + x.sum())


def share_of_the_mean(seen: Any, x: Any) -> Any:
    return jax.lax.pmean(jnp.abs(x).sum(), "data"), seen.set(seen.value + x.sum())


def total_unreduced(seen: Any, x: Any) -> Any:
    return jnp.abs(x).sum(), seen.set(seen.value + x.sum())


def total(seen: Any, x: Any) -> Any:
    return jax.lax.psum(jnp.abs(x).sum(), "data"), seen.set(seen.value + x.sum())


ONE_RESULT: Any = {"out_specs": (P(), P())}
RIGHT["share"] = Code(share, counter)
RIGHT["total"] = Code(total, counter, **ONE_RESULT)
WRONG["psum dropped"] = Mistake(
    Code(share_of_the_part, counter), "return x / (1e-3 + jnp.abs(x).sum())"
)
WRONG["psum dropped, result unreduced"] = Mistake(
    Code(total_unreduced, counter, more=UNCHECKED, **ONE_RESULT), "return jnp.abs(x).sum(), seen"
)
WRONG["psum twice"] = Mistake(
    Code(share_reduced_twice, counter, **ONE_RESULT), "total = jax.lax.psum(jax.lax.psum("
)
WRONG["pmean for psum"] = Mistake(
    Code(share_of_the_mean, counter, **ONE_RESULT), "return jax.lax.pmean(jnp.abs(x).sum()"
)


# Noise


class Noisy(sm.Module):
    rng: sm.RandomState
    key: Any


def noisy() -> Noisy:
    return Noisy(sm.RandomState(jax.random.key(1)), jax.random.key(2))


def noise(model: Noisy, x: Any) -> Any:
    keys, rng = model.rng.rows(len(x), "data")
    return x + jax.vmap(jax.random.normal)(keys)[:, None], model.replace(rng=rng)


def dropout(model: Noisy, x: Any) -> Any:
    keys, rng = model.rng.rows(len(x), "data")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return jnp.where(keep, 2 * x, 0.0), model.replace(rng=rng)


def noise_of_a_shared_key(model: Noisy, x: Any) -> Any:
    key, later = jax.random.split(model.key)
    return x + jax.random.normal(key, x.shape), model.replace(key=later)


def dropout_of_a_shared_key(model: Noisy, x: Any) -> Any:
    key, later = jax.random.split(model.key)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0), model.replace(key=later)


RIGHT["noise"], RIGHT["dropout"] = Code(noise, noisy), Code(dropout, noisy)
WRONG["key shared"] = Mistake(
    Code(noise_of_a_shared_key, noisy), "return x + jax.random.normal(key, x.shape)"
)
WRONG["key shared, dropout"] = Mistake(
    Code(dropout_of_a_shared_key, noisy), "return jnp.where(jax.random.bernoulli(key"
)


# Specs


def doubled(seen: Any, x: Any) -> Any:
    return 2 * x + jnp.cos(x), seen


def folded(seen: Any, x: Any) -> Any:
    return jax.lax.psum(x.sum(0), "data"), seen


BOTH: Any = {"in_specs": (None, P(("data", "model"))), "out_specs": (P(("data", "model")), P())}
RIGHT["doubled"] = Code(doubled, counter)
RIGHT["doubled over both axes"] = Code(doubled, counter, **BOTH)
RIGHT["folded"] = Code(folded, counter, out_specs=(P(), P()))
WRONG["input not split"] = Mistake(
    Code(doubled, counter, in_specs=(None, P())), "doubled(...)[0]"
)
WRONG["input not split, then summed"] = Mistake(
    Code(folded, counter, in_specs=(None, P()), out_specs=(P(), P())),
    'return jax.lax.psum(x.sum(0), "data")',
)
WRONG["output not split"] = Mistake(
    Code(doubled, counter, out_specs=(P(), P()), more=UNCHECKED), "doubled(...)[0]"
)
WRONG["axes exchanged"] = Mistake(
    Code(doubled, counter, **{**BOTH, "out_specs": (P(("model", "data")), P())}),
    "doubled(...)[0]",
)


# Statistics


class Stats(sm.Module):
    mean: sm.BatchState
    var: sm.BatchState


def stats() -> Stats:
    return Stats(
        sm.BatchState(np.zeros(WIDTH, np.float32), reduce="mean"),
        sm.BatchState(np.ones(WIDTH, np.float32), reduce="mean"),
    )


def updated(model: Stats, mean: Any, var: Any) -> Stats:
    return model.replace(
        mean=0.5 * model.mean.value + 0.5 * mean, var=0.5 * model.var.value + 0.5 * var
    )


def normalized(model: Stats, x: Any) -> Any:
    mean = jax.lax.pmean(x.mean(0), "data")
    var = jax.lax.pmean(((x - mean) ** 2).mean(0), "data")
    return (x - mean) / jnp.sqrt(var + 0.1), updated(model, mean, var)


def mean_of_variances(model: Stats, x: Any) -> Any:
    mean = jax.lax.pmean(x.mean(0), "data")
    return x - mean, updated(model, mean, x.var(0))


def own_mean(model: Stats, x: Any) -> Any:
    mean = x.mean(0)
    all_rows = jax.lax.pmean(mean, "data")
    var = jax.lax.pmean(((x - all_rows) ** 2).mean(0), "data")
    return x - mean, updated(model, mean, var)


RIGHT["normalized"] = Code(normalized, stats)
WRONG["mean of variances"] = Mistake(Code(mean_of_variances, stats), "updated(model, mean, x.var(0))")
WRONG["mean of the shard's own rows"] = Mistake(Code(own_mean, stats), "mean = x.mean(0)")


# Training


def weights() -> sm.ParamState:
    return sm.ParamState(np.array([0.5, -0.25, 0.125], np.float32))


def loss(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w.value - x[:, 0]).mean()


def train(w: Any, x: Any) -> Any:
    (value, w), grads = sm.value_and_grad(lambda w, x: (loss(w, x), w), axis_name="data")(w, x)
    return value, w.set(w.value - 0.1 * grads.value)


def train_with_jax(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, x)
    # Of parameters that are whole on every shard it is summed already.
    return jax.lax.pmean(value, "data"), w.set(
        w.value - 0.1 * grads.value / jax.lax.axis_size("data")
    )


def train_reduced_twice(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, x)
    return jax.lax.pmean(value, "data"), w.set(w.value - 0.1 * jax.lax.pmean(grads.value, "data"))


RIGHT["train"] = Code(train, weights, **ONE_RESULT)
RIGHT["train with jax"] = Code(train_with_jax, weights, **ONE_RESULT)
WRONG["gradient reduced twice"] = Mistake(
    Code(train_reduced_twice, weights, **ONE_RESULT), 'jax.lax.pmean(grads.value, "data")'
)


# States


def tracked(seen: Any, x: Any) -> Any:
    return x, seen.set(seen.value + x.sum())


def not_returned(seen: Any, x: Any) -> Any:
    seen.set(seen.value + x.sum())
    return x, seen


def plainly_tracked(seen: Any, x: Any) -> Any:
    return x, seen.set(seen.value + np.asarray(x).sum(dtype=np.float32))


PLAIN: Any = {"unsharded": plainly_tracked, "gradients": False}
RIGHT["tracked"] = Code(tracked, counter, more=PLAIN)
WRONG["state not returned"] = Mistake(
    Code(not_returned, counter, more=PLAIN), "not_returned(...)[1].value"
)


# Neighbours


def differences(step: int) -> Callable[[Any, Any], Any]:
    """Each row less the one before it, around."""

    def fun(seen: Any, x: Any) -> Any:
        count = jax.lax.axis_size("data")
        ring = [(i, (i + step) % count) for i in range(count)]
        before = jax.lax.ppermute(x[-1:], "data", ring)
        return x - jnp.concatenate([before, x[:-1]]), seen

    return fun


def turned(step: int) -> Callable[[Any, Any], Any]:
    """What the shard before has."""

    def fun(seen: Any, x: Any) -> Any:
        count = jax.lax.axis_size("data")
        return jax.lax.ppermute(x, "data", [(i, (i + step) % count) for i in range(count)]), seen

    return fun


def plainly_turned(seen: Any, x: Any) -> Any:
    return jnp.roll(x, ROWS // 4, 0), seen


TURNED: Any = {"unsharded": plainly_turned}
RIGHT["differences"] = Code(differences(1), counter)
RIGHT["turned"] = Code(turned(1), counter, more=TURNED)
WRONG["ppermute off by one, edges"] = Mistake(
    Code(differences(2), counter), "before = jax.lax.ppermute("
)
WRONG["ppermute off by one, parts"] = Mistake(
    Code(turned(2), counter, more=TURNED), "return jax.lax.ppermute("
)


# Positions


def positioned(seen: Any, x: Any) -> Any:
    rows = jax.lax.axis_index("data") * len(x) + jnp.arange(len(x))
    return x + jnp.sin(rows)[:, None], seen


def positioned_on_the_shard(seen: Any, x: Any) -> Any:
    return x + jnp.sin(jnp.arange(len(x)))[:, None], seen


RIGHT["positions"] = Code(positioned, counter)
WRONG["local row index"] = Mistake(Code(positioned_on_the_shard, counter), "jnp.arange(len(x))")
