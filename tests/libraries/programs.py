"""Small programs in the manner of libraries' own examples: each is one lane of a function over a batch.

A program takes a number `p` of its lane, and parameters `w` that all lanes share. `p` is split over shards
and `w` replicated, so that the two meet inside the library. Nothing in a program knows of a mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax
from jax.experimental.ode import odeint


Lane = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what is known of it.

    **Attributes:**

    - `lane`: the function of one lane.
    - `library`: the module that it needs.
    - `differentiable`: whether JAX can take its gradient outside of every `shard_map`.
    - `upstream`: an issue of the library's about `shard_map`.
    - `outcome`: what happens in a checked `shard_map`.
    """

    name: str
    lane: Lane
    library: str
    differentiable: bool
    upstream: str
    outcome: str = "runs"


PROGRAMS: list[Program] = []


def program(
    library: str, differentiable: bool = True, upstream: str = ""
) -> Callable[[Lane], Lane]:
    def added(lane: Lane) -> Lane:
        name = f"{library}: {(lane.__doc__ or '').strip().rstrip('.')}"
        PROGRAMS.append(Program(name, lane, library, differentiable, upstream))
        return lane

    return added


def matrix(p: Any, w: Any) -> Any:
    """A symmetric positive definite matrix of the lane."""
    return 2 * jnp.eye(2) + p * jnp.outer(w, w)


# JAX


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`scan` that starts at zeros."""
    return lax.scan(lambda c, y: (c * w + y * p, c.sum()), jnp.zeros(2), jnp.arange(3.0))[1].sum()


@program("jax", differentiable=False)
def _(p: Any, w: Any) -> Any:
    """`while_loop` with an end of its own in each lane."""
    return lax.while_loop(lambda c: c[0] < p, lambda c: (c[0] + 0.2, c[1] * w), (0.0, jnp.ones(2)))[
        1
    ].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`fori_loop` that rotates its carry."""
    start = (w[0], w[1], w[0], w[1])
    return lax.fori_loop(0, 5, lambda _, c: (c[1], c[2], c[3], c[0] * p + 1), start)[0]


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`cond` with a constant in one branch."""
    return lax.cond(p > 0.5, lambda: p * w.sum(), lambda: jnp.zeros(()))


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`switch` between what varies and what does not."""
    return lax.switch((3 * p).astype(int), [lambda: p * w[0], lambda: 0.5, lambda: w[1]])


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`checkpoint` of a loop in a loop."""
    inner = lambda c, y: (jnp.where(c > y, c * p, w[0] + y), None)
    body = jax.checkpoint(lambda c: lax.scan(inner, c, jnp.arange(2.0))[0])
    return lax.fori_loop(0, 3, lambda _, c: body(c), w[1])


@program("jax")
def _(p: Any, w: Any) -> Any:
    """the gradient of exact `gelu`."""
    return jax.grad(lambda x: jax.nn.gelu(x * w.sum(), approximate=False))(p)


@program("jax")
def _(p: Any, w: Any) -> Any:
    """the gradients of `erf` and `ndtri`."""
    return jax.grad(lambda x: jsp.special.erf(x * w[0]) + jsp.special.ndtri(0.5 * x))(p)


@program("jax", differentiable=False)
def _(p: Any, w: Any) -> Any:
    """`random.poisson`."""
    return jax.random.poisson(jax.random.key(0), 5 * p * w.sum()).astype(float)


@program("jax", differentiable=False)
def _(p: Any, w: Any) -> Any:
    """`random.binomial`."""
    return jax.random.binomial(jax.random.key(0), 10, p * w[0])


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`random.gamma`."""
    return jax.random.gamma(jax.random.key(0), p + w.sum())


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`scipy.sparse.linalg.cg`."""
    return jsp.sparse.linalg.cg(lambda v: matrix(p, w) @ v, jnp.ones(2))[0].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`scipy.sparse.linalg.cg` with a matrix that all lanes share."""
    return jsp.sparse.linalg.cg(lambda v: 2 * v + w * (w @ v), p * jnp.ones(2))[0].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`scipy.sparse.linalg.gmres`."""
    return jsp.sparse.linalg.gmres(lambda v: matrix(p, w) @ v, jnp.ones(2))[0].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`scipy.sparse.linalg.bicgstab`."""
    return jsp.sparse.linalg.bicgstab(lambda v: matrix(p, w) @ v, jnp.ones(2))[0].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`experimental.ode.odeint`."""
    return odeint(lambda y, t: -y * p * w, jnp.ones(2), jnp.linspace(0.0, 1.0, 3))[-1].sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`associative_scan`."""
    return lax.associative_scan(lambda a, b: a * b * w[0], p * jnp.arange(1.0, 4.0)).sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """`lax.map` over constants."""
    return lax.map(lambda y: jnp.sin(y * p) * w[0], jnp.arange(3.0)).sum()


