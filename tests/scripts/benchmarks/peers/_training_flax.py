"""Training steps of a Flax NNX module."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from tests.scripts.benchmarks.peers._case import Case, Made
from tests.scripts.benchmarks.peers._models import OPTIMIZER, Arrays
from tests.scripts.benchmarks.peers._training import of_all_rows, start, whole


class Net(nnx.Module):
    def __init__(self, params: Arrays, statistics: Arrays) -> None:
        self.params = nnx.List([nnx.Param(value) for value in params.values()])
        self.statistics = nnx.List([nnx.BatchStat(value) for value in statistics.values()])


def under_jit(case: Case) -> Made:
    model, params, stats, batch = start(case)

    def values(names: Sequence[str], variables: Any) -> Arrays:
        return {name: variable[...] for name, variable in zip(names, variables, strict=True)}

    def loss_fn(net: Net, x: Any, y: Any) -> Any:
        held = values([*params], net.params), values([*stats], net.statistics)
        return model.loss(*held, x, y, of_all_rows)

    def step(net: Net, optimizer: Any, x: Any, y: Any) -> Any:
        (loss, new), grads = nnx.value_and_grad(loss_fn, has_aux=True)(net, x, y)
        optimizer.update(net, grads)
        for name, variable in zip(stats, net.statistics, strict=True):
            variable[...] = new[name]
        return loss

    net = Net(params, stats)
    optimizer = nnx.Optimizer(net, OPTIMIZER, wrt=nnx.Param)
    nnx.update(optimizer, whole(case, nnx.state(optimizer)))
    call = nnx.jit(step, donate_argnums=(0, 1))
    lower = lambda: call.lower(net, optimizer, *batch)
    return Made(lambda: call(net, optimizer, *batch), lambda: net.params[0][...], lower)
