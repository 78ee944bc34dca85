"""Settings that layers refuse when they are made, and axis names wherever they are taken."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh

from .states import KEY
from .table import Mistake, Mistakes, each


NAN = float("nan")
LAYERS: dict[str, dict[str, Any]] = {
    "BatchNorm": {"size": 3},
    "Dropout": {"rate": 0.5, "key": KEY},
    "EMA": {"model": jnp.ones(2)},
    "GRUCell": {"input_size": 3, "hidden_size": 4, "key": KEY},
    "KVCache": {"capacity": 4, "heads": 1, "dim": 2},
}
# Values at the edges; the table of keywords has those of other types.
EDGES: dict[str, tuple[Any, ...]] = {
    "BatchNorm.size": (0, 2.0, "3"),
    "BatchNorm.momentum": (-0.1, 1.5, NAN),
    "BatchNorm.eps": (0, NAN, float("inf")),
    "BatchNorm.channel_axis": (1.0, (0,)),
    "Dropout.rate": (-0.1, 1, NAN, False),
    "Dropout.row_axis": (0.0, (0,)),
    "EMA.decay": (0, 1, NAN),
    "GRUCell.input_size": (0, 2.0),
    "GRUCell.hidden_size": (0, 2.0),
    "KVCache.capacity": (0, 4.0),
    "KVCache.heads": (0,),
    "KVCache.dim": (0, 2.0),
}


def made(setting: str, value: Any) -> Any:
    """A layer with this setting, by the name `layer.setting`."""
    layer, name = setting.split(".")
    return getattr(sm.nn, layer)(**{**LAYERS[layer], name: value})


# What takes names of axes, and a result that depends on them.
def loss_fn(model: Any, x: Any) -> Any:
    return (x * model["w"].value).mean(), model


WHOLE = {"w": sm.ParamState(jnp.ones(4))}
NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "axis_index": lambda names, x: sm.axis_index(names),
    "axis_size": lambda names, x: sm.axis_size(names) * jnp.ones(()),
    "psum": lambda names, x: sm.psum(x, names),
    "pmean": lambda names, x: sm.pmean(x, names),
    "pmax": lambda names, x: sm.pmax(x, names),
    "pmin": lambda names, x: sm.pmin(x, names),
    "all_gather": lambda names, x: sm.all_gather(x, names),
    "rows": lambda names, x: sm.RandomState(KEY).rows(1, names)[0][0],
    "gather": lambda names, x: sm.gather({"w": sm.ParamState(x, spec=P("x"))}, names)["w"].value,
    "value_and_grad": lambda names, x: sm.value_and_grad(loss_fn, axis_name=names)(WHOLE, x)[0][0],
    "grad": lambda names, x: sm.grad(loss_fn, axis_name=names)(WHOLE, x)[0]["w"].value,
    "BatchNorm": lambda names, x: sm.nn.BatchNorm(4, axis_name=names)(x)[0],
    "Average": lambda names, x: sm.nn.Average(jnp.zeros(4), axis_name=names)(x[0])[0],
    "Dropout": lambda names, x: sm.nn.Dropout(0.5, KEY, axis_name=names)(x)[0],
    "KVCache": lambda names, x: sm.nn.KVCache(4, 1, 2, axis_name=names).axis_name and x,
}


def on_shards(fun: Callable[[Any], Any], mesh: Any, spec: Any) -> Any:
    x = np.cos(np.arange(32.0, dtype=np.float32)).reshape(8, 4)
    each_shard = lambda x: jax.tree.map(lambda y: jnp.asarray(y)[None], fun(x))
    return sm.shard_map(each_shard, mesh, (spec,), spec, check_vma=False)(x)


def named_twice(name: str) -> list[Mistake]:
    """In a mapped call, and outside of any."""
    fun: Callable[[Any], Any] = lambda x: NAMED[name](("x", "y", "x"), x)
    inside = lambda: on_shards(fun, make_mesh("4x2"), P(("x", "y")))
    return [inside, lambda: fun(jnp.ones((2, 4)))]


MISTAKES: Mistakes = {
    "settings of layers": [
        functools.partial(made, setting, value)
        for setting, values in EDGES.items()
        for value in values
    ],
    "hidden values of no rows": lambda: sm.nn.GRUCell(3, 4, key=KEY).init_state(batch_size=0),
    "weight of an average": each(
        lambda weight: sm.nn.Average(0.0)(1.0, weight=weight), -1, NAN, np.float32(-1)
    ),
    "axis named twice": [mistake for name in NAMED for mistake in named_twice(name)],
    "names of several axes": each(
        lambda names: sm.value_and_grad(loss_fn, axis_name=names), "", {}, ("a", 0)
    ),
}