@program("jax")
def _(p: Any, w: Any) -> Any:
    """a gradient by forward mode with a basis of its own."""
    return jax.jacfwd(lambda y: y**2 * p * w)(jnp.ones(2)).sum()


# lineax


def _linear(solver: Callable[[Any], Any], tags: str = "") -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import lineax as lx

        tagged = getattr(lx, tags) if tags else ()
        operator = lx.MatrixLinearOperator(matrix(p, w), tagged)
        return lx.linear_solve(operator, jnp.array([1.0, -0.5]), solver(lx)).value.sum()

    return lane


for _name, _solver, _tags in (
    ("LU", lambda lx: lx.LU(), ""),
    ("Cholesky", lambda lx: lx.Cholesky(), "positive_semidefinite_tag"),
    ("SVD", lambda lx: lx.SVD(), ""),
    ("AutoLinearSolver", lambda lx: lx.AutoLinearSolver(well_posed=True), ""),
    ("CG", lambda lx: lx.CG(1e-6, 1e-6), "positive_semidefinite_tag"),
    ("GMRES", lambda lx: lx.GMRES(1e-6, 1e-6), ""),
    ("NormalCG", lambda lx: lx.Normal(lx.CG(1e-6, 1e-6)), ""),
):
    PROGRAMS.append(
        Program(f"lineax: {_name}", _linear(_solver, _tags), "lineax", True, "lineax#185")
    )


@program("lineax", upstream="lineax#185")
def _(p: Any, w: Any) -> Any:
    """QR of a tall matrix."""
    import lineax as lx

    tall = jnp.concatenate([matrix(p, w), jnp.ones((1, 2))])
    return lx.linear_solve(lx.MatrixLinearOperator(tall), jnp.arange(3.0), lx.QR()).value.sum()


@program("lineax", upstream="lineax#185")
def _(p: Any, w: Any) -> Any:
    """a Jacobian as the operator, by CG."""
    import lineax as lx

    fun = lambda y, _: matrix(p, w) @ y
    operator = lx.JacobianLinearOperator(fun, jnp.ones(2), tags=lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, w, lx.CG(1e-6, 1e-6)).value.sum()


# optimistix


def _root(solver: Callable[[Any], Any]) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import optimistix as optx

        fun = lambda y, args: y**2 - args[0] * args[1]
        return optx.root_find(fun, solver(optx), jnp.ones(2), args=(p, w)).value.sum()

    return lane


def _minimum(solver: Callable[[Any], Any], steps: int = 256) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import optimistix as optx

        fun = lambda y, args: ((y - args[0] * args[1]) ** 2).sum() + 0.1 * (y**4).sum()
        solution = optx.minimise(fun, solver(optx), jnp.ones(2), args=(p, w), max_steps=steps)
        return solution.value.sum()

    return lane


for _name, _lane in (
    ("Newton", _root(lambda optx: optx.Newton(1e-5, 1e-5))),
    ("Chord", _root(lambda optx: optx.Chord(1e-5, 1e-5))),
    ("BFGS", _minimum(lambda optx: optx.BFGS(1e-5, 1e-5))),
    ("NonlinearCG", _minimum(lambda optx: optx.NonlinearCG(1e-4, 1e-4))),
    ("GradientDescent", _minimum(lambda optx: optx.GradientDescent(0.1, 1e-4, 1e-4))),
    ("NelderMead", _minimum(lambda optx: optx.NelderMead(1e-4, 1e-4))),
):
    PROGRAMS.append(Program(f"optimistix: {_name}", _lane, "optimistix", True, ""))


