"""What the rows of the table call functions on, made of two 4×4 matrices with entries between 0.2 and 0.9.

A program that shows a wrong cell contains the source of each helper that its row uses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def whole(x: Array) -> Array:
    return (x * 100).astype(jnp.int32) % 7


def key(x: Array) -> Array:
    return jax.random.fold_in(jax.random.key(0), (x[0, 0] * 1000).astype(jnp.uint32))


def positive(x: Array) -> Array:
    return x @ x.T + 4 * jnp.eye(4)


def image(x: Array) -> Array:
    return x.reshape(1, 1, 4, 4)


def narrow(x: Array) -> Array:
    """Blocks of 32 entries of 8 bits, as those that share one scale."""
    return jnp.tile(x, (1, 8))[None].astype(jnp.float8_e4m3fn)


def scales() -> Array:
    return jnp.ones((1, 4, 1), jnp.float8_e8m0fnu)


MATMUL = (((1,), (0,)), ((), ()))
GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def updates(optimizer: Any, params: Array, gradients: Array) -> Any:
    """The parameters and the optimizer's state after two steps of an optimizer of Optax."""
    import optax

    state = optimizer.init(params)
    for _ in range(2):
        change, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, change)
    return params, state


def linear(solver: Any, matrix: Array, vector: Array) -> Any:
    """The solution of a positive system by a solver of lineax."""
    import lineax

    operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
    return lineax.linear_solve(operator, vector, solver).value


def root(solver: Any, start: Array, target: Array) -> Any:
    """The root of `x + x ** 3 = target` by a solver of optimistix."""
    import optimistix

    return optimistix.root_find(
        lambda x, y: x + x**3 - y, solver, start, target, max_steps=64
    ).value


def least(solver: Any, start: Array, target: Array) -> Any:
    """The least of a sum of squares by a solver of optimistix."""
    import optimistix

    def off(x: Array, y: Array) -> Array:
        return x + x**3 - y

    if isinstance(solver, optimistix.AbstractLeastSquaresSolver):
        return optimistix.least_squares(
            off, solver, start, target, max_steps=128, throw=False
        ).value
    loss = lambda x, y: (off(x, y) ** 2).sum()
    return optimistix.minimise(loss, solver, start, target, max_steps=128, throw=False).value


def path(solver: Any, start: Array, rate: Array) -> Any:
    """Where a differential equation leads, by a solver of diffrax."""
    import diffrax

    term = diffrax.ODETerm(lambda t, x, rate: -rate * x)
    is_adaptive = isinstance(solver, diffrax.AbstractAdaptiveSolver)
    steps = diffrax.PIDController(1e-8, 1e-8) if is_adaptive else diffrax.ConstantStepSize()
    return diffrax.diffeqsolve(
        term, solver, 0.0, 1.0, 0.1, start, rate, stepsize_controller=steps
    ).ys


def initialised(module: Any, x: Array, *others: Any) -> Any:
    """What a module of Flax's linen makes of an array, with parameters that it makes first."""
    made, _ = module.init_with_output(
        {"params": jax.random.key(7), "dropout": jax.random.key(8)}, x, *others
    )
    return made


def rngs() -> Any:
    from flax import nnx

    return nnx.Rngs(7)