@program("optimistix")
def _(p: Any, w: Any) -> Any:
    """Bisection."""
    import optimistix as optx

    fun = lambda y, args: y**3 - args[0] * args[1].sum()
    options = {"lower": 0.0, "upper": 2.0}
    return optx.root_find(
        fun, optx.Bisection(1e-6, 1e-6), jnp.array(0.5), args=(p, w), options=options
    ).value


@program("optimistix")
def _(p: Any, w: Any) -> Any:
    """FixedPointIteration."""
    import optimistix as optx

    fun = lambda y, args: jnp.cos(y * args[0]) * args[1]
    solver = optx.FixedPointIteration(1e-6, 1e-6)
    return optx.fixed_point(fun, solver, 0.3 * jnp.ones(2), args=(p, w)).value.sum()


def _fit(solver: Callable[[Any], Any]) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import optimistix as optx

        fun = lambda y, args: 2 * jnp.tanh(y) - args[0] * args[1]
        start = 0.3 * jnp.ones(2)
        return optx.least_squares(fun, solver(optx), start, args=(p, w)).value.sum()

    return lane


COMPARES = "error: optimistix compares jaxprs, and those of the two types differ"
for _name, _solver in (
    ("LevenbergMarquardt", lambda optx: optx.LevenbergMarquardt(1e-5, 1e-5)),
    ("GaussNewton", lambda optx: optx.GaussNewton(1e-5, 1e-5)),
):
    PROGRAMS.append(
        Program(f"optimistix: {_name}", _fit(_solver), "optimistix", True, "", COMPARES)
    )


# diffrax


def _ode(
    solver: Callable[[Any], Any], adaptive: bool = False, **more: Callable[[Any], Any]
) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import diffrax as dfx

        term = dfx.ODETerm(lambda t, y, args: -y * args[0] * args[1].sum())
        options = {key: value(dfx) for key, value in more.items()}
        if adaptive:
            options["stepsize_controller"] = dfx.PIDController(rtol=1e-4, atol=1e-6)
        solution = dfx.diffeqsolve(
            term, solver(dfx), 0.0, 1.0, 0.25, jnp.ones(2), args=(p, w), max_steps=256, **options
        )
        return solution.ys[-1].sum()

    return lane


for _name, _lane, _upstream in (
    ("Euler", _ode(lambda dfx: dfx.Euler()), "diffrax#735"),
    ("Tsit5", _ode(lambda dfx: dfx.Tsit5()), "diffrax#735"),
    ("Tsit5 with PIDController", _ode(lambda dfx: dfx.Tsit5(), adaptive=True), "diffrax#738"),
    ("Dopri5 with SaveAt", _ode(lambda dfx: dfx.Dopri5(),
     saveat=lambda dfx: dfx.SaveAt(ts=jnp.linspace(0.0, 1.0, 3))), ""),
    ("ImplicitEuler", _ode(lambda dfx: dfx.ImplicitEuler(), adaptive=True), ""),
    ("Kvaerno5", _ode(lambda dfx: dfx.Kvaerno5(), adaptive=True), "diffrax#765"),
    ("Tsit5 with BacksolveAdjoint", _ode(lambda dfx: dfx.Tsit5(),
     adjoint=lambda dfx: dfx.BacksolveAdjoint()), ""),
):  # fmt: skip
    PROGRAMS.append(Program(f"diffrax: {_name}", _lane, "diffrax", True, _upstream))


@program("diffrax")
def _(p: Any, w: Any) -> Any:
    """an SDE by Euler with a VirtualBrownianTree."""
    import diffrax as dfx

    path = dfx.VirtualBrownianTree(0.0, 1.0, tol=0.05, shape=(2,), key=jax.random.key(0))
    drift = dfx.ODETerm(lambda t, y, args: -p * y)
    noise = dfx.ControlTerm(lambda t, y, args: jnp.diag(0.1 * w), path)
    solution = dfx.diffeqsolve(
        dfx.MultiTerm(drift, noise), dfx.Euler(), 0.0, 1.0, 0.25, jnp.ones(2), max_steps=16
    )
    return solution.ys[-1].sum()


@program("diffrax")
def _(p: Any, w: Any) -> Any:
    """an Event that ends the solve."""
    import diffrax as dfx

    event = dfx.Event(lambda t, y, args, **_: y.sum() < 1.2)
    term = dfx.ODETerm(lambda t, y, args: -y * p * w.sum())
    solution = dfx.diffeqsolve(
        term, dfx.Tsit5(), 0.0, 2.0, 0.1, jnp.ones(2), max_steps=64, event=event
    )
    return solution.ys[-1].sum()


# equinox, optax, blackjax


@program("equinox")
def _(p: Any, w: Any) -> Any:
    """the checkpointed `while_loop`."""
    import equinox.internal as eqxi

    body = lambda c: (c[0] + 1, jnp.sin(c[1] * p) + w[0])
    loop = eqxi.while_loop(lambda c: c[0] < 5, body, (0, w[1]), max_steps=8, kind="checkpointed")
    return loop[1]


@program("equinox")
def _(p: Any, w: Any) -> Any:
    """the bounded `while_loop`."""
    import equinox.internal as eqxi

    body = lambda c: (c[0] + 1, jnp.sin(c[1] * p) + w[0])
    return eqxi.while_loop(lambda c: c[0] < 5, body, (0, w[1]), max_steps=8, kind="bounded")[1]


@program("equinox")
def _(p: Any, w: Any) -> Any:
    """the checkpointed `scan`."""
    import equinox.internal as eqxi

    body = lambda c, y: (jnp.sin(c * p) + w[0] * y, None)
    return eqxi.scan(body, w[1], jnp.arange(4.0), kind="checkpointed")[0]


@program("equinox")
def _(p: Any, w: Any) -> Any:
    """a GRUCell in a `scan`, from a hidden state of zeros."""
    import equinox as eqx

    cell = eqx.nn.GRUCell(1, 2, key=jax.random.key(0))
    step = lambda h, x: (cell(x * p, h * w), None)
    return lax.scan(step, jnp.zeros(2), jnp.ones((3, 1)))[0].sum()


@program("equinox")
def _(p: Any, w: Any) -> Any:
    """`error_if`."""
    import equinox as eqx

    return eqx.error_if(p * w.sum(), p < 0, "negative")


@program("optax", differentiable=False)
def _(p: Any, w: Any) -> Any:
    """L-BFGS with its line search."""
    import optax

    loss = lambda y: ((y - p * w) ** 2).sum() + 0.1 * (y**4).sum()
    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: Any, _: Any) -> Any:
        y, state = carry
        value, grad = value_and_grad(y, state=state)
        updates, state = solver.update(grad, state, y, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(y, updates), state), None

    start = jnp.ones(2)
    return lax.scan(step, (start, solver.init(start)), None, length=6)[0][0].sum()


def _adam(start_of: Callable[[Any], Any]) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import optax

        solver = optax.adam(0.1)

        def step(_: Any, carry: Any) -> Any:
            y, state = carry
            updates, state = solver.update(jax.grad(lambda y: ((y - p * w) ** 2).sum())(y), state)
            return optax.apply_updates(y, updates), state

        start = start_of(p)
        return lax.fori_loop(0, 5, step, (start, solver.init(start)))[0].sum()

    return lane


# Without statemesh JAX takes this program too, and gives the same.
SUMMED = "differs: JAX sums the gradient of a constant over shards"
for _name, _lane, _outcome in (
    ("Adam in a `fori_loop`", _adam(lambda p: jnp.ones(2) + 0 * p), "runs"),
    ("Adam in a `fori_loop` that starts at a constant", _adam(lambda p: jnp.ones(2)), SUMMED),
):
    PROGRAMS.append(Program(f"optax: {_name}", _lane, "optax", True, "", _outcome))


def _chain(kernel_of: Callable[[Any, Any], Any], steps: int = 5) -> Lane:
    def lane(p: Any, w: Any) -> Any:
        import blackjax

        logdensity = lambda x: -0.5 * ((x - p * w) ** 2).sum()
        kernel = kernel_of(blackjax, logdensity)
        key = jax.random.fold_in(jax.random.key(0), (1000 * p).astype(int))
        step = lambda state, key: (kernel.step(key, state)[0], None)
        state = kernel.init(jnp.zeros(2) * p)
        return lax.scan(step, state, jax.random.split(key, steps))[0].position.sum()

    return lane


for _name, _kernel in (
    ("NUTS", lambda b, f: b.nuts(f, 0.3, jnp.ones(2), max_num_doublings=4)),
    ("HMC", lambda b, f: b.hmc(f, 0.3, jnp.ones(2), 4)),
    ("MALA", lambda b, f: b.mala(f, 0.1)),
    ("random walk", lambda b, f: b.normal_random_walk(f, jnp.eye(2))),
):
    PROGRAMS.append(
        Program(f"blackjax: {_name}", _chain(_kernel), "blackjax", False, "blackjax#805")
    )


@program("blackjax", differentiable=False, upstream="blackjax#805")
def _(p: Any, w: Any) -> Any:
    """window adaptation of HMC."""
    import blackjax

    logdensity = lambda x: -0.5 * ((x - p * w) ** 2).sum()
    warmup = blackjax.window_adaptation(blackjax.hmc, logdensity, num_integration_steps=3)
    (state, _), _ = warmup.run(jax.random.key(0), jnp.zeros(2) * p, num_steps=20)
    return state.position.sum()


@program("blackjax", differentiable=False, upstream="blackjax#805")
def _(p: Any, w: Any) -> Any:
    """adaptive tempered SMC."""
    import blackjax
    import blackjax.smc.resampling as resampling

    prior = lambda x: -0.5 * (x**2).sum()
    likelihood = lambda x: -0.5 * ((x - p * w) ** 2).sum()
    smc = blackjax.tempered_smc(
        prior,
        likelihood,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        {"step_size": jnp.full((1,), 0.2), "inverse_mass_matrix": jnp.ones((1, 2)),
         "num_integration_steps": jnp.full((1,), 2)},
        resampling.systematic,
        num_mcmc_steps=2,
    )  # fmt: skip
    particles = jax.random.normal(jax.random.key(1), (8, 2)) * (1 + 0 * p)
    step = lambda state, args: (smc.step(args[0], state, args[1])[0], None)
    keys, levels = jax.random.split(jax.random.key(0), 3), jnp.array([0.3, 0.6, 1.0])
    return lax.scan(step, smc.init(particles), (keys, levels))[0].particles.sum()


def table() -> str:
    """The table of the page `any-library.md`, which has a row for each library."""
    head = ("library", "runs, with its gradients", "runs", "does not run, or differs", "upstream")
    rows = [head, ("---",) * len(head)]
    by_library: dict[str, list[tuple[str, Program]]] = {}
    for each in PROGRAMS:
        library, name = each.name.split(": ", 1)
        by_library.setdefault(library, []).append((name, each))
    for library, those in by_library.items():
        runs = [(name, each.differentiable) for name, each in those if each.outcome == "runs"]
        others: dict[str, list[str]] = {}
        for name, each in those:
            if each.outcome != "runs":
                others.setdefault(each.outcome, []).append(name)
        cells = (
            "; ".join(name for name, differentiable in runs if differentiable),
            "; ".join(name for name, differentiable in runs if not differentiable),
            "; ".join(f"{', '.join(names)}: {outcome}" for outcome, names in others.items()),
            ", ".join(dict.fromkeys(each.upstream for _, each in those if each.upstream)),
        )
        rows.append((library, *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
